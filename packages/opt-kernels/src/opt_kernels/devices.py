"""Sets the current device around launches, because Triton launches on it and not on the device of the tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches, and queries of the current stream, use `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
