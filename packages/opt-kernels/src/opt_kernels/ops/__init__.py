"""Operations, one directory each: `reference` is the formula, `torch_native` and `triton` are its fast versions."""
