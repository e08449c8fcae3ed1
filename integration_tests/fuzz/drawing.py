"""Draw valid cases from seeds. Torch and the standard library only."""

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from fuzz import cases
from fuzz.cases import HABITS, MATRIX_RULES, OTHER_ORDERS, RULES, Bad, Case, Grid, Param, Setup, Skip, is_trained
from fuzz.mistakes import with_mistake

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
NUMBERS = ("fp32", "fp32", "bf16", "bf16", "bf16_remainder", "fp16", "fp16_constant", "bf16_narrow", "bf16_grads")
NARROW_MAINS = ("bf16_short", "bf16_scaled")
SAME_MAINS = ("bf16", "bf16_remainder", "bf16_grads")  # numbers between which nothing is lost


def draw(seed: int) -> Case:
    """The case of a seed, the same in every process."""
    rng = random.Random(seed)
    rule = rng.choice((*RULES[:4], *RULES))
    numbers = _numbers(rng, rule)
    own = random.Random(f"main values of {seed}")  # so that these choices change no other
    if numbers in ("bf16", "bf16_remainder") and own.random() < 0.4:
        numbers = own.choice(NARROW_MAINS)
    setup = _setup(rng, rule, numbers)
    params = _params(rng, numbers, setup)
    case = Case(
        seed=seed,
        rule=rule,
        numbers=numbers,
        params=params,
        setup=_with_groups(setup, params),
        steps=rng.choice((1, 2, 3, 3, 4, 5)),
        clip=rng.choice((0.0, 0.0, 0.5, 3.0, 1e3)),
        counts_zeros=rng.random() < 0.4,
        zero_share=rng.choice((0.0, 0.0, 0.1, 0.5)),
        scale=rng.choice((1.0, 256.0, 1024.0, 1024.0, 2.0**20 if numbers == "fp16" else 1.0)),
        skip_above=rng.choice((math.inf,) * 6 + (20.0,)),
        schedules=rng.random() < 0.3,
        keeps_grads=rng.random() < 0.2,
        habits=tuple(habit for habit in HABITS if rng.random() < 0.12),
        scale_mode=rng.choice(("spectral", "spectral", "unit_rms_norm", "shape_scaling")),
        window=rng.choice((1, 2, 1000)),
        hysteresis=rng.choice((1, 2)),
        looks_each_step=rng.random() < (0.4 if setup.overlap_gather else 0.9),
        nesterov=rng.random() < 0.3,
        tp_mode=rng.choice(("blockwise", "duplicated", "distributed")),
        moment2=rng.choice(("adamuon", "normuon")),
    )
    case = dataclasses.replace(case, overrides=_overrides(rng, case))
    if setup.layout != "plain":
        case = _laid_out(case)
        case = dataclasses.replace(case, habits=tuple(habit for habit in case.habits if habit != OTHER_ORDERS))
    if case.steps > 1 and rng.random() < 0.4:
        case = _resumed(rng, case)
    elif case.steps > 1 and rng.random() < 0.15:
        case = dataclasses.replace(case, reload_at=rng.randrange(1, case.steps))
    case = dataclasses.replace(case, skips=tuple(_skips(rng, case)) if rng.random() < 0.5 else ())
    case = dataclasses.replace(case, bad=tuple(_bad(rng, case)) if rng.random() < 0.35 else ())
    return with_mistake(rng, case) if rng.random() < 0.06 else case


def _numbers(rng: random.Random, rule: str) -> str:
    numbers = rng.choice(NUMBERS)
    return "bf16" if numbers == "bf16_narrow" and rule not in ("adam", "adam_l2") else numbers


