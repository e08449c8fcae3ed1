"""What a step keeps of the last one while no tensor has moved, for compiled sweeps and for kernels."""
