"""F14, F15, F16: ranks that do not fit together, states that do not fit the checkpoint, and a rank that dies."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import error_on_all, run_ranks, save_as_ranks
from states import COLUMNS, ROWS, state_at
from torch import nn

from opt_checkpoint import (
    AsyncSaver,
    CheckpointingException,
    CheckpointKeyError,
    CheckpointManager,
    CheckpointMismatchError,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    load,
    load_optimizer,
    save,
    sharded_model,
    sharded_optimizer,
)
from opt_checkpoint.dcp.layout import fingerprint
from opt_checkpoint.state import checksums

SHAPE = (ROWS, COLUMNS)
HALF = ROWS * COLUMNS // 2


def flat_w(data: torch.Tensor, start: int) -> dict[str, Any]:
    stop = start + len(data)
    return {"w": ShardedTensor("w", data, data.dtype, SHAPE, SHAPE, (0, 0), None, flattened_range=slice(start, stop))}


def small_w() -> dict[str, Any]:
    return {"w": ShardedTensor("w", torch.zeros(3, 3), torch.float32, (3, 3), (3, 3), (0, 0), None)}


# What rank 1 has instead, and the error.
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing shard": (
        {"w": LocalNonpersistentObject(None)},
        r"w: Invalid access pattern: main replicas hold 240 of the 480 .*ranks \[0\]",
    ),
    "other dtype": (flat_w(torch.zeros(HALF).double(), HALF), r"w: rank 0 has float32 \[12, 40\], rank 1 has float64"),
    "other shape": (small_w(), r"w: rank 0 has float32 \[12, 40\], rank 1 has float32 \[3, 3\]"),
    "overlap": (flat_w(torch.zeros(HALF), 100), r"rank [01] holds .* and rank [01] .*both as main replica"),
    "two main replicas": (
        {"b": ShardedTensor.from_rank_offsets("b", torch.zeros(5))},
        r"b: Invalid access pattern: rank 0 .* and rank 1",
    ),
    "double object": (
        {"rng": ShardedObject("rng", 1, (1,), (0,))},
        r"Duplicate ShardedObject keys: rng/shard_0_1 on ranks \[0, 1\]",
    ),
    "missing object": ({"o": ShardedObject("other", 1, (3,), (1,))}, r"other: 1 of 3 ShardedObject are missing"),
    "other common value": ({"groups": [{"lr": 99.0}]}, r"values differ between ranks: groups \(ranks \[1\]\)"),
    "no data": (
        {"w": ShardedTensor("w", None, torch.float32, SHAPE, SHAPE, (0, 0), None)},
        r"rank 1: CheckpointValueError: w has no data to save",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_are_an_error_on_all_before_a_write(tmp_path: Path, name: str) -> None:
    change, text = DISAGREEMENTS[name]
    states = [state_at(1, 0, 2), state_at(1, 1, 2) | change]
    error = error_on_all(2, lambda ranks: save(states[ranks.rank], tmp_path / "x", process_group=ranks))
    assert isinstance(error, CheckpointingException)
    assert re.search(text, str(error))
    assert list(tmp_path.iterdir()) == []


ON_A_PATH: dict[str, Callable[..., object]] = {
    "save": partial(save, {}),
    "async save": lambda path, process_group: AsyncSaver(process_group).save({}, path),
    "load": partial(load, {}),
    "series": CheckpointManager,
}


@pytest.mark.parametrize("name", ON_A_PATH)
def test_ranks_with_different_paths_are_an_error_everywhere(tmp_path: Path, name: str) -> None:
    """What rank 0 is given would decide, and the others' would be passed over in silence."""
    call = ON_A_PATH[name]
    error = error_on_all(3, lambda ranks: call(tmp_path / f"of-rank-{min(ranks.rank, 1)}", process_group=ranks))
    assert f"{tmp_path}/of-rank-0 (ranks [0]), {tmp_path}/of-rank-1 (ranks [1, 2])" in str(error)
    assert list(tmp_path.iterdir()) == []


