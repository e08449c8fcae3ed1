"""Where the Triton tests run: on a GPU if there is one, else under Triton's interpreter on CPU tensors."""

import os
from collections.abc import Iterator

import pytest
import torch

# Read when a kernel is defined, hence before any module that defines one is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """The device on which Triton kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN: whatever reads it before it is written shows."""
    # The public switch does the same, and imports the whole of Inductor first.
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)
