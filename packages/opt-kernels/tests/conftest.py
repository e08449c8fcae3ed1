"""Where the Triton tests run: on a GPU if there is one, else under Triton's interpreter on CPU tensors."""

import os

import pytest
import torch

# Read when a kernel is defined, hence before any module that defines one is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """The device on which Triton kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
