"""The typed choices behind the flat configuration: each option exists only in the case where it means something."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """In which numbers a step is kept."""

    params: torch.dtype  # the model's parameters
    grads: torch.dtype  # what the rule reads
    mains: torch.dtype  # what the rule writes
    exp_avg: torch.dtype  # first moment
    exp_avg_sq: torch.dtype  # second moment; torch.uint8 stands for scaled fp8 in both
    remainder: bool  # bf16 parameters keep the low 16 bits of their fp32 mains instead of a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Every rank keeps the whole state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShards:
    """State cut into equal runs of elements over the data-parallel ranks (ZeRO-1)."""

    overlap_gather: bool  # gather parameters before use in the next forward
    overlap_gather_with_step: bool  # the first model chunk's gather starts while the rest is stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParams:
    """Whole matrices dealt to ranks (layer-wise); what no matrix rule moves is cut as in `FlatShards`."""

    overlap_gather: bool  # gather parameters before use in the next forward


@dataclass(frozen=True, slots=True, kw_only=True)
class NoScale:
    """The loss is not scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantScale:
    """The loss is multiplied by one number; an overflow skips the step."""

    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale:
    """The scale backs off after overflows and grows after a run of good steps."""

    initial: float
    minimum: float
    window: float  # good steps before it grows
    hysteresis: int  # overflows before it backs off
    growth: float = 2.0
    backoff: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """Mains and state live beside the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHost:
    """A part of mains and state lives in host memory and is updated there."""

    fraction: float  # of the elements, in (0, 1]
    overlap: bool  # copies run beside the update
    pin_grads: bool
    pin_params: bool


Sharding = Replicated | FlatShards | WholeParams
LossScaling = NoScale | ConstantScale | DynamicScale
Placement = OnDevice | OnHost
