"""Dtypes that a sweep would misread are refused before it reads or writes memory."""

import pytest
import torch

from opt_kernels.backends.elements import LayoutError
from opt_kernels.codecs import Plain
from opt_kernels.rules.lion import Lion
from opt_kernels.works import Batch, Hyper, Work

HYPER = Hyper(lr=0.1)
NUMEL = 300


def lion_step(backend: str, **tensors: torch.Tensor | None) -> None:
    rule = Lion(backend=backend)
    work = {"grad": torch.ones(NUMEL), "main": torch.ones(NUMEL), **tensors}
    rule.update_([Batch(HYPER, [Work(state=rule.init_state(torch.ones(NUMEL)), **work)])])


@pytest.mark.parametrize(
    ("out", "remainder"),
    [
        (torch.bfloat16, torch.uint8),
        (torch.bfloat16, torch.int32),
        (torch.float16, torch.int16),
        (torch.float32, torch.int16),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", "torch", "cpp", "triton"])
def test_halves_of_other_dtypes_are_refused(backend: str, out: torch.dtype, remainder: torch.dtype) -> None:
    """Symptom: with a uint8 remainder the compiled sweeps wrote two bytes an element beyond its end."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    rest = torch.zeros(NUMEL, dtype=remainder)
    with pytest.raises(LayoutError, match="neither a main nor its two halves"):
        lion_step(backend, main=None, out=torch.ones(NUMEL, dtype=out), remainder=rest)


@pytest.mark.needs_extra
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("column", ["grad", "main", "out"])
def test_triton_refuses_fp8_values(column: str, dtype: torch.dtype) -> None:
    """Symptom: the kernels read fp8 bytes as integers, and every gradient was positive."""
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(LayoutError, match="cannot sweep torch"):
        lion_step("triton", **{column: torch.ones(NUMEL).to(dtype)})


@pytest.mark.needs_extra
def test_triton_refuses_fp8_gradients_and_states() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from opt_kernels.backends.grad_stats import grad_stats
    from opt_kernels.backends.triton.quantize import scheme

    with pytest.raises(LayoutError, match="cannot sweep torch"):
        grad_stats([torch.ones(NUMEL).to(torch.float8_e4m3fn)], backend="triton")
    with pytest.raises(LayoutError, match="has no sweep for Plain"):
        scheme(Plain(dtype=torch.float8_e4m3fn))
