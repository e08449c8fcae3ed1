"""How ranks talk: the `Comm` protocol, its implementations, and the process groups by role."""
