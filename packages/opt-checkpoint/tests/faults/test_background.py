"""F11, F12: saving in the background: isolation, order, failure, and the end of the process."""

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import run_ranks
from failing_calls import Calls, failing_at
from processes import RankError, run_program
from states import LARGE_NUMEL, assert_is_step, state_at, whole_tensors

from opt_checkpoint import (
    AsyncSaver,
    CheckpointFailedError,
    CheckpointingException,
    CheckpointManager,
    TieredCheckpointManager,
    async_save,
    load,
    read_index,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.run.save_load import save_as


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path) -> None:
    """A snapshot that held the tensors of `model.state_dict()` would store what training writes during the save."""
    gate = threading.Event()
    model = torch.nn.Linear(3, 2)
    saver = AsyncSaver()
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    parts = [sharded_like(f"part.{n}", torch.full((3,), float(n))) for n in range(4)]
    # Paths of equal text once shared a buffer: one value was lost.
    same_text = {"a.b": parts[0], "a": {"b": parts[1], "c": {0: parts[2], "0": parts[3]}}}
    state = state_at(1, 0, 1) | {"model": model.state_dict(), "list": [torch.ones(2)]} | same_text
    with Calls(lambda name, key: gate.wait(60)):
        handle = saver.save(state, tmp_path / "x")
        assert not handle.done()
        with torch.no_grad():
            for tensor in (state["w"].data, state["b"].data, *model.parameters(), state["list"][0]):
                tensor.fill_(-5)
        state["rng"].data["seed"] = state["groups"][0]["lr"] = -5
        gate.set()
        assert handle.wait() == tmp_path / "x"
    wanted = {"model": {name: torch.zeros_like(value) for name, value in before.items()}, "list": None}
    loaded = load(state_at(0, 0, 1, filled=False) | wanted, tmp_path / "x").state
    assert_is_step(loaded, 1, 0, 1)
    assert all(torch.equal(wanted["model"][name], value) for name, value in before.items())
    assert loaded["list"][0].tolist() == [1.0, 1.0]
    stored = whole_tensors(tmp_path / "x", "part.")
    assert {key: part.tolist() for key, part in stored.items()} == {f"part.{n}": [n] * 3 for n in range(4)}
    saver.close()


def test_a_relative_path_is_of_where_the_call_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may go elsewhere before the thread begins."""
    gate = threading.Event()

    def late(*arguments: Any, **options: Any) -> None:
        gate.wait(60)
        save_as(*arguments, **options)

    monkeypatch.setattr(sys.modules["opt_checkpoint.run.async_save"], "save_as", late)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handle = async_save(state_at(1, 0, 1), "x")
    monkeypatch.chdir("elsewhere")
    gate.set()
    assert handle.wait() == tmp_path / "x"
    assert verify_checkpoint(tmp_path / "x") == []


def test_a_forked_process_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    """Symptom: it waited for ever, because it has no thread that saves."""
    ended = threading.Event()
    with CheckpointManager(tmp_path) as manager, Calls(lambda name, _: ended.wait(30) if name == "fsync" else None):
        manager.save(1, state_at(1, 0, 1))
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if manager.latest() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        ended.set()


def test_an_exit_before_the_thread_starts_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler of SIGTERM may exit at any point."""

    def exits(thread: threading.Thread) -> None:
        raise SystemExit(3)

    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exits)
        with pytest.raises(SystemExit):
            manager.save(1, state_at(1, 0, 1))
    with pytest.raises(SystemExit):  # as the failure of the save
        manager.wait()
    manager.save(2, state_at(2, 0, 1))
    manager.close()
    assert CheckpointManager(tmp_path).steps() == [2]


