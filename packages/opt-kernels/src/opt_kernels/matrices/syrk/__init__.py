"""Products of matrices that are known to be symmetric: half of the result is computed, the other half is mirrored."""
