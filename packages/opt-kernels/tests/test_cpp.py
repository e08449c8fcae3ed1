"""Sweeps compiled in C++: found again on disk, the same bits on any number of threads and however a run is cut."""

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elementwise_works import HYPER, assert_same, in_another_process, work_of
from elementwise_works import NEEDS_COMPILER as needs_compiler

from opt_kernels.backends import grad_stats
from opt_kernels.backends.cpp import compiler
from opt_kernels.backends.cpp import grad_stats as grad_stats_cpp
from opt_kernels.backends.cpp.compiler import CompilerError, library, usable
from opt_kernels.backends.dispatch import _available, _chosen
from opt_kernels.rules import Adam, Lion
from opt_kernels.works import Batch


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A compiler that remembers nothing, and an empty folder to keep libraries in."""
    found = (
        compiler.usable, compiler.library, compiler.attempt, compiler._warned, compiler._compiler,
        compiler._compiler_version, compiler.cache_folder, _available, _chosen,
    )  # fmt: skip
    monkeypatch.setenv("OPT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("OPT_KERNELS_CPP", raising=False)
    for cached in found:
        cached.cache_clear()
    yield tmp_path
    for cached in found:
        cached.cache_clear()


@needs_compiler
def test_a_library_is_compiled_once_and_found_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable()
    source = grad_stats_cpp.SOURCE
    for count_zeros in (0, 1):
        library(source, GRAD="float", COUNT_ZEROS=count_zeros)
    assert len(list(fresh.glob("grad_stats-*.so"))) == 2
    shutil.rmtree(fresh)  # a folder that was cleared is made again
    library.cache_clear()
    library(compiler.PROBE)
    [made] = fresh.iterdir()
    assert made.suffix == ".so"
    library.cache_clear()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    library(compiler.PROBE)
    assert list(fresh.iterdir()) == [made]


@needs_compiler
def test_threads_that_need_one_library_compile_it_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads, and reach their first step together."""
    assert usable()
    compiled, begun, may_end = compiler._compile, threading.Event(), threading.Event()
    calls: list[str] = []

    def slow(text: str, flags: Sequence[str], stem: str) -> Path:
        calls.append(stem)
        begun.set()
        may_end.wait(60)
        return compiled(text, flags, stem)

    monkeypatch.setattr(compiler, "_compile", slow)
    needs = {"source": grad_stats_cpp.SOURCE, "GRAD": "float", "COUNT_ZEROS": 1}
    threads = [threading.Thread(target=library, kwargs=needs) for _ in range(2)]
    threads[0].start()
    begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1


