"""fp8 codes with scales: the arithmetic common to all quantised parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opt_kernels.quantized.recipes import (
    Recipe,
    as_matrix,
    exponents_of,
    from_codes,
    from_exponents,
    scales_of,
    to_codes,
)
from opt_kernels.quantized.tiles import raise_to_largest_, spread

HISTORY, SCALE = "fp8_amax_history", "fp8_scale"


@dataclass(slots=True, kw_only=True)
class ScaledCodes:
    """fp8 codes of a tensor and their scales. Implements the arithmetic of `QuantizedParam`."""

    recipe: Recipe
    shape: torch.Size
    codes: Tensor  # (numel,) uint8
    scales: Tensor  # (num_scales,) of `recipe.scale_dtype`
    history: Tensor | None = field(default=None)  # (recipe.history,) fp32: largest magnitudes, the newest first

    @classmethod
    def empty(cls, recipe: Recipe, shape: torch.Size, device: torch.device) -> "ScaledCodes":
        """Codes and scales of zeros."""
        return cls(
            recipe=recipe,
            shape=shape,
            codes=torch.zeros(shape.numel(), dtype=torch.uint8, device=device),
            scales=torch.zeros(recipe.num_scales(shape), dtype=recipe.scale_dtype, device=device),
            history=torch.zeros(recipe.history, device=device) if recipe.history else None,
        )

    @property
    def num_scales(self) -> int:
        return self.recipe.num_scales(self.shape)

    def values(self) -> Tensor:
        """(shape) fp32."""
        return from_codes(self.codes, self._spread(0, self.codes.numel())).view(self.shape)

    def largest_(self, largest: Tensor, values: Tensor, start: int) -> None:
        """Raise `largest`, see `QuantizedParam`. NaN counts as infinite."""
        if not values.numel():
            return
        known = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if self.recipe.run:
            first = start // self.recipe.run
            of_runs = known.abs().view(-1, self.recipe.run).amax(1)
            part = largest[first : first + of_runs.numel()]
            part.copy_(torch.maximum(part, of_runs))
        elif self.recipe.square:
            cols = as_matrix(self.shape)[1]
            raise_to_largest_(largest, known, start, cols=cols, square=self.recipe.square)
        else:
            largest.copy_(torch.maximum(largest, known.abs().amax()))

    def rescale_(self, largest: Tensor, *, skip: Tensor | None = None) -> None:
        """Write the scales and the history. A negative magnitude keeps its scale."""
        stays = largest < 0 if skip is None else (largest < 0) | skip
        follows = largest
        if self.history is not None:
            before = self.history.amax().view(1)
            follows = torch.where(before > 0, before, largest)  # the history is empty before the first update
            rolled = torch.cat([largest, self.history[:-1]])
            self.history.copy_(torch.where(stays, self.history, rolled))
        self._write_scales(slice(None), scales_of(follows.clamp(min=0), self.recipe), stays)

    def encode_(self, values: Tensor, start: int, *, skip: Tensor | None = None) -> None:
        """Write the codes. A recipe with runs first writes their scales."""
        run = self.recipe.run
        if run and values.numel():
            of_runs = values.new_zeros(values.numel() // run)
            self._alone(values).largest_(of_runs, values, 0)
            self._write_scales(
                slice(start // run, start // run + of_runs.numel()), scales_of(of_runs, self.recipe), skip
            )
        target = self.codes[start : start + values.numel()]
        codes = to_codes(values, self._spread(start, values.numel()))
        target.copy_(codes if skip is None else torch.where(skip, target, codes))

    def quantize_(self, values: Tensor) -> None:
        """Write scales and codes from `values` (shape), and clear the history."""
        if self.history is not None:
            self.history.zero_()
        flat = values.detach().reshape(-1).to(device=self.codes.device, dtype=torch.float32)
        if not self.recipe.run:
            largest = torch.zeros(self.num_scales, device=flat.device)
            self.largest_(largest, flat, 0)
            self.rescale_(largest)
        self.encode_(flat, 0)

    def extra(self) -> Mapping[str, Tensor]:
        """The history of delayed scaling, and the current scale, which does not reflect its newest entry yet."""
        return {} if self.history is None else {HISTORY: self.history, SCALE: self.scales}

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Move to the given memory."""
        codes.copy_(self.codes)
        self.codes = codes
        if scales is not None:
            scales.copy_(self.scales)
            self.scales = scales

    def cloned(self, device: torch.device) -> "ScaledCodes":
        """A copy on the given device."""
        return ScaledCodes(
            recipe=self.recipe,
            shape=self.shape,
            codes=self.codes.to(device, copy=True),
            scales=self.scales.to(device, copy=True),
            history=None if self.history is None else self.history.to(device, copy=True),
        )

    def _alone(self, values: Tensor) -> "ScaledCodes":
        """The same recipe for a separate tensor with the shape of `values`."""
        return ScaledCodes(recipe=self.recipe, shape=values.shape, codes=self.codes, scales=self.scales)

    def _write_scales(self, at: slice, scales: Tensor, stays: Tensor | None) -> None:
        target = self.scales[at]
        stored = exponents_of(scales) if self.recipe.run else scales
        target.copy_(stored if stays is None else torch.where(stays, target, stored))

    def _spread(self, start: int, numel: int) -> Tensor:
        """fp32 scales of a run of elements, or a single scale for all."""
        if not numel:
            return torch.ones(1, device=self.scales.device)
        if self.recipe.run:
            run = self.recipe.run
            return from_exponents(self.scales[start // run : (start + numel) // run]).repeat_interleave(run)
        if self.recipe.square:
            return spread(self.scales, start, numel, cols=as_matrix(self.shape)[1], square=self.recipe.square)
        return self.scales


class ScaledParam:
    """The part of `QuantizedParam` that every parameter delegates to its codes and scales, `scaled`."""

    scaled: ScaledCodes

    @property
    def recipe(self) -> Recipe:
        """The recipe of its scales."""
        return self.scaled.recipe

    @property
    def codes(self) -> Tensor:
        """The bits of float8_e4m3fn, (numel,) uint8."""
        return self.scaled.codes

    @property
    def scales(self) -> Tensor:
        """(num_scales,) fp32, or uint8 exponents."""
        return self.scaled.scales

    @property
    def num_scales(self) -> int:
        """Number of groups of elements that share a scale."""
        return self.scaled.num_scales

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Move the codes, and the scales if memory for them is given."""
        self.scaled.move_(codes, scales)

    def largest_(self, largest: Tensor, values: Tensor, start: int) -> None:
        """Raise `largest` to the magnitudes of `values`, elements from `start` on."""
        self.scaled.largest_(largest, values, start)

    def rescale_(self, largest: Tensor, *, skip: Tensor | None = None) -> None:
        """Set the scales from the largest magnitudes."""
        self.scaled.rescale_(largest, skip=skip)

    def encode_(self, values: Tensor, start: int, *, skip: Tensor | None = None) -> None:
        """Write the codes of `values`, elements from `start` on."""
        self.scaled.encode_(values, start, skip=skip)

    def quantize_(self, values: Tensor) -> None:
        """Write scales and codes from `values` (shape), of any float dtype."""
        self.scaled.quantize_(values)
