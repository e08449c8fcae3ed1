"""Scripts that end while a save is running: `python endings.py FOLDER` runs each in a fork of one interpreter.

Saves begin to write when the script has ended. No thread can be started then, as on Python 3.12.0 to 3.12.2. The output
and errors of a script are in the files `FOLDER/NAME.out` and `NAME.err`; the exit statuses are printed.
"""

import atexit
import errno
import gc
import multiprocessing as mp
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path += sys.argv[2:]

from failing_calls import Calls, error
from states import state_at

from opt_checkpoint import AsyncSaver, CheckpointManager, TieredCheckpointManager, async_save

has_ended = threading.Event()
start = threading.Thread.start


def start_before_the_end(thread: threading.Thread) -> None:
    if has_ended.is_set():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)


def wait_for_the_end(name: str, key: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        has_ended.wait()
    if "broken" in key and ".distcp" in key:
        error(errno.ENOSPC)


calls = Calls(wait_for_the_end)


def run(script: Callable[[Path], None], folder: Path) -> None:
    calls.__enter__()  # for good
    threading.Thread.start = start_before_the_end  # type: ignore[method-assign]
    try:
        script(folder)
    finally:
        has_ended.set()


def one_save(folder: Path) -> None:
    async_save(state_at(1, 0, 1), folder / "x")


def several_savers(folder: Path) -> None:
    calls.before = lambda name, key: None
    manager = CheckpointManager(folder / "run", keep=1)
    manager.save(1, state_at(1, 0, 1))
    manager.wait()
    calls.before = wait_for_the_end
    manager.save(2, state_at(2, 0, 1))
    TieredCheckpointManager(folder / "local", folder / "durable", durable_every=1).save(3, state_at(3, 0, 1))
    for name in ("x", "y"):
        AsyncSaver().save(state_at(4, 0, 1), folder / name)


def one_of_two_fails(folder: Path) -> None:
    atexit.register(print, "exit handlers run")
    CheckpointManager(folder / "broken").save(5, state_at(5, 0, 1))
    async_save(state_at(1, 0, 1), folder / "x")
    print("output is flushed")


def two_fail(folder: Path) -> None:
    TieredCheckpointManager(folder / "broken1", folder / "broken2", durable_every=1).save(5, state_at(5, 0, 1))


def fails_and_exits_with_0(folder: Path) -> None:
    async_save(state_at(5, 0, 1), folder / "broken" / "x")
    sys.exit()


def fails_and_exits_with_3(folder: Path) -> None:
    async_save(state_at(5, 0, 1), folder / "broken" / "x")
    raise SystemExit(3)


def fails_and_raises(folder: Path) -> None:
    async_save(state_at(5, 0, 1), folder / "broken" / "x")
    raise ZeroDivisionError


def fails_and_is_told(folder: Path) -> None:
    handle = async_save(state_at(5, 0, 1), folder / "broken" / "x")
    has_ended.set()
    try:
        handle.wait()
    except OSError:
        print("told")


def exit_handlers_save(folder: Path) -> None:
    atexit.register(async_save, state_at(5, 0, 1), folder / "broken" / "x")
    atexit.register(async_save, state_at(1, 0, 1), folder / "x")


def in_child(script: Callable[[Path], None], folder: Path) -> None:
    process = mp.get_context("fork").Process(target=run, args=(script, folder))
    process.start()
    process.join()
    print("exitcode", process.exitcode)


def child_saves(folder: Path) -> None:
    in_child(one_save, folder)


def child_fails(folder: Path) -> None:
    in_child(fails_and_exits_with_0, folder)


def child_exits_with_3(folder: Path) -> None:
    in_child(fails_and_exits_with_3, folder)


SCRIPTS = [one_save, several_savers, one_of_two_fails, two_fail, fails_and_exits_with_0, fails_and_exits_with_3]
SCRIPTS += [fails_and_raises, fails_and_is_told, exit_handlers_save, child_saves, child_fails, child_exits_with_3]


def start_fork(script: Callable[[Path], None], folder: Path) -> int:
    """The process that runs a script; 0 in that process, once the script has ended."""
    pid = os.fork()
    if pid == 0:
        for stream, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{script.__name__}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
        run(script, folder / script.__name__)
    return pid


def main(folder: Path) -> None:
    scripts: dict[int, str] = {}
    gc.freeze()  # at the end of a process, Python looks through all objects
    for script in SCRIPTS:
        pid = start_fork(script, folder)
        if pid == 0:
            return
        scripts[pid] = script.__name__
        if script is one_save:  # which has imported this at its end
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            import_module("torch.distributed.checkpoint")
    for pid, name in scripts.items():
        _, status = os.waitpid(pid, 0)
        print(name, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
