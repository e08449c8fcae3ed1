"""Checkpoints of runs with parameters in fp8: to the bit on the same ranks, into other precisions, and back."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_training import build, fp8_params, make_model, same, set_grads, stored
from parity import sharded_state
from torch import Tensor, nn

from opt_checkpoint import Segment, ShardedTensorFactory, load, save, sharded_model
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_kernels.quantized import RECIPES
from opt_stack import Optimizer

ZERO = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, Any]] = {"replicated": {}, "flat": ZERO, "wrapped": {**ZERO, "wraps": True}}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def load_into(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    optimizer.load_state_dict(load(sharded_state(model, optimizer), path).state["optimizer"])


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        set_grads(model, step)
        assert optimizer.step().success
        optimizer.zero_grad()
    return stored(model)


def mains_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [optimizer.state[param]["fp32_param"].clone() for param in model.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
@every_recipe
def test_a_local_state_dict_goes_on_to_the_bit(recipe: str, layout: str) -> None:
    def rank_main(comm: Comm) -> None:
        model, _, optimizer = build(comm, recipe, **LAYOUTS[layout])
        before = train(model, optimizer, range(3))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        after = train(model, optimizer, range(3, 6))
        file.seek(0)
        of_model, of_optimizer = torch.load(file, weights_only=True)
        again, _, resumed = build(comm, recipe, **LAYOUTS[layout])
        again.load_state_dict(of_model)
        resumed.load_state_dict(of_optimizer)
        assert same(stored(again), before)
        assert same(train(again, resumed, range(3, 6)), after)

    run_threads(2, rank_main)


@every_recipe
def test_a_checkpoint_goes_on_in_bf16_and_again_in_fp8(recipe: str, tmp_path: Path) -> None:
    """In fp8 on any ranks: `test_fp8_experts.py`."""
    model, _, optimizer = build(Alone(), recipe)
    before = train(model, optimizer, range(3))
    mains = mains_of(model, optimizer)
    save(sharded_state(model, optimizer), tmp_path / "fp8")
    wide, _, optimizer = build(Alone(), None)
    load_into(wide, optimizer, tmp_path / "fp8")
    assert same(mains_of(wide, optimizer), mains)
    assert same([*wide.parameters()], [main.bfloat16() for main in mains])  # not the values of the codes
    save(sharded_state(wide, optimizer), tmp_path / "bf16")
    narrow, _, optimizer = build(Alone(), recipe)
    load_into(narrow, optimizer, tmp_path / "bf16")
    assert same(mains_of(narrow, optimizer), mains)
    if recipe == "delayed":  # the checkpoint has no amax history, so it restarts
        for param, scales in zip(fp8_params(narrow), before[1::2], strict=False):
            torch.testing.assert_close(param.scales, scales, rtol=0.1, atol=0.0)
    else:
        assert same(stored(narrow), before)


@every_recipe
def test_weights_alone_are_saved_dequantised_and_requantised(recipe: str, tmp_path: Path) -> None:
    model = make_model(recipe)
    wide = make_model(None, seed=5)
    other = make_model(recipe, seed=7)
    save({"model": sharded_model(model)}, tmp_path / "weights")
    load({"model": sharded_model(wide)}, tmp_path / "weights")
    found = load({"model": sharded_model(other)}, tmp_path / "weights").state["model"]
    assert found.keys() == dict(model.named_parameters()).keys()
    for param, dense, again in zip(model.parameters(), wide.parameters(), other.parameters(), strict=True):
        assert torch.equal(param + 0, dense)
        # One more rounding to bf16, and of a scale that is not a power of two: the next code at most, an eighth.
        torch.testing.assert_close(again + 0, param + 0, rtol=1 / 8, atol=1e-3)


def test_a_factory_of_fused_rows_quantises_what_it_merges(tmp_path: Path) -> None:
    def state(model: nn.Module) -> dict[str, Any]:
        rows = [
            Segment(row_start=a, row_stop=b, global_shape=(b - a, 160), global_offset=(0, 0), suffix=f".{a}")
            for a, b in ((0, 64), (64, 192))
        ]
        return {"w": ShardedTensorFactory("w", model[0].weight, segments=tuple(rows), local_shape=(192, 160))}

    model = make_model("blockwise")
    other = make_model("blockwise", seed=7)
    save(state(model), tmp_path / "fused")
    load(state(other), tmp_path / "fused")
    assert torch.equal(other[0].weight.values(), model[0].weight.values())


def test_weights_become_mains_and_exact_weights_are_quantised() -> None:
    model, _, optimizer = build(Alone(), "blockwise")
    train(model, optimizer, range(2))
    weights = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    model.load_state_dict({name: value.bfloat16() for name, value in weights.items()})
    optimizer.reload_model_params()
    values = [(param + 0).float() if param.dim() == 1 else param.values() for param in model.parameters()]
    assert same(mains_of(model, optimizer), values)
    optimizer.reload_model_params(weights)
    want = make_model("blockwise")
    want.load_state_dict(weights)
    assert same([param.codes for param in fp8_params(model)], [param.codes for param in fp8_params(want)])


def test_a_state_dict_broken_on_one_rank_is_refused_on_all() -> None:
    """A load ends with collectives over fp8 parameters, in which ranks used to wait for one that had raised."""

    def rank_main(comm: Comm) -> str:
        model, _, optimizer = build(comm, "blockwise", **ZERO)
        before = train(model, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 7.0
        if comm.rank == 1:
            saved["version"] = 99
        with pytest.raises(ValueError, match="version 99") as caught:
            optimizer.load_state_dict(saved)
        assert same(stored(model), before)
        assert optimizer.param_groups[0]["lr"] != 7.0
        return str(caught.value)

    messages = run_threads(3, rank_main)
    assert [message.startswith("rank 1 refused") for message in messages] == [True, False, True]
