"""One step over a tuple of units, whatever their rules, layouts and numbers."""
