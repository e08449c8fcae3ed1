"""Draw cases from seeds: independent choices, without those that do not go together."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grids import Grid

from fuzz import cases
from fuzz.cases import HABITS, MATRIX_RULES, OTHER_ORDERS, Bad, Case, Mistake, Param, Setup, Skip

HALF = (False, True)
SOMETIMES = (False, False, False, True)
RARELY = (False,) * 9 + (True,)
RULES = ("adam", "adam", "adam_l2", "adam_l2", "sgd", "sgd", "lion", "lion", *MATRIX_RULES)
NUMBERS = ("fp32", "fp32", "bf16", "bf16_remainder", "bf16_short", "bf16_scaled", "fp16", "fp16_constant")
NUMBERS += ("bf16_narrow", "bf16_grads")
SAME_MAINS = ("bf16", "bf16_remainder", "bf16_short", "bf16_scaled")  # from which a run may be resumed in another
EMPTY = ((0,), (0, 8), (5, 0))
VECTORS = ((1,), (7,), (63,), (64,), (65,), (127,), (), (3, 1, 5), (2, 1))
MATRICES = ((12, 16), (16, 12), (8, 8), (24, 4), (4, 36), (12, 20))
LARGE = ((70_001,), (257, 260))
ODD_MATRICES = ((13, 7), (5, 31), (1, 17), (11, 11), (3, 4))
OFTEN = (  # how often, and the sizes of dp, tp, pp and instances
    (2, 1, 1, 1, 1), (5, 2, 1, 1, 1), (3, 3, 1, 1, 1), (3, 4, 1, 1, 1), (2, 1, 2, 1, 1), (4, 2, 2, 1, 1),
    (3, 2, 1, 2, 1), (1, 1, 1, 2, 1), (1, 1, 1, 3, 1), (1, 1, 2, 2, 1), (3, 4, 1, 1, 2), (1, 2, 1, 1, 2),
    (1, 6, 1, 1, 3), (1, 8, 1, 1, 2), (1, 3, 2, 1, 1), (1, 1, 4, 1, 1), (1, 4, 2, 1, 2), (1, 2, 2, 2, 1),
    (1, 5, 1, 1, 1),
)  # fmt: skip
GRIDS = [Grid(dp=dp, tp=tp, pp=pp, instances=n) for count, dp, tp, pp, n in OFTEN for _ in range(count)]
OF_CASES: dict[str, Sequence[Any]] = {
    "steps": (1, 2, 3, 3, 4, 5), "schedules": SOMETIMES, "standard_overrides": SOMETIMES, "keeps_grads": SOMETIMES,
    "zero_share": (0.0, 0.0, 0.1, 0.5), "looks_each_step": (False, True, True, True),
}  # fmt: skip
OF_OPTIMIZERS: dict[str, Sequence[Any]] = {
    "clip_grad": (0.0, 0.0, 0.5, 3.0, 1e3), "log_num_zeros_in_grad": HALF, "muon_nesterov": SOMETIMES,
    "grad_norm_skip_threshold": (math.inf,) * 6 + (20.0,),
    "muon_tp_mode": ("blockwise", "layer_sharded", "distributed"),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "adaptive_muon_moment2_method": ("adamuon", "normuon"),
}  # fmt: skip
OF_SCALES: dict[str, dict[str, Sequence[Any]]] = {
    "fp16": {"initial_loss_scale": (1.0, 1024.0, 2.0**20), "loss_scale_window": (1, 2, 1000), "hysteresis": (1, 2)},
    "fp16_constant": {"loss_scale": (1.0, 256.0, 1024.0)},
}
OF_SETUPS: dict[str, Sequence[Any]] = {
    "chunks": (1, 1, 1, 2), "microbatches": (1, 1, 2, 3), "on_host": (0.0, 0.0, 0.0, 0.3, 0.7, 1.0),
    "late": (*HALF, True), "processes": SOMETIMES, "groups_none": HALF, "wrapped": (*HALF, True),
    "per_token": SOMETIMES, "gathers_with_step": HALF,
}  # fmt: skip
OF_AVERAGES: dict[str, Sequence[Any]] = {
    "ema_decay": (0.5, 0.9), "ema_from_step": (1, 1, 2, 3), "ema_share": (1.0, 1.0, 0.5),
}  # fmt: skip
OF_LOOK_AHEADS: dict[str, Sequence[Any]] = {"ema_nesterov_beta": (0.5, 0.9), "ema_nesterov_gamma": (0.5, 0.9)}
OF_NORMS: dict[str, Sequence[Any]] = {
    "muon_pre_norm": ("none", "rows"),
    "muon_post_norm": ("none", "frobenius", "rows", "cols", "rows_cols", "cols_rows"),
}
SUM_IN_FP32 = "reduce_scatter_with_fp32_accumulation"
SUMS_LOCALLY = "param_name_patterns_for_fp32_local_accumulation"
OF_WRAPPERS: dict[str, Sequence[Any]] = {
    "overlap_grad_reduce": HALF, "overlap_param_gather": HALF, "align_param_gather": HALF, "num_buckets": (1, 3, None),
    "bucket_size": (1, 60, 200, 700, None), "check_for_nan_in_grad": RARELY, "grad_reduce_in_fp32": HALF,
    "average_in_collective": SOMETIMES, SUM_IN_FP32: SOMETIMES, SUMS_LOCALLY: ((), ("all",)),
    "pad_buckets_for_high_nccl_busbw": RARELY,
}  # fmt: skip


SIMPLEST = Setup()


def layouts_on(grid: Grid) -> Sequence[str]:
    """How processes may lay out a model on this grid."""
    if grid != Grid(dp=grid.dp, tp=grid.tp):
        return ("plain",)
    of_dp = ("plain", "fsdp2", "hsdp") if grid.dp == 4 else ("plain", "fsdp2")
    return of_dp if grid.tp == 1 else ("plain", "tp_plan", "fsdp2_x_tp")


# In which setups a choice remains, in this order; whether there are experts is the second argument.
ONLY: dict[str, Callable[[Setup, bool], bool]] = {
    "processes": lambda s, _: s.grid.size <= 4,
    "late": lambda s, _: not s.processes,
    "layout": lambda s, _: s.processes,
    "sharding": lambda s, _: s.layout == "plain",  # DTensors are sharded as they are
    "wrapped": lambda s, _: s.layout == "plain",
    "ddp": lambda s, _: s.wrapped,
    "per_token": lambda s, _: s.wrapped,
    # Without groups, the ranks that hold an expert are unknown; and a wrapper reports NaN to its replicas only.
    "groups_none": lambda s, experts: s.processes and s.grid == Grid(dp=s.grid.dp) and not experts,
    "check_for_nan_in_grad": lambda s, experts: s.grid.dp == s.grid.size and not experts,
    "overlap_param_gather": lambda s, _: s.is_sharded,
    "gathers_with_step": lambda s, _: s.overlaps_gather and s.sharding == "flat" and s.chunks > 1,
    "align_param_gather": lambda s, _: s.overlaps_gather and not s.gathers_with_step,
    "num_buckets": lambda s, _: s.ddp.get("bucket_size") is None,
    SUM_IN_FP32: lambda s, _: s.is_sharded and s.grid.instances == 1 and not s.ddp["grad_reduce_in_fp32"],
    SUMS_LOCALLY: lambda s, _: not s.ddp["grad_reduce_in_fp32"],
    "average_in_collective": lambda s, _: not (s.per_token or s.ddp.get(SUM_IN_FP32)),
}


def draw(seed: int) -> Case:
    """The case of a seed, the same in every process."""
    rng = random.Random(seed)
    rule = rng.choice(RULES)
    numbers = rng.choice(NUMBERS)
    if numbers == "bf16_narrow" and not rule.startswith("adam"):
        numbers = "bf16"
    setup = _setup(rng, rule, numbers)
    params = _params(rng, rule, numbers, setup.grid)
    setup = _consistent(setup, params)
    case = Case(
        seed=seed,
        rule=rule,
        numbers=numbers,
        params=params if setup.layout == "plain" else _laid_out(params),
        setup=setup,
        habits=tuple(habit for habit in HABITS if rng.choice(RARELY)),
        fields=_chosen(rng, OF_OPTIMIZERS) | _chosen(rng, OF_SCALES.get(numbers, {})),
        **_chosen(rng, OF_CASES),
    )
    if setup.layout != "plain":
        case = replace(case, habits=tuple(habit for habit in case.habits if habit != OTHER_ORDERS))
    if any(param.left_out or param.own[0] for param in params):
        case = replace(case, standard_overrides=False)
    if case.steps > 1 and rng.random() < 0.4:
        case = _resumed(rng, case)
    elif case.steps > 1 and rng.random() < 0.15:
        case = replace(case, reload_at=rng.randrange(1, case.steps))
    case = replace(case, skips=tuple(_skips(rng, case)) if rng.random() < 0.5 else ())
    case = replace(case, bad=tuple(_bad(rng, case)) if rng.random() < 0.35 else ())
    case = _with_mistake(rng, case) if rng.random() < 0.06 else case
    if rng.random() < 0.3:
        case = _with_fields(rng, case, OF_AVERAGES)
    # A look-ahead would round mains that share a scale with blocks of other values.
    if rng.random() < 0.2 and "bf16_scaled" not in (case.numbers, case.resume_numbers):
        case = _with_fields(rng, case, OF_LOOK_AHEADS)
    return _with_fields(rng, case, OF_NORMS) if case.rule in MATRIX_RULES and rng.random() < 0.4 else case


def _with_fields(rng: random.Random, case: Case, choices: Mapping[str, Sequence[Any]]) -> Case:
    return replace(case, fields=case.fields | _chosen(rng, choices))


def _chosen(rng: random.Random, choices: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in choices.items()}


def _setup(rng: random.Random, rule: str, numbers: str) -> Setup:
    grid = rng.choice(GRIDS)
    grid = replace(grid, ep=rng.choice((1, 1, 2)), etp=rng.choice((1, grid.tp)))
    grid = grid if grid.is_possible else replace(grid, ep=1, etp=1)
    sharding = rng.choice(("replicated", "flat", "flat", "whole"))
    if rule in MATRIX_RULES:
        grid = replace(grid, instances=1)
        sharding = rng.choice(("replicated", "whole"))
    elif grid.instances > 1:
        sharding = "flat"
    elif grid.dp % 2 == 0:
        grid = replace(grid, cp=rng.choice((1, 1, 2)))
    ddp = _chosen(rng, OF_WRAPPERS)
    ddp["grad_reduce_in_fp32"] &= numbers != "bf16_grads"
    layout = rng.choice(layouts_on(grid))
    return Setup(grid=grid, sharding=sharding, layout=layout, ddp=ddp, **_chosen(rng, OF_SETUPS))


def _consistent(setup: Setup, params: Sequence[Param]) -> Setup:
    has_experts = any(param.expert is not None for param in params)
    for name, remains in ONLY.items():
        if name in OF_WRAPPERS and setup.wrapped and not remains(setup, has_experts):
            setup = replace(setup, ddp={key: value for key, value in setup.ddp.items() if key != name})
        elif name not in OF_WRAPPERS and not remains(setup, has_experts):
            setup = replace(setup, **{name: getattr(SIMPLEST, name)})
    return setup if setup.layout == "plain" else replace(setup, groups_none=True)


def _resumed(rng: random.Random, case: Case) -> Case:
    """The case, continued in another setup from a later step; unchanged if no setup fits its parameters."""
    numbers = rng.choice(SAME_MAINS) if case.numbers in SAME_MAINS and rng.random() < 0.5 else None
    for _ in range(9):
        setup = _consistent(_setup(rng, case.rule, numbers or case.numbers), case.params)
        is_laid_out = setup.layout != "plain"
        if setup.processes != case.setup.processes or (is_laid_out and OTHER_ORDERS in case.habits):
            continue
        if all(_fits(p, setup.grid) for p in case.params) and not (
            is_laid_out and case.params != _laid_out(case.params)
        ):
            return replace(case, resume=setup, resume_at=rng.randrange(1, case.steps), resume_numbers=numbers)
    return case


def _fits(param: Param, grid: Grid) -> bool:
    parts = cases.num_parts(param, grid)
    rows = param.shape[0] // (parts if param.cut == 0 else 1) if param.qkv else 0
    return rows % 4 == 0 and (param.cut is None or param.shape[param.cut] % parts == 0)


# --- the model --------------------------------------------------------------------------------------------------------


def _params(rng: random.Random, rule: str, numbers: str, grid: Grid) -> tuple[Param, ...]:
    """Dense parameters, the first of which is trained and of the model's dtype, and layers of experts. In most models
    experts of a layer have equal shapes; in some, expert-parallel ranks have other parameters."""
    count = rng.choice((1, 2, 3, 4, 6, 8))
    found = [_param(rng, number, rule, numbers, grid, is_expert=False) for number in range(count)]
    if rng.random() < 0.45:
        experts = range(rng.choice((2, 4)))
        if rng.random() < 0.1:
            found += [_param(rng, count + number, rule, numbers, grid, is_expert=True) for number in experts]
        else:
            for layer in range(count, count + rng.choice((1, 2))):
                like = _param(rng, layer, rule, numbers, grid, is_expert=True)
                found += [replace(like, name=f"e{layer}_{expert}", expert=expert) for expert in experts]
    if rng.random() < 0.15:
        number = rng.choice(found).number
        found = [replace(param, left_out=param.number == number) for param in found]
    found[0] = replace(found[0], left_out=False, frozen=False, wide=False)
    return tuple(param if param.is_trained else replace(param, own=("", None)) for param in found)


def _param(rng: random.Random, number: int, rule: str, numbers: str, grid: Grid, *, is_expert: bool) -> Param:
    shape = rng.choice(rng.choice((VECTORS, MATRICES, MATRICES, ODD_MATRICES)))
    shape = rng.choice(EMPTY if rng.random() < 0.03 else LARGE if rng.random() < 0.02 else (shape,))
    parts = grid.etp if is_expert else grid.tp
    cuttable = [dim for dim, size in enumerate(shape) if size and size % max(parts, 2) == 0]
    cut = rng.choice(cuttable) if cuttable and rng.random() < 0.7 else None
    may_differ = grid.tp > 1 and cut is None and not is_expert
    over_tp = rng.choice((None, None, "sequence_parallel", "average_gradients_across_tp_domain"))
    rows = shape[0] // (parts if cut == 0 else 1) if len(shape) == 2 else 0
    is_tied = not is_expert and rng.random() < 0.15
    entries: list[tuple[str, Any]] = [("max_lr", 0.005), ("wd_mult", 0.0), ("wd_mult", 0.5), ("clip_grad", False)]
    # Every matrix rule names the rule of what it leaves out, and narrow moments are Adam's.
    if rule not in (*MATRIX_RULES, "adam_l2") and numbers != "bf16_narrow":
        entries += [("optimizer", "lion"), ("optimizer", "sgd"), ("optimizer", "adam")]
    return Param(
        name=f"{'e' if is_expert else 'p'}{number}",
        number=number,
        shape=shape,
        wide=numbers != "fp32" and rng.random() < 0.2,
        cut=cut,
        expert=number if is_expert else None,
        embedding=len(shape) == 2 and (is_tied or rng.random() < 0.15),
        qkv=rows > 0 and rows % 4 == 0 and rng.random() < 0.3,
        tied=is_tied,
        norm_group="mtp" if rng.random() < 0.05 else None,
        over_tp=over_tp if may_differ and not is_tied else None,
        frozen=rng.random() < 0.1,
        uses=2 if rng.random() < 0.1 else 1,
        own=rng.choice(entries) if rng.random() < 0.2 else ("", None),
    )


def _laid_out(params: Sequence[Param]) -> tuple[Param, ...]:
    """A model that FSDP2 takes: no experts, no scalars, no module that runs twice."""
    return tuple(
        replace(p, uses=1, over_tp=None, tied=False, **({} if p.shape and 0 not in p.shape else AS_VECTOR))
        for p in params
        if p.expert is None
    )


AS_VECTOR: dict[str, Any] = {"shape": (4,), "cut": None, "embedding": False, "qkv": False}


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _skips(rng: random.Random, case: Case) -> Iterator[Skip]:
    """Parameters that some forwards do not use: most often in the first iteration, which decides on the order of
    reductions."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        param = rng.choice(case.params)
        step = rng.choice((0, 0, case.resume_at, rng.randrange(case.steps)))
        setup = case.setup_at(step)
        # FSDP2 reduces what its modules use, so that all ranks have to use the same ones.
        replicas = range(cases.num_replicas(param, setup.grid) if setup.layout == "plain" else 0)
        yield Skip(step, param.name, rng.choice((None, *replicas)), rng.choice((None, *range(setup.microbatches))))


