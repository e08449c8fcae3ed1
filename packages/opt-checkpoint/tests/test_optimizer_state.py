"""Optimizer state as sharded state: the four functions, and states that are not shaped like their parameter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import load_as_ranks, save_as_ranks
from processes import world_of_one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from opt_checkpoint import (
    REFERENCE_ALIASES,
    CheckpointingException,
    CheckpointKeyError,
    LayoutBound,
    LocalNonpersistentObject,
    PerMatrix,
    PerParam,
    Reduced,
    ShardedTensor,
    ShardedTensorFactory,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    load,
    make_sharded_optimizer_tensor,
    make_sharded_state,
    optim_state_to_sharding_state,
    sharded_like,
    sharded_model,
)
from opt_checkpoint.dcp.names import _hint


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def stepped(params: list[nn.Parameter]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(params)
    sum((p**2).sum() for p in params).backward()
    optimizer.step()
    return optimizer


def sharded_params(module: nn.Module) -> dict[str, ShardedTensor]:
    return {k: ShardedTensor.from_rank_offsets(k, v) for k, v in module.state_dict(keep_vars=True).items()}


def test_the_first_position_of_a_repeated_parameter_wins() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    assert get_optim_param_to_id_map([a, b, a]) == {id(a): 0, id(b): 1}


def test_a_dtensor_parameter_is_found_by_its_local_values() -> None:
    """From torch 2.13 on, to_local() of a parameter makes a new tensor at every call."""
    with world_of_one():
        mesh = init_device_mesh("cpu", (1,))
        params = [torch.nn.Parameter(distribute_tensor(torch.ones(n, 2), mesh, [Shard(0)])) for n in (3, 4)]
        described = {str(i): sharded_like(str(i), param) for i, param in enumerate(params)}
        found = get_param_id_to_sharded_param_map(described, reversed(params))
        assert {index: entry.key for index, entry in found.items()} == {0: "1", 1: "0"}


def test_parameters_are_matched_by_identity_wherever_they_are() -> None:
    module = model()
    entries = sharded_params(module)
    nested = {"x": [entries["1.bias"]], "y": {"z": entries["0.weight"]}, "other": entries["0.bias"]}
    found = get_param_id_to_sharded_param_map(nested, [module[0].weight, module[1].bias])
    assert {i: e.key for i, e in found.items()} == {0: "0.weight", 1: "1.bias"}


def test_tied_weights_go_by_the_key_that_sorts_first_whatever_the_order(caplog: pytest.LogCaptureFixture) -> None:
    weight = nn.Parameter(torch.zeros(3))
    entries = [ShardedTensor.from_rank_offsets(k, weight) for k in ("output", "embedding")]
    with caplog.at_level("INFO"):
        for order in (entries, entries[::-1]):
            found = get_param_id_to_sharded_param_map(dict(enumerate(order)), [weight])
            assert found[0].key == "embedding"
    assert "saved as embedding, not as output" in caplog.text


def test_an_optimizer_that_matches_nothing_is_an_error_unless_allowed() -> None:
    module = model()
    detached = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in module.state_dict().items()}
    with pytest.raises(CheckpointingException, match="keep_vars=True"):
        get_param_id_to_sharded_param_map(detached, module.parameters())
    assert get_param_id_to_sharded_param_map(detached, module.parameters(), strict=False) == {}
    assert get_param_id_to_sharded_param_map(detached, []) == {}


def test_a_plain_state_dict_is_refused_with_what_to_pass_instead() -> None:
    """The message advised `keep_vars=True` to callers who had passed it."""
    module = model()
    with pytest.raises(CheckpointingException, match=r"plain tensors, as .*weight.*\.sharded_model\(model\)") as error:
        get_param_id_to_sharded_param_map(module.state_dict(keep_vars=True), module.parameters())
    assert "keep_vars" not in str(error.value)
    assert get_param_id_to_sharded_param_map(sharded_model(module), module.parameters())[0].data is not None


def test_state_takes_over_all_but_key_data_and_dtype() -> None:
    param = ShardedTensor.from_rank_offsets(
        "w",
        torch.zeros(4, 3),
        (0, 1, 2),
        (1, 1, 2),
        prepend_axis_num=1,
        replica_id=(0, 1, 2),
        allow_shape_mismatch=True,
    )
    values = torch.ones(4, 3, dtype=torch.float64)
    state = make_sharded_optimizer_tensor(param, values, "optimizer.state.exp_avg")
    assert (state.key, state.dtype) == ("optimizer.state.exp_avg.w", torch.float64)
    assert state.data is values
    same = ("local_shape", "global_shape", "global_offset", "replica_id", "prepend_axis_num", "allow_shape_mismatch")
    assert all(getattr(state, f) == getattr(param, f) for f in same)


@pytest.mark.parametrize("kind", [AssertionError, ValueError])
def test_another_shape_is_an_error_of_both_kinds(kind: type[Exception]) -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3))
    with pytest.raises(kind, match=r"Optimizer shape \(4,\) does not match model shape \(4, 3\) of w"):
        make_sharded_optimizer_tensor(param, torch.zeros(4), "p")
    with pytest.raises(kind, match=r"does not match model shape \(5,\)"):
        make_sharded_optimizer_tensor(param.flat(torch.zeros(5), 0, 5), torch.zeros(4), "p")


def test_an_adamw_becomes_sharded_in_place() -> None:
    module = model()
    params = list(module.parameters())
    optimizer = stepped(params)
    state_dict = optimizer.state_dict()
    mapping = get_param_id_to_sharded_param_map(sharded_params(module), params)
    assert optim_state_to_sharding_state(state_dict, mapping) is None
    assert state_dict["state"][0]["exp_avg"].key == "optimizer.state.exp_avg.0.weight"
    assert state_dict["state"][3]["step"].key == "optimizer.state.step.1.bias"
    assert state_dict["state"][3]["step"].global_shape == ()
    assert isinstance(state_dict["param_groups"][0]["params"], LocalNonpersistentObject)
    assert optimizer.state_dict()["param_groups"][0]["params"] == [0, 1, 2, 3]


@pytest.mark.parametrize("exclude", ["step", ("step",), ["step"]])
def test_excluded_names_are_names_not_parts_of_names(exclude: Any) -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    state = {"state": {0: {"step": torch.tensor(1.0), "tep": torch.zeros(2)}}, "param_groups": []}
    optim_state_to_sharding_state(state, {0: param}, exclude)
    assert set(state["state"][0]) == {"tep"}


def test_a_parameter_without_description_is_an_error_only_if_it_has_something_to_save() -> None:
    state = {"state": {7: {"step": torch.tensor(1.0)}}, "param_groups": []}
    with pytest.raises(ValueError, match="Param id 7 does not match any model sharded param"):
        optim_state_to_sharding_state(copy.deepcopy(state), {})
    optim_state_to_sharding_state(state, {}, "step")
    assert state["state"] == {7: {}}


@pytest.mark.parametrize(("value", "dtype"), [(3, torch.int64), (0.1, torch.float64), (True, torch.bool)])
def test_numbers_are_stored_as_exact_scalars(value: Any, dtype: torch.dtype) -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    made = make_sharded_state(param, value, "scale", PerParam())
    assert (made.data.dtype, made.data.item()) == (dtype, value)


# ----- states of other shapes, saved on one grid and loaded on another


def block(rank: int, size: int, axis: int, *, layer: int | None = None) -> ShardedTensor:
    """A (12, 8) parameter cut along an axis, possibly one of 3 stacked layers."""
    shape = tuple(n // size if a == axis else n for a, n in enumerate((12, 8)))
    p = 0 if layer is None else 1
    offsets = [(axis + p, rank, size)] + ([(0, layer, 3)] if layer is not None else [])
    return ShardedTensor.from_rank_offsets("w", torch.zeros(shape), *offsets, prepend_axis_num=p)


def roundtrip(tmp_path: Path, saved: list[Any], wanted: list[Any]) -> list[torch.Tensor]:
    save_as_ranks([{"s": s} for s in saved], tmp_path / "x")
    return [state["s"] for state in load_as_ranks([{"s": w} for w in wanted], tmp_path / "x")]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dims", [(0,), (1,), (-1,), (0, 1)])
def test_reduced_statistics_are_resharded(tmp_path: Path, axis: int, dims: tuple[int, ...]) -> None:
    whole = torch.arange(96.0).view(12, 8).sum(dims)
    left = [a for a in (0, 1) if a not in [d % 2 for d in dims]]

    def states(size: int, filled: bool) -> list[Any]:
        made = []
        for rank in range(size):
            own = whole
            if axis in left:
                own = whole.chunk(size, left.index(axis))[rank]
            data = own.clone() if filled else torch.zeros_like(own)
            made.append(make_sharded_state(block(rank, size, axis), data, "row", Reduced(dims=dims)))
        return made

    wanted = states(4, False)
    loaded = roundtrip(tmp_path, states(2, True), wanted)
    expected = [whole.chunk(4, left.index(axis))[r] if axis in left else whole for r in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected))


def test_one_value_per_parameter_of_every_layer(tmp_path: Path) -> None:
    def states(size: int, filled: bool) -> list[Any]:
        return [
            {str(n): make_sharded_state(block(r, size, 0, layer=n), torch.eye(3) * n * filled, "basis", PerParam())
             for n in range(3)}
            for r in range(size)
        ]  # fmt: skip

    for state in roundtrip(tmp_path, states(2, True), states(3, False)):
        assert all(torch.equal(state[str(layer)], torch.eye(3) * layer) for layer in range(3))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_value_of_each_matrix_of_a_stack_is_resharded_with_the_stack(tmp_path: Path, axis: int) -> None:
    # Experts: as `PerParam`, the factors of the first rank's experts were loaded into those of all.
    factors = torch.arange(12.0).view(12, 1, 1) * torch.eye(3)

    def states(size: int, filled: bool) -> list[Any]:
        made = []
        for rank in range(size):
            stack = torch.zeros(12, 12, 12).chunk(size, axis)[rank]
            own = factors.chunk(size)[rank] if axis == 0 else factors
            param = ShardedTensor.from_rank_offsets("w", stack, (axis, rank, size))
            made.append(make_sharded_state(param, own.clone() if filled else own * 0, "L", PerMatrix()))
        return made

    for rank, loaded in enumerate(roundtrip(tmp_path, states(2, True), states(3, False))):
        assert torch.equal(loaded, factors.chunk(3)[rank] if axis == 0 else factors)


def test_state_bound_to_a_layout_loads_there_and_nowhere_else(tmp_path: Path) -> None:
    def state(fingerprint: str, value: float) -> dict[str, Any]:
        spec = LayoutBound(fingerprint=fingerprint)
        return {"s": make_sharded_state(block(0, 1, 0), torch.full((5,), value), "local", spec)}

    save_as_ranks([state("tp2", 7.0)], tmp_path / "x")
    assert (load(state("tp2", 0.0), tmp_path / "x").state["s"] == 7).all()
    with pytest.raises(CheckpointKeyError, match=r"optimizer\.state\.local\.w was saved, but on another layout"):
        load(state("tp4", 0.0), tmp_path / "x")


def test_state_saved_by_another_rule_is_named() -> None:
    stored = ["optimizer.state.exp_avg.w", "optimizer.state.exp_avg_sq.w", "optimizer.state.exp_avg.other.w"]
    assert "saved by another rule, with exp_avg, exp_avg_sq;" in _hint(["optimizer.state.momentum_buffer.w"], stored)
    assert _hint(["optimizer.state.exp_avg.new"], stored) == ""


def test_main_weights_of_a_run_without_any_are_not_laid_to_another_rule() -> None:
    hint = _hint(["optimizer.state.fp32_param.w"], ["optimizer.state.exp_avg.w"])
    assert "no main weights were saved" in hint
    assert "another rule" not in hint


@pytest.mark.parametrize(("stored", "wanted"), [("param", "fp32_param"), ("fp32_param", "param")])
def test_main_weights_are_found_under_either_of_megatron_cores_names(tmp_path: Path, stored: str, wanted: str) -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(3))
    save_as_ranks(
        [{"s": make_sharded_optimizer_tensor(param, torch.ones(3), f"optimizer.state.{stored}")}], tmp_path / "x"
    )
    state = {"s": make_sharded_optimizer_tensor(param, torch.zeros(3), f"optimizer.state.{wanted}")}
    with pytest.raises(CheckpointKeyError, match=f"saved by another rule, with {stored};"):
        load(state, tmp_path / "x")
    assert load(state, tmp_path / "x", aliases=REFERENCE_ALIASES).state["s"].tolist() == [1, 1, 1]


MISUSES: dict[str, tuple[Any, Any, Any, str]] = {
    "reduced flat": (block(0, 1, 0).flat(torch.zeros(3), 0, 3), torch.zeros(3), Reduced(dims=(0,)), "not be a flat"),
    "reduced shape": (block(0, 1, 0), torch.zeros(3), Reduced(dims=(0,)), r"it must have \(8,\)"),
    "text": (block(0, 1, 0), "text", PerParam(), "store it as a ShardedObject"),
    "matrices": (
        ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2, 2)), torch.zeros(2, 2), PerMatrix(), r"begin with \(4,\)"
    ),
    "matrices flat": (
        ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2, 2)).flat(torch.zeros(3), 0, 3), torch.zeros(4, 2, 2),
        PerMatrix(), "not be a flat",
    ),
    "function factory": (
        ShardedTensorFactory("f", torch.zeros(1), lambda *a: [], lambda x: x), 1.0, PerParam(), "factory by segments",
    ),
    "text like a parameter": (block(0, 1, 0), "text", Reduced(dims=(0,)), "store it as a ShardedObject"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_specs_that_cannot_hold_are_refused(name: str) -> None:
    param, value, spec, text = MISUSES[name]
    with pytest.raises(CheckpointingException, match=text):
        make_sharded_state(param, value, "s", spec)
