"""float32 to bfloat16 by chance: up or down, right on average."""
