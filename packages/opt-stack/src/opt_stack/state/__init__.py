"""The state of an optimizer: saved, loaded, read while it trains, moved to the host."""
