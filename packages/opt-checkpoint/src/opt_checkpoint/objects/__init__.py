"""Object stores: the client protocol, its implementation with obstore, and paths in stores."""
