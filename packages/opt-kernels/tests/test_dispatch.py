"""Which version of an operation runs."""

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opt_kernels import BackendError
from opt_kernels.backends import dispatch
from opt_kernels.backends.dispatch import Backend, version

CPU = [torch.ones(2)]
GPU: Any = [SimpleNamespace(device=torch.device("cuda"))]  # a stand-in, on machines without one
Installed = Callable[[Backend, bool], None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Installed]:
    """Says whether what a backend needs is there; nothing was asked before."""

    def forget() -> None:
        for cached in (dispatch._chosen, dispatch._available, dispatch._function, dispatch._warn_without_triton):
            cached.cache_clear()

    def is_installed(backend: Backend, there: bool) -> None:
        monkeypatch.setitem(dispatch._REQUIRED, backend, lambda: there)

    forget()
    caplog.set_level(logging.INFO, logger="opt_kernels.backends.dispatch")
    yield is_installed
    forget()


def module_of(op: str, backend: str | None, tensors: Sequence[torch.Tensor]) -> str:
    function = {"grad_stats": "grad_stats", "muon": "in_phases_", "syrk": "symmetric_product"}.get(op, f"{op}_")
    return version(op, function, backend=backend, tensors=tensors).__module__.removeprefix("opt_kernels.")


@pytest.mark.parametrize(("there", "chosen"), [(True, "backends.cpp.update"), (False, "backends.torch_native")])
def test_the_device_decides_and_an_explicit_choice_wins(
    there: bool, chosen: str, installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    installed(Backend.CPP, there)
    for _ in range(3):
        assert module_of("update", None, CPU) == chosen
    assert caplog.messages == [f"update runs as {chosen}.update_"]
    assert module_of("update", "torch", CPU) == module_of("update", None, []) == "backends.torch_native"
    assert module_of("update", "reference", CPU) == "backends.reference"


def test_a_gpu_without_triton_is_warned_of_once(installed: Installed, caplog: pytest.LogCaptureFixture) -> None:
    installed(Backend.TRITON, False)
    assert [module_of(op, None, GPU) for op in ("update", "muon")] == ["backends.torch_native", "rules.whole_matrices"]
    [message] = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "steps on GPUs run on torch's operations" in message


@pytest.mark.needs_extra
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("op", ["update", "muon", "grad_stats", "syrk"])
def test_gpus_run_triton(op: str) -> None:
    expected = f"backends.triton.{op}" if op in ("update", "grad_stats") else f"matrices.{op}.triton"
    assert module_of(op, None, GPU) == expected


def test_a_version_that_cannot_run_is_refused(installed: Installed) -> None:
    for backend in (Backend.CPP, Backend.TRITON):
        installed(backend, False)
    for op, backend, tensors, message in (
        ("nothing", "torch", CPU, "not available for 'nothing'"),
        ("update", "cpp", CPU, r"backend='cpp' .* install a C\+\+ compiler, or name it in CXX"),
        ("update", "triton", CPU, "install triton"),
        ("update", "cuda", CPU, "pass one of 'reference', 'torch', 'cpp', 'triton'"),
    ):
        with pytest.raises(BackendError, match=message):
            module_of(op, backend, tensors)
    installed(Backend.CPP, True)
    dispatch._available.cache_clear()
    with pytest.raises(BackendError, match="backend='cpp' with tensors on meta"):
        module_of("update", "cpp", [torch.ones(2, device="meta")])
