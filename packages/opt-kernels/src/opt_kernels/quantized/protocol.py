"""What an optimizer must be able to do with a parameter that is stored in fp8."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from opt_kernels.quantized.recipes import Recipe


class QuantizationError(ValueError):
    """A parameter that a recipe cannot quantise, or in a form that cannot be updated."""


class QuantizedParam(Protocol):
    """A parameter of `shape` in fp8 codes with scales. Ranks may each own a run of its row-major elements.

    An update has three parts. Each rank adds its run to the largest magnitudes (`largest_`), which are then the largest
    over all ranks; the scales follow (`rescale_`); each rank writes the codes of its run (`encode_`). Where a recipe
    scales by runs of `recipe.run` elements, ranks own whole runs, and `encode_` writes their scales, too.
    """

    @property
    def recipe(self) -> Recipe: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def codes(self) -> Tensor:
        """(numel,) uint8: the bits of float8_e4m3fn, row-major. The parameter's own memory."""
        ...

    @property
    def scales(self) -> Tensor:
        """What codes are multiplied by: fp32, or uint8 exponents (e8m0) by run. The parameter's own memory."""
        ...

    @property
    def num_scales(self) -> int:
        """Groups of elements that share a scale."""
        ...

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Moves the codes to `codes`, and the scales to `scales` where these are given: same dtypes and sizes."""
        ...

    def values(self) -> Tensor:
        """The values of the codes: a new fp32 tensor of `shape`."""
        ...

    def initial(self) -> Tensor | None:
        """The values that the parameter was made from, in their own precision, where it has kept them."""
        ...

    def forget_initial(self) -> None:
        """Frees what `initial` returns."""
        ...

    def largest_(self, largest: Tensor, values: Tensor, start: int) -> None:
        """Raises `largest` (num_scales,) fp32 to the magnitudes of `values` (n,) fp32, elements from `start` on."""
        ...

    def rescale_(self, largest: Tensor, *, skip: Tensor | None = None) -> None:
        """Sets the scales from the largest magnitudes of the whole parameter; a negative one leaves its scale."""
        ...

    def encode_(self, values: Tensor, start: int, *, skip: Tensor | None = None) -> None:
        """Writes the codes of `values` (n,) fp32, elements from `start` on; nothing where `skip` is set."""
        ...

    def quantize_(self, values: Tensor) -> None:
        """Writes scales and codes from `values` (shape), of any float dtype."""
        ...

    def finish_(self) -> None:
        """All codes and scales have been written, by this rank or by others."""
        ...

    def extra(self) -> Mapping[str, Tensor]:
        """What else of it a checkpoint must hold, by name: the memory itself, written when one is loaded."""
        ...
