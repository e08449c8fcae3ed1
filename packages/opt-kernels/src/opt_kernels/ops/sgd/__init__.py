"""The update sweep of SGD with momentum."""
