"""The bf16 + int16 remainder in few passes: what `reference` says, on tiles that stay in the cache."""

import torch
from torch import Tensor

from opt_kernels.ops.remainder import reference


def join_(main: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Writes the float32 numbers `main` (n,) whose halves are `weight` (bfloat16) and `remainder` (int16)."""
    # Widening bfloat16 is a shift of its bits by 16; the sum wraps as the formula asks.
    main.copy_(weight)
    main.view(torch.int32).add_(remainder)


def split_(weight: Tensor, remainder: Tensor, main: Tensor, *, scratch: Tensor) -> None:
    """Writes the halves of `main` (n,) float32 to `weight` and `remainder`; `scratch` (n,) int32 is overwritten."""
    # One reduction finds whether there may be a NaN at all: an infinite sum costs only the slow path.
    if not bool(main.sum().isfinite()):
        reference.split_(weight, remainder, main)
        return
    word = main.view(torch.int32)
    remainder.copy_(word)
    torch.add(word, 0x8000, out=scratch).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(scratch)