def _setup(rng: random.Random, rule: str, numbers: str, *, processes: bool | None = None) -> Setup:
    grid = _grid(rng)
    if rule in MATRIX_RULES and grid.instances > 1:
        grid = dataclasses.replace(grid, instances=1)
    sharding = rng.choice(("replicated", "whole") if rule in MATRIX_RULES else ("replicated", "flat", "flat", "whole"))
    setup = Setup(
        grid=grid,
        sharding="flat" if grid.instances > 1 else sharding,
        wrapped=rng.random() < 0.55,
        chunks=rng.choice((1, 1, 1, 2)),
        microbatches=rng.choice((1, 1, 2, 3)),
        late=rng.random() < 0.6,
    )
    if grid.size <= 4 and (rng.random() < 0.2 if processes is None else processes):
        setup = _in_processes(rng, setup)
    setup = _wrapped(rng, numbers, setup) if setup.wrapped else setup
    own = random.Random(f"offload of {setup}")
    return dataclasses.replace(setup, on_host=own.choice((0.0, 0.0, 0.0, 0.3, 0.7, 1.0)))


def _in_processes(rng: random.Random, setup: Setup) -> Setup:
    grid = setup.grid
    if grid.dp % 2 == 0 and grid.instances == 1 and rng.random() < 0.4:
        grid = dataclasses.replace(grid, cp=2)
    setup = dataclasses.replace(setup, grid=grid, processes=True, late=False)
    if grid.pp == grid.instances == grid.ep == grid.etp == grid.cp == 1 and rng.random() < 0.5:
        layouts = ("tp_plan", "fsdp2_x_tp") if grid.tp > 1 else ("fsdp2", "fsdp2", "hsdp")
        layout = rng.choice(layouts if grid.dp == 4 else layouts[:2])
        # DTensors are sharded as they are, so that a sharded optimizer is refused.
        return dataclasses.replace(setup, layout=layout, sharding="replicated", wrapped=False, groups_none=True)
    is_world = grid.dp == grid.size and grid.instances == 1 and grid.ep == 1 and grid.cp == 1
    return dataclasses.replace(setup, groups_none=is_world and rng.random() < 0.5)


def _laid_out(case: Case) -> Case:
    """The case, with a model that FSDP2 takes: no experts, no scalars, no module that runs twice."""
    params = tuple(
        dataclasses.replace(p, uses=1, over_tp=None, tied=False)
        if p.shape and 0 not in p.shape
        else Param(name=p.name, number=p.number, shape=(4,), left_out=p.left_out, frozen=p.frozen)
        for p in case.params
        if p.expert is None
    )
    if not any(is_trained(param) for param in params):
        params = (dataclasses.replace(params[0], frozen=False, left_out=False), *params[1:])
    names = {param.name for param in params}
    overrides = case.overrides and tuple(own for own in case.overrides if own[0] in names)
    return dataclasses.replace(case, params=_not_all_wide(params), overrides=overrides)


def _wrapped(rng: random.Random, numbers: str, setup: Setup) -> Setup:
    """With the choices that only a wrapped model has."""
    in_fp32 = numbers != "bf16_grads" and rng.random() < 0.6
    per_token = rng.random() < 0.25
    sums_in_fp32 = setup.is_sharded and not in_fp32 and setup.grid.instances == 1 and rng.random() < 0.3
    buckets = rng.choice(("size", "size", "number", "default"))
    setup = dataclasses.replace(
        setup,
        overlap_grads=rng.random() < 0.6,
        overlap_gather=setup.is_sharded and rng.random() < 0.5,
        bucket_size=rng.choice((1, 60, 200, 700)) if buckets == "size" else None,
        num_buckets=rng.choice((1, 3)) if buckets == "number" else None,
        reduce_in_fp32=in_fp32,
        average_in_collective=not (per_token or sums_in_fp32) and rng.random() < 0.25,
        sum_in_fp32=sums_in_fp32,
        checks_nan=rng.random() < 0.1,
        pads_for_busbw=rng.random() < 0.05,
        per_token=per_token,
    )
    can_gather_with_step = setup.overlap_gather and setup.sharding == "flat" and setup.chunks > 1
    setup = dataclasses.replace(setup, gathers_with_step=can_gather_with_step and rng.random() < 0.5)
    own = random.Random(str(setup))  # so that these choices change no other
    return dataclasses.replace(
        setup,
        aligned=setup.overlap_gather and not setup.gathers_with_step and own.random() < 0.5,
        sums_locally=not setup.reduce_in_fp32 and own.random() < 0.5,
    )


