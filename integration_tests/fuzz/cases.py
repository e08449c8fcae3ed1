"""Cases of the composition fuzz: frozen values, who holds what, and the weights and gradients of every rank.

A case says which model is trained by which rule in which dtypes, on which grid of ranks, how gradients and state
travel, and what goes wrong on the way. `drawing.draw(seed)` makes them.
"""

import dataclasses
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from grids import Grid, Place
from torch import Tensor

MATRIX_RULES = ("muon", "adaptive_muon")
OTHER_ORDERS = "each rank runs its layers in another order"  # which FSDP2 does not allow
HABITS = ("reduces before the step", "steps by halves", "toggles hooks", "offloads", "recomputes activations")
HABITS += (OTHER_ORDERS,)
# Hyper-parameters, by their names in a configuration. Lion's betas are not a simple ratio, so that no sum of a few
# exact gradients cancels.
HYPER = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_eps": 1e-8,
    "sgd_momentum": 0.9,
    "lion_beta1": 0.9123,
    "lion_beta2": 0.9717,
    "muon_momentum": 0.9,
    "adaptive_muon_beta2": 0.95,
    "adaptive_muon_eps": 1e-8,
}
UNIT = 1 / 64
TOP = 255  # integers up to here are exact in bf16


FUSED = (("qkv_split_shapes", (2, 1, 1)), ("split_rows", (1, 1)), ("head_rows", (3, 1)))  # of rows of which 4 are whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    name: str
    number: int  # of the layer; decides on the stage and the chunk
    shape: tuple[int, ...]
    wide: bool = False  # fp32 in a 16-bit model
    cut: int | None = None  # the dim that (expert) tensor parallelism cuts
    expert: int | None = None  # number of the expert that it belongs to
    embedding: bool = False  # marked as embedding or output
    norm_group: str | None = None  # "mtp": a gradient norm of its own
    qkv: bool = False  # rows of several matrices, fused as `fused` says
    tied: bool = False  # an embedding that the first and the last stage hold
    over_tp: str | None = None  # attribute of a gradient that differs between tensor-parallel ranks
    frozen: bool = False
    left_out: bool = False  # trainable, but in no parameter group
    uses: int = 1  # modules that use it in one forward
    own: tuple[str, Any] = ("", None)  # an entry of its parameter group that is not the configuration's

    @property
    def is_trained(self) -> bool:
        return not (self.frozen or self.left_out)

    @property
    def fused(self) -> tuple[str, tuple[int, ...]]:
        """The attribute that says how rows are fused, and its value."""
        return FUSED[self.number % len(FUSED)]

    def own_entries(self) -> dict[str, Any]:
        return dict([self.own]) if self.own[0] else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is laid out over ranks, and how gradients and parameters travel."""

    grid: Grid = field(default_factory=Grid)
    sharding: str = "replicated"  # "flat", "whole"
    chunks: int = 1
    microbatches: int = 1
    on_host: float = 0.0  # optimizer_offload_fraction; 0: no optimizer_cpu_offload
    late: bool = False  # threads: an asynchronous collective delivers when it is waited for, and not before
    processes: bool = False  # ranks are gloo processes; else threads
    groups_none: bool = False  # pg_collection=None: the world is data parallel
    layout: str = "plain"  # of processes: DTensors by "fsdp2", "hsdp", "tp_plan", "fsdp2_x_tp"
    wrapped: bool = False  # in DistributedDataParallel; what follows only applies then
    per_token: bool = False
    gathers_with_step: bool = False  # the first chunk's parameters are gathered while the others are stepped
    ddp: dict[str, Any] = field(default_factory=dict)  # fields of DistributedDataParallelConfig

    @property
    def is_sharded(self) -> bool:
        return self.sharding != "replicated"

    @property
    def overlaps_gather(self) -> bool:
        return bool(self.ddp.get("overlap_param_gather"))

    def __str__(self) -> str:
        others = [name if value is True else f"{name}={value}" for name, value in _unusual(self, "grid", "sharding")]
        return " ".join([str(self.grid), self.sharding, *others])


class Skip(NamedTuple):
    """A forward that does not use a parameter."""

    step: int
    param: str
    replica: int | None  # of the parameter's replicas; None: all
    microbatch: int | None  # None: all


class Bad(NamedTuple):
    """One element of one rank's gradient that is not finite."""

    step: int
    param: str
    rank: int
    microbatch: int
    value: float


