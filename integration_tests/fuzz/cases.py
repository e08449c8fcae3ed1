"""Cases of the composition fuzz: frozen values and who holds what. Torch and the standard library only.

A case says which model is trained by which rule in which dtypes, on which grid of ranks, how gradients and state
travel, and what goes wrong on the way. `drawing.draw(seed)` makes them.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

MATRIX_RULES = ("muon", "adaptive_muon")
RULES = ("adam", "adam_l2", "sgd", "lion", *MATRIX_RULES)
OTHER_ORDERS = "each rank runs its layers in another order"  # which FSDP2 does not allow
HABITS = ("reduces before the step", "steps by halves", "toggles hooks", "offloads", "recomputes activations")
HABITS += (OTHER_ORDERS,)
# Hyper-parameters, by their names in a configuration. Lion's betas are not a simple ratio, so that no sum of a few
# exact gradients cancels.
HYPER = {
    "lr": 0.02, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.99, "adam_eps": 1e-8, "sgd_momentum": 0.9,
    "lion_beta1": 0.9123, "lion_beta2": 0.9717, "muon_momentum": 0.9, "adaptive_muon_beta2": 0.95,
    "adaptive_muon_eps": 1e-8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks by what they hold, in the order of Megatron-Core: rank = (stage * dp + replica) * tp + index within tp.

    Experts divide the `dp * tp` ranks of a stage again: expert tensor parallelism innermost, then expert parallelism,
    then replicas of the experts. Optimizer instances are consecutive replicas.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    instances: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1  # replicas that are context-parallel peers; only process groups tell them from others

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert."""
        return self.dp * self.tp // (self.ep * self.etp)

    @property
    def is_possible(self) -> bool:
        per_stage = self.dp * self.tp
        return per_stage % (self.ep * self.etp) == 0 and not (
            self.dp % self.instances or self.expert_dp % self.instances
        )

    def place(self, rank: int) -> "Place":
        """The coordinate of a rank on every axis."""
        outer, tp = divmod(rank, self.tp)
        stage, replica = divmod(outer, self.dp)
        expert_replica, of_expert = divmod(replica * self.tp + tp, self.etp * self.ep)
        ep, etp = divmod(of_expert, self.etp)
        instance = replica // (self.dp // self.instances)
        return Place(tp, replica, stage, instance, etp, ep, expert_replica)

    def places(self) -> list["Place"]:
        return [self.place(rank) for rank in range(self.size)]

    def __str__(self) -> str:
        axes = {name: getattr(self, name) for name in ("tp", "pp", "dp", "cp", "instances", "ep", "etp")}
        return "x".join(f"{name}{size}" for name, size in axes.items() if size > 1 or name == "dp")


