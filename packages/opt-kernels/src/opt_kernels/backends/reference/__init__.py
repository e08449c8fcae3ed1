"""The formulas, executed as they are written: slow, on any device, in any float dtype."""
