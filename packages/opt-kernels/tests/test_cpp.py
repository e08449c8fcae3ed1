"""Libraries of compiled sweeps: kept in a safe folder, and not used where a compiler is wrong or fails."""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from elementwise_works import HYPER, assert_same, work_of
from elementwise_works import NEEDS_COMPILER as needs_compiler

from opt_kernels.backends import grad_stats
from opt_kernels.backends.cpp import compiler
from opt_kernels.backends.cpp import grad_stats as grad_stats_cpp
from opt_kernels.backends.cpp.compiler import library, usable
from opt_kernels.backends.dispatch import _available, _chosen
from opt_kernels.rules import Adam, Lion
from opt_kernels.works import Batch

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture


@pytest.fixture
def fresh(monkeypatch: Patch, caplog: Log, tmp_path: Path) -> Iterator[Path]:
    """A compiler that remembers nothing, and an empty folder to keep libraries in."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("OPT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("OPT_KERNELS_CPP", raising=False)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (
        compiler.usable,
        compiler.library,
        compiler.attempt,
        compiler._warned,
        compiler._compiler,
        compiler._compiler_version,
        compiler.cache_folder,
        _available,
        _chosen,
    ):
        cached.cache_clear()


@needs_compiler
def test_a_library_is_compiled_once_and_found_again(fresh: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("OPT_KERNELS_CACHE", str(fresh / "made"))
    before = os.umask(0)
    assert usable()
    os.umask(before)
    assert (fresh / "made").stat().st_mode & 0o777 == 0o700
    for count_zeros in (0, 1):
        library(grad_stats_cpp.SOURCE, GRAD="float", COUNT_ZEROS=count_zeros)
    assert len(list((fresh / "made").glob("grad_stats-*.so"))) == 2
    shutil.rmtree(fresh / "made")  # a folder that was cleared is made again
    library.cache_clear()
    library(compiler.PROBE)
    [made] = (fresh / "made").iterdir()
    library.cache_clear()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    library(compiler.PROBE)
    assert list((fresh / "made").iterdir()) == [made]


@needs_compiler
def test_a_library_is_synced_before_its_rename_or_discarded(fresh: Path, monkeypatch: Patch) -> None:
    events = []
    fsync = os.fsync
    replaced = Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("rename"), replaced(path, to))[1])
    assert usable()
    assert events == ["fsync", "rename"]
    [made] = fresh.iterdir()
    stem = made.name.rsplit("-", 1)[0]
    content = made.read_bytes()
    assert compiler.find_cached(stem) == made
    for percent in (0, 25, 75, 99):
        made.unlink()  # this process has loaded the file, and would end with SIGBUS if it were cut in place
        made.write_bytes(content[: len(content) * percent // 100])
        assert compiler.find_cached(stem) is None
        assert not list(fresh.iterdir())
        made.touch()


@needs_compiler
@pytest.mark.parametrize("problem", ["foreign", 0o770, 0o707, "a file"])
def test_an_unsafe_folder_is_replaced_for_this_process(
    fresh: Path, problem: str | int, monkeypatch: Patch, caplog: Log
) -> None:
    named = fresh / "named"
    named.mkdir(mode=0o700)
    if problem == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: fresh.stat().st_uid + 1)
    elif isinstance(problem, int):
        named.chmod(problem)
    else:
        named.rmdir()
        named.touch()
    monkeypatch.setenv("OPT_KERNELS_CACHE", str(named))
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr("atexit.register", lambda function, *arguments: at_exit.append((function, *arguments)))
    assert usable()
    assert named.is_file() or not list(named.iterdir())
    ((remove, used, process),) = at_exit
    assert list(used.glob("*.so"))
    assert used.stat().st_mode & 0o077 == 0
    [message] = caplog.messages
    assert f"kept for this process only, in {used}: {named} " in message
    assert "set OPT_KERNELS_CACHE to a folder of your own" in message
    remove(used, os.getppid())  # a forked process ends
    assert used.exists()
    remove(used, process)
    assert not used.exists()


def test_the_folder_is_never_in_the_working_directory(fresh: Path, monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.chdir(fresh)
    monkeypatch.delenv("OPT_KERNELS_CACHE")
    for home, base, parent in (
        (fresh / "home", "relative", fresh / "home/.cache"),
        (fresh / "home", str(fresh / "xdg"), fresh / "xdg"),
        ("~", "", None),  # as without HOME and an entry in the password database
        ("~", "relative", None),
    ):
        monkeypatch.setattr(os.path, "expanduser", lambda path, home=home: str(home))
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        compiler.cache_folder.cache_clear()
        folder = compiler.cache_folder()
        assert folder == parent / "opt-kernels" if parent else not folder.is_relative_to(fresh)
        assert parent or "no home folder" in caplog.messages.pop()
    assert {path.name for path in fresh.iterdir()} == {"home", "xdg"}


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_libraries_are_per_compiler_and_cpu_and_undo_fast_math(
    monkeypatch: Patch,
) -> None:
    plain = compiler._compiler()
    digests = {compiler._digest("", {})}
    assert plain is not None
    for part in ("_compiler_version", "_processor"):
        with monkeypatch.context() as changed:
            changed.setattr(compiler, part, lambda: "another")
            digests.add(compiler._digest("", {}))
    monkeypatch.setenv("CXX", f"{plain[0]} -ffast-math -Ofast -DTOLD='1 2'")
    compiler._compiler.cache_clear()
    assert compiler._compiler() == (plain[0], "-ffast-math", "-Ofast", "-DTOLD=1 2")
    assert len({*digests, compiler._digest("", {})}) == 4
    assert usable()


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_a_compiler_with_wrong_numbers_is_not_used(monkeypatch: Patch, caplog: Log) -> None:
    relaxed = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-freciprocal-math")
    monkeypatch.setattr(compiler, "FLAGS", ("-O3", *relaxed, "-std=c++17"))
    assert not usable()
    assert "(a + b) - b" in caplog.text
    assert "otherwise than IEEE 754" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_missing_compiler_is_reported_once_with_its_cost(monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setenv("OPT_KERNELS_CPP", "0")
    assert not usable()
    assert not caplog.messages
    monkeypatch.delenv("OPT_KERNELS_CPP")
    monkeypatch.setenv("PATH", "/nowhere")
    reasons = {"no-such-compiler -O0": "CXX=no-such-compiler -O0 is not found", "": "no C++ compiler is found"}
    for name, reason in reasons.items():
        monkeypatch.setenv("CXX", name)
        forget()
        assert not usable()
        assert not usable()
        message = caplog.messages[0]
        assert len(caplog.messages) == 1
        assert "run on torch's operations instead of compiled sweeps" in message
        assert reason in message
        caplog.clear()


FAILURES: dict[str, tuple[str, Mock]] = {
    "No space left": ("tempfile.TemporaryDirectory", Mock(side_effect=OSError(28, "No space left on device"))),
    "timed out": ("subprocess.run", Mock(side_effect=subprocess.TimeoutExpired("c++", compiler.TIMEOUT))),
    "out of memory": ("subprocess.run", Mock(return_value=subprocess.CompletedProcess((), 1, "", "out of memory"))),
}


@needs_compiler
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("reason", FAILURES)
def test_a_failing_compiler_leaves_steps_to_torch_with_a_warning(reason: str, monkeypatch: Patch, caplog: Log) -> None:
    # Formats that were not compiled before.
    compiled, expected = (work_of(Adam(), 33, "fp32-gfp16") for _ in range(2))
    function, failing = FAILURES[reason]
    monkeypatch.setattr(f"opt_kernels.backends.cpp.compiler.{function}", failing)
    for step in (4, 5):
        Adam().update_([Batch(replace(HYPER, step=step), [compiled])])
        Adam(backend="torch").update_([Batch(replace(HYPER, step=step), [expected])])
        Lion().update_([Batch(HYPER, [work_of(Lion(), 3, "fp32")])])
        assert float(grad_stats([torch.ones(9)]).sum_of_squares) == 9.0
    assert_same(compiled, expected)
    [message] = caplog.messages
    assert reason in message
    assert "torch's operations" in message
