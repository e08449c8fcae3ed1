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
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.codecs import StateCodec, codecs_of
from opt_kernels.rules import Adam
from opt_stack import Optimizer, Registry, RuleEntry, get_optimizer

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign
RULES = {
    "wide": Adam(),
    "int8": Adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8),
    "fp8": Adam(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn),
}
SHAPES = {"rows": ((72, 24), 0), "columns": ((24, 48), 1), "vector": ((24,), None)}  # the dim that is cut
NARROW = [name for name in RULES if name != "wide"]
# Of the largest value of a block (for second moments: of its root), how far a code may be from the value. Companded
# codes lie 2/127 apart near it, roots 1/255; e4m3 has three bits of mantissa, at a scale that is at most doubled.
FAR = {"int8": {"exp_avg": 1 / 127, "exp_avg_sq": 0.5 / 255}, "fp8": {"exp_avg": 2**-4, "exp_avg_sq": 2**-4}}

State = dict[str, dict[str, Tensor]]


class Elsewhere(Alone):
    """A communicator with another rank's index, for code that only needs the index."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


class Net(nn.Module):
    """This rank's part of matrices that tensor parallelism cuts by rows and by columns, and of a vector."""

    def __init__(self, tp: Comm):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (shape, dim) in SHAPES.items():
            self.add_module(name, Part(torch.randn(shape, generator=generator), tp, dim=dim))

    def parts(self) -> dict[str, Part]:
        return {name: part for name, part in self.named_children() if isinstance(part, Part)}


def begin(rule: str, *, tp: Comm | None = None, dp: Comm | None = None) -> tuple[Net, Optimizer]:
    model = Net(tp or Alone())
    hyper = {"betas": (0.9, 0.95), "eps": 1e-8}
    entry = RuleEntry(name="mine", summary="", make=lambda config: RULES[rule], hyper=lambda config: hyper)
    options = OptimizerConfig(optimizer="mine", lr=1e-2, use_distributed_optimizer=dp is not None)
    roles = Grid(tp=Alone(), dp=dp or Alone(), world=dp or Alone()).roles
    return model, get_optimizer(options, [model], pg_collection=roles, rules=Registry().with_rule(entry))


def state_of(model: Net, optimizer: Optimizer) -> dict[str, Any]:
    weights = {name: part.sharded(name) for name, part in model.parts().items()}
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def resume(model: Net, optimizer: Optimizer, path: Path) -> None:
    optimizer.load_state_dict(load(state_of(model, optimizer), path).state["optimizer"])


def states(optimizer: Optimizer) -> State:
    held = optimizer.state_dict()
    return {
        name.removesuffix(".weight"): held["state"][index]
        for group in held["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
        if index in held["state"]
    }


def codec_of(rule: str, moment: str) -> StateCodec:
    return codecs_of(RULES[rule])[moment]


def decoded(rule: str, state: dict[str, Tensor], moment: str) -> Tensor:
    values = torch.empty(state[moment].numel())
    codec_of(rule, moment).decode_(values, state[moment].flatten(), state.get(f"{moment}_scale"))
    return values.view(state[moment].shape)


def encoded(rule: str, moment: str, values: Tensor) -> dict[str, Tensor]:
    codec = codec_of(rule, moment)
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
        save(state_of(model, optimizer), path)
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

    def rank_main(comm: ThreadComm) -> State:
        model, optimizer = begin(rule, dp=comm)
        resume(model, optimizer, path)
        held = states(optimizer)
        return {name: {k.partition("[")[0]: v.clone() for k, v in state.items()} for name, state in held.items()}

    by_rank = run_threads(ranks, rank_main)
    for name, state in want.items():
        for moment in MOMENTS:
            got = torch.cat([decoded(rule, held[name], moment).flatten() for held in by_rank if name in held])
            assert torch.equal(got, decoded(rule, state, moment).flatten()), f"{moment} of {name}"


@pytest.mark.parametrize("rule", NARROW)
def test_narrow_moments_are_wide_ones_to_the_bit(rule: str, saved: Any) -> None:
    path, want = saved[rule]
    model, optimizer = begin("wide")
    resume(model, optimizer, path)
    for name, state in states(optimizer).items():
        for moment in MOMENTS:
            assert torch.equal(state[moment], decoded(rule, want[name], moment))


@pytest.mark.parametrize("rule", NARROW)
def test_wide_moments_are_rounded_once(rule: str, saved: Any) -> None:
    path, want = saved["wide"]
    model, optimizer = begin(rule)
    resume(model, optimizer, path)
    for name, state in states(optimizer).items():
        for moment in MOMENTS:
            for key, value in encoded(rule, moment, want[name][moment]).items():
                assert bits_equal(state[key], value)


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("before", NARROW)
@pytest.mark.parametrize("after", NARROW)
def test_on_other_blocks_values_stay_near(before: str, after: str, tp_rank: int, saved: Any) -> None:
    """Half of each matrix, by rows or by columns: its blocks hold elements of several of the saved ones."""
    path, want = saved[before]
    model, optimizer = begin(after, tp=Elsewhere(tp_rank, 2))
    resume(model, optimizer, path)
    state, num_other = states(optimizer), 0
    for name, part in model.parts().items():
        for moment in MOMENTS:
            values = cut(decoded(before, want[name], moment), tp_rank, 2, dim=part.dim)
            got = decoded(after, state[name], moment)
            num_other += not torch.equal(got, values)
            assert_near(got, values, after, moment)
    assert num_other > 0 or before == after == "fp8"


def assert_near(got: Tensor, want: Tensor, rule: str, moment: str) -> None:
    if not MOMENTS[moment]:
        got, want = got.sqrt(), want.sqrt()
    block = codec_of(rule, moment).block
    for one, other in zip(got.flatten().split(block), want.flatten().split(block), strict=True):
        assert (one - other).abs().max() <= FAR[rule][moment] * other.abs().max() * (1 + 1e-3)