def test_a_failure_is_raised_once_and_a_closed_saver_refuses(tmp_path: Path) -> None:
    saver = AsyncSaver()
    with failing_at(5, errno.ENOSPC):
        handle = saver.save(state_at(1, 0, 1), tmp_path / "1")
        with pytest.raises(CheckpointFailedError, match="No space left"):
            saver.save(state_at(2, 0, 1), tmp_path / "2")
    with pytest.raises(CheckpointFailedError, match="No space left"):
        handle.wait()
    assert list(tmp_path.iterdir()) == []
    saver.save(state_at(3, 0, 1), tmp_path / "3").wait()
    saver.close()
    assert verify_checkpoint(tmp_path / "3") == []
    with pytest.raises(CheckpointingException, match="this saver is closed"):  # else on the group of training
        saver.save(state_at(4, 0, 1), tmp_path / "4")
    saver.close()


class Ending(NamedTuple):
    """How a script of `endings.py` ends.

    Args:
        status: its exit status.
        whole: the checkpoints that are complete afterwards.
        failed: what each line about a failed save names.
        out: what it prints.
    """

    status: int
    whole: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    out: tuple[str, ...] = ()


BROKEN = "the state was not saved to {}/broken/x"
ENDINGS = {
    "one_save": Ending(0, ("x",)),
    "several_savers": Ending(0, ("run/step-000000002", "durable/step-000000003", "x", "y")),
    "one_of_two_fails": Ending(
        status=1,
        whole=("x",),
        failed=("step 5 was not saved to {}/broken/step-000000005",),
        out=("output is flushed", "exit handlers run"),
    ),
    "two_fail": Ending(1, failed=("step 5 was not saved to {}/broken1", "step 5 was not saved to {}/broken2")),
    "fails_and_exits_with_0": Ending(1, failed=(BROKEN,)),
    "fails_and_exits_with_3": Ending(3, failed=(BROKEN,)),
    "fails_and_raises": Ending(1, failed=(BROKEN,)),
    "fails_and_is_told": Ending(0, out=("told",)),
    "exit_handlers_save": Ending(0, ("x",)),  # in the foreground: the handler raises the failure
    "child_saves": Ending(0, ("x",), out=("exitcode 0",)),
    "child_fails": Ending(0, failed=(BROKEN,), out=("exitcode 1",)),
    "child_exits_with_3": Ending(0, failed=(BROKEN,), out=("exitcode 3",)),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder in which all scripts have run, and their exit statuses."""
    folder = tmp_path_factory.mktemp("endings")
    command = [sys.executable, str(Path(__file__).with_name("endings.py")), str(folder)]
    printed = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout
    return folder, {name: int(status) for name, status in map(str.split, printed.splitlines())}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_that_ends_finishes_its_saves(ended: tuple[Path, dict[str, int]], name: str) -> None:
    """Python 3.12.0 to 3.12.2 lost them, since no thread can be started then; and a failure was told nowhere."""
    (folder, statuses) = ended
    ending = ENDINGS[name]
    errors = (folder / f"{name}.err").read_text()
    assert statuses[name] == ending.status, errors
    found = {str(path.parent.relative_to(folder / name)) for path in (folder / name).rglob("manifest.bin")}
    assert {path for path in found if "local" not in path} == set(ending.whole)
    assert all(verify_checkpoint(folder / name / path) == [] for path in found)
    lines = sorted(line for line in errors.splitlines() if line.startswith("opt-checkpoint: "))
    assert len(lines) == len(ending.failed), errors
    for line, failed in zip(lines, sorted(ending.failed), strict=True):
        assert failed.format(folder / name) in line
        assert "No space left on device" in line
    assert tuple((folder / f"{name}.out").read_text().splitlines()) == ending.out
    assert not list((folder / name).rglob(".opt-checkpoint-tmp-*"))


KEEPS_GROUPS = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 cannot use a destroyed group: the save fails with an error"
)


@pytest.mark.parametrize("how", ["keeps its groups", pytest.param("destroys", marks=KEEPS_GROUPS), "fails"])
def test_ranks_whose_scripts_end_finish_their_saves(tmp_path: Path, how: str) -> None:
    """`destroy_process_group()` destroys the groups of all saves, too."""
    program = Path(__file__).with_name("ends_on_ranks.py")
    failure = pytest.raises(
        RankError, match=r"exit status 1[^\0]*step 5 was not saved to .*/run/step-000000005: .*rank"
    )
    with failure if how == "fails" else contextlib.nullcontext():
        run_program(program, tmp_path, Path(__file__).parent.parent, how, ranks=2)
    whole = [] if how == "fails" else ["run/step-000000005", "x"]
    assert sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("manifest.bin")) == whole
    assert all(verify_checkpoint(tmp_path / path) == [] for path in whole)


def test_snapshot_memory_is_reused_or_freed(tmp_path: Path) -> None:
    saver = AsyncSaver()
    bucket = torch.zeros(1 << 20)
    seen = []
    for step in (1, 2, 3):
        state = state_at(step, 0, 1)
        state["b"].data = bucket[:5]
        saver.save(state, tmp_path / str(step)).wait()
        seen.append({buffer.data_ptr(): buffer.nbytes for buffer in saver._staging._buffers.values()})
    assert seen[0] == seen[1] == seen[2]
    assert sum(seen[0].values()) == (12 * 40 + 5 + LARGE_NUMEL) * 4
    saver.save({"b": sharded_like("b", torch.ones(10))}, tmp_path / "less").wait()
    assert [buffer.nbytes for buffer in saver._staging._buffers.values()] == [40]
    saver.close()


def close_before_the_thread_runs(rank: int, size: int, folder: str, kind: str) -> None:
    """Ctrl-C ends the wait in `close` while the thread of a save has not begun."""
    gate = threading.Event()
    run = threading.Thread.run
    late = list[threading.Thread]()

    def run_late(thread: threading.Thread) -> None:
        if thread.name.startswith("opt-checkpoint /"):
            late.append(thread)
            gate.wait()
        run(thread)

    def interrupted(saver: AsyncSaver) -> None:
        raise KeyboardInterrupt

    made: dict[str, Callable[[], Any]] = {
        "saver": AsyncSaver,
        "manager": lambda: CheckpointManager(folder),
        "tiers": lambda: TieredCheckpointManager(f"{folder}/{rank}", folder, durable_every=1, node=str(rank)),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "run", run_late)
        saver = made[kind]()
        state = state_at(1, rank, size)
        saver.save(*((state, Path(folder) / "x") if kind == "saver" else (1, state)))
        patched.setattr(AsyncSaver, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.close()
        gate.set()
        for thread in late:
            thread.join(60)


@KEEPS_GROUPS
@pytest.mark.parametrize("kind", ["saver", "manager", "tiers"])
def test_a_save_whose_group_is_destroyed_is_one_of_all_ranks(tmp_path: Path, kind: str) -> None:
    """It became two saves of one rank each."""
    run_ranks(2, close_before_the_thread_runs, str(tmp_path), kind)
    (path,) = {tmp_path / "x", tmp_path / "step-000000001"}.intersection(tmp_path.iterdir())
    assert verify_checkpoint(path) == []
    assert read_index(path).details["ranks"] == 2


def save_many_times(rank: int, size: int, folder: str, fails: bool) -> None:
    open_files = []
    for number in range(9):
        failure = failing_at(5, errno.ENOSPC) if fails else contextlib.nullcontext()
        with failure, contextlib.suppress(CheckpointFailedError):
            handle = async_save(state_at(1, rank, size), Path(folder) / str(number))
            handle.wait()
        dist.barrier()
        gc.collect()  # tracebacks refer to the group
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[-1] <= open_files[1], open_files  # the last handle keeps its group


@pytest.mark.parametrize("fails", [False, True])
def test_an_async_save_without_a_saver_leaves_no_group(tmp_path: Path, fails: bool) -> None:
    """Each call kept a gloo group: five descriptors on two ranks, for good."""
    run_ranks(2, save_many_times, str(tmp_path), fails)