@needs_compiler
@pytest.mark.parametrize("percent", [0, 25, 75, 99])
def test_a_library_that_is_cut_short_is_not_found(fresh: Path, percent: int) -> None:
    assert usable()
    [made] = fresh.iterdir()
    stem = made.name.rsplit("-", 1)[0]
    assert compiler.find_cached(stem) == made
    content = made.read_bytes()
    made.unlink()  # this process has loaded the file, and would end with SIGBUS if it were cut in place
    made.write_bytes(content[: len(content) * percent // 100])
    assert compiler.find_cached(stem) is None
    assert not list(fresh.iterdir())


@needs_compiler
def test_a_library_is_on_the_disk_before_it_has_its_name(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replaced = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("rename"), replaced(path, to))[1])
    assert usable()
    assert events == ["fsync", "rename"]
    assert len(list(fresh.iterdir())) == 1


@pytest.mark.parametrize("part", ["_compiler_version", "_processor"])
def test_another_compiler_or_processor_has_separate_libraries(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_compiler_version", "_processor"):
        monkeypatch.setattr(compiler, name, lambda: "this one")
    monkeypatch.setattr(compiler, "_command", lambda: ("c++",))
    before = compiler._digest("", {})
    monkeypatch.setattr(compiler, part, lambda: "another")
    assert compiler._digest("", {}) != before


def test_the_folder_is_for_its_user_alone(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPT_KERNELS_CACHE", str(fresh / "made"))
    before = os.umask(0)
    try:
        assert compiler.cache_folder() == fresh / "made"
    finally:
        os.umask(before)
    assert compiler.cache_folder().stat().st_mode & 0o777 == 0o700


def unsafe(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `folder` one that native code must not be loaded from."""
    if how == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.chmod(0o770 if how == "of a group" else 0o707)


@needs_compiler
@pytest.mark.parametrize("how", ["foreign", "of a group", "of everybody"])
def test_native_code_is_not_loaded_from_a_folder_that_others_may_write(
    fresh: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unsafe(fresh, how, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert usable()
    assert not list(fresh.iterdir())
    used = compiler.cache_folder()
    assert used.stat().st_mode & 0o077 == 0
    [message] = caplog.messages
    assert f"kept for this process only, in {used}: {fresh} " in message
    assert "set OPT_KERNELS_CACHE to a folder of your own" in message


NOWHERE = """
import os, sys
os.path.expanduser = lambda path: path  # as without an entry in the password database
from opt_kernels.backends.cpp import compiler
print(compiler.cache_folder())
"""


@pytest.mark.parametrize("base", [None, "relative/cache"])
def test_without_a_home_nothing_is_put_into_the_working_directory(
    base: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = in_another_process(NOWHERE, HOME=None, XDG_CACHE_HOME=base, OPT_KERNELS_CACHE=None)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    assert not Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert "no home folder" in done.stderr


@pytest.mark.parametrize(("base", "parent"), [("relative", "home/.cache"), ("{}/xdg", "xdg")])
def test_a_relative_xdg_cache_home_is_ignored(base: str, parent: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = "from opt_kernels.backends.cpp import compiler; print(compiler.cache_folder())"
    base = base.format(tmp_path)
    done = in_another_process(script, HOME=str(home), XDG_CACHE_HOME=base, OPT_KERNELS_CACHE=None)
    assert done.stdout.strip() == str(tmp_path / parent / "opt-kernels")


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_cxx_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiler._compiler()
    assert plain is not None
    name = compiler._digest("", {})
    monkeypatch.setenv("CXX", f"{plain[0]} -DTOLD='1 2'")
    compiler._compiler.cache_clear()
    assert compiler._compiler() == (plain[0], "-DTOLD=1 2")
    assert compiler._digest("", {}) != name
    assert usable()


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_relaxed_arithmetic_of_cxx_is_undone() -> None:
    plain = compiler._compiler()
    assert plain is not None
    for options in ("-ffast-math", "-Ofast"):
        script = "from opt_kernels.backends.cpp import compiler; print(compiler.usable())"
        assert in_another_process(script, CXX=f"{plain[0]} {options}").stdout.strip() == "True"


RELAXED = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-freciprocal-math")


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_a_compiler_with_wrong_numbers_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The probe was an empty function, so that `CXX="c++ -ffast-math"` was trusted.
    monkeypatch.setattr(compiler, "FLAGS", ("-O3", *RELAXED, "-std=c++17"))
    with caplog.at_level(logging.WARNING, logger="opt_kernels.backends.cpp.compiler"):
        assert not usable()
    assert "(a + b) - b" in caplog.text
    assert "otherwise than IEEE 754" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_missing_cxx_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O0")
    with caplog.at_level(logging.WARNING, logger="opt_kernels.backends.cpp.compiler"):
        assert not usable()
        assert not usable()
    [message] = caplog.messages
    assert "CXX=no-such-compiler -O0 is not found" in message


@pytest.mark.usefixtures("fresh")
def test_without_any_compiler_one_warning_names_the_slower_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPT_KERNELS_CPP", "0")
    assert not usable()
    usable.cache_clear()
    monkeypatch.delenv("OPT_KERNELS_CPP")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        assert not usable()
    [message] = caplog.messages
    assert "run on torch's operations instead of compiled sweeps" in message
    assert "no C++ compiler is found" in message


def fail(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing can be compiled, in one of three ways."""

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def slow(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("c++", compiler.TIMEOUT)

    def refused(*command: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess((), 1, "", "internal compiler error")

    if failure == "full disk":
        monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", full_disk)
    else:
        monkeypatch.setattr(compiler.subprocess, "run", slow if failure == "timeout" else refused)


@needs_compiler
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("failure", "reason"),
    [("full disk", "No space left"), ("timeout", "timed out"), ("error", "internal compiler error")],
)
def test_a_compiler_that_fails_in_the_middle_of_a_run_leaves_steps_to_torch_with_one_warning(
    failure: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Formats that were not compiled before.
    compiled, expected = (work_of(Adam(), 33, "fp32-gfp16") for _ in range(2))
    fail(failure, monkeypatch)
    with caplog.at_level(logging.WARNING):
        for step in (4, 5):
            Adam().update_([Batch(replace(HYPER, step=step), [compiled])])
            Adam(backend="torch").update_([Batch(replace(HYPER, step=step), [expected])])
            Lion().update_([Batch(HYPER, [work_of(Lion(), 3, "fp32")])])
            assert float(grad_stats([torch.ones(9)]).sum_of_squares) == 9.0
    assert_same(compiled, expected)
    [message] = caplog.messages
    assert reason in message
    assert "torch's operations" in message


@needs_compiler
def test_a_source_that_the_compiler_refuses_is_an_error_in_its_words(fresh: Path) -> None:
    source = fresh / "wrong.cpp"
    source.write_text("static int64_t sweep(const Task &, int64_t, int64_t) { return nothing; }")
    with pytest.raises(CompilerError, match="nothing"):
        library(source)
    assert not list(fresh.glob("*.so"))


@needs_compiler
def test_a_folder_that_cannot_be_written_is_replaced_for_this_process(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("OPT_KERNELS_CACHE", str(fresh / "file" / "folder"))
    at_exit: list[tuple[object, ...]] = []
    monkeypatch.setattr("atexit.register", lambda function, *arguments: at_exit.append((function, *arguments)))
    assert usable()
    ((remove, folder, process),) = at_exit
    assert isinstance(folder, Path)
    assert callable(remove)
    assert list(folder.glob("*.so"))
    remove(folder, os.getppid())  # a forked process ends
    assert folder.exists()
    remove(folder, process)
    assert not folder.exists()
