"""fp8 experts under expert and tensor parallelism: values and norms of one process that holds everything. Threads."""

import copy
import threading
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from expert_grid import Net, Place, Shape, Shapes, cut, mean_gradients, parts, run_grid
from fp8_training import everything, fp8_params, same, stored
from grids import comms_of
from tiers import sampled
from torch import Tensor, nn

from opt_checkpoint import ShardedTensor, load, save
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.quantized import RECIPES, QuantizedTensor
from opt_stack import Optimizer, get_optimizer

# Between squares of 128 and runs of 32.
DENSE = {"column": Shape((256, 96), 0), "norm": Shape((64,), None)}
EXPERT = {"up": Shape((256, 64), 0), "down": Shape((64, 256), 1)}
SHAPES = Shapes(DENSE, EXPERT)
BY_PART = ("delayed", "tensorwise")  # recipes that give each tensor-parallel part a scale of its own
STEPS = 3
EP = 2
GRIDS = {
    "TP 2": {"tp": 2, "ep": EP, "etp": 2},
    "TP 2, experts whole": {"tp": 2, "ep": EP, "etp": 1},
    "two replicas": {"tp": 1, "ep": EP, "etp": 1},
}
FLAT = {"use_distributed_optimizer": True}
SPREADS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "flat": FLAT,
    "whole": {"optimizer": "muon", "muon_tp_mode": "duplicated", "use_layer_wise_distributed_optimizer": True},
}
THROUGH_GRADIENTS = {**FLAT, "reuse_grad_buf_for_mxfp8_param_ag": True}
SPREADS |= {"wrapped": {**FLAT, "wrapped": True}, "through gradients": {**THROUGH_GRADIENTS, "wrapped": True}}
SPREADS |= {f"{spread}, wrapped": {**SPREADS[spread], "wrapped": True} for spread in ("replicated", "whole")}
SPREADS["overlapped"] = {**SPREADS["wrapped"], "overlap_param_gather": True}
LAYOUTS = [pair for pair in product(RECIPES, SPREADS) if pair[1] != "through gradients" or pair[0] == "mxfp8"]
Grads = Callable[[int], dict[str, Tensor]]  # of a step


def on_grid(name: str, rank_main: Callable[[Place], Any]) -> list[Any]:
    """Dense shards of two instances are over two of the four ranks; each expert has a replica in each instance."""
    if name != "two instances":
        return run_grid(rank_main, **GRIDS[name])
    dp = comms_of([[0, 1], [2, 3]])
    inter = comms_of([[0, 2], [1, 3]])

    def start(comm: ThreadComm) -> Any:
        rank = comm.rank
        return rank_main(Place(Alone(), dp[rank], Alone(), Alone(), (rank % EP,), comm, inter[rank]))

    return run_threads(4, start)


def own_grads(place: Place) -> Grads:
    replicas = (place.world.rank, place.world.rank // 2) if place.inter.size > 1 else None
    return lambda step: parts(place, 1000 * step, SHAPES, replicas=replicas)


def built(
    recipe: str, place: Place, *, wrapped: bool = False, in_fp8: str = "", **fields: Any
) -> tuple[Net, nn.Module, Optimizer]:
    """The model, whose matrices are in fp8, or those with `in_fp8` in their names; what the optimizer gets; and it."""
    net = Net(place, SHAPES, dtype=torch.bfloat16)
    for name, held in net.named_children():
        if held.weight.dim() == 2 and in_fp8 in name:
            marks = dict(vars(held.weight))
            held.weight = nn.Parameter(QuantizedTensor.of(held.weight.detach(), recipe))
            for mark, value in marks.items():
                setattr(held.weight, mark, value)
    base = {"lr": 2e-2, "bf16": True, "clip_grad": 0.0, "fp8_recipe": recipe, "muon_fp32_matmul_prec": "highest"}
    config = OptimizerConfig(**{**base, **fields})
    chunk = net
    if wrapped:
        sharded = config.use_distributed_optimizer or config.use_layer_wise_distributed_optimizer
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            grad_reduce_in_fp32=True,
            fp8_param_gather=sharded,
            overlap_param_gather=config.overlap_param_gather,
            bucket_size=12_000 if config.overlap_param_gather else None,
            num_distributed_optimizer_instances=place.inter.size,
            reuse_grad_buf_for_mxfp8_param_ag=config.reuse_grad_buf_for_mxfp8_param_ag,
        )
        chunk = DistributedDataParallel(ddp, net, groups=place.roles, optimizer_config=config)
    return net, chunk, get_optimizer(config, [chunk], pg_collection=place.roles)