WITH_OPTIONS: dict[str, tuple[Callable[..., object], Any, str]] = {
    "common": (partial(save, {}), "first_rank", "equal"),
    "strict": (partial(load, {}), "very", "raise_unexpected"),
    "dtype": (partial(load, {}), "cast", "exact"),
    "verify": (partial(load, {}), "chunks", "sizes"),
    "keep": (CheckpointManager, 0, "3"),
    "keep_every": (CheckpointManager, 5, "None"),
    "in_background": (CheckpointManager, False, "True"),
    "step": (lambda path, step=None, **group: CheckpointManager(path, **group).load({}, step=step), 3, "None"),
}


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_ranks_with_different_options_are_an_error_everywhere(tmp_path: Path, name: str) -> None:
    """Valid or not: a rank that did other things, or refused alone, would leave the others waiting for it."""
    call, value, default = WITH_OPTIONS[name]
    act = lambda ranks: call(tmp_path / "x", process_group=ranks, **({name: value} if ranks.rank else {}))
    assert f"{name}: {default} (ranks [0]), {value} (ranks [1])" in str(error_on_all(2, act))
    assert list(tmp_path.iterdir()) == []


ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a dot in a key": ({"a.b": 1, "a": {"b": 2}}, {"a.b": 9, "a": {"b": 2}}),
    "a number and its digits": ({"a": {1: 5, "1": 6}}, {"a": {1: 9, "1": 6}}),
    "nested and not": ({"a.b": 1}, {"a": {"b": 1}}),
    "another shape of the same bytes": ({"scale": torch.zeros(4)}, {"scale": torch.zeros(2, 2)}),
    "another dtype of the same bytes": ({"scale": torch.zeros(4)}, {"scale": torch.zeros(4, dtype=torch.int32)}),
    "another end of a dict in a list": ({"x": [{"a": {"b": 1}, "c": 2}]}, {"x": [{"a": {"b": 1, "c": 2}}]}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_values_whose_paths_have_equal_text_are_each_compared(tmp_path: Path, name: str) -> None:
    """One fingerprint stood for both paths, so a value that differed between ranks was saved as rank 0's in silence."""
    states = [{**state_at(1, rank, 2), **own} for rank, own in enumerate(ALIKE[name])]
    with pytest.raises(CheckpointingException, match=r"common values differ between ranks: .* \(ranks \[1\]\)"):
        save_as_ranks(states, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


UNEQUAL: dict[str, tuple[Any, Any]] = {
    "sets": ({1, 5}, {1, 6}),
    "sets of text": ({"a"}, {"a", "b"}),
    "frozen sets": (frozenset({1}), frozenset({2})),
    "a set inside": ({"x": [(1, {2})]}, {"x": [(1, {3})]}),
    "bytearrays": (bytearray(b"a"), bytearray(b"b")),
    "devices": (torch.device("cuda", 0), torch.device("cuda", 1)),
    "memory formats": (torch.channels_last, torch.contiguous_format),
    "counters": (Counter("ab"), Counter("aab")),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_objects_that_differ_are_refused_by_value(tmp_path: Path, name: str) -> None:
    states = [{"value": value} for value in UNEQUAL[name]]
    with pytest.raises(
        CheckpointingException, match=r"differ between ranks: value.* \(ranks \[1\]\).*common='first_rank'"
    ):
        save_as_ranks(states, tmp_path / "x")


def test_unequal_groups_of_an_optimizer_name_the_remedy(tmp_path: Path) -> None:
    layers: list[nn.Module] = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]  # as of two pipeline stages
    states = [{"optimizer": sharded_optimizer(layer, torch.optim.SGD(layer.parameters(), lr=0.1))} for layer in layers]
    with pytest.raises(CheckpointingException, match=r"differ between ranks.*sharded_optimizer\(.*groups=\.\.\.\)"):
        save_as_ranks(states, tmp_path / "x")


class Undescribed(nn.Linear):
    def sharded_state_dict(self, prefix: str) -> None:
        raise ValueError("cannot be described")


def describe_stages(rank: int, size: int, folder: str) -> list[str]:
    """The refusals where only the second stage of a pipeline cannot be described."""
    model = nn.Sequential(Undescribed(2, 2) if rank == 1 else nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = SimpleNamespace(pp=dist.group.WORLD)
    refusals = []
    for call in (
        lambda: sharded_model(model, groups=groups),
        lambda: sharded_optimizer(model, optimizer, groups=groups),
        lambda: load_optimizer(model, optimizer, folder, groups=groups),
    ):
        with pytest.raises(CheckpointingException) as caught:
            call()
        refusals.append(str(caught.value))
    return refusals


def test_a_stage_that_cannot_be_described_is_refused_on_all(tmp_path: Path) -> None:
    """Symptom: the other ranks waited for their places, or took its failure for an answer to another question."""
    save({}, tmp_path / "x")
    first, second = run_ranks(2, describe_stages, str(tmp_path / "x"))
    assert first == second
    assert all("rank 1: ValueError: cannot be described" in refusal for refusal in first)


def test_a_value_that_rank_0_lacks_is_not_lost_by_first_rank(tmp_path: Path) -> None:
    """It was left out of the checkpoint, with a warning that those of the first rank are stored."""
    states = [{"value": 1}, {"value": 2, "own": {"rng": 3}}]
    lacks = r"rank 0, which lacks own.rng \(on ranks \[1\] only\); give it"
    with pytest.raises(CheckpointingException, match=lacks):
        save_as_ranks(states, tmp_path / "x", common="first_rank")
    held = [{"value": 1, "own": {"rng": 3}}, {"value": 2}]
    save_as_ranks(held, tmp_path / "x", common="first_rank")
    assert load({"value": None, "own": None}, tmp_path / "x").state == {"value": 1, "own": {"rng": 3}}


def test_an_object_that_contains_itself_has_a_fingerprint() -> None:
    model = torch.nn.Linear(1, 1)
    model.parts = [model, {"again": model}]
    assert fingerprint(model) == fingerprint(model)
    assert fingerprint(model) != fingerprint(torch.nn.Linear(1, 1))


def test_equal_sets_in_another_order_are_equal(tmp_path: Path) -> None:
    orders = [range(0, 200, 8), reversed(range(0, 200, 8))]
    states = [{"value": set(order), "device": torch.device("cpu"), "raw": bytearray(b"a")} for order in orders]
    save_as_ranks(states, tmp_path / "x")
    assert load({"value": None}, tmp_path / "x").state["value"] == set(range(0, 200, 8))


def test_a_tensor_without_a_main_replica_names_ranks_and_a_cure(tmp_path: Path) -> None:
    """As of a buffer that rank 0 lacks."""
    states = [{}, *({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4, 4), replica_id=rank)} for rank in (1, 2))]
    text = r"w: .* hold 0 of the 16 elements .*; ranks \[1, 2\] hold replicas, of which none is main .*groups="
    with pytest.raises(CheckpointingException, match=text):
        save_as_ranks(states, tmp_path / "x")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_as_ranks([state_at(1, 0, 1)], tmp_path / "saved")
    return tmp_path / "saved"


MISFITS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "extra tensor": (
        {"more": ShardedTensor.from_rank_offsets("more", torch.zeros(2))},
        CheckpointKeyError,
        "1 requested key.s. are not in .*: more;",
    ),
    "extra value": ({"more": {"deep": None}}, CheckpointKeyError, "more.deep"),
    "extra object": ({"more": ShardedObject("more", None, (1,), (0,))}, CheckpointKeyError, "more/shard_0_1"),
    "narrower dtype": (
        flat_w(torch.zeros(2 * HALF).bfloat16(), 0),
        CheckpointMismatchError,
        "stored as torch.float32, asked for as torch.bfloat16",
    ),
    "other shape": (small_w(), CheckpointMismatchError, r"global shape \[12, 40\], asked for with \[3, 3\]"),
    "other shape, and padding, which is not zeroed": (
        {
            "b": ShardedTensor.from_rank_offsets("b", torch.full((8,), -1.0), allow_shape_mismatch=True),
            "z": small_w(),
        },
        CheckpointMismatchError,
        r"asked for with \[3, 3\]",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_is_refused_and_left_alone(saved: Path, name: str) -> None:
    change, kind, text = MISFITS[name]
    state = state_at(0, 0, 1, filled=False) | change
    with pytest.raises(kind, match=text):
        load(state, saved)
    assert (state["b"].data == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn], ids=str)
def test_a_checksum_depends_on_every_bit_and_its_place(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-3, 3, (1 << 20) + 7).to(dtype)

    def of(value: torch.Tensor) -> int:
        return checksums({"w": value})["w"]

    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    seen = {of(tensor), of(tensor.flip(0)) if dtype.itemsize > 1 else 1}
    for at in (0, 12345, (1 << 20) - 1, 1 << 20, len(bits) - 1):
        changed = bits.clone()
        changed[at] ^= 1
        seen.add(of(changed.view(dtype)))
    assert len(seen) == 7
    assert of(tensor.clone()) == of(tensor) == of(tensor.view(1, -1).t())


def test_a_misfit_on_one_rank_is_an_error_on_all(saved: Path) -> None:
    states = [state_at(0, rank, 2, filled=False) for rank in range(2)]
    states[1] |= MISFITS["extra tensor"][0]
    error = error_on_all(2, lambda ranks: load(states[ranks.rank], saved, process_group=ranks))
    assert isinstance(error, CheckpointKeyError)
    assert re.search(r"rank 1: CheckpointKeyError: 1 requested key\(s\) are not in .*: more;", str(error))
    assert all((state["w"].data == -1).all() for state in states)
