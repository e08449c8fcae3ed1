"""Sets the current device around launches, because Triton launches on it and not on the device of the tensors."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

_NO_CONTEXT = nullcontext()


@cache  # asked several times in every launch
def is_cuda(device: torch.device) -> bool:
    """Whether `device` is a GPU, with streams and graphs."""
    return device.type == "cuda"


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches, and queries of the current stream, use `device`."""
    return torch.cuda.device(device) if is_cuda(device) else _NO_CONTEXT
