"""Rules by name: built in, from the caller, from installed packages, or any `torch.optim` class."""
