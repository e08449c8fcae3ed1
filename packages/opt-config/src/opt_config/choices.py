"""The typed choices of an `OptimizerConfig`: precision, sharding, loss scaling, placement; and all as JSON values."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from opt_config.optimizer_config import OptimizerConfig

MUON_FAMILY = ("muon", "adaptive_muon")
"""The rules that honour `use_muon=False` on a parameter and `muon_scalar_optimizer`."""

MATRIX_RULES = (*MUON_FAMILY, "muown", "soap", "soap_muon")
"""The rules that update whole matrices only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of parameters, gradients, main parameters (mains) and moments."""

    params: torch.dtype  # the model's parameters
    grads: torch.dtype  # the gradients that the rule reads
    mains: torch.dtype  # the main parameters that the rule updates
    exp_avg: torch.dtype  # first moment
    exp_avg_sq: torch.dtype  # second moment; torch.uint8 stands for scaled fp8 in both
    remainder: bool  # bf16 parameters store the low 16 bits of their fp32 mains instead of a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Every rank keeps the whole optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShards:
    """Optimizer state sharded into equal runs of elements over the data-parallel ranks (ZeRO-1)."""

    overlap_gather: bool  # gather parameters before use in the next forward
    overlap_gather_with_step: bool  # the first model chunk's gather starts while the other chunks are updated


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParams:
    """Whole matrices assigned to ranks (layer-wise). Parameters of elementwise rules are sharded as in `FlatShards`."""

    overlap_gather: bool  # gather parameters before use in the next forward
    by_owner: bool = False  # a matrix has one owner among tensor-parallel ranks, too


@dataclass(frozen=True, slots=True, kw_only=True)
class NoScale:
    """The loss is not scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantScale:
    """The loss is multiplied by one number; an overflow skips the step."""

    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale:
    """The scale is reduced after overflows and grows after a run of successful steps."""

    initial: float
    minimum: float
    window: float  # successful steps before it grows
    hysteresis: int  # overflows before it is reduced
    growth: float = 2.0
    backoff: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """Mains and state are kept on the device of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHost:
    """A part of the mains and state is kept in host memory."""

    fraction: float  # of the elements, in (0, 1]
    overlap: bool  # copies overlap with the update
    pin_grads: bool
    pin_params: bool
    compute: str = "host"  # where they are updated: "host", or "device", which fetches and returns them run by run


Sharding = Replicated | FlatShards | WholeParams
LossScaling = NoScale | ConstantScale | DynamicScale
Placement = OnDevice | OnHost


def resolved(config: "OptimizerConfig") -> dict[str, dict[str, object]]:
    """Return the fields of `config` and its four typed choices as JSON values, as written to `config_logger_dir`.

    >>> from opt_config import OptimizerConfig
    >>> resolved(OptimizerConfig(bf16=True))["sharding"]
    {'is': 'Replicated'}
    """
    names = ("precision", "sharding", "loss_scaling", "placement")
    choices = {name: _plain_choice(getattr(config, name)) for name in names}
    return {"config": config.to_dict(), **choices}


def _plain_choice(choice: Precision | Sharding | LossScaling | Placement) -> dict[str, object]:
    values = dataclasses.asdict(choice).items()
    plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values}
    return {"is": type(choice).__name__, **plain}
