"""Fixtures of the kernels' tests. The repository's own conftest chooses between a GPU and Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def exact_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that reading it before it is written shows."""
    # The public switch does the same, and imports the whole of Inductor first.
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture
def device(backend: str, kernel_device: torch.device) -> torch.device:
    """Where sweeps of the test's backend run."""
    return kernel_device if backend == "triton" else torch.device("cpu")
