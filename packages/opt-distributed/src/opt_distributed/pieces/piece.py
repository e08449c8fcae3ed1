"""`OwnedPiece`: the part of one parameter that a rank updates, with its main values, state and count of updates.

A rule updates main values: the parameter itself, an fp32 copy, a bf16 parameter with a remainder, or codes. A remainder
of 8 bits takes one byte an element. With 8-bit moments and gradient release, training takes five bytes a parameter, as
with FlashOptim (arXiv 2602.23349). Main values in host memory are in `offload`, those of fp8 parameters in `quantized`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.comm.device import HostCopy
from opt_distributed.pieces.dtensor import local
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.sources import Source
from opt_kernels.backends import in_memory_order
from opt_kernels.codecs import StateCodec, codec_for, join, split_
from opt_kernels.rules import Rule
from opt_kernels.rules import init_state as state_of_rule
from opt_kernels.works import MatrixSpec
from opt_paramgroups import ParamId

FP16 = codec_for("main_params", torch.float16, signed=True)
Groups = Sequence[Mapping[str, Any]]
"""`param_groups`."""


def check_rate(group: Mapping[str, Any]) -> None:
    """Raise ValueError if the group has no learning rate yet."""
    if group["lr"] is None:
        raise ValueError(f"lr of group {group['name']!r} is None: set lr in the configuration, or attach a scheduler")


class Numbers(Enum):
    """The number format of main values."""

    DIRECT = auto()  # the parameter itself
    FP32_COPY = auto()  # an fp32 copy, which is rounded to the parameter
    REMAINDER = auto()  # the bf16 parameter and the lower 16 bits of the fp32 value
    SHORT_REMAINDER = auto()  # the bf16 parameter and 8 more bits: 24 bits in all
    FP16_SCALED = auto()  # fp16 codes with a scale for each block; see `CodedMain`


@dataclass(slots=True, eq=False)
class Main:
    """The main values of one piece of a parameter. `target` is the piece itself: a view of the parameter's memory."""

    numbers: Numbers
    target: Tensor
    copy: Tensor | None = None  # FP32_COPY: fp32, the target's shape
    remainder: Tensor | None = None  # REMAINDER: int16; SHORT_REMAINDER: int8; the target's shape

    @property
    def updated(self) -> "Main":
        """The main values that a rule updates: these, or those in host memory that stand behind them."""
        return self

    @property
    def main(self) -> Tensor | None:
        """The tensor that a rule updates in place; None if values are joined from two halves."""
        return self.target if self.numbers is Numbers.DIRECT else self.copy

    @property
    def out(self) -> Tensor | None:
        """The tensor that receives the rounded value; None if the rule, or `close_`, writes the parameter itself."""
        return None if self.main is self.target else self.target

    @property
    def shape(self) -> torch.Size:
        """Shape of the piece."""
        return self.target.shape

    def kept(self) -> tuple[Tensor, ...]:
        """The tensors kept in addition to the parameter."""
        return tuple(tensor for tensor in (self.copy, self.remainder) if tensor is not None)

    def value(self) -> Tensor:
        """The exact main values: their memory, or a new fp32 tensor if they are joined or decoded."""
        if self.remainder is not None:
            return join(self.target.detach(), self.remainder)
        main = self.main
        assert main is not None
        return main

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values and the parameter."""
        if self.remainder is not None:
            split_(self.target, self.remainder, value.to(torch.float32))
            return
        if self.copy is not None:
            self.copy.copy_(value)
        self.target.copy_(value)

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the main values from the parameter, after other code wrote the parameter."""
        if self.copy is not None:
            self.copy.copy_(self.target)
        if self.remainder is not None:
            self.remainder.zero_()

    def extra(self) -> Mapping[str, Tensor]:
        """The further tensors of an fp8 parameter that a checkpoint must hold, sharing memory; empty for others."""
        return {}

    def restore_(self, saved: Mapping[str, Tensor]) -> None:
        """Load `extra`, as saved with the main values that were set before. If any was not saved, reset all to zero."""


