"""The bf16 + int16 remainder in few passes: what `reference` says, on tiles that stay in the cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import remainder as reference


def join_(mains: Sequence[Tensor], weights: Sequence[Tensor], remainders: Sequence[Tensor]) -> None:
    """Writes the float32 numbers `mains` (n,) whose halves are `weights` (bfloat16) and `remainders` (int16)."""
    # Widening bfloat16 is a shift of its bits by 16; the sum wraps as the formula asks.
    torch._foreach_copy_(list(mains), list(weights))
    torch._foreach_add_([main.view(torch.int32) for main in mains], list(remainders))


def split_(weights: Sequence[Tensor], remainders: Sequence[Tensor], row: Tensor, *, words: Tensor) -> None:
    """Writes the halves of `row` (n,) float32 to `weights` and `remainders`, which share its n elements in order.

    `words` (n,) int32 is overwritten.
    """
    numels = [weight.numel() for weight in weights]
    # One reduction finds whether there may be a NaN at all: an infinite sum costs only the slow path.
    if not bool(row.sum().isfinite()):
        for weight, rest, main in zip(weights, remainders, torch.split(row, numels)):
            reference.split_(weight, rest, main)
        return
    word = row.view(torch.int32)
    torch._foreach_copy_(list(remainders), list(torch.split(word, numels)))
    torch.add(word, 0x8000, out=words).bitwise_right_shift_(16)
    torch._foreach_copy_([weight.view(torch.int16) for weight in weights], list(torch.split(words, numels)))
