"""Model chunks inside a `DistributedDataParallel`: ours, or the one of torch."""
