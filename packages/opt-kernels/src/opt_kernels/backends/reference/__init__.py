"""Reference versions: formulas executed as written. Slow, on any device, in any float dtype."""
