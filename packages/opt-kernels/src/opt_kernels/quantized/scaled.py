"""`QuantizedParam`: a parameter in fp8 codes with scales, its arithmetic, and its recipe: which elements share a scale.

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
from torch.nn.functional import pad

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
            rows, cols = (-(-size // self.square) for size in as_matrix(shape))
            return rows * cols
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
    rows = torch.Size(shape).numel() // cols if cols else 0
    return rows, cols


def scales_of(largest: Tensor, recipe: Recipe) -> Tensor:
    """fp32 scales from the largest magnitudes: 1 if all elements are zero, NaN if one is not finite."""
    if recipe.square or recipe.run:  # powers of two, so that scaling is exact
        mantissa, exponent = torch.frexp(largest)
        power = exponent - 9 + (mantissa > MAX / 512)  # largest / 2^power is in (224, 448]
        biased = (power + 127).clamp(1, 254)
        scales = (biased << 23).view(torch.float32)
    else:
        scales = (largest / MAX).clamp(min=_TINY)
    scales = torch.where(largest > 0, scales, 1.0)
    return scales.masked_fill_(~largest.isfinite(), torch.nan)


HISTORY = "fp8_amax_history"
SCALE = "fp8_scale"


@dataclass(eq=False, kw_only=True)
class QuantizedParam:
    """A parameter of `shape` in fp8 codes with scales. Ranks may each own a run of its row-major elements.

    An update has three parts. Each rank computes the largest magnitudes of its run (`largest_`), which are then reduced
    by maximum over ranks; every rank sets the scales from them (`rescale_`); each rank writes the codes of its run
    (`encode_`). If the recipe scales runs of `recipe.run` elements, ranks own whole runs and `encode_` also writes
    their scales.
    """

    recipe: Recipe
    shape: torch.Size
    codes: Tensor  # (numel,) uint8: the bits of float8_e4m3fn, row-major
    scales: Tensor  # (num_scales,) factors of the codes: fp32, or uint8 exponents (e8m0) by run
    history: Tensor | None = None  # (recipe.history,) fp32: largest magnitudes, the newest first
    source: Tensor | None = None  # the values that it was quantised from, if they are kept

    @classmethod
    def empty(cls, recipe: Recipe, shape: torch.Size, device: torch.device) -> "QuantizedParam":
        """Codes and scales of zeros."""
        codes = torch.zeros(shape.numel(), dtype=torch.uint8, device=device)
        scales = torch.zeros(recipe.num_scales(shape), dtype=recipe.scale_dtype, device=device)
        made = cls(recipe=recipe, shape=shape, codes=codes, scales=scales)
        if recipe.history:
            made.history = torch.zeros(recipe.history, dtype=torch.float32, device=device)
        return made

    @property
    def num_scales(self) -> int:
        """Number of groups of elements that share a scale."""
        return self.recipe.num_scales(self.shape)

    def values(self) -> Tensor:
        """The values of the codes: a new fp32 tensor of `shape`."""
        values = self.codes.view(FP8).to(torch.float32)
        return values.mul_(self._spread(0, values.numel())).view(self.shape)

    def largest_(self, largest: Tensor, values: Tensor, start: int) -> None:
        """Raise `largest` (num_scales,) fp32 to the magnitudes of `values` (n,) fp32, elements from `start` on.

        NaN counts as infinite.
        """
        if not values.numel():
            return
        known = values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        first = 0
        if self.recipe.run:
            first = start // self.recipe.run
            found = known.view(-1, self.recipe.run).amax(1)
        elif self.recipe.square:
            first, rows, lead = self._squares(start, known.numel())
            square = self.recipe.square
            _, cols = as_matrix(self.shape)
            rest = rows * square * cols - lead - known.numel()
            table = pad(known, (lead, rest)).view(-1, cols)
            squares = pad(table, (0, -cols % square)).view(rows, square, -1, square)
            found = squares.amax((1, 3)).view(-1)
        else:
            found = known.amax().view(1)
        part = largest[first : first + found.numel()]
        part.copy_(torch.maximum(part, found))

    def rescale_(self, largest: Tensor) -> None:
        """Set scales and history from the largest magnitudes of the whole parameter. A negative one keeps its scale."""
        unchanged = largest < 0
        follows = largest
        if self.history is not None:
            before = self.history.amax().view(1)
            follows = torch.where(before > 0, before, largest)  # the history is empty before the first update
            rolled = torch.cat([largest, self.history[:-1]])
            self.history.copy_(torch.where(unchanged, self.history, rolled))
        self._write_scales(slice(None), scales_of(follows.clamp(min=0), self.recipe), unchanged)

    def encode_(self, values: Tensor, start: int, *, skip: Tensor | None = None) -> None:
        """Write the codes of `values` (n,) fp32, elements from `start` on; nothing if `skip` is set. A recipe with runs
        first writes their scales."""
        if self.recipe.run and values.numel():
            of_runs = values.new_zeros(values.numel() // self.recipe.run)
            self.largest_(of_runs, values, 0)
            first = start // self.recipe.run
            self._write_scales(slice(first, first + of_runs.numel()), scales_of(of_runs, self.recipe), skip)
        scaled = values / self._spread(start, values.numel())
        codes = scaled.clamp_(-MAX, MAX).to(FP8).view(torch.uint8)
        target = self.codes[start : start + values.numel()]
        target.copy_(codes if skip is None else torch.where(skip, target, codes))

    def quantize_(self, values: Tensor) -> None:
        """Write scales and codes from `values` (shape), of any float dtype, and clear the history."""
        if self.history is not None:
            self.history.zero_()
        flat = values.detach().reshape(-1).to(device=self.codes.device, dtype=torch.float32)
        if not self.recipe.run:
            largest = torch.zeros(self.num_scales, dtype=torch.float32, device=flat.device)
            self.largest_(largest, flat, 0)
            self.rescale_(largest)
        self.encode_(flat, 0)

    def initial(self) -> Tensor | None:
        """The values that the parameter was quantised from, in their own dtype, if it kept them."""
        return self.source

    def forget_initial(self) -> None:
        """Free the tensor that `initial` returns."""
        self.source = None

    def finish_(self) -> None:
        """Called after all codes and scales were written, by this rank or by others."""

    def extra(self) -> Mapping[str, Tensor]:
        """Further tensors that a checkpoint must contain, by name. Loading writes to these tensors in place.

        The history of delayed scaling, and the current scale, which does not reflect its newest entry yet.
        """
        return {} if self.history is None else {HISTORY: self.history, SCALE: self.scales}

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Move the codes to the memory `codes`, and the scales to `scales` if given. Dtypes and sizes stay the same."""
        codes.copy_(self.codes)
        self.codes = codes
        if scales is not None:
            scales.copy_(self.scales)
            self.scales = scales

    def cloned(self, device: torch.device) -> "QuantizedParam":
        """A copy on the given device, without `source`."""
        return QuantizedParam(
            recipe=self.recipe,
            shape=self.shape,
            codes=self.codes.to(device, copy=True),
            scales=self.scales.to(device, copy=True),
            history=None if self.history is None else self.history.to(device, copy=True),
        )

    def _write_scales(self, at: slice, scales: Tensor, unchanged: Tensor | None) -> None:
        target = self.scales[at]
        if self.recipe.run:  # powers of two, stored as uint8 exponents (e8m0)
            scales = ((scales.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)
        target.copy_(scales if unchanged is None else torch.where(unchanged, target, scales))

    def _spread(self, start: int, numel: int) -> Tensor:
        """fp32 scales of a run of elements, or a single scale for all."""
        if not numel:
            return torch.ones(1, dtype=torch.float32, device=self.scales.device)
        if self.recipe.run:
            run = self.recipe.run
            exponents = self.scales[start // run : (start + numel) // run]
            scales = (exponents.to(torch.int32) << 23).view(torch.float32)
            scales.masked_fill_(exponents == _NAN_EXPONENT, torch.nan)
            return scales.repeat_interleave(run)
        if self.recipe.square:
            first, rows, lead = self._squares(start, numel)
            square = self.recipe.square
            _, cols = as_matrix(self.shape)
            squares_of_row = -(-cols // square)
            table = self.scales[first : first + rows * squares_of_row].view(rows, -1)
            wide = table.repeat_interleave(square, 1)[:, :cols]
            of_elements = wide.repeat_interleave(square, 0).reshape(-1)
            return of_elements[lead : lead + numel]
        return self.scales

    def _squares(self, start: int, numel: int) -> tuple[int, int, int]:
        """The first square of the rows of squares with elements of a run, the number of these rows, and the number of
        their elements before the run."""
        _, cols = as_matrix(self.shape)
        of_row = self.recipe.square * cols  # elements of a row of squares
        squares_of_row = -(-cols // self.recipe.square)
        first, lead = divmod(start, of_row)
        rows = -(-(lead + numel) // of_row)
        return first * squares_of_row, rows, lead
