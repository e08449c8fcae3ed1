"""Checkpoints of runs with parameters in fp8: to the bit on any number of ranks, into other precisions, and back."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_training import Stored, build, fp8_params, make_model, set_grads, stored
from torch import Tensor, nn

from opt_checkpoint import Segment, ShardedTensorFactory, load, save, sharded_model
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_kernels.quantized import RECIPES
from opt_stack import Optimizer

ZERO = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, Any]] = {"replicated": {}, "flat": ZERO, "wrapped": {**ZERO, "wraps": True}}


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(model, step)
        assert optimizer.step().success
        optimizer.zero_grad()


def mains_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Copies of the main values, in the order of the parameters."""
    return [optimizer.state[param]["fp32_param"].clone() for param in model.parameters()]


def saved_run(recipe: str | None, path: Path) -> tuple[Stored, list[Tensor], Stored]:
    """What was stored when it was saved, its main values, and what was stored three steps later."""
    model, _, optimizer = build(Alone(), recipe)
    train(model, optimizer, range(3))
    before, mains = stored(model), mains_of(model, optimizer)
    save(state_of(model, optimizer), path)
    train(model, optimizer, range(3, 6))
    return before, mains, stored(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_local_state_dict_goes_on_to_the_bit(recipe: str, layout: str) -> None:
    def rank_main(comm: Comm) -> bool:
        model, _, optimizer = build(comm, recipe, **LAYOUTS[layout])
        train(model, optimizer, range(3))
        before = stored(model)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        train(model, optimizer, range(3, 6))
        file.seek(0)
        of_model, of_optimizer = torch.load(file, weights_only=True)
        again, _, resumed = build(comm, recipe, **LAYOUTS[layout])
        again.load_state_dict(of_model)
        resumed.load_state_dict(of_optimizer)
        assert stored(again).equals(before)
        train(again, resumed, range(3, 6))
        return stored(again).equals(stored(model))

    assert run_threads(2, rank_main) == [True, True]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_goes_on_to_the_bit_on_any_number_of_ranks(recipe: str, ranks: int, tmp_path: Path) -> None:
    before, _, after = saved_run(recipe, tmp_path / "saved")

    def rank_main(comm: Comm) -> None:
        model, _, optimizer = build(comm, recipe, **ZERO)
        loaded = load(state_of(model, optimizer), tmp_path / "saved").state
        optimizer.load_state_dict(loaded["optimizer"])
        assert stored(model).equals(before)
        train(model, optimizer, range(3, 6))
        assert stored(model).equals(after)

    run_threads(ranks, rank_main)


@pytest.mark.parametrize("recipe", RECIPES)
def test_mains_go_to_a_bf16_run_and_back(recipe: str, tmp_path: Path) -> None:
    before, mains, _ = saved_run(recipe, tmp_path / "fp8")
    wide, _, optimizer = build(Alone(), None)
    optimizer.load_state_dict(load(state_of(wide, optimizer), tmp_path / "fp8").state["optimizer"])
    for got, want in zip(mains_of(wide, optimizer), mains, strict=True):
        assert torch.equal(got, want)
    for param, main in zip(wide.parameters(), mains, strict=True):
        assert torch.equal(param, main.bfloat16())  # the mains' value, not that of the codes
    save(state_of(wide, optimizer), tmp_path / "bf16")
    model, _, narrow = build(Alone(), recipe)
    narrow.load_state_dict(load(state_of(model, narrow), tmp_path / "bf16").state["optimizer"])
    for got, want in zip(mains_of(model, narrow), mains, strict=True):
        assert torch.equal(got, want)
    if recipe == "delayed":  # the checkpoint has no amax history, so it restarts
        for ours, (_, scales) in zip(fp8_params(model), before.fp8, strict=True):
            torch.testing.assert_close(ours.scales, scales, rtol=0.1, atol=0.0)
    else:
        assert stored(model).equals(before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_alone_are_saved_dequantised_and_quantised_when_loaded(recipe: str, tmp_path: Path) -> None:
    model = make_model(recipe)
    save({"model": sharded_model(model)}, tmp_path / "weights")
    wide = make_model(None, seed=5)
    load({"model": sharded_model(wide)}, tmp_path / "weights")
    other = make_model(recipe, seed=7)
    found = load({"model": sharded_model(other)}, tmp_path / "weights").state["model"]
    for (name, param), dense, again in zip(
        model.named_parameters(), wide.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(param + 0, dense)
        # One more rounding to bf16, and of a scale that is not a power of two: the next code at most, an eighth.
        torch.testing.assert_close(again + 0, param + 0, rtol=1 / 8, atol=1e-3)
        assert found[name] is not None
        assert (again + 0).norm() > 0.9 * (param + 0).norm()


def test_a_factory_of_fused_rows_quantises_what_it_merges(tmp_path: Path) -> None:
    def state(model: nn.Module) -> dict[str, Any]:
        weight = model[0].weight
        rows = [Segment(row_start=a, row_stop=b, global_shape=(b - a, 160), global_offset=(0, 0), suffix=f".{a}")
                for a, b in ((0, 64), (64, 192))]  # fmt: skip
        return {"w": ShardedTensorFactory("w", weight, segments=tuple(rows), local_shape=(192, 160))}

    model, other = make_model("blockwise"), make_model("blockwise", seed=7)
    save(state(model), tmp_path / "fused")
    load(state(other), tmp_path / "fused")
    assert torch.equal(other[0].weight.values(), model[0].weight.values())


def test_reloaded_weights_become_main_values_and_exact_ones_are_quantised() -> None:
    model, _, optimizer = build(Alone(), "blockwise")
    train(model, optimizer, range(2))
    weights = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    model.load_state_dict({name: value.bfloat16() for name, value in weights.items()})
    optimizer.reload_model_params()
    mains = mains_of(model, optimizer)
    for main, param in zip(mains, model.parameters(), strict=True):
        assert torch.equal(main, (param + 0).float() if param.dim() == 1 else param.values())
    optimizer.reload_model_params(weights)
    want = make_model("blockwise")
    want.load_state_dict(weights)
    for ours, theirs in zip(fp8_params(model), fp8_params(want), strict=True):
        assert torch.equal(ours.codes, theirs.codes)


def test_a_local_state_dict_that_is_broken_on_one_rank_is_refused_on_all() -> None:
    """A load ends with collectives over fp8 parameters, in which ranks used to wait for one that had raised."""

    def rank_main(comm: Comm) -> str:
        model, _, optimizer = build(comm, "blockwise", **LAYOUTS["flat"])
        train(model, optimizer, range(2))
        saved, before = copy.deepcopy(optimizer.state_dict()), stored(model)
        saved["param_groups"][0]["lr"] = 7.0
        if comm.rank == 1:
            saved["version"] = 99
        with pytest.raises(ValueError, match="version 99") as refusal:
            optimizer.load_state_dict(saved)
        assert stored(model).equals(before)
        assert optimizer.param_groups[0]["lr"] != 7.0
        return str(refusal.value)

    assert [message.startswith("rank 1 refused") for message in run_threads(3, rank_main)] == [True, False, True]