def _grid(rng: random.Random) -> Grid:
    grid = rng.choice(GRIDS)
    found = dataclasses.replace(grid, ep=rng.choice((1, 1, 2)), etp=rng.choice((1, grid.tp)))
    return found if found.is_possible else dataclasses.replace(grid, etp=1)


def _resumed(rng: random.Random, case: Case) -> Case:
    """The case, continued in another setup from a later step; unchanged if no setup fits its parameters."""
    for _ in range(5):
        setup = _setup(rng, case.rule, case.numbers, processes=case.setup.processes)
        numbers = rng.choice(SAME_MAINS) if case.numbers in SAME_MAINS and rng.random() < 0.3 else None
        if (numbers or case.numbers) == "bf16_grads":
            setup = dataclasses.replace(setup, reduce_in_fp32=False)
        if setup.sum_in_fp32 and setup.reduce_in_fp32:
            continue
        setup = _with_groups(setup, case.params)
        if setup.layout != "plain" and OTHER_ORDERS in case.habits:
            continue
        if all(_fits(param, setup) for param in case.params) and (setup.layout == "plain" or case == _laid_out(case)):
            at, own = rng.randrange(1, case.steps), random.Random(f"numbers of the resumed run of {case.seed}")
            in_bf16 = [*SAME_MAINS[:2], *NARROW_MAINS]
            if numbers is None and case.numbers in in_bf16 and own.random() < 0.5:
                numbers = own.choice(in_bf16)
            return dataclasses.replace(case, resume=setup, resume_at=at, resume_numbers=numbers)
    return case


def _fits(param: Param, setup: Setup) -> bool:
    pieces = setup.grid.tp if param.expert is None else setup.grid.etp
    rows = param.shape[0] // (pieces if param.cut == 0 else 1) if param.qkv else 0
    return rows % 4 == 0 and (param.cut is None or param.shape[param.cut] % pieces == 0)


# --- the model --------------------------------------------------------------------------------------------------------


def _with_groups(setup: Setup, params: tuple[Param, ...]) -> Setup:
    """Without groups, the ranks that hold an expert are unknown; and a wrapper reports NaN to its replicas only."""
    has_experts = any(param.expert is not None for param in params)
    is_guess = setup.layout == "plain" and setup.grid.size > 1 and has_experts
    tells_all = setup.grid.dp == setup.grid.size and not has_experts
    return dataclasses.replace(
        setup, groups_none=setup.groups_none and not is_guess, checks_nan=setup.checks_nan and tells_all
    )


def _params(rng: random.Random, numbers: str, setup: Setup) -> tuple[Param, ...]:
    count = rng.choice((1, 2, 3, 4, 6, 8))
    found = [_param(rng, number, numbers, setup, is_expert=False) for number in range(count)]
    if rng.random() < 0.45:
        found += _experts(rng, count, numbers, setup)
    if rng.random() < 0.15:
        index = rng.randrange(len(found))
        found[index] = dataclasses.replace(found[index], left_out=True)
    if not any(is_trained(param) for param in found):
        found[0] = dataclasses.replace(found[0], left_out=False, frozen=False)
    return _not_all_wide(found)


def _not_all_wide(params: Sequence[Param]) -> tuple[Param, ...]:
    """At least the first in the 16 bits of the model, since `bf16=True` is refused where all parameters are in fp32."""
    if all(param.wide for param in params):
        return (dataclasses.replace(params[0], wide=False), *params[1:])
    return tuple(params)


