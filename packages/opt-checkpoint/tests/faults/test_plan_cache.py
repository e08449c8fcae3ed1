"""A plan that is remembered between saves never describes what ranks no longer hold."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import on_threads, save_as_ranks
from failing_calls import Calls, failing
from states import assert_is_step, state_at
from torch import Tensor

from opt_checkpoint import (
    CheckpointFailedError,
    CheckpointingException,
    CheckpointManager,
    PlanCache,
    ShardedObject,
    ShardedTensor,
    committed_steps,
    load,
    read_index,
    save,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.dcp.plan import GlobalPlan
from opt_checkpoint.dcp.writing import CheckpointWriter
from opt_checkpoint.run import save_load
from opt_checkpoint.run.series import step_name


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ranks each plan was made for, in order."""
    calls: list[int] = []
    original = GlobalPlan.of.__func__

    def counted(cls: Any, layouts: Any, digests: Any, **options: Any) -> GlobalPlan:
        calls.append(len(layouts))
        return original(cls, layouts, digests, **options)

    monkeypatch.setattr(GlobalPlan, "of", classmethod(counted))
    return calls


def rows_of(key: str, whole: Tensor, cuts: list[int], rank: int) -> dict[str, Any]:
    """Rank `rank`'s rows of a tensor that is cut at `cuts`."""
    bounds = [0, *cuts, whole.shape[0]]
    part = whole[bounds[rank] : bounds[rank + 1]].clone()
    offset = (bounds[rank], *(0 for _ in whole.shape[1:]))
    return {key: ShardedTensor(key, part, part.dtype, tuple(part.shape), tuple(whole.shape), offset, None)}


def flat_part(whole: Tensor, rank: int) -> ShardedTensor:
    start, stop = ((0, 10), (10, whole.numel()))[rank]
    return sharded_like("w", whole).flat(whole.view(-1)[start:stop], start, stop)