@dataclass(slots=True, eq=False, kw_only=True)
class CodedMain(Main):
    """Main values in scaled fp16: half the memory of an fp32 copy, decoded to fp32 (`copy`) from `open_` to `close_`.

    The codes are fp16, with an fp32 scale (a power of two) for each 128 elements. (Megatron-Core keeps one scale for
    each tensor, max |x| / 32752, so that its values depend on how the tensor is cut over ranks.) The parameter is
    rounded from the values of the codes, not from those that the rule computed, so that a run that loads a checkpoint
    continues with the same parameter.

    An element is off by at most 2**-11 of itself, or by 2**-39 of the largest of its 128, whichever is larger. An
    infinite or NaN element makes all 128 NaN.
    """

    codes: Tensor  # (target.numel(),) fp16
    scales: Tensor  # (ceil(target.numel() / 128),) fp32

    @classmethod
    def of(cls, target: Tensor) -> "CodedMain":
        """Create the main values of `target` from its present values."""
        numel = target.numel()
        device = target.device
        made = cls(
            numbers=Numbers.FP16_SCALED,
            target=target,
            codes=torch.zeros(numel, dtype=FP16.dtype, device=device),
            scales=torch.zeros(-(-numel // FP16.block), dtype=torch.float32, device=device),
        )
        made.reload_()
        return made

    @property
    def out(self) -> None:
        return None

    def kept(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales

    def value(self) -> Tensor:
        return values_of(FP16, self.codes, self.scales).view(self.target.shape)

    def open_(self) -> Tensor:
        """Return the fp32 values, which a rule updates until `close_`."""
        self.copy = self.value()
        return self.copy

    @torch.no_grad()
    def close_(self, *, skip: Tensor | None = None) -> None:
        """Store the updated values. Nothing changes if `skip`, 0-d bool on the device, is set."""
        assert self.copy is not None
        values = self.copy.reshape(-1)
        self.copy = None
        memory = self.codes, self.scales, self.target
        before = None if skip is None else [tensor.clone() for tensor in memory]
        FP16.encode_(self.codes, self.scales, values)
        self.target.copy_(self.value())
        if before is not None and skip is not None:
            for tensor, kept in zip(memory, before, strict=True):
                tensor.copy_(torch.where(skip, kept, tensor))

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        encode_again_(FP16, self.codes, self.scales, value.reshape(-1).float())
        self.target.copy_(self.value())

    @torch.no_grad()
    def reload_(self) -> None:
        encode_again_(FP16, self.codes, self.scales, self.target.detach().reshape(-1).float())


@torch.no_grad()
def make_main(numbers: Numbers, target: Tensor) -> Main:
    """Create the main values of `target` from its present values."""
    match numbers:
        case Numbers.DIRECT:
            return Main(numbers, target)
        case Numbers.FP32_COPY:
            return Main(numbers, target, copy=target.detach().to(torch.float32, copy=True))
        case Numbers.REMAINDER | Numbers.SHORT_REMAINDER:
            if target.dtype != torch.bfloat16:
                raise ValueError(f"remainders are for bf16 parameters, and this one is {target.dtype}")
            dtype = torch.int16 if numbers is Numbers.REMAINDER else torch.int8
            return Main(numbers, target, remainder=torch.zeros_like(target, dtype=dtype))
        case Numbers.FP16_SCALED:
            return CodedMain.of(target)


def values_of(codec: StateCodec, codes: Tensor, scales: Tensor) -> Tensor:
    """Decode `codes`, of dense memory, to a new fp32 tensor of their shape and strides: blocks are runs of memory."""
    values = torch.empty_like(codes, dtype=torch.float32)
    codec.decode_(in_memory_order(values), in_memory_order(codes), scales)
    return values


def encode_again_(codec: StateCodec, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Encode `values` to `codes` and `scales`. Values that were decoded from the same blocks are kept exactly.

    The scale of a block follows from its largest value. If the first encoding rounded that value up to a power of two,
    it now requires twice the scale, and the smallest codes would lose a bit. So values are also encoded with the
    largest one reduced by a factor of 1 - 2**-20, which is rounded up again; each block keeps the more exact result.
    """
    codec.encode_(codes, scales, values)
    is_exact = values_of(codec, codes, scales) == values
    if is_exact.all():
        return
    magnitudes = _rows(values.abs(), codec.block)
    is_largest = (magnitudes == magnitudes.amax(1, keepdim=True)).view(-1)[: len(values)]
    reduced = torch.where(is_largest, values * (1 - 2.0**-20), values)
    codec.encode_(codes, scales, reduced)
    is_exact_reduced = values_of(codec, codes, scales) == values
    keeps = _rows(is_exact, codec.block).sum(1) >= _rows(is_exact_reduced, codec.block).sum(1)
    keeps = keeps.repeat_interleave(codec.block)[: len(values)]
    codec.encode_(codes, scales, torch.where(keeps, values, reduced))


def _rows(flat: Tensor, block: int) -> Tensor:
    """View a flat tensor as one row for each block; the last row is padded with zeros."""
    return torch.cat([flat, flat.new_zeros(-len(flat) % block)]).view(-1, block)


# --- a piece ----------------------------------------------------------------------------------------------------------


class StepCount:
    """The number of updates made so far to pieces that are always updated together.

    The host knows the number until a device first decides whether an update is made. From then on it is in a tensor on
    the device, always the same one, because only the device knows which steps were skipped: `int(count)` waits for it.
    """

    __slots__ = ("_next", "_stays", "known")

    def __init__(self, known: int | None = 0, on_device: Tensor | None = None):
        self.known = known  # None: only the device knows it
        self._next = on_device  # 0-d int64: the number of the next update
        self._stays = False  # whether others than `advance` count, too

    def __int__(self) -> int:
        if self.known is not None:
            return self.known
        assert self._next is not None
        number = int(self._next) - 1
        if not self._stays:  # a replay counts without the host, so the number must not be cached
            self.known = number
        return number

    def stay_on(self, device: torch.device) -> None:
        """Keep the number on `device` only, from now on. Replays of a graph may then count without the host."""
        if not self._stays:
            self._on(device)
            self.known = None
            self._stays = True

    def copy(self) -> "StepCount":
        """Return a separate count with the same number, for pieces that are updated separately from now on."""
        with torch.inference_mode(False):
            return StepCount(self.known, None if self._next is None else self._next.clone())

    def next(self) -> int | Tensor:
        """The number of the next update, counted from 1. A tensor is always the same one, and `advance` writes it."""
        if self._next is not None:
            return self._next
        assert self.known is not None
        return self.known + 1

    def advance(self, skip: Tensor | None) -> None:
        """Count an update, unless `skip` (a 0-d bool on the device) is true; None stands for false."""
        if skip is not None:
            self._on(skip.device).add_(~skip)
            self.known = None
            return
        if self._next is not None:
            self._next.add_(1)
        if self.known is not None:
            self.known += 1

    def _on(self, device: torch.device) -> Tensor:
        """The tensor of the next number, created on `device` if there is none."""
        if self._next is None:
            assert self.known is not None
            with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
                self._next = torch.full((), self.known + 1, dtype=torch.int64, device=device)
        return self._next


@dataclass(slots=True, kw_only=True)
class OwnedPiece:
    """The part of one parameter that this rank owns: gradient source, main values and state."""

    id: ParamId
    param: nn.Parameter
    of_param: slice  # flat elements of the (local) parameter
    group: int  # index in `param_groups`
    source: Source  # of its gradient
    main: Main
    state: dict[str, Tensor]
    norm_slot: int = 0  # the gradient norm of the step to which it contributes
    counted: bool = True  # False if another rank counts these elements in norms and zeros
    inspected: bool = True  # whether this rank checks the gradient for infinities and NaNs; true if it counts
    matrix: MatrixSpec = field(default_factory=MatrixSpec)
    replica: int | None = None  # its replica number, if data-parallel ranks do not hold the same parts
    part: str = ""  # names this rank's part of a plain parameter that is cut over tensor-parallel ranks
    stage: ComputeStage | None = None  # gathers it with the other ranks' parts of the same matrix
    count: StepCount = field(default_factory=StepCount)  # of updates; shared with pieces that are updated with it

    @property
    def step(self) -> int:
        """The number of updates made so far. On an accelerator the host waits for it."""
        return int(self.count)

    @step.setter
    def step(self, value: int) -> None:
        self.count = StepCount(value)

    @property
    def is_whole(self) -> bool:
        """Whether it is everything that this rank stores of the parameter."""
        return self.of_param == slice(0, local(self.param).numel())


class Kind(NamedTuple):
    """What the statistics must know of a piece; see `OwnedPiece`."""

    source: Source
    norm_slot: int
    counted: bool
    inspected: bool


Kinds = Mapping[Kind, Sequence[int]]
"""Pieces by kind, as places among them."""


def kinds_of(pieces: Sequence[OwnedPiece]) -> Kinds:
    """The kinds of these pieces."""
    found: dict[Kind, list[int]] = {}
    for place, piece in enumerate(pieces):
        kind = Kind(piece.source, piece.norm_slot, piece.counted, piece.inspected)
        found.setdefault(kind, []).append(place)
    return found


class Ready(NamedTuple):
    """The pieces of a unit that have gradients, and these gradients, in the same order.

    Two lists instead of pairs: with thousands of small parameters, creating objects takes most of a step's time.
    """

    pieces: Sequence[OwnedPiece]
    grads: Sequence[Tensor]
    kinds: Kinds | None = None  # of the pieces, if they are known


class Update(NamedTuple):
    """What a unit is updated with."""

    ready: Ready
    groups: Groups
    scale_of_slot: Sequence[float | Tensor]  # by which the gradients of each norm slot are multiplied
    skip: Tensor | None = None  # 0-d bool on the device; if it is set, nothing is written or counted
    on_host: HostCopy | None = None  # of `skip` and the scales, for units in host memory; queued once a step


def init_state(
    rule: Rule, main: Tensor, *, id: ParamId, matrix: MatrixSpec, stage: ComputeStage | None
) -> dict[str, Tensor]:
    """Create the state that this rank keeps of a parameter of which it stores `main`, before the first step."""
    whole = {spec.name for spec in rule.state_specs if spec.whole} if stage is not None else set()
    if stage is None or not whole:
        return state_of_rule(rule, main, matrix, of=repr(id.name))
    state = {}
    if len(whole) < len(rule.state_specs):
        state = {name: value for name, value in rule.init_state(main).items() if name not in whole}
    if stage.computes(id):
        made = state_of_rule(rule, main.new_empty(stage.whole(id).shape), stage.of_whole[id], of=repr(id.name))
        state |= {name: value for name, value in made.items() if name in whole}
    return state
