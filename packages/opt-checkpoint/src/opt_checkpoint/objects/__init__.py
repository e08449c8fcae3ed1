"""Object stores: one protocol, its client by obstore, and paths in it."""