def _bad(rng: random.Random, case: Case) -> Iterator[Bad]:
    for _ in range(rng.choice((1, 1, 2))):
        param = rng.choice(case.params)
        step = rng.randrange(case.steps)
        grid = case.setup_at(step).grid
        microbatch = rng.randrange(case.setup_at(step).microbatches)
        used = [
            rank
            for rank, place in enumerate(grid.places())
            if cases.is_held(param, place, grid)
            and cases.is_used(case, param, step=step, microbatch=microbatch, replica=cases.replica_of(param, place))
        ]
        if param.is_trained and 0 not in param.shape and used:
            yield Bad(step, param.name, rng.choice(used), microbatch, rng.choice((math.inf, -math.inf, math.nan)))


def _holds_parts(case: Case) -> bool:
    cuts = case.setup.grid.tp > 1
    parts = any(not p.frozen and (p.expert is not None or (p.cut is not None and cuts)) for p in case.params)
    return case.setup.processes and case.setup.layout == "plain" and case.setup.grid.size > 1 and parts


def _updates_matrices(case: Case) -> bool:
    is_plain = case.setup.sharding == "replicated" and case.setup.layout == "plain" and not case.setup.wrapped
    moves = any(param.is_trained and case.rule_of(param) == case.rule for param in case.params)
    return case.rule in MATRIX_RULES and is_plain and moves


