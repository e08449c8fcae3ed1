"""Sweeps compiled in C++: found again on disk, the same bits on any number of threads and however a run is cut."""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opt_kernels.backends.cpp import cache as on_disk
from opt_kernels.backends.cpp import compiler, threads
from opt_kernels.backends.cpp import grad_stats as grad_stats_cpp
from opt_kernels.backends.cpp.compiler import CompilerError, library, usable
from opt_kernels.backends.dispatch import _available
from opt_kernels.backends.grad_stats import grad_stats
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.rules.lion import Lion
from opt_kernels.works import Batch, Hyper, Work, Works

HYPER = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), step=3)
NUMEL = 3 * threads.SHARES_PER_THREAD * (1 << 15) + 37

needs_compiler = pytest.mark.skipif(not usable(), reason="no C++ compiler here")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A compiler that remembers nothing, and an empty folder to keep libraries in."""
    found = (
        compiler.usable, compiler._library, compiler._attempt, compiler._warned, compiler._compiler,
        compiler._compiler_version, on_disk.folder, _available,
    )  # fmt: skip
    monkeypatch.setenv("OPT_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("OPT_KERNELS_CPP", raising=False)
    for cached in found:
        cached.cache_clear()
    yield tmp_path
    for cached in found:
        cached.cache_clear()


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def tensors(*numels: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator).to(dtype) for numel in numels]


def work_of(numel: int) -> Work:
    """A bf16 parameter with its float32 main, in the middle of a run."""
    main, grad, exp_avg, exp_avg_sq = tensors(*[numel] * 4)
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq.square()}
    return Work(grad=grad.bfloat16(), main=main, out=torch.empty(numel, dtype=torch.bfloat16), state=state)


def part(work: Work, cut: slice) -> Work:
    assert work.main is not None
    assert work.out is not None
    state = {name: tensor[cut] for name, tensor in work.state.items()}
    return Work(grad=work.grad[cut], main=work.main[cut], out=work.out[cut], state=state)


def written(work: Work) -> list[Tensor]:
    return [tensor for tensor in (work.main, work.out, *work.state.values()) if tensor is not None]


def assert_same(one: Work, other: Work) -> None:
    assert all(torch.equal(a, b) for a, b in zip(written(one), written(other), strict=True))


@needs_compiler
def test_a_library_is_compiled_once_and_found_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable()
    made = sorted(fresh.iterdir())
    assert [path.suffix for path in made] == [".so"]
    compiler._library.cache_clear()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    library(compiler.PROBE)
    assert sorted(fresh.iterdir()) == made


@needs_compiler
def test_the_cache_key_distinguishes_libraries(fresh: Path) -> None:
    source = grad_stats_cpp.SOURCE
    for count_zeros in (0, 1):
        library(source, GRAD="float", COUNT_ZEROS=count_zeros)
    assert len(list(fresh.glob("grad_stats-*.so"))) == 2


LOADS = """
from opt_kernels.backends.cpp import compiler
assert compiler.usable()
print(compiler.library(compiler.PROBE)._name)
"""


def in_another_process(script: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """`script` in a fresh interpreter; a variable that is None is not set there."""
    changed = {key: value for key, value in (os.environ | environment).items() if value is not None}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=changed, capture_output=True, text=True, timeout=120, check=False)


@needs_compiler
def test_half_a_library_is_compiled_anew(fresh: Path) -> None:
    # dlopen maps the file by its headers and ended the process with SIGBUS.
    made = Path(in_another_process(LOADS).stdout.strip())
    content = made.read_bytes()
    made.write_bytes(content[: len(content) // 2])
    again = in_another_process(LOADS)
    assert again.returncode == 0, again.stderr
    assert Path(again.stdout.strip()).read_bytes() == content
    assert len(list(fresh.iterdir())) == 1


@needs_compiler
@pytest.mark.parametrize("percent", [0, 25, 75, 99])
def test_a_library_that_is_cut_short_is_not_found(fresh: Path, percent: int) -> None:
    assert usable()
    [made] = fresh.iterdir()
    stem = made.name.rsplit("-", 1)[0]
    assert on_disk.find(stem) == made
    content = made.read_bytes()
    made.write_bytes(content[: len(content) * percent // 100])
    assert on_disk.find(stem) is None
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
        assert on_disk.folder() == fresh / "made"
    finally:
        os.umask(before)
    assert on_disk.folder().stat().st_mode & 0o777 == 0o700


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
    used = on_disk.folder()
    assert used.stat().st_mode & 0o077 == 0
    [message] = caplog.messages
    assert f"kept for this process only, in {used}: {fresh} " in message
    assert "set OPT_KERNELS_CACHE to a folder of your own" in message


NOWHERE = """
import os, sys
os.path.expanduser = lambda path: path  # as without an entry in the password database
from opt_kernels.backends.cpp import cache
print(cache.folder())
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
    script = "from opt_kernels.backends.cpp import cache; print(cache.folder())"
    base = base.format(tmp_path)
    done = in_another_process(script, HOME=str(home), XDG_CACHE_HOME=base, OPT_KERNELS_CACHE=None)
    assert done.stdout.strip() == str(tmp_path / parent / "opt-kernels")


