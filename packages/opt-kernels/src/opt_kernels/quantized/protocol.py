"""The operations that an optimizer needs of a parameter stored in fp8."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from opt_kernels.quantized.recipes import Recipe


class QuantizationError(ValueError):
    """A parameter that a recipe cannot quantise, or whose format cannot be updated."""


class QuantizedParam(Protocol):
    """A parameter of `shape` in fp8 codes with scales. Ranks may each own a run of its row-major elements.

    An update has three parts. Each rank computes the largest magnitudes of its run (`largest_`), which are then reduced
    by maximum over ranks; every rank sets the scales from them (`rescale_`); each rank writes the codes of its run
    (`encode_`). If the recipe scales runs of `recipe.run` elements, ranks own whole runs and `encode_` also writes
    their scales.
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
        """The factors of the codes: fp32, or uint8 exponents (e8m0) by run. The parameter's own memory."""
        ...

    @property
    def num_scales(self) -> int:
        """Number of groups of elements that share a scale."""
        ...

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Move the codes to the memory `codes`, and the scales to `scales` if given. Dtypes and sizes stay the same."""
        ...

    def values(self) -> Tensor:
        """The values of the codes: a new fp32 tensor of `shape`."""
        ...

    def initial(self) -> Tensor | None:
        """The values that the parameter was quantised from, in their own dtype, if it kept them."""
        ...

    def forget_initial(self) -> None:
        """Free the tensor that `initial` returns."""
        ...

    def largest_(self, largest: Tensor, values: Tensor, start: int) -> None:
        """Raise `largest` (num_scales,) fp32 to the magnitudes of `values` (n,) fp32, elements from `start` on."""
        ...

    def rescale_(self, largest: Tensor, *, skip: Tensor | None = None) -> None:
        """Set the scales from the largest magnitudes of the whole parameter. A negative magnitude keeps its scale."""
        ...

    def encode_(self, values: Tensor, start: int, *, skip: Tensor | None = None) -> None:
        """Write the codes of `values` (n,) fp32, elements from `start` on. Write nothing if `skip` is set."""
        ...

    def quantize_(self, values: Tensor) -> None:
        """Write scales and codes from `values` (shape), of any float dtype."""
        ...

    def finish_(self) -> None:
        """Called after all codes and scales were written, by this rank or by others."""
        ...

    def extra(self) -> Mapping[str, Tensor]:
        """Further tensors that a checkpoint must contain, by name. Loading writes to these tensors in place."""
        ...