def _experts(rng: random.Random, first: int, numbers: str, setup: Setup) -> Iterator[Param]:
    """Layers of experts. In most models experts of a layer have equal shapes; in some, expert-parallel ranks have other
    parameters."""
    count = rng.choice((2, 4))
    if rng.random() < 0.1:
        for number in range(count):
            yield _param(rng, first + number, numbers, setup, is_expert=True)
        return
    for layer in range(first, first + rng.choice((1, 2))):
        shared_shape = _param(rng, layer, numbers, setup, is_expert=True)
        for expert in range(count):
            yield dataclasses.replace(shared_shape, name=f"e{layer}_{expert}", expert=expert)


def _param(rng: random.Random, number: int, numbers: str, setup: Setup, *, is_expert: bool) -> Param:
    shape = rng.choice(rng.choice((VECTORS, MATRICES, MATRICES, ODD_MATRICES)))
    shape = rng.choice(EMPTY if rng.random() < 0.03 else LARGE if rng.random() < 0.02 else (shape,))
    pieces = setup.grid.etp if is_expert else setup.grid.tp
    cuttable = [dim for dim, size in enumerate(shape) if size and size % max(pieces, 2) == 0]
    cut = rng.choice(cuttable) if cuttable and rng.random() < 0.7 else None
    may_differ = setup.grid.tp > 1 and cut is None and not is_expert
    over_tp = rng.choice((None, None, "sequence_parallel", "average_gradients_across_tp_domain"))
    rows = shape[0] // (pieces if cut == 0 else 1) if len(shape) == 2 else 0
    is_tied = not is_expert and rng.random() < 0.15
    return Param(
        name=f"e{number}" if is_expert else f"p{number}",
        shape=shape,
        number=number,
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
    )


def _overrides(rng: random.Random, case: Case) -> Any:
    if rng.random() < 0.2 and not any(param.left_out for param in case.params):
        return None
    trained = [param for param in case.params if is_trained(param)]
    return tuple((param.name, (_override(rng, case),)) for param in trained if rng.random() < 0.25)


def _override(rng: random.Random, case: Case) -> tuple[str, Any]:
    choices: list[tuple[str, Any]] = [("max_lr", 0.005), ("wd_mult", 0.0), ("wd_mult", 0.5), ("clip_grad", False)]
    # Every matrix rule names the rule of what it leaves out, and narrow moments are Adam's.
    if case.rule not in (*MATRIX_RULES, "adam_l2") and case.numbers != "bf16_narrow":
        choices += [("optimizer", "lion"), ("optimizer", "sgd"), ("optimizer", "adam")]
    return rng.choice(choices)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _skips(rng: random.Random, case: Case) -> Iterator[Skip]:
    """Parameters that some forwards do not use: most often in the first iteration, which decides on the order of
    reductions."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        param, step = rng.choice(case.params), rng.choice((0, 0, case.resume_at, rng.randrange(case.steps)))
        setup = case.setup_at(step)
        replicas, microbatches = cases.num_replicas(param, setup.grid), setup.microbatches
        yield Skip(
            step=step,
            param=param.name,
            # FSDP2 reduces what its modules use, so that all ranks have to use the same ones.
            replica=rng.choice((None, rng.randrange(replicas))) if setup.layout == "plain" else None,
            microbatch=rng.choice((None, rng.randrange(microbatches))),
        )


def _bad(rng: random.Random, case: Case) -> Iterator[Bad]:
    for _ in range(rng.choice((1, 1, 2))):
        param = rng.choice([param for param in case.params if is_trained(param)])
        if 0 in param.shape:
            continue
        step = rng.randrange(case.steps)
        grid, microbatch = case.setup_at(step).grid, rng.randrange(case.setup_at(step).microbatches)
        at = {"step": step, "microbatch": microbatch}
        places = [(rank, place) for rank, place in enumerate(grid.places()) if cases.is_held(param, place, grid)]
        ranks = [r for r, place in places if cases.is_used(case, param, replica=cases.replica_of(param, place), **at)]
        if ranks:
            value = rng.choice((float("inf"), float("-inf"), float("nan")))
            yield Bad(step=step, param=param.name, rank=rng.choice(ranks), value=value, microbatch=microbatch)