class Place(NamedTuple):
    tp: int
    replica: int
    stage: int
    instance: int
    etp: int
    ep: int
    expert_replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    name: str
    shape: tuple[int, ...]
    number: int  # position in the model; decides on the stage and the chunk
    wide: bool = False  # fp32 in a 16-bit model
    cut: int | None = None  # the dim that (expert) tensor parallelism cuts
    expert: int | None = None  # number of the expert that it belongs to
    embedding: bool = False  # marked as embedding or output
    norm_group: str | None = None  # "mtp": a gradient norm of its own
    qkv: bool = False  # rows of queries, keys and values, fused: 2, 1 and 1 in each group
    tied: bool = False  # an embedding that the first and the last stage hold
    over_tp: str | None = None  # attribute of a gradient that differs between tensor-parallel ranks
    frozen: bool = False
    left_out: bool = False  # trainable, but in no parameter group
    uses: int = 1  # modules that use it in one forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is laid out over ranks, and how gradients and parameters travel."""

    grid: Grid = field(default_factory=Grid)
    sharding: str = "replicated"  # "flat", "whole"
    wrapped: bool = False  # in DistributedDataParallel
    overlap_grads: bool = False
    overlap_gather: bool = False
    aligned: bool = False  # align_param_gather: no schedule requests gathers, so reads and reductions start them
    gathers_with_step: bool = False  # the first chunk's parameters are gathered while the others are stepped
    checks_nan: bool = False  # check_for_nan_in_grad: an exception in place of a skipped step
    bucket_size: int | None = None
    num_buckets: int | None = None
    reduce_in_fp32: bool = True
    average_in_collective: bool = False
    sum_in_fp32: bool = False  # reduce_scatter_with_fp32_accumulation
    sums_locally: bool = False  # gradients of all parameters add up in fp32 before they are rounded and sent
    pads_for_busbw: bool = False
    chunks: int = 1
    microbatches: int = 1
    per_token: bool = False
    processes: bool = False  # ranks are gloo processes; else threads
    late: bool = False  # threads: an asynchronous collective delivers when it is waited for, and not before
    groups_none: bool = False  # pg_collection=None: the world is data parallel
    on_host: float = 0.0  # optimizer_offload_fraction; 0: no optimizer_cpu_offload
    layout: str = "plain"  # of processes: DTensors by "fsdp2", "hsdp", "tp_plan", "fsdp2_x_tp"

    @property
    def is_sharded(self) -> bool:
        return self.sharding != "replicated"

    def __str__(self) -> str:
        others = [name if value is True else f"{name}={value}" for name, value in _unusual(self, "grid", "sharding")]
        return " ".join([str(self.grid), self.sharding, *others])


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A forward that does not use a parameter."""

    step: int
    param: str
    replica: int | None  # of the parameter's replicas; None: all
    microbatch: int | None  # None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One element of one rank's gradient that is not finite."""

    step: int
    param: str
    rank: int
    value: float
    microbatch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Fields of the configurations that make a case one that has to be refused."""

    words: str  # that the refusal must hold
    fields: tuple[tuple[str, Any], ...] = ()  # of OptimizerConfig
    ddp_fields: tuple[tuple[str, Any], ...] = ()
    rank: int | None = None  # the only rank that makes it; None: all
    groups_none: bool = False  # pg_collection=None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    seed: int
    rule: str = "adam"
    numbers: str = "fp32"
    params: tuple[Param, ...] = ()
    setup: Setup = field(default_factory=Setup)
    resume: Setup | None = None  # the run is saved before step `resume_at` and goes on in this setup
    resume_at: int = 0
    resume_numbers: str | None = None  # of the resumed run, where they are others
    mistake: Mistake | None = None
    steps: int = 3
    clip: float = 0.0
    counts_zeros: bool = False
    overrides: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] | None = ()  # by parameter; None: the standard ones
    zero_share: float = 0.0  # of gradient elements that are zero on every rank
    skips: tuple[Skip, ...] = ()
    bad: tuple[Bad, ...] = ()
    scale: float = 1024.0  # initial or constant loss scale
    window: int = 1000
    hysteresis: int = 2
    skip_above: float = math.inf  # grad_norm_skip_threshold
    schedules: bool = False  # the learning rate falls from step to step
    keeps_grads: bool = False  # zero_grad(set_to_none=False)
    reload_at: int | None = None  # before that step a new model and optimizer take the state dicts of the old ones
    habits: tuple[str, ...] = ()  # of the training loop, see HABITS
    scale_mode: str = "spectral"
    looks_each_step: bool = True  # weights are compared after every step; else after the last one
    nesterov: bool = False
    tp_mode: str = "blockwise"
    moment2: str = "adamuon"

    def numbers_of(self, setup: Setup) -> str:
        """In which the part of the case with this setup computes."""
        return self.resume_numbers if setup is self.resume and self.resume_numbers else self.numbers

    def dtype_of(self, param: Param, setup: Setup) -> torch.dtype:
        numbers = self.numbers_of(setup)
        if numbers == "fp32" or param.wide:
            return torch.float32
        return torch.float16 if numbers.startswith("fp16") else torch.bfloat16

    def setup_at(self, step: int) -> Setup:
        return self.resume if self.resume is not None and step >= self.resume_at else self.setup

    def overrides_of(self, param: Param) -> Mapping[str, Any]:
        return MappingProxyType(dict(dict(self.overrides or ()).get(param.name, ())))

    def rule_of(self, param: Param) -> str:
        is_left_out = self.rule in MATRIX_RULES and (len(param.shape) != 2 or param.embedding)
        return str(self.overrides_of(param).get("optimizer", "adam" if is_left_out else self.rule))

    def param(self, name: str) -> Param:
        return next(param for param in self.params if param.name == name)

    def __str__(self) -> str:
        """The case in a sentence: what differs from the simplest one."""
        parts = [f"{self.rule} in {self.numbers}", f"{len(self.params)} parameters", str(self.setup)]
        if self.resume is not None:
            parts.append(f"saved before step {self.resume_at} and resumed on [{self.resume}]")
        said = ("seed", "rule", "numbers", "params", "setup", "resume", "resume_at")
        return f"case {self.seed}: " + ", ".join([*parts, *(f"{k}={v!r}" for k, v in _unusual(self, *said))])


# --- which rank has which part of a parameter -------------------------------------------------------------------------


def is_held(param: Param, place: Place, grid: Grid) -> bool:
    if param.tied:
        return place.stage in (0, grid.pp - 1)
    return param.number % grid.pp == place.stage and (param.expert is None or param.expert % grid.ep == place.ep)


def is_copy(param: Param, place: Place) -> bool:
    """Whether the rank holds the second copy of a tied parameter."""
    return param.tied and place.stage > 0


def chunk_of(param: Param, setup: Setup) -> int:
    return param.number // setup.grid.pp % setup.chunks


def cut_of(param: Param, place: Place, grid: Grid) -> tuple[int, int]:
    """The index of the rank's part and the number of parts; (0, 1) for a parameter that is not cut."""
    if param.cut is None:
        return 0, 1
    return (place.tp, grid.tp) if param.expert is None else (place.etp, grid.etp)


def kept_as(param: Param, place: Place, setup: Setup) -> int:
    """The part of the parameter that the rank reports: ranks with the same number must report the same bits."""
    return 0 if setup.layout != "plain" else cut_of(param, place, setup.grid)[0]


def replica_of(param: Param, place: Place) -> int:
    return place.replica if param.expert is None else place.expert_replica


def num_replicas(param: Param, grid: Grid) -> int:
    return grid.dp if param.expert is None else grid.expert_dp


def is_used(case: Case, param: Param, *, step: int, microbatch: int, replica: int) -> bool:
    return not any(
        skip.param == param.name
        and skip.step == step
        and skip.replica in (None, replica)
        and skip.microbatch in (None, microbatch)
        for skip in case.skips
    )


def is_trained(param: Param) -> bool:
    return not (param.frozen or param.left_out)


def _unusual(value: Any, *but: str) -> list[tuple[str, Any]]:
    """The fields that are not at their defaults, without those in `but`."""
    fields = [(field.name, field.default, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [(name, present) for name, default, present in fields if name not in but and present != default]