@needs_compiler
def test_a_cache_that_was_cleared_is_made_again(fresh: Path) -> None:
    assert usable()
    shutil.rmtree(fresh)
    library(grad_stats_cpp.SOURCE, GRAD="float", COUNT_ZEROS=1)
    assert len(list(fresh.iterdir())) == 1


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
    compiled, expected = ([work_of(70), work_of(33)] for _ in range(2))
    Adam(backend="cpp").update_([Batch(HYPER, compiled[:1])])
    fail(failure, monkeypatch)
    for works in (compiled, expected):  # in formats that were not compiled before
        works[1] = Work(grad=works[1].grad, main=works[1].main, state=works[1].state)
    with caplog.at_level(logging.WARNING):
        for step in (4, 5):
            hyper = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), step=step)
            Adam().update_([Batch(hyper, compiled)])
            Adam(backend="torch").update_([Batch(hyper, expected[1:])])
            Lion().update_(
                [Batch(hyper, [Work(grad=torch.ones(3), main=torch.ones(3), state={"exp_avg": torch.ones(3)})])]
            )
            assert float(grad_stats([torch.ones(9)]).sum_of_squares) == 9.0
    assert_same(compiled[1], expected[1])
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


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_does_not_work_is_reported_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of order >&2\ncase $1 in --version) exit 0;; esac\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING, logger="opt_kernels.backends.cpp.compiler"):
        assert not usable()
    [message] = caplog.messages
    assert message.startswith("CPU steps run on torch's operations instead of compiled sweeps")
    assert "broken: out of order" in message


@pytest.mark.usefixtures("fresh")
def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPT_KERNELS_CPP", "0")
    assert not usable()


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


@needs_compiler
def test_float32_adamw_has_the_operations_of_torchs_fused_adamw() -> None:
    mine, theirs = (tensors(4096, 4096, 4096, 4096) for _ in range(2))
    mine[3].square_()
    theirs[3].square_()
    state = {"exp_avg": mine[2], "exp_avg_sq": mine[3]}
    Adam(backend="cpp").update_([Batch(HYPER, [Work(grad=mine[1], main=mine[0], state=state)])])
    p, g, m, v = ([tensor] for tensor in theirs)
    numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": HYPER.eps}
    torch._fused_adamw_(p, g, m, v, [], [torch.tensor(3.0)], **numbers, amsgrad=False, maximize=False)
    # Equal bits where torch's own vectors have fused products; elsewhere one rounding of 2^-24 may differ.
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2.5e-7, atol=1e-9)


@needs_compiler
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("rule", [Adam(backend="cpp"), Adam(backend="cpp", order="te"), Lion(backend="cpp")])
def test_neither_threads_nor_cuts_change_a_bit(rule: ElementwiseRule) -> None:
    together, alone, cut = (work_of(NUMEL) for _ in range(3))
    rule.update_([Batch(HYPER, [together])], grad_scale=0.3)
    torch.set_num_threads(1)
    rule.update_([Batch(HYPER, [alone])], grad_scale=0.3)
    cuts = [0, 1, 17, 63, 64, 65, 100_001, NUMEL]  # at any element
    rule.update_([Batch(HYPER, [part(cut, slice(*bounds)) for bounds in pairwise(cuts)])], grad_scale=0.3)
    assert_same(together, alone)
    assert_same(together, cut)


