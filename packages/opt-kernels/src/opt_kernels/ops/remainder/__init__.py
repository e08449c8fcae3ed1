"""float32 numbers kept as a bfloat16 parameter and 16 more bits."""
