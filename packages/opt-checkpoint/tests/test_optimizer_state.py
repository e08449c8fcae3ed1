"""Optimizer state as sharded state: Megatron-Core's four functions, and states of other shapes than their parameter."""

import copy
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import load_as_ranks, save_as_ranks
from torch import nn

import opt_checkpoint
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
    save,
    sharded_like,
    sharded_model,
)

# ----- Megatron-Core's names


def test_the_modules_have_megatron_cores_names_and_our_objects() -> None:
    modules = ("core", "mapping", "optimizer", "utils", "validation")
    found: Any = {name: importlib.import_module(f"opt_checkpoint.dist_checkpointing.{name}") for name in modules}
    assert {"KEEP_VARS_HINT", "logger"} <= set(found["optimizer"].__all__)
    assert found["core"].CheckpointingException is CheckpointingException
    for module in found.values():  # no second class of the same name, which `isinstance` would tell from the first
        for name in module.__all__:
            assert getattr(opt_checkpoint, name, getattr(module, name)) is getattr(module, name)


# ----- from parameters to their state


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def sharded_params(module: nn.Module, **options: Any) -> dict[str, ShardedTensor]:
    return {k: ShardedTensor.from_rank_offsets(k, v) for k, v in module.state_dict(**options).items()}


def test_the_first_position_of_a_repeated_parameter_wins() -> None:
    a = nn.Parameter(torch.zeros(1))
    b = nn.Parameter(torch.zeros(1))
    assert get_optim_param_to_id_map([a, b, a]) == {id(a): 0, id(b): 1}


def test_parameters_are_matched_by_identity_wherever_they_are(model: Any) -> None:
    entries = sharded_params(model, keep_vars=True)
    nested = {"x": [entries["1.bias"]], "y": {"z": entries["0.weight"]}, "other": entries["0.bias"]}
    found = get_param_id_to_sharded_param_map(nested, [model[0].weight, model[1].bias])
    assert {i: e.key for i, e in found.items()} == {0: "0.weight", 1: "1.bias"}


def test_tied_weights_use_the_key_that_sorts_first_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    weight = nn.Parameter(torch.zeros(3))
    entries = [ShardedTensor.from_rank_offsets(k, weight) for k in ("output", "embedding")]
    with caplog.at_level("INFO"):
        for order in (entries, entries[::-1]):
            found = get_param_id_to_sharded_param_map(dict(enumerate(order)), [weight])
            assert found[0].key == "embedding"
    assert "saved as embedding, not as output" in caplog.text


def test_an_unmatched_optimizer_is_an_error_unless_allowed(model: Any) -> None:
    detached = sharded_params(model)
    with pytest.raises(CheckpointingException, match="keep_vars=True"):
        get_param_id_to_sharded_param_map(detached, model.parameters())
    assert get_param_id_to_sharded_param_map(detached, model.parameters(), strict=False) == {}
    assert get_param_id_to_sharded_param_map(detached, []) == {}
    # A plain state dict is refused with what to pass instead: the message advised what the caller had done.
    with pytest.raises(CheckpointingException, match=r"plain tensors, as .*weight.*\.sharded_model\(model\)") as error:
        get_param_id_to_sharded_param_map(model.state_dict(keep_vars=True), model.parameters())
    assert "keep_vars" not in str(error.value)
    assert get_param_id_to_sharded_param_map(sharded_model(model), model.parameters())[0].data is not None


def test_state_takes_over_all_but_key_data_and_dtype() -> None:
    others = {"prepend_axis_num": 1, "replica_id": (0, 1, 2), "allow_shape_mismatch": True}
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), (0, 1, 2), (1, 1, 2), **others)
    values = torch.ones(4, 3, dtype=torch.float64)
    state = make_sharded_optimizer_tensor(param, values, "optimizer.state.exp_avg")
    assert (state.key, state.dtype) == ("optimizer.state.exp_avg.w", torch.float64)
    assert state.data is values
    same = ShardedTensor.__dataclass_fields__.keys() - {"key", "data", "dtype"}
    assert all(getattr(state, name) == getattr(param, name) for name in same)