def wholes(seed: int, shape: tuple[int, ...] = (6, 4)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def saved_values(path: Path, *keys: str) -> dict[str, Tensor]:
    """What is stored, read back whole by one process."""
    assert verify_checkpoint(path) == []
    loaded: dict[str, Tensor] = load(dict.fromkeys(keys), path).state
    return loaded


def base(rank: int) -> dict[str, Any]:
    return rows_of("w", wholes(1), [3], rank)


# What one rank or all hold in the second save, and what must then be stored under `w`.
def rows(whole: Tensor, cut: int = 3, **more: Any) -> tuple[Callable[[int], dict[str, Any]], Tensor]:
    return lambda rank: {**rows_of("w", whole, [cut], rank), **{k: value(rank) for k, value in more.items()}}, whole


CHANGES: dict[str, tuple[Callable[[int], dict[str, Any]], Tensor]] = {
    "shape": rows(wholes(2, (6, 5))),
    "axes": rows(wholes(2, (6, 2, 2))),
    "dtype": rows(wholes(2).double()),
    "dtype of the same width": rows(wholes(2).int()),
    "placement": rows(wholes(2), 2),
    "exchanged places": (lambda rank: rows_of("w", wholes(2), [3], 1 - rank), wholes(2)),
    "flat": (lambda rank: {"w": flat_part(wholes(2), rank)}, wholes(2)),
    "replicas": (lambda rank: {"w": replace(sharded_like("w", wholes(2)), replica_id=1 - rank)}, wholes(2)),
    "other main replica": (lambda rank: {"w": replace(sharded_like("w", wholes(2)), replica_id=rank)}, wholes(2)),
    "one rank only": (lambda rank: {"w": sharded_like("w", wholes(2))} if rank else {}, wholes(2)),
    "more keys": rows(wholes(2), a=lambda rank: rows_of("a", wholes(3), [3], rank)["a"]),
    "an object": rows(wholes(2), o=lambda rank: ShardedObject("o", rank, (2,), (rank,))),
    "a plain tensor": (lambda rank: {"w": wholes(2)}, wholes(2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_between_two_saves_is_stored_as_it_is_now(tmp_path: Path, planned: list[int], name: str) -> None:
    change, expected = CHANGES[name]
    caches = [PlanCache(), PlanCache()]
    save_as_ranks([base(0), base(1)], tmp_path / "1", caches=caches)
    for number in ("2", "3"):
        save_as_ranks([change(0), change(1)], tmp_path / number, caches=caches)
        stored = saved_values(tmp_path / number, "w")["w"]
        assert stored.dtype == expected.dtype
        assert torch.equal(stored, expected)
    save_as_ranks([base(0), base(1)], tmp_path / "4", caches=caches)
    assert torch.equal(saved_values(tmp_path / "4", "w")["w"], wholes(1))
    assert list(read_index(tmp_path / "4").tensors) == ["w"]  # no key that is gone
    assert planned == [2, 2, 2]  # one for each change; the third save has the layout of the second


def replicas(rank: int, step: int) -> dict[str, Any]:
    """The same layout on ranks 1 and 2, which share the writing of what rank 0 holds too."""
    whole = torch.arange(64 << 10, dtype=torch.float32).view(1024, 64) + step
    return {"w": replace(sharded_like("w", whole), replica_id=min(rank, 1))}


def test_ranks_of_equal_layouts_that_changed_places_plan_anew(tmp_path: Path, planned: list[int]) -> None:
    caches = [PlanCache() for _ in range(3)]
    save_as_ranks([replicas(rank, 0) for rank in range(3)], tmp_path / "1", caches=caches)
    save_as_ranks([replicas(rank, 1) for rank in range(3)], tmp_path / "2", caches=[caches[n] for n in (0, 2, 1)])
    expected = replicas(0, 1)["w"].data
    assert torch.equal(saved_values(tmp_path / "2", "w")["w"], expected)
    assert planned == [3, 3]


DIFFER = r"common values differ between ranks: v \(ranks \[1\]\)"
# A value of a number, how the last save takes those of ranks, and the error where they differ.
VALUES: dict[str, tuple[Callable[[float], Any], str, str]] = {
    "a number": (lambda n: n, "first_rank", DIFFER),
    "a tensor": (lambda n: torch.full((64 << 10,), n), "first_rank", DIFFER),
    "a block that repeats": (
        lambda n: replace(sharded_like("v", torch.tensor([n, 2.0])), may_repeat=True),
        "equal",
        "v: Invalid access pattern: rank 0 .* and rank 1",
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_differ_are_refused_with_a_remembered_plan(tmp_path: Path, kind: str) -> None:
    value, common, error = VALUES[kind]
    caches = [PlanCache(), PlanCache()]
    save_as_ranks([{"v": value(1.0)}] * 2, tmp_path / "1", caches=caches)
    with pytest.raises(CheckpointingException, match=error):
        save_as_ranks([{"v": value(3.0)}, {"v": value(4.0)}], tmp_path / "2", caches=caches)
    assert not (tmp_path / "2").exists()
    last = [{"v": value(5.0)}, {"v": value(6.0 if common == "first_rank" else 5.0)}]
    save_as_ranks(last, tmp_path / "3", caches=caches, common=common)
    expected = value(5.0)
    assert str(saved_values(tmp_path / "3", "v")["v"]) == str(getattr(expected, "data", expected))


def test_parts_that_differ_from_the_plan_are_found_before_commit(tmp_path: Path) -> None:
    caches = [PlanCache() for _ in range(3)]
    save_as_ranks([replicas(rank, 0) for rank in range(3)], tmp_path / "1", caches=caches)
    caches[1].plan = caches[1].plan._replace(assigned=caches[2].plan.assigned)
    with pytest.raises(CheckpointingException, match=r"rank 1 has not written the .* parts and"):
        save_as_ranks([replicas(rank, 1) for rank in range(3)], tmp_path / "2", caches=caches)
    assert not (tmp_path / "2").exists()


def test_an_unwritten_object_is_noticed_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = CheckpointWriter.write

    def forget(*arguments: Any) -> Any:
        written = write(*arguments)
        written.objects.popitem()
        return written

    monkeypatch.setattr(CheckpointWriter, "write", forget)
    with pytest.raises(CheckpointingException, match=r"rank 0 has not written the .* objects"):
        save(state_at(1, 0, 1), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_concurrent_saves_with_one_cache_do_not_mix_their_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second began once the first had agreed to use the cached plan: values went under the other's keys."""
    cache = PlanCache()
    agree = save_load.agree
    save(rows_of("w", wholes(1), [], 0), tmp_path / "1", plans=cache)

    def interrupted(policy: str, offers: Any) -> Any:
        monkeypatch.setattr(save_load, "agree", agree)
        save(rows_of("other", wholes(3), [], 0), tmp_path / "other", plans=cache)
        return agree(policy, offers)

    monkeypatch.setattr(save_load, "agree", interrupted)
    save(rows_of("w", wholes(2), [], 0), tmp_path / "2", plans=cache)
    assert list(read_index(tmp_path / "2").tensors) == ["w"]
    assert torch.equal(saved_values(tmp_path / "2", "w")["w"], wholes(2))
    assert torch.equal(saved_values(tmp_path / "other", "other")["other"], wholes(3))


def test_a_series_of_saves_plans_anew_when_it_must_and_only_then(tmp_path: Path, planned: list[int]) -> None:
    """Step 3 fails on one rank midway, step 5 has another layout there, and before step 7 its memory is lost."""

    def work(ranks: Any) -> None:
        with CheckpointManager(tmp_path, keep=100, process_group=ranks) as manager:
            for step in range(1, 9):
                state = state_at(step, ranks.rank, 2)
                if ranks.rank == 0:
                    planned.append(-step)
                elif step == 5:
                    state["extra"] = sharded_like("extra", torch.ones(3))
                elif step == 7:
                    manager._plans = PlanCache()
                with pytest.raises(CheckpointFailedError, match="Input/output") if step == 3 else nullcontext():
                    manager.save(step, state)
                    manager.wait()

    with Calls(failing(1, lambda name, key: planned[-1] == -3 and "__1_0.distcp" in key)):
        assert on_threads(2, work) == [None, None]
    assert planned == [-1, 2, -2, -3, -4, -5, 2, -6, 2, -7, 2, -8]
    assert committed_steps(tmp_path) == [1, 2, 4, 5, 6, 7, 8]
    for step in committed_steps(tmp_path):
        path = tmp_path / step_name(step)
        assert verify_checkpoint(path) == []
        assert_is_step(load(state_at(0, 0, 1, filled=False), path).state, step, 0, 1)
        assert ("extra" in read_index(path).tensors) == (step == 5)
