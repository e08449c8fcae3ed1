"""Checksums of tensors, computed on their device, with which ranks compare what they hold without sending it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
_CHUNK_NUMEL = 1 << 20  # elements that are widened to 64 bits at a time
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, odd, as a signed 64-bit number
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Mapping[Key, Tensor]) -> dict[Key, int]:
    """Return a 64-bit checksum of the bits of each tensor, in their order. One host read for each device.

    Zeros of any shape have the same checksum, and so does a tensor on the meta device.
    """
    by_device: dict[torch.device, list[Key]] = {}
    for key, tensor in tensors.items():
        if not tensor.is_meta:
            by_device.setdefault(tensor.device, []).append(key)
    found = dict.fromkeys(tensors, 0)
    for device, keys in by_device.items():
        bits = [bits_of(tensors[key]) for key in keys]
        longest = min(_CHUNK_NUMEL, max(1, *map(len, bits)))
        # Pseudo-random odd numbers, so that no simple pattern of differences cancels.
        weights = torch.arange(longest, dtype=torch.int64, device=device).mul_(_GOLDEN)
        weights ^= weights >> 29
        weights *= _GOLDEN
        weights ^= weights >> 32
        weights.mul_(2).add_(1)
        sums = torch.stack([_checksum(own, weights) for own in bits])
        found.update(zip(keys, sums.tolist(), strict=True))
    return found


def _checksum(bits: Tensor, weights: Tensor) -> Tensor:
    """0-d int64. Products wrap around; odd weights lose no bit."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in torch.split(bits, _CHUNK_NUMEL):
        wide = chunk.to(torch.int64)
        wide = wide ^ (wide >> 32)  # the sign of a float64 must not stay in the highest bit, where two of them cancel
        total = total * _GOLDEN + (wide * weights[: chunk.numel()]).sum()
    return total


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor's values in row-major order as integers: 1-D, on its device."""
    values = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(values) if values.is_complex() else values
    return real.contiguous().view(-1).view(_BITS[real.element_size()])
