"""Keys that a checkpoint and a state do not share: an error, or reported if requested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_ranks import load_as_ranks, save_as_ranks
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointKeyError,
    CheckpointNotFoundError,
    ShardedTensor,
    StrictHandling,
    load,
    save,
    sharded_like,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_as_ranks([state_at(1, rank, 2) for rank in range(2)], tmp_path / "saved")
    return tmp_path / "saved"


MODES = {  # of keys that are requested and not stored, and of keys that are stored and requested by no rank
    "assume_ok_unexpected": ("raise", "allow"),
    "log_unexpected": ("log", "allow"),
    "log_all": ("log", "log"),
    "raise_unexpected": ("raise", "allow"),
    "raise_all": ("raise", "raise"),
    "return_unexpected": ("allow", "allow"),
    "return_all": ("allow", "allow"),
    "ignore_all": ("allow", "allow"),
}
TORCHS = {"raise_missing": ("raise", "allow"), "log_missing": ("log", "allow"), "return_missing": ("allow", "allow")}


@pytest.mark.parametrize("mode", [*MODES, *TORCHS])
def test_keys_of_one_side_raise_or_are_left_out_and_reported(
    saved: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    assert {m.value for m in StrictHandling} == MODES.keys()
    missing, unexpected = {**MODES, **TORCHS}[mode]
    more = ShardedTensor.from_rank_offsets("more", torch.full((2,), 7.0))
    state = {**state_at(0, 0, 1, filled=False), "more": more, "absent": None}
    if missing == "raise":
        with pytest.raises(CheckpointKeyError, match=r"are not in .*: absent, more|are not in .*: more, absent"):
            load(state, saved, strict=mode)
    else:
        report = load(state, saved, strict=mode)
        assert set(report.missing) == {"more", "absent"}
        assert "more" not in report.state
        assert ("are not in" in caplog.text) is (missing == "log")
        assert_is_step(report.state, 1, 0, 1)
    assert (more.data == 7).all()
    state = state_at(0, 0, 1, filled=False)
    del state["b"]
    if unexpected == "raise":
        with pytest.raises(CheckpointKeyError, match="requested by no rank: b"):
            load(state, saved, strict=mode)
    else:
        assert load(state, saved, strict=mode).unexpected == ("b",)
        assert ("requested by no rank" in caplog.text) is (unexpected == "log")


def test_a_key_that_some_rank_requests_is_not_unexpected(saved: Path) -> None:
    whole = state_at(0, 0, 1, filled=False)
    first = {key: whole[key] for key in ("w", "rng", "large", "step")}
    load_as_ranks([first, {"b": whole["b"], "groups": None}], saved, strict="raise_all")
    with pytest.raises(CheckpointKeyError, match=r"1 key\(s\) of .* are requested by no rank: groups;"):
        load_as_ranks([first, {"b": whole["b"]}], saved, strict="raise_all")


def test_unknown_options_and_places_without_a_checkpoint_are_refused(saved: Path, tmp_path: Path) -> None:
    for option in ({"strict": "very"}, {"verify": "maybe"}, {"dtype": "any"}):
        with pytest.raises(ValueError, match="; allowed: "):
            load({}, saved, **option)  # type: ignore[arg-type]
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError):
            load({}, path)


def test_an_empty_key_is_a_key(tmp_path: Path) -> None:
    save({"a": sharded_like("", torch.arange(3.0)), "b": sharded_like("b", torch.ones(2))}, tmp_path / "x")
    target = torch.zeros(3)
    load({"a": sharded_like("", target)}, tmp_path / "x")
    assert torch.equal(target, torch.arange(3.0))
