"""Moments kept in blocks of 8-bit codes, loaded where blocks lie elsewhere, or moments are wide, and back.

They are stored decoded, in fp32. What a load does is one encoding, on the blocks that are there; on the same blocks it
changes no value.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tp_model import Grid, Part, cut

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_kernels.codecs import codecs_of
from opt_kernels.rules import Adam
from opt_stack import Optimizer, Registry, RuleEntry, get_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
RULES = {
    "wide": Adam(),
    "int8": Adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8),
    "fp8": Adam(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn),
}
NARROW = ("int8", "fp8")
SHAPES = {"rows": ((72, 24), 0), "columns": ((24, 48), 1), "vector": ((24,), None)}  # the dim that is cut
State = dict[str, dict[str, Tensor]]


class Elsewhere(Alone):
    """A communicator with another rank's index, for code that only needs the index."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def begin(rule: str, *, tp: Comm | None = None, dp: Comm | None = None) -> tuple[nn.Module, Optimizer]:
    """This rank's part of matrices that tensor parallelism cuts by rows and by columns, and of a vector."""
    model, generator = nn.Module(), torch.Generator().manual_seed(0)
    for name, (shape, dim) in SHAPES.items():
        model.add_module(name, Part(torch.randn(shape, generator=generator), tp or Alone(), dim=dim))
    hyper = {"betas": (0.9, 0.95), "eps": 1e-8}
    entry = RuleEntry(name="mine", summary="", make=lambda config: RULES[rule], hyper=lambda config: hyper)
    options = OptimizerConfig(optimizer="mine", lr=1e-2, use_distributed_optimizer=dp is not None)
    roles = Grid(tp=Alone(), dp=dp or Alone(), world=dp or Alone()).roles
    return model, get_optimizer(options, [model], pg_collection=roles, rules=Registry().with_rule(entry))


def sharded(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = {name: part.sharded(name) for name, part in model.named_children()}
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def resumed(path: Path, rule: str, **comms: Comm) -> State:
    model, optimizer = begin(rule, **comms)
    optimizer.load_state_dict(load(sharded(model, optimizer), path).state["optimizer"])
    return states(optimizer)


def states(optimizer: Optimizer) -> State:
    state = optimizer.state_dict()
    return {
        name.removesuffix(".weight"): {key.partition("[")[0]: value.clone() for key, value in state["state"][i].items()}
        for group in state["param_groups"]
        for i, name in zip(group["params"], group["param_names"], strict=True)
        if i in state["state"]
    }


def decoded(rule: str, state: dict[str, Tensor], moment: str) -> Tensor:
    if rule == "wide":
        return state[moment]
    values = torch.empty(state[moment].numel())
    codecs_of(RULES[rule])[moment].decode_(values, state[moment].flatten(), state[f"{moment}_scale"])
    return values.view(state[moment].shape)


def encoded(rule: str, moment: str, values: Tensor) -> dict[str, Tensor]:
    if rule == "wide":
        return {moment: values}
    codec = codecs_of(RULES[rule])[moment]
    codes, scales = torch.empty(values.numel(), dtype=codec.dtype), torch.empty(-(-values.numel() // codec.block))
    codec.encode_(codes, scales, values.flatten())
    return {moment: codes.view(values.shape), f"{moment}_scale": scales}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, State]]:
    """By rule: a run after three steps, and its state then."""
    found = {}
    for rule in RULES:
        model, optimizer = begin(rule)
        for step in range(3):
            generator = torch.Generator().manual_seed(1 + step)
            for param in model.parameters():  # rows of other sizes, so that blocks differ
                sizes = torch.logspace(-1, 0, param.shape[0]).view(-1, *[1] * (param.dim() - 1))
                param.grad = torch.randn(param.shape, generator=generator) * sizes
            optimizer.step()
        path = tmp_path_factory.mktemp("narrow") / rule
        save(sharded(model, optimizer), path)
        found[rule] = path, states(optimizer)
    return found


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rule", NARROW)
def test_flat_shards_of_any_number_of_ranks_hold_the_very_values(rule: str, ranks: int, saved: Any) -> None:
    """Shards are cut on whole blocks of the parameter, so no block is ever another one. Codes may differ where a scale
    is twice as large and no bit is lost."""
    path, want = saved[rule]
    by_rank = run_threads(ranks, lambda comm: resumed(path, rule, dp=comm))
    for name, state in want.items():
        for moment in MOMENTS:
            got = torch.cat([decoded(rule, part[name], moment).flatten() for part in by_rank if name in part])
            assert torch.equal(got, decoded(rule, state, moment).flatten()), f"{moment} of {name}"


@pytest.mark.parametrize("tp_rank", [None, 0, 1])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in RULES for b in RULES if {a, b} != {"wide"}])
def test_loaded_moments_are_rounded_once_on_the_blocks_that_are_there(
    before: str, after: str, tp_rank: int | None, saved: Any
) -> None:
    """On a half of each matrix, by rows or by columns, blocks hold elements of several of the saved ones."""
    path, want = saved[before]
    state = resumed(path, after, tp=Alone() if tp_rank is None else Elsewhere(tp_rank, 2))
    for name, (_, dim) in SHAPES.items():
        for moment in MOMENTS:
            values = decoded(before, want[name], moment)
            values = values if tp_rank is None else cut(values, tp_rank, 2, dim=dim)
            expected = encoded(after, moment, values)
            if before == after:  # codes may differ where a scale is twice as large
                assert torch.equal(decoded(after, state[name], moment), decoded(after, expected, moment))
            else:
                assert all(bits_equal(state[name][key], value) for key, value in expected.items())
