"""Recipes of fp8 parameters: which elements share a scale, and how the scale follows from their magnitudes.

All codes are float8_e4m3fn, whose largest value is 448. With a = max |x| over the elements that share a scale,

    scale = a / 448                            tensorwise, delayed
    scale = 2^k, the smallest with a <= 448 * 2^k   blockwise, mxfp8
    code  = x / scale, rounded to nearest even and clamped to +-448

`delayed` uses the largest a of the last 16 updates instead of the current one, like the history of TransformerEngine's
delayed scaling. `blockwise` has one scale per square of 128 x 128 elements (DeepSeek-V3, arXiv 2412.19437, 3.3.2),
`mxfp8` one per 32 neighbours in a row (OCP Microscaling Formats 1.0); its scales are stored as biased exponents.
Elements that share a scale with one that is not finite become NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max  # 448
_TINY = torch.finfo(torch.float32).tiny
_NAN_EXPONENT = 255  # of e8m0


class QuantizationError(ValueError):
    """A parameter that a recipe cannot quantise, or whose format cannot be updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a parameter is scaled. With neither `square` nor `run` it has a single scale."""

    name: str
    square: int = 0  # rows and columns of the elements that share a scale
    run: int = 0  # neighbours in a row that share a scale
    history: int = 0  # number of past updates that a scale follows; 0: the current values only

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the stored scales: fp32, or uint8 for e8m0 exponents."""
        return torch.uint8 if self.run else torch.float32

    def num_scales(self, shape: tuple[int, ...]) -> int:
        """Number of scales of a parameter of this shape."""
        numel = torch.Size(shape).numel()
        if self.run:
            return numel // self.run
        if self.square:
            rows, cols = as_matrix(shape)
            return -(-rows // self.square) * -(-cols // self.square)
        return 1

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Size of codes and scales in bytes."""
        return torch.Size(shape).numel() + self.num_scales(shape) * self.scale_dtype.itemsize

    def problem(self, shape: tuple[int, ...]) -> str:
        """Why a parameter of this shape cannot be quantised; empty if it can."""
        if self.run and (not shape or shape[-1] % self.run):
            return f"the recipe {self.name!r} needs a last dim that is a multiple of {self.run}"
        return ""


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "delayed": Recipe(name="delayed", history=16),
        "tensorwise": Recipe(name="tensorwise"),
        "blockwise": Recipe(name="blockwise", square=128),
        "mxfp8": Recipe(name="mxfp8", run=32),
    }
)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a parameter viewed as a matrix of its last dim."""
    cols = shape[-1] if shape else 1
    return (torch.Size(shape).numel() // cols if cols else 0), cols


def scales_of(largest: Tensor, recipe: Recipe) -> Tensor:
    """fp32 scales from the largest magnitudes: 1 if all elements are zero, NaN if one is not finite."""
    if recipe.square or recipe.run:  # powers of two, so that scaling is exact
        mantissa, exponent = torch.frexp(largest)
        power = exponent - 9 + (mantissa > MAX / 512)  # largest / 2^power is in (224, 448]
        scales = ((power + 127).clamp(1, 254) << 23).view(torch.float32)
    else:
        scales = (largest / MAX).clamp(min=_TINY)
    return torch.where(largest > 0, scales, 1.0).masked_fill_(~largest.isfinite(), torch.nan)


def exponents_of(scales: Tensor) -> Tensor:
    """uint8 e8m0 from fp32 powers of two."""
    return ((scales.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def from_exponents(exponents: Tensor) -> Tensor:
    """fp32 from uint8 e8m0."""
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    return scales.masked_fill_(exponents == _NAN_EXPONENT, torch.nan)


def to_codes(values: Tensor, scales: Tensor) -> Tensor:
    """uint8 bits of the fp8 codes of `values`; `scales` broadcasts."""
    return (values / scales).clamp_(-MAX, MAX).to(FP8).view(torch.uint8)


def from_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of codes; `scales` broadcasts."""
    return codes.view(FP8).to(torch.float32).mul_(scales)
