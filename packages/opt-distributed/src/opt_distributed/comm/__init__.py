"""Communication: the `Comm` protocol, its implementations, process groups by role, and devices."""
