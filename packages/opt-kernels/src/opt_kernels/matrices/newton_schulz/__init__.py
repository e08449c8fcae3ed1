"""The Newton-Schulz iteration: an approximate polar factor out of matrix products alone."""
