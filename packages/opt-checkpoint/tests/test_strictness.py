"""Keys and dtypes that a checkpoint and a state do not share: an error, or reported if requested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_as_ranks([state_at(1, rank, 2) for rank in range(2)], tmp_path / "saved")
    return tmp_path / "saved"


EXTRA = {"more": lambda: ShardedTensor.from_rank_offsets("more", torch.full((2,), 7.0))}
RAISES_UNEXPECTED = {"assume_ok_unexpected", "raise_unexpected", "raise_all"}
LOGS_UNEXPECTED, LOGS_MISSING = {"log_unexpected", "log_all"}, {"log_all"}


@pytest.mark.parametrize("mode", [m.value for m in StrictHandling])
def test_keys_that_are_not_stored_raise_or_are_left_out(
    saved: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    state = {**state_at(0, 0, 1, filled=False), "more": EXTRA["more"]()}
    if mode in RAISES_UNEXPECTED:
        with pytest.raises(CheckpointKeyError, match="more"):
            load(state, saved, strict=mode)
        return
    report = load(state, saved, strict=mode)
    assert report.missing == ("more",)
    assert "more" not in report.state
    assert (state["more"].data == 7).all()
    assert ("are not in" in caplog.text) is (mode in LOGS_UNEXPECTED)
    assert_is_step(report.state, 1, 0, 1)


@pytest.mark.parametrize("mode", [m.value for m in StrictHandling])
def test_keys_that_no_rank_requests_raise_or_are_reported(
    saved: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    state = state_at(0, 0, 1, filled=False)
    del state["b"]
    if mode == "raise_all":
        with pytest.raises(CheckpointKeyError, match="requested by no rank: b"):
            load(state, saved, strict=mode)
        return
    assert load(state, saved, strict=mode).unexpected == ("b",)
    assert ("requested by no rank" in caplog.text) is (mode in LOGS_MISSING)


@pytest.mark.parametrize("option", [{"strict": "very"}, {"verify": "maybe"}, {"dtype": "any"}])
def test_unknown_options_are_refused(saved: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="; allowed: "):
        load({}, saved, **option)


def test_a_key_that_some_rank_requests_is_not_unexpected(saved: Path) -> None:
    whole = state_at(0, 0, 1, filled=False)
    first = {key: whole[key] for key in ("w", "rng", "large", "step")}
    load_as_ranks([first, {"b": whole["b"], "groups": None}], saved, strict="raise_all")
    with pytest.raises(CheckpointKeyError, match=r"1 key\(s\) of .* are requested by no rank: groups;"):
        load_as_ranks([first, {"b": whole["b"]}], saved, strict="raise_all")


@pytest.mark.parametrize("mode", ["raise", "log", "return"])
def test_strictness_has_names_in_torchs_words(saved: Path, mode: str) -> None:
    if mode == "raise":
        with pytest.raises(CheckpointKeyError, match="absent"):
            load({"absent": None}, saved, strict="raise_missing")
    else:
        assert load({"absent": None}, saved, strict=f"{mode}_missing").missing == ("absent",)


# ----- dtypes and shapes


def test_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError):
            load({}, path)


def test_an_empty_key_is_a_key(tmp_path: Path) -> None:
    save({"a": sharded_like("", torch.arange(3.0)), "b": sharded_like("b", torch.ones(2))}, tmp_path / "x")
    target = torch.zeros(3)
    load({"a": sharded_like("", target)}, tmp_path / "x")
    assert torch.equal(target, torch.arange(3.0))
