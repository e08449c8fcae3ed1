"""The Newton-Schulz iteration: approximates the polar factor of a matrix with matrix products only."""
