"""The rules, one algorithm per file."""
