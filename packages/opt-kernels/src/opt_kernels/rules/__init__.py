"""The rules, one algorithm a file."""
