"""Works for tests of compiled C++ sweeps, and a run in another process."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.works import Hyper, Work

HYPER = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), step=3)
needs_compiler = pytest.mark.skipif(not usable(), reason="no C++ compiler here")


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


def in_another_process(script: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """`script` in a fresh interpreter; a variable that is None is not set there."""
    changed = {key: value for key, value in (os.environ | environment).items() if value is not None}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=changed, capture_output=True, text=True, timeout=300, check=False)