@needs_compiler
@pytest.mark.usefixtures("three_threads")
def test_pythons_threads_do_what_torchs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = work_of(NUMEL), work_of(NUMEL)
    Adam(backend="cpp").update_([Batch(HYPER, [theirs])])
    calls: list[int] = []

    def team(work: object, task: int, threads_asked: int) -> None:
        calls.append(threads_asked)
        threads._python_team(work, task, threads_asked)

    monkeypatch.setattr(threads, "_team", lambda: team)
    Adam(backend="cpp").update_([Batch(HYPER, [ours])])
    assert calls == [3]
    assert_same(ours, theirs)


@needs_compiler
@pytest.mark.usefixtures("three_threads")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    # Each too small for torch to wake threads for; all together are not.
    batch = Batch(HYPER, [work_of(1 << 13) for _ in range(16)])
    Adam(backend="cpp").update_([batch])
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it waits for ever
        Adam(backend="cpp").update_([batch])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


FORKED = """
import os, signal
import torch
import opt_kernels.optim  # the parent makes no step
torch.set_num_threads(3)
torch.randn(1 << 20).exp_()  # starts torch's threads
# Each too small for torch to wake threads for; all together are not.
params = [torch.nn.Parameter(torch.ones(1 << 13)) for _ in range(16)]
for param in params:
    param.grad = torch.ones(1 << 13)
optimizer = opt_kernels.optim.AdamW(params)
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends it where it waits for ever
    optimizer.step()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_may_make_the_first_step() -> None:
    done = in_another_process(FORKED)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.usefixtures("three_threads")
def test_statistics_have_the_same_bits_on_any_number_of_threads() -> None:
    grads = tensors(NUMEL, 5, 4097)
    three = grad_stats(grads, backend="cpp").sum_of_squares
    torch.set_num_threads(1)
    assert torch.equal(grad_stats(grads, backend="cpp").sum_of_squares, three)


@needs_compiler
def test_groups_share_a_call_and_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [Batch(HYPER, [work_of(100), work_of(7)]), Batch(Hyper(lr=0.5, step=9), [work_of(33)])]
    expected = [Batch(hyper, [work_of(work.grad.numel()) for work in works]) for hyper, works in batches]
    for batch in expected:
        Adam(backend="cpp").update_([batch])
    calls: list[ctypes.CDLL] = []
    run = threads.run
    monkeypatch.setattr("opt_kernels.backends.cpp.sweep.run", lambda lib, **call: (calls.append(lib), run(lib, **call)))
    Adam(backend="cpp").update_(batches)
    assert len(calls) == 1
    for (_, ours), (_, theirs) in zip(batches, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


@needs_compiler
def test_works_in_columns_are_swept_as_works_are() -> None:
    listed, columns = ([work_of(100), work_of(7)] for _ in range(2))
    works = Works(
        [work.grad for work in columns],
        mains=[work.main for work in columns if work.main is not None],
        outs=[work.out for work in columns if work.out is not None],
        states=[work.state for work in columns],
    )
    Adam(backend="cpp").update_([Batch(HYPER, works)])
    Adam(backend="cpp").update_([Batch(HYPER, listed)])
    for one, other in zip(listed, columns, strict=True):
        assert_same(one, other)


@needs_compiler
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_lost_number_stays_lost(bad: float) -> None:
    for rule in (Adam(backend="cpp"), Lion(backend="cpp")):
        work = work_of(70)
        work.grad[65] = bad
        rule.update_([Batch(HYPER, [work])])
        assert work.main is not None
        assert work.out is not None
        assert bool(work.main[65].isnan()) is bool(work.out[65].isnan())
        assert work.main[:65].isfinite().all()
        assert rule.name == "lion" or work.main[65].isnan()


@needs_compiler
def test_a_nan_of_any_payload_is_a_nan_in_bfloat16() -> None:
    work = work_of(70)
    assert work.main is not None
    work.main.view(torch.int32)[65] = 0x7FFFFFFF  # rounded as a number it would be minus zero
    Adam(backend="cpp").update_([Batch(HYPER, [work])])
    assert work.out is not None
    assert work.out[65].isnan()
