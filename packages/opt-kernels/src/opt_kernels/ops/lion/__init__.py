"""The update sweep of Lion."""