def test_another_shape_is_an_error_of_both_kinds() -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3))
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match=r"Optimizer shape \(4,\) does not match model shape \(4, 3\) of w"):
            make_sharded_optimizer_tensor(param, torch.zeros(4), "p")
        with pytest.raises(kind, match=r"does not match model shape \(5,\)"):
            make_sharded_optimizer_tensor(param.flat(torch.zeros(5), 0, 5), torch.zeros(4), "p")


def test_an_adamw_becomes_sharded_in_place(model: Any) -> None:
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params)
    sum((p**2).sum() for p in params).backward()
    optimizer.step()
    state_dict = optimizer.state_dict()
    mapping = get_param_id_to_sharded_param_map(sharded_params(model, keep_vars=True), params)
    assert optim_state_to_sharding_state(state_dict, mapping) is None
    assert state_dict["state"][0]["exp_avg"].key == "optimizer.state.exp_avg.0.weight"
    assert state_dict["state"][3]["step"].key == "optimizer.state.step.1.bias"
    assert state_dict["state"][3]["step"].global_shape == ()
    assert isinstance(state_dict["param_groups"][0]["params"], LocalNonpersistentObject)
    assert optimizer.state_dict()["param_groups"][0]["params"] == [0, 1, 2, 3]


def test_excluded_names_are_names_not_parts_of_names() -> None:
    for exclude in ("step", ("step",), ["step"]):
        state: Any = {"state": {0: {"step": torch.tensor(1.0), "tep": torch.zeros(2)}}, "param_groups": []}
        optim_state_to_sharding_state(state, {0: ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, exclude)
        assert set(state["state"][0]) == {"tep"}


def test_an_undescribed_parameter_is_an_error_if_it_has_state() -> None:
    state = {"state": {7: {"step": torch.tensor(1.0)}}, "param_groups": []}
    with pytest.raises(ValueError, match="Param id 7 does not match any model sharded param"):
        optim_state_to_sharding_state(copy.deepcopy(state), {})
    optim_state_to_sharding_state(state, {}, "step")
    assert state["state"] == {7: {}}


def test_numbers_are_stored_as_exact_scalars() -> None:
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    for value, dtype in ((3, torch.int64), (0.1, torch.float64), (True, torch.bool)):
        made = make_sharded_state(param, value, "scale", PerParam())
        assert (made.data.dtype, made.data.item()) == (dtype, value)


# ----- states of other shapes, saved on one grid and loaded on another


def block(rank: int, size: int, axis: int) -> ShardedTensor:
    """A (12, 8) parameter cut along an axis."""
    shape = tuple(n // size if a == axis else n for a, n in enumerate((12, 8)))
    return ShardedTensor.from_rank_offsets("w", torch.zeros(shape), (axis, rank, size))


def assert_resharded(
    path: Path, sizes: tuple[int, int], spec: Any, block: Callable[[int, int], Any], part: Callable[[int, int], Any]
) -> None:
    """Saved on ranks that hold `part(rank, size)` of a state of `block(rank, size)`, and loaded on more ranks."""

    def states(size: int, filled: bool) -> list[Any]:
        values = [part(rank, size).clone() * filled for rank in range(size)]
        return [{"s": make_sharded_state(block(rank, size), v, "state", spec)} for rank, v in enumerate(values)]

    save_as_ranks(states(sizes[0], True), path)
    for rank, loaded in enumerate(load_as_ranks(states(sizes[1], False), path)):
        assert torch.equal(loaded["s"], part(rank, sizes[1])), (rank, spec)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dims", [(0,), (1,), (-1,), (0, 1)])
def test_reduced_statistics_are_resharded(tmp_path: Path, axis: int, dims: tuple[int, ...]) -> None:
    whole = torch.arange(96.0).view(12, 8).sum(dims)
    left = [a for a in (0, 1) if a not in [d % 2 for d in dims]]
    part = lambda rank, size: whole.chunk(size, left.index(axis))[rank] if axis in left else whole
    assert_resharded(tmp_path / "x", (2, 4), Reduced(dims=dims), lambda r, n: block(r, n, axis), part)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_values_per_matrix_are_resharded_with_their_stack(tmp_path: Path, axis: int) -> None:
    # Experts: as `PerParam`, the factors of the first rank's experts were loaded into those of all.
    factors = torch.arange(12.0).view(12, 1, 1) * torch.eye(3)
    stack = lambda r, n: ShardedTensor.from_rank_offsets("w", torch.zeros(12, 12, 12).chunk(n, axis)[r], (axis, r, n))
    part = lambda rank, size: factors.chunk(size)[rank] if axis == 0 else factors
    assert_resharded(tmp_path / "x", (2, 3), PerMatrix(), stack, part)


def test_state_bound_to_a_layout_loads_there_and_nowhere_else(tmp_path: Path) -> None:
    def state(fingerprint: str, value: float) -> dict[str, Any]:
        spec = LayoutBound(fingerprint=fingerprint)
        return {"s": make_sharded_state(block(0, 1, 0), torch.full((5,), value), "local", spec)}

    save_as_ranks([state("tp2", 7.0)], tmp_path / "x")
    assert (load(state("tp2", 0.0), tmp_path / "x").state["s"] == 7).all()
    with pytest.raises(CheckpointKeyError, match=r"optimizer\.state\.local\.w was saved, but on another layout"):
        load(state("tp4", 0.0), tmp_path / "x")


@pytest.mark.parametrize(("stored", "wanted"), [("param", "fp32_param"), ("fp32_param", "param")])
def test_main_weights_are_found_under_both_megatron_core_names(tmp_path: Path, stored: str, wanted: str) -> None:
    def state(name: str, key: str = "w") -> dict[str, Any]:
        return {"s": sharded_like(f"optimizer.state.{name}.{key}", torch.ones(3) * (name == stored))}

    save(state(stored), tmp_path / "x")
    with pytest.raises(CheckpointKeyError, match=f"saved by another rule, with {stored};"):
        load(state(wanted), tmp_path / "x")
    loaded = load(state(wanted), tmp_path / "x", aliases=REFERENCE_ALIASES).state["s"]
    assert loaded.tolist() == [1, 1, 1]


HINTS = [
    (("exp_avg.w", "exp_avg_sq.w", "exp_avg.b"), "velocity.w", "saved by another rule, with exp_avg, exp_avg_sq;"),
    (("exp_avg.w",), "exp_avg.new", ".exp_avg.new; load with"),
    (("exp_avg.w",), "fp32_param.w", ".fp32_param.w (no main weights were saved"),
]


def test_a_state_that_was_not_saved_is_named_with_what_was(tmp_path: Path) -> None:
    for number, (stored, wanted, text) in enumerate(HINTS):
        save({name: sharded_like(f"optimizer.state.{name}", torch.ones(2)) for name in stored}, tmp_path / str(number))
        with pytest.raises(CheckpointKeyError, match=re.escape(text)):
            load({"s": sharded_like(f"optimizer.state.{wanted}", torch.ones(2))}, tmp_path / str(number))


MATRICES = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2, 2))
BUILT = ShardedTensorFactory("f", torch.zeros(1), lambda *a: [], lambda x: x)
MISUSES: list[tuple[Any, Any, Any, str]] = [
    (block(0, 1, 0).flat(torch.zeros(3), 0, 3), torch.zeros(3), Reduced(dims=(0,)), "not be a flat"),
    (block(0, 1, 0), torch.zeros(3), Reduced(dims=(0,)), r"it must have \(8,\)"),
    (block(0, 1, 0), "text", PerParam(), "store it as a ShardedObject"),
    (block(0, 1, 0), "text", Reduced(dims=(0,)), "store it as a ShardedObject"),
    (MATRICES, torch.zeros(2, 2), PerMatrix(), r"begin with \(4,\)"),
    (MATRICES.flat(torch.zeros(3), 0, 3), torch.zeros(4, 2, 2), PerMatrix(), "not be a flat"),
    (BUILT, 1.0, PerParam(), "factory by segments"),
]


def test_specs_that_cannot_hold_are_refused() -> None:
    for param, value, spec, text in MISUSES:
        with pytest.raises(CheckpointingException, match=text):
            make_sharded_state(param, value, "s", spec)