def stepped(chunk: nn.Module, optimizer: Optimizer, grads: Grads, steps: range) -> list[float]:
    norms = []
    for step in steps:
        chunk(grads(step)).backward()
        result = optimizer.step()
        assert result.success
        norms.append(result.grad_norm)
        optimizer.zero_grad()
    return norms


class Trained(NamedTuple):
    place: Place
    weights: dict[str, Tensor]
    norms: list[float]


def trained(net: Net, place: Place, norms: list[float]) -> Trained:
    return Trained(place, {name: (held.weight + 0).detach() for name, held in net.named_children()}, norms)


def train(recipe: str, place: Place, grads: Grads, **options: Any) -> Trained:
    net, chunk, optimizer = built(recipe, place, **options)
    norms = stepped(chunk, optimizer, grads, range(STEPS))
    if isinstance(chunk, DistributedDataParallel):
        chunk.finish_param_sync()
    return trained(net, place, norms)


ALONE = Place(Alone(), Alone(), Alone(), Alone(), tuple(range(EP)), Alone())


def replicas_on(name: str) -> tuple[int, int]:
    """Of dense parameters, and of each expert."""
    sizes = GRIDS.get(name, GRIDS["two replicas"])
    return 4 // sizes["tp"], 4 // sizes["etp"] // EP


def mean_grads(dp: int, expert_dp: int) -> Grads:
    def of_step(step: int) -> dict[str, Tensor]:
        means = mean_gradients(dp=dp, ep=EP, expert_dp=expert_dp, seed=1000 * step, shapes=SHAPES)
        return {name: grad.float() for name, grad in means.items()}

    return of_step


@cache
def trained_alone(recipe: str, spread: str, dp: int, expert_dp: int) -> Trained:
    """With the rule of the spread, and through gradients with its rounding to bf16."""
    is_of_rule = ("optimizer", "muon", *(SPREADS[spread] if spread == "through gradients" else ()))
    options = {key: value for key, value in SPREADS[spread].items() if key.startswith(is_of_rule)}
    return train(recipe, ALONE, mean_grads(dp, expert_dp), **options)


def assert_same(found: Trained, alone: Trained, recipe: str, *, atol: float) -> None:
    """Parts have the values of the whole, within two codes if they have scales of their own; a step moves ten codes."""
    for name, weight in found.weights.items():
        tp = found.place.expert_tp if name[-1].isdigit() else found.place.tp
        want = cut(alone.weights[name], tp.rank, tp.size, dim={**DENSE, **EXPERT}[name.rstrip("01")].cut)
        is_scaled_alone = recipe in BY_PART and weight.dim() == 2 and tp.size > 1
        far = {"rtol": 1 / 8, "atol": 2e-3} if is_scaled_alone else {"rtol": 0.0, "atol": atol}
        torch.testing.assert_close(weight, want, **far)
    assert found.norms == pytest.approx(alone.norms, rel=1e-6)


CASES = [(name, recipe, spread) for name in GRIDS for recipe, spread in LAYOUTS]
CASES += [("two instances", recipe, spread) for recipe in RECIPES for spread in ("flat", "wrapped")]