def _starts_reductions_early(case: Case) -> bool:
    setup = case.setup
    is_early = setup.ddp.get("overlap_grad_reduce") and setup.ddp.get("num_buckets") is None
    return is_early and setup.grid.dp == setup.grid.size > 1


# In which cases a mistake is one, and the mistake. Most of those that all ranks make are in tables of the packages.
MISTAKES: tuple[tuple[Callable[[Case], bool], Mistake], ...] = (
    # Nobody can guess which ranks hold the other parts of a matrix, or copies of an expert.
    (_holds_parts, Mistake("pg_collection", groups_none=True)),
    # Newton-Schulz needs whole matrices, and flat shards cut them.
    (_updates_matrices, Mistake("whole matrices", {"use_distributed_optimizer": True})),
    # A single chunk is gathered: no other can be stepped meanwhile.
    (
        lambda case: case.setup.overlaps_gather and case.setup.sharding == "flat" and case.setup.chunks == 1,
        Mistake("overlap_param_gather_with_optimizer_step", {"overlap_param_gather_with_optimizer_step": True}),
    ),
    # Ranks step by different rates, or do not know the optimizer.
    (lambda case: case.setup.grid.size > 1, Mistake("lr", {"lr": 0.5}, rank=1)),
    (lambda case: case.setup.grid.size > 1, Mistake("optimizer", {"optimizer": "adma"}, rank=0)),
    # Replicas cut their buffers into different buckets.
    (_starts_reductions_early, Mistake("bucket_size", ddp_fields={"bucket_size": 11}, rank=0)),
    # Gradients are averaged in the collective and divided by tokens.
    (
        lambda case: case.setup.per_token,
        Mistake("average_in_collective", ddp_fields={"average_in_collective": True, SUM_IN_FP32: False}),
    ),
)


def _with_mistake(rng: random.Random, case: Case) -> Case:
    fitting = [mistake for is_one, mistake in MISTAKES if is_one(case)]
    if not fitting:
        return case
    mistake = rng.choice(fitting)
    setup = replace(case.setup, groups_none=case.setup.groups_none or mistake.groups_none)
    return replace(case, mistake=mistake, setup=setup, resume=None)