@dataclass(frozen=True, slots=True)
class Mistake:
    """Fields of the configurations that make a case one that has to be refused on every rank, before the first step."""

    words: str  # that the refusal must hold
    fields: dict[str, Any] = field(default_factory=dict)  # of OptimizerConfig
    ddp_fields: dict[str, Any] = field(default_factory=dict)
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
    reload_at: int | None = None  # before that step a new model and optimizer take the state dicts of the old ones
    mistake: Mistake | None = None
    steps: int = 3
    fields: dict[str, Any] = field(default_factory=dict)  # of OptimizerConfig
    standard_overrides: bool = False  # vectors are not decayed
    zero_share: float = 0.0  # of gradient elements that are zero on every rank
    skips: tuple[Skip, ...] = ()
    bad: tuple[Bad, ...] = ()
    schedules: bool = False  # the learning rate falls from step to step
    keeps_grads: bool = False  # zero_grad(set_to_none=False)
    looks_each_step: bool = True  # weights are compared after every step; else after the last one
    habits: tuple[str, ...] = ()  # of the training loop, see HABITS

    @property
    def is_averaged(self) -> bool:
        return "ema_decay" in self.fields or self.looks_ahead

    @property
    def looks_ahead(self) -> bool:
        return "ema_nesterov_beta" in self.fields

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

    def rule_of(self, param: Param) -> str:
        is_left_out = self.rule in MATRIX_RULES and (len(param.shape) != 2 or param.embedding)
        return str(param.own_entries().get("optimizer", "adam" if is_left_out else self.rule))

    def is_wrong(self, rank: int) -> bool:
        return self.mistake is not None and self.mistake.rank in (None, rank)

    def param(self, name: str) -> Param:
        return next(param for param in self.params if param.name == name)

    def __str__(self) -> str:
        """The case in a sentence: what differs from the simplest one."""
        parts = [f"{self.rule} in {self.numbers}", f"{len(self.params)} parameters", str(self.setup)]
        if self.resume is not None:
            parts.append(f"saved before step {self.resume_at} and resumed on [{self.resume}]")
        said = ("seed", "rule", "numbers", "params", "setup", "resume", "resume_at")
        return f"case {self.seed}: " + ", ".join([*parts, *(f"{k}={v!r}" for k, v in _unusual(self, *said))])


def _unusual(value: Any, *but: str) -> list[tuple[str, Any]]:
    """The fields that are not at their defaults, without those in `but`."""
    fields = [(field.name, field.default, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [(name, present) for name, default, present in fields if name not in but and present != default]


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


def num_parts(param: Param, grid: Grid) -> int:
    """Into which (expert) tensor parallelism cuts the parameter."""
    return 1 if param.cut is None else grid.tp if param.expert is None else grid.etp


def part_of(param: Param, place: Place) -> int:
    """The number of the rank's part; 0 of a parameter that is not cut."""
    return 0 if param.cut is None else place.tp if param.expert is None else place.etp


def replica_of(param: Param, place: Place) -> int:
    return place.replica if param.expert is None else place.expert_replica


def num_replicas(param: Param, grid: Grid) -> int:
    return grid.dp if param.expert is None else grid.expert_dp


def is_used(case: Case, param: Param, *, step: int, microbatch: int, replica: int) -> bool:
    return not any(
        (skip.param, skip.step) == (param.name, step)
        and skip.replica in (None, replica)
        and skip.microbatch in (None, microbatch)
        for skip in case.skips
    )


def cut(value: Tensor, param: Param, place: Place, grid: Grid) -> Tensor:
    """The part of a whole parameter, or of its gradient, that a rank holds."""
    if param.cut is None or num_parts(param, grid) == 1:
        return value
    return value.chunk(num_parts(param, grid), param.cut)[part_of(param, place)].contiguous()


# --- weights and gradients, which every rank can make -----------------------------------------------------------------
#
# Gradients are small integers over a power of two, times the odd part of the number of replicas. So every sum over
# microbatches and ranks and every mean is exact in fp16, bf16 and fp32, in any order, and what is left to tolerate is
# the rounding of the norm and of the rule.


def first_weight(case: Case, param: Param) -> Tensor:
    """The whole parameter before the first step, float64, exact in its dtype."""
    values = torch.rand(param.shape, generator=_generator(case.seed, "weight", param.name)) - 0.5
    return values.to(case.dtype_of(param, case.setup)).double()


def gradient(case: Case, param: Param, *, step: int, microbatch: int, replica: int, tp: int, is_copy: bool) -> Tensor:
    """What one replica's microbatch adds to the whole parameter's gradient, float64.

    `tp`: the tensor-parallel rank; it matters only where the gradient differs between them (`over_tp`). `is_copy`: of
    the second copy of a tied parameter.
    """
    setup = case.setup_at(step)
    odd = setup.grid.dp // (setup.grid.dp & -setup.grid.dp)
    parts = setup.grid.tp if param.over_tp else 1
    terms = num_replicas(param, setup.grid) * setup.microbatches * odd * parts * (1 + param.tied)
    largest = max(TOP // terms, 1)
    key = (case.seed, "gradient", param.name, step, microbatch, replica, tp if param.over_tp else 0, is_copy)
    values = torch.randint(-largest, largest + 1, param.shape, generator=_generator(*key))
    present = torch.rand(param.shape, generator=_generator(case.seed, "zeros", param.name, step)) >= case.zero_share
    return values * present * odd * UNIT


def local_gradient(case: Case, param: Param, rank: int, *, step: int, microbatch: int) -> Tensor:
    """This rank's gradient after backward, with the case's faults."""
    grid = case.setup_at(step).grid
    place = grid.place(rank)
    at = {"replica": replica_of(param, place), "tp": place.tp, "is_copy": is_copy(param, place)}
    found = cut(gradient(case, param, step=step, microbatch=microbatch, **at), param, place, grid)
    for bad in case.bad:
        if bad[:4] == (step, param.name, rank, microbatch):
            found.view(-1)[found.numel() // 2] = bad.value
    return found


def tokens(case: Case, step: int, replica: int) -> int:
    """In the losses of one replica's iteration. Together they are a power of two, so that the mean is exact."""
    each = [1 + (3 * step + 5 * other) % 7 for other in range(case.setup_at(step).grid.dp)]
    each[-1] += (1 << (sum(each) - 1).bit_length()) - sum(each)
    return each[replica]


def _generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
