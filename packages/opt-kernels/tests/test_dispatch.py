"""Which version of an operation runs."""

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from opt_kernels import BackendError
from opt_kernels.backends import dispatch
from opt_kernels.backends.dispatch import Backend, version

CPU = [torch.ones(2)]


def forget() -> None:
    """Forget what is installed, and which warnings were logged."""
    for cached in (dispatch._chosen, dispatch._available, dispatch._function, dispatch._warn_without_triton):
        cached.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says whether there is a C++ compiler."""

    def there_is(one: bool) -> None:
        monkeypatch.setitem(dispatch._REQUIRED, Backend.CPP, lambda: one)
        forget()

    yield there_is
    forget()


def test_the_device_decides_and_an_explicit_choice_wins(compiler: Callable[[bool], None]) -> None:
    compiler(True)

    def folder(backend: str | None, tensors: list[torch.Tensor]) -> str:
        return version("update", "update_", backend=backend, tensors=tensors).__module__.split(".")[2]

    assert folder(None, CPU) == "cpp"
    assert folder("torch", CPU) == "torch_native"
    assert folder("reference", CPU) == "reference"
    assert folder(None, []) == "torch_native"


def test_a_version_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BackendError, match="not available for 'nothing'"):
        version("nothing", "nothing_", backend="torch", tensors=CPU)


def test_without_a_compiler_torch_does_it_and_the_log_says_so(
    compiler: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    compiler(False)
    with caplog.at_level(logging.INFO, logger="opt_kernels.backends.dispatch"):
        version("update", "update_", backend=None, tensors=CPU)
    assert caplog.messages == ["update runs as backends.torch_native.update_"]
    with pytest.raises(BackendError, match=r"backend='cpp' .* install a C\+\+ compiler, or name it in CXX"):
        version("update", "update_", backend="cpp", tensors=CPU)


def test_cpp_sweeps_cpu_memory_only(compiler: Callable[[bool], None]) -> None:
    compiler(True)
    with pytest.raises(BackendError, match="backend='cpp' with tensors on meta"):
        version("update", "update_", backend="cpp", tensors=[torch.ones(2, device="meta")])


def test_triton_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    forget()
    with pytest.raises(BackendError, match="install triton"):
        version("update", "update_", backend="triton", tensors=CPU)
    forget()


def on_a_gpu() -> list[torch.Tensor]:
    """A stand-in for a tensor on a GPU, on machines without one."""
    return [SimpleNamespace(device=torch.device("cuda"))]  # type: ignore[list-item]


@pytest.mark.needs_extra
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("op", ["update", "muon", "grad_stats", "syrk"])
def test_gpus_run_triton(op: str) -> None:
    functions = {"grad_stats": "grad_stats", "syrk": "symmetric_product"}
    found = version(op, functions.get(op, f"{op}_"), backend=None, tensors=on_a_gpu())
    sweeps = ("update", "grad_stats")
    expected = f"opt_kernels.backends.triton.{op}" if op in sweeps else f"opt_kernels.matrices.{op}.triton"
    assert found.__module__ == expected


def test_a_gpu_without_triton_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(dispatch._REQUIRED, Backend.TRITON, lambda: False)
    forget()
    with caplog.at_level(logging.WARNING, logger="opt_kernels.backends.dispatch"):
        for op in ("update", "muon", "update"):
            found = version(op, f"{op}_", backend=None, tensors=on_a_gpu())
            assert found.__module__.split(".", 1)[1] in ("backends.torch_native", "matrices.muon")
    [message] = caplog.messages
    assert "steps on GPUs run on torch's operations" in message
    forget()


def test_the_log_says_once_which_version_runs(
    compiler: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    compiler(True)
    with caplog.at_level(logging.INFO, logger="opt_kernels.backends.dispatch"):
        for _ in range(3):
            version("update", "update_", backend=None, tensors=CPU)
    assert caplog.messages == ["update runs as backends.cpp.update.update_"]
