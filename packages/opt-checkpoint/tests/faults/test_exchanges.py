"""F1: five exchanges a save and a load; whatever a rank raises, wherever, all ranks raise, and none waits."""

import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import ThreadRanks, error_on_all, on_threads, run_ranks, save_as_ranks
from failing_calls import die
from states import assert_is_step, state_at
from tiers import NIGHT

from opt_checkpoint import (
    AsyncSaver,
    CheckpointFailedError,
    CheckpointManager,
    PlanCache,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    save,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.run.ranks import Turns, from_all, from_rank_0, own_and_distinct, through_rank_0


class Counted(ThreadRanks):
    """Ranks that record the messages they send: the kind of exchange, and its bytes."""

    def gather_objects(self, value: Any) -> list[Any]:  # which the other exchanges are made of
        kind = sys._getframe(1).f_code.co_name
        vars(self).setdefault("sent", []).append((kind, len(pickle.dumps(value))))
        return super().gather_objects(value)


def counted(size: int, work: Callable[[Any], object]) -> list[tuple[str, int]]:
    """What rank 1 (or 0, if it is alone) sent during a task."""

    def record(ranks: Any) -> Any:
        ranks = Counted(ranks.rank, ranks.size, ranks.barrier, ranks.slots)
        work(ranks)
        return vars(ranks)["sent"]

    return on_threads(size, record)[-1 if size > 1 else 0]


def many(rank: int, count: int) -> dict[str, Any]:
    """Tensors that each rank has a row of."""
    row = torch.full((1, 4), float(rank))
    shards = {
        f"w{n}": sharded_like(f"w{n}", torch.zeros(2, 4)).flat(row.view(-1), rank * 4, rank * 4 + 4)
        for n in range(count)
    }
    return {**shards, "step": 7}


def saving(path: Path, caches: list[PlanCache], state: Callable[[int], dict[str, Any]]) -> Callable[[Any], None]:
    return lambda ranks: save(state(ranks.rank), path, process_group=ranks, plans=caches[ranks.rank])


SAVE = ["from_all", "gather", "scatter", "gather", "broadcast"]
LOAD = ["from_all", "broadcast", "gather", "broadcast", "from_all"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_save_and_a_load_take_five_exchanges(tmp_path: Path, size: int) -> None:
    caches = [PlanCache() for _ in range(size)]
    for path in (tmp_path / "first", tmp_path / "later"):
        assert [name for name, _ in counted(size, saving(path, caches, lambda rank: state_at(1, rank, size)))] == SAVE
    loading = lambda r: load(state_at(0, r.rank, size, filled=False), tmp_path / "later", process_group=r)
    assert [name for name, _ in counted(size, loading)] == LOAD


def test_layouts_go_to_rank_0_only_and_a_cached_plan_sends_none(tmp_path: Path) -> None:
    caches = [PlanCache(), PlanCache()]
    few = counted(2, saving(tmp_path / "1", [PlanCache(), PlanCache()], lambda rank: many(rank, 1)))
    first, later = (counted(2, saving(tmp_path / n, caches, lambda rank: many(rank, 200))) for n in ("2", "3"))
    assert first[0] == few[0], "what all ranks receive depends on the number of tensors"
    assert first[1][1] > 200 * 40 > 10 * later[1][1]


def test_equal_values_are_sent_by_the_first_rank_that_has_them() -> None:
    """Every replica sent all names of a described optimizer to every rank."""
    names = [f"layers.{number}.weight" for number in range(500)]

    def describe(ranks: Any) -> object:
        own = [*names, ranks.rank // 2]  # two replicas of each part
        return own_and_distinct(ranks, lambda: own, lambda value: value, "it")

    sent = counted(4, describe)
    assert [kind for kind, _ in sent] == ["from_all"] * 2
    assert sum(size for _, size in sent) < 1000
    assert on_threads(4, describe) == [([*names, rank // 2], [[*names, n // 2] for n in range(4)]) for rank in range(4)]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_managers_save_adds_one_exchange_for_its_snapshot(tmp_path: Path, in_background: bool) -> None:
    def work(ranks: Any) -> None:
        with CheckpointManager(tmp_path, keep=1, process_group=ranks, in_background=in_background) as manager:
            for step in (1, 2):
                vars(ranks)["sent"].clear()
                manager.save(step, state_at(step, ranks.rank, 2))
                manager.wait()

    sent = [name for name, _ in counted(2, work)]
    assert sent == (["from_all", *SAVE] if in_background else SAVE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]


class TwoArguments(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, what: str = "error", number: int = 2) -> None:
        super().__init__(f"{what} number {number}")


class CannotBePrinted(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = {
    TwoArguments: "error number 2",
    CannotBePrinted: "<exception str.. failed>",
    KeyboardInterrupt: "",
    SystemExit: "",
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", ["all", "first", "each", "combined"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exchange_completes_and_raises_on_every_rank(kind: type[BaseException], where: str, culprit: int) -> None:
    def work(ranks: Any) -> object:
        def fail(*given: object) -> object:
            if ranks.rank == culprit:
                raise kind
            return 0

        if where == "all":
            return from_all(ranks, fail, "it")
        if where == "first":
            return from_rank_0(ranks, fail, "it")
        return through_rank_0(ranks, fail if where == "each" else int, fail if where == "combined" else len, "it")

    results = on_threads(2, work)
    if where in ("first", "combined") and culprit == 1:
        assert not any(isinstance(result, BaseException) for result in results)
        return
    is_interrupt = not issubclass(kind, Exception)
    assert type(results[culprit]) is (kind if is_interrupt else CheckpointFailedError)
    for result in results if not is_interrupt else [results[1 - culprit]]:
        assert isinstance(result, CheckpointFailedError)
        assert f"rank {culprit}: {kind.__name__}: " in str(result)
        assert any(f"On rank {culprit}:" in note and "in fail" in note for note in result.__notes__)


def test_an_error_shows_the_tracebacks_of_four_ranks() -> None:
    def fail() -> None:
        raise ValueError

    for result in on_threads(5, lambda ranks: from_all(ranks, fail, "it")):
        assert [note.partition(":")[0] for note in result.__notes__] == [f"On rank {rank}" for rank in range(4)]


def test_threads_on_one_group_take_turns_in_the_order_of_rank_0() -> None:
    of_rank_zero = [*"10011010"]
    order = list[str]()
    turns = Turns(lambda proposed: of_rank_zero[len(order)])

    def take(thread: Any) -> None:
        for _ in range(4):
            with turns.turn(str(thread.rank)):
                order.append(str(thread.rank))

    on_threads(2, take)
    assert order == of_rank_zero


def test_ctrl_c_ends_the_wait_for_a_turn_while_ranks_choose() -> None:
    """Until rank 0 takes part in a choice, minutes may pass."""
    has_turn = threading.Event()
    is_chosen = threading.Event()

    def choose(proposed: str) -> str:
        if has_turn.is_set():
            is_chosen.wait(10)
        return "other"

    def take_two_turns() -> None:
        with turns.turn("other"):
            has_turn.set()
            time.sleep(0.5)  # until the main thread waits
        with turns.turn("other"):
            pass

    turns = Turns(choose)
    other = threading.Thread(target=take_two_turns)
    other.start()
    has_turn.wait()
    started = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    threading.Timer(1.0, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt), turns.turn("main"):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 5
    is_chosen.set()
    other.join(10)
    assert not other.is_alive()


def test_a_value_that_does_not_pickle_is_an_error_on_every_rank() -> None:
    for act in (
        lambda ranks: from_all(ranks, threading.Lock if ranks.rank else int, "it"),
        lambda ranks: from_rank_0(ranks, threading.Lock, "it"),
        lambda ranks: through_rank_0(ranks, int, lambda _: threading.Lock(), "it"),
    ):
        error = error_on_all(2, act)
        assert isinstance(error, CheckpointFailedError)
        assert "pickle" in str(error)


def in_exchange(frame: Any) -> bool:
    """Whether a rank computes what it sends in an exchange."""
    outer = frame.f_back
    while outer is not None and outer.f_code.co_qualname != "_Exchange.attempt":
        outer = outer.f_back
    return outer is not None and frame.f_code.co_filename != outer.f_code.co_filename


def interrupts(act: Callable[[Any], object], rank: int) -> Iterator[bool]:
    """Two ranks act; then they do it again, one interrupted at its first call in an exchange, at its second, and so on.

    Yields:
        After each time, whether it raised KeyboardInterrupt; then the other raises an error. Otherwise cleanup has
        swallowed it, and both have succeeded.
    """

    def interrupt(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call" and "/opt_checkpoint/" in frame.f_code.co_filename and in_exchange(frame):
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

    def work(ranks: Any) -> object:
        sys.setprofile(interrupt if ranks.rank == rank else None)
        try:
            return act(ranks)
        finally:
            sys.setprofile(None)

    numbers = [0]
    for at in numbers:
        calls = 0
        started = time.monotonic()
        results = on_threads(2, work)
        assert time.monotonic() - started < 20, f"call {at}: a rank waited"
        own = results[rank]
        other = results[1 - rank]
        if is_raised := isinstance(own, KeyboardInterrupt):
            assert isinstance(other, CheckpointFailedError), f"call {at}: {other!r}"
            assert f"rank {rank}: KeyboardInterrupt" in str(other)
        else:
            assert not any(isinstance(result, BaseException) for result in results), f"call {at}: {results}"
        yield is_raised
        if at == 0:
            assert calls > 20, "no call was made inside an exchange"
            numbers += range(1, calls + 1, 1 if NIGHT else max(1, calls // 15))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_save_is_an_error_on_other_ranks(tmp_path: Path, rank: int) -> None:
    act = lambda ranks: save(state_at(1, ranks.rank, 2), tmp_path / "x", process_group=ranks)
    for is_raised in interrupts(act, rank):
        left = [path.name for path in tmp_path.iterdir()]
        assert is_raised or left
        if left:  # interrupted after the commit, or not at all
            assert left == ["x"]
            assert verify_checkpoint(tmp_path / "x") == []
            shutil.rmtree(tmp_path / "x")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_load_is_an_error_on_other_ranks(tmp_path: Path, rank: int) -> None:
    def act(ranks: Any) -> Any:
        return load(state_at(0, ranks.rank, 2, filled=False), tmp_path / "x", process_group=ranks, threads=1).state

    save_as_ranks([state_at(1, rank, 2) for rank in (0, 1)], tmp_path / "x")
    assert list(interrupts(act, rank)).count(True) > 8
    for number, loaded in enumerate(on_threads(2, act)):
        assert_is_step(loaded, 1, number, 2)


# ----- errors


def test_a_snapshot_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    class Broken(torch.Tensor):
        def detach(self) -> Any:
            raise ZeroDivisionError("no copy")

    def act(ranks: Any) -> None:
        state = state_at(1, ranks.rank, 2)
        if ranks.rank == 1:
            state["b"].data = state["b"].data.as_subclass(Broken)
        AsyncSaver(ranks).save(state, tmp_path / "x")

    assert "rank 1: ZeroDivisionError: no copy" in str(error_on_all(2, act))
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica_id: object, flat: object) -> list[ShardedTensor]:
        return [sharded_like(f"{key}.{half}", part) for half, part in enumerate(data.chunk(2))]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        raise ZeroDivisionError("halves of nothing")

    states = [{f"w{r}": ShardedTensorFactory(f"w{r}", torch.ones(4), build, merge if r else torch.cat)} for r in (0, 1)]
    save_as_ranks(states, tmp_path / "x")
    error = error_on_all(2, lambda ranks: load(states[ranks.rank], tmp_path / "x", process_group=ranks))
    assert "rank 1: ZeroDivisionError: halves of nothing" in str(error)


def save_without_the_other(rank: int, size: int, folder: str) -> None:
    dist.barrier()  # making the group has the timeout too
    saver = AsyncSaver(timeout_s=3)
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(CheckpointFailedError, match="a rank did not answer"):
            saver.save(state_at(1, rank, size), Path(folder) / "x")
        assert 2 < time.monotonic() - started < 50
    dist.barrier()


def test_a_background_save_times_out_if_a_rank_is_absent(tmp_path: Path) -> None:
    run_ranks(2, save_without_the_other, str(tmp_path))


def load_or_die(rank: int, size: int, folder: str) -> None:
    dist.barrier()  # all are connected
    load({"step": None}, folder) if rank != 1 else die()


def test_when_a_rank_dies_while_others_load_all_of_these_raise(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path / "x")
    with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*did not answer.*rank 1: .*ended.*rank 2:.*did not answer"):
        run_ranks(3, load_or_die, str(tmp_path / "x"))
