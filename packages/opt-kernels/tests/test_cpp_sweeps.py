"""C++ sweeps: the same bits on any number of threads and however works are cut, in forked processes, and where a sweep
over coded states runs a formula in two parts and divides roots by scalars without a division."""

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from elementwise_works import HYPER, NEEDS_COMPILER, assert_same, cut, in_another_process, only_lr, work_of
from torch import Tensor

from opt_kernels.backends import reference
from opt_kernels.backends.cpp import threads
from opt_kernels.backends.cpp import update as cpp
from opt_kernels.codecs import codec_for, init_state
from opt_kernels.formulas import Formula, State, absolute, sqrt
from opt_kernels.rules import Adam, ElementwiseRule, Lion
from opt_kernels.works import Batch, Hyper, Work

pytestmark = NEEDS_COMPILER
NUMEL = 3 * threads.SHARES_PER_THREAD * (1 << 15) + 37


@pytest.mark.parametrize("rule", [Adam(backend="cpp"), Adam(backend="cpp", order="te"), Lion(backend="cpp")])
def test_neither_threads_nor_cuts_change_a_bit(rule: ElementwiseRule, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs, alone, pythons, pieces = (work_of(rule, NUMEL) for _ in range(4))
    before = torch.get_num_threads()
    calls = []

    def team(work: object, task: int, threads_asked: int) -> None:
        calls.append(threads_asked)
        threads._python_team(work, task, threads_asked)

    for work, num_threads in ((torchs, 3), (alone, 1), (pythons, 3)):
        torch.set_num_threads(num_threads)
        if work is pythons:
            monkeypatch.setattr(threads, "_team", lambda: team)
        rule.update_([Batch(HYPER, [work])], grad_scale=0.3)
    assert calls == [3]
    torch.set_num_threads(before)
    cuts = [0, 1, 17, 63, 64, 65, 100_001, NUMEL]  # at any element
    rule.update_([Batch(HYPER, [cut(pieces, slice(*bounds)) for bounds in pairwise(cuts)])], grad_scale=0.3)
    for other in (alone, pythons, pieces):
        assert_same(torchs, other)


FORKED = """
import os, signal
import torch
import opt_kernels.optim
torch.set_num_threads(3)
torch.randn(1 << 20).exp_()  # starts torch's threads
# Each too small for torch to wake threads for; all together are not.
params = [torch.nn.Parameter(torch.ones(1 << 13)) for _ in range(16)]
for param in params:
    param.grad = torch.ones(1 << 13)
optimizer = opt_kernels.optim.AdamW(params)
for step in range(2):  # before a step of the parent, and after
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # ends it where it waits for ever
        optimizer.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, step
    optimizer.step()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_does_not_wait_for_its_parents_threads() -> None:
    done = in_another_process(FORKED)
    assert done.returncode == 0, done.stderr


SPECIAL = [0.0, 1e-45, 1e-38, 3e38, torch.inf, torch.nan]
DIVISORS = [1.0, 0.3, 0.9999999, 1e-4, 2.0**-39, 1.1e12, 2.0**-41, 1e-30, 1e30, 1e38, 1e-45, -0.7, 0.0, torch.inf]
CODECS = {"x": codec_for("x", torch.int8, signed=True)}


def swept(sweep: Any, update: Any, lr: float, main: Tensor, grad: Tensor) -> Work:
    """A work with an 8-bit state x, after a sweep of this formula."""
    formula = Formula(name="two_parts", states=(State(name="x"),), scalars=only_lr, update=update)
    work = Work(grad=grad, main=main.clone(), state=init_state(CODECS, grad))
    sweep.update_([Batch(Hyper(lr=lr), [work])], formula, CODECS)
    return work


def root_over_lr(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    return sqrt(g) / lr, x


def test_a_root_over_a_scalar_is_rounded_correctly_near_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-120, 120, (5000,), generator=generator)
    roots = torch.cat([torch.tensor(SPECIAL), torch.ldexp(1 + torch.rand(5000, generator=generator), powers)])
    # Squares of 12-bit integers have roots of 12 bits; over divisors of 24 bits some quotients come next to a tie.
    squares = torch.arange(1.0, 4096.0).square()
    near_ties = [(squares, divisor) for divisor in (2**24 - 1.0, 2**24 - 3.0, 2**23 + 1.0, 12345677.0, 16764931.0)]
    for g, divisor in [*((roots, divisor) for divisor in DIVISORS), *near_ties]:
        found = swept(cpp, root_over_lr, divisor, torch.zeros_like(g), g).main
        expected = g.double().sqrt().float() / torch.tensor(divisor)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=f"{divisor}")


def replaces_main_in_a_branch(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    if lr > 1:
        p = g
    q = sqrt(g)
    return p - q, q + p


def reads_what_changes(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    q = g
    g = g * 2
    x = x + g
    p = q / sqrt(absolute(x) + 1)
    return p, x


def changes_what_is_read(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    q = 1.0
    q = q + x
    x = q * 2
    return q / sqrt(absolute(x) + 1), x


def has_inner_and_late_roots(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    x = x + sqrt(g + sqrt(absolute(x)))
    return p - sqrt(g), x


def chooses_a_root(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    return p - (sqrt(g + 1) if lr > 1 else g), x + p


UPDATES = [
    replaces_main_in_a_branch,
    reads_what_changes,
    changes_what_is_read,
    has_inner_and_late_roots,
    chooses_a_root,
]


@pytest.mark.parametrize("update", UPDATES)
def test_a_formula_cut_at_its_roots_has_the_bits_of_the_whole(update: Any, caplog: pytest.LogCaptureFixture) -> None:
    g = torch.rand(300, generator=torch.Generator().manual_seed(0))
    for lr in (0.5, 2.0):
        assert_same(*(swept(sweep, update, lr, 3 + g.flip(0), g) for sweep in (cpp, reference)))
    assert not caplog.records