@pytest.mark.parametrize(("name", "recipe", "spread"), sampled(CASES, enumerate))
def test_every_grid_of_experts_has_the_values_of_one_process(name: str, recipe: str, spread: str) -> None:
    alone = trained_alone(recipe, spread, *replicas_on(name))
    for found in on_grid(name, lambda place: train(recipe, place, own_grads(place), **SPREADS[spread])):
        # Muon sums its products in another order, so that a few values round to the next code.
        assert_same(found, alone, recipe, atol=2**-4 if "whole" in spread else 0.0)


@pytest.mark.parametrize(("recipe", "name"), [("delayed", "two instances"), *(("mxfp8", name) for name in GRIDS)])
def test_an_overflow_in_one_expert_changes_no_byte_on_any_rank(recipe: str, name: str) -> None:
    def rank_main(place: Place) -> tuple[bool, bool]:
        net, chunk, optimizer = built(recipe, place, **SPREADS["wrapped"])
        stepped(chunk, optimizer, own_grads(place), range(1))
        before = everything(net)
        grads = own_grads(place)(1)
        if place.world.rank == 3:
            grads["down1"][0, 0] = torch.inf
        chunk(grads).backward()
        success = bool(optimizer.step().success)
        chunk.finish_param_sync()
        return success, same(everything(net), before)

    assert on_grid(name, rank_main) == [(False, True)] * 4


def state_of(net: Net, place: Place, optimizer: Optimizer) -> dict[str, Any]:
    weights = {}
    for name, held in net.named_children():
        is_expert = name[-1].isdigit()
        dim = {**DENSE, **EXPERT}[name.rstrip("01")].cut
        if is_expert:
            tp = place.expert_tp
            dp = place.expert_dp
        else:
            tp = place.tp
            dp = place.dp
        offsets = [] if dim is None else [(dim, tp.rank, tp.size)]
        replica = (0, tp.rank if dim is None else 0, dp.rank)
        weights[name] = ShardedTensor.from_rank_offsets(name, held.weight, *offsets, replica_id=replica)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


SAVED = [*product(RECIPES, ["replicated", "flat"], GRIDS)]


@pytest.mark.parametrize(("recipe", "spread", "name"), sampled(SAVED, enumerate))
def test_a_checkpoint_of_experts_continues_on_every_grid(recipe: str, spread: str, name: str, tmp_path: Path) -> None:
    """Saved by one process, which goes on itself."""
    # A load without torch.distributed is not made for threads.
    lock = threading.Lock()
    grads = mean_grads(*replicas_on(name))
    net, chunk, optimizer = built(recipe, ALONE, **SPREADS[spread])
    stepped(chunk, optimizer, grads, range(2))
    save(state_of(net, ALONE, optimizer), tmp_path / "saved")
    alone = trained(net, ALONE, stepped(chunk, optimizer, grads, range(2, 4)))

    def rank_main(place: Place) -> Trained:
        net, chunk, optimizer = built(recipe, place, **SPREADS[spread])
        stepped(chunk, optimizer, own_grads(place), range(1))  # of which nothing is left
        state = state_of(net, place, optimizer)
        with lock:
            loaded = load(state, tmp_path / "saved").state
        optimizer.load_state_dict(loaded["optimizer"])
        return trained(net, place, stepped(chunk, optimizer, own_grads(place), range(2, 4)))

    for found in on_grid(name, rank_main):
        assert_same(found, alone, recipe, atol=0.0)


@pytest.mark.parametrize("spread", ["replicated", "flat"])
def test_fp8_experts_on_some_ranks_load_without_the_others(spread: str) -> None:
    """Ranks whose experts are not in fp8 have nothing to quantise after a load."""

    def rank_main(place: Place) -> bool:
        net, chunk, optimizer = built("blockwise", place, **SPREADS[spread], in_fp8="1")
        stepped(chunk, optimizer, own_grads(place), range(2))
        before = stored(net)
        kept = copy.deepcopy(optimizer.state_dict())
        stepped(chunk, optimizer, own_grads(place), range(2, 3))
        optimizer.load_state_dict(kept)
        assert len(fp8_params(net)) == (2 if place.experts == (1,) else 0)
        return same(stored(net), before)

    assert on_grid("two replicas", rank_main) == [True] * 4
