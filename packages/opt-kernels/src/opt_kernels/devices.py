"""The device that Triton launches on: the current one, not that of the tensors, so it is set around launches."""

from contextlib import AbstractContextManager, nullcontext

import torch


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """While entered, launches and questions about the current stream go to `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
