"""C++ sweeps: the bits of torch on any number of threads, groups in one call, forked processes."""

import ctypes
import os
import signal
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from cpp_works import HYPER, assert_same, in_another_process, needs_compiler, part, work_of

from opt_kernels.backends.cpp import threads
from opt_kernels.rules import Adam, ElementwiseRule, Lion
from opt_kernels.works import Batch, Hyper

NUMEL = 3 * threads.SHARES_PER_THREAD * (1 << 15) + 37


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


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
        signal.alarm(100)  # ends it where it waits for ever
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
    signal.alarm(100)  # ends it where it waits for ever
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
def test_groups_share_a_call_and_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [Batch(HYPER, [work_of(100), work_of(7)]), Batch(Hyper(lr=0.5, step=9), [work_of(33)])]
    expected = [Batch(hyper, [work_of(work.grad.numel()) for work in works]) for hyper, works in batches]
    for batch in expected:
        Adam(backend="cpp").update_([batch])
    calls: list[ctypes.CDLL] = []
    run = threads.run
    monkeypatch.setattr(
        "opt_kernels.backends.cpp.update.run", lambda lib, **call: (calls.append(lib), run(lib, **call))
    )
    Adam(backend="cpp").update_(batches)
    assert len(calls) == 1
    for (_, ours), (_, theirs) in zip(batches, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


@needs_compiler
def test_a_nan_of_any_payload_is_a_nan_in_bfloat16() -> None:
    work = work_of(70)
    assert work.main is not None
    work.main.view(torch.int32)[65] = 0x7FFFFFFF  # rounded as a number it would be minus zero
    Adam(backend="cpp").update_([Batch(HYPER, [work])])
    assert work.out is not None
    assert work.out[65].isnan()
