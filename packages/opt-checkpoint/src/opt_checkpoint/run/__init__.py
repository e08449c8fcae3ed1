"""The functions that users call: save, load, background saves, a series of checkpoints, torch optimizers."""
