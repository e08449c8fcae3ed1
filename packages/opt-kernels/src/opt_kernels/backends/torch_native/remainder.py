"""Joining and splitting bf16 weights and remainders in few passes over tiles that fit the cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import remainder as reference


def join_(mains: Sequence[Tensor], weights: Sequence[Tensor], remainders: Sequence[Tensor]) -> None:
    """Write to `mains` (n,) float32 the numbers with halves `weights` (bfloat16) and `remainders`, of one dtype."""
    # Converting bfloat16 to float32 shifts its bits by 16. The integer sum wraps around, as in the formula.
    torch._foreach_copy_(list(mains), list(weights))
    words = [main.view(torch.int32) for main in mains]
    torch._foreach_add_(words, list(remainders), alpha=1 << 8 if remainders[0].dtype is torch.int8 else 1)


def split_(weights: Sequence[Tensor], remainders: Sequence[Tensor], row: Tensor, *, words: Tensor) -> None:
    """Write the halves of `row` (n,) float32 to `weights` and `remainders`, which have n elements in all.

    `words` (n,) int32 is overwritten.
    """
    numels = [weight.numel() for weight in weights]
    # A finite sum excludes NaN. A sum that overflows without a NaN only costs the slow path.
    if remainders[0].dtype is torch.int8 or not bool(row.sum().isfinite()):
        for weight, rest, main in zip(weights, remainders, torch.split(row, numels)):
            reference.split_(weight, rest, main)
        return
    word = row.view(torch.int32)
    torch._foreach_copy_(list(remainders), list(torch.split(word, numels)))
    torch.add(word, 0x8000, out=words).bitwise_right_shift_(16)
    torch._foreach_copy_([weight.view(torch.int16) for weight in weights], list(torch.split(words, numels)))
