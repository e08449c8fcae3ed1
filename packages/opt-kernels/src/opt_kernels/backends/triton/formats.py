"""The dtypes and alignment that a Triton sweep is compiled for."""

from functools import cache
from typing import NamedTuple

import torch

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.triton import tl

BLOCK = 1024  # elements a program handles at a time: 8 for each lane of 4 warps
NUM_WARPS = 4
VALUES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of gradients, mains and outs
ALIGNMENT = 16  # bytes; below it a tensor is swept one element at a time
IEEE_BYTES = 18  # bytes per element from which memory traffic hides the cost of exact division


class LaunchFormats(NamedTuple):
    """The formats that a launch is compiled for: the dtype of every column, and whether all columns are aligned."""

    grad: torch.dtype
    main: torch.dtype  # what is stored as the main, which may be a remainder
    out: torch.dtype | None
    states: tuple[torch.dtype, ...]  # of the values or codes; scales are float32
    aligned: bool
    remainder: bool = False  # whether the main is joined from out and a remainder

    @property
    def vector(self) -> int:
        """Number of elements to which every pointer is aligned.

        It is the same for all columns. If every column were accessed 16 bytes at a time, 16-bit and 32-bit tiles would
        have different layouts and would be exchanged through shared memory.
        """
        if not self.aligned:
            return 1
        stored = (self.grad, self.main, self.out or self.grad, *self.states)
        return 4 if max(dtype.itemsize for dtype in stored) > 2 else 8

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written per element, without block scales."""
        of_states = sum(dtype.itemsize for dtype in self.states)
        of_out = 0 if self.out is None else self.out.itemsize
        if self.remainder:  # half of the main: read, too
            of_out *= 2
        return self.grad.itemsize + 2 * (self.main.itemsize + of_states) + of_out

    @property
    def ieee(self) -> bool:
        """Whether divisions and roots are rounded correctly and nothing is contracted, which gives the bits of CPUs."""
        return self.bytes_moved >= IEEE_BYTES


@cache
def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The Triton dtype of tensors of `dtype`. Raises LayoutError for a dtype that sweeps do not support."""
    names = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.int16: tl.int16,
        torch.int8: tl.int8,
        torch.uint8: tl.uint8,
        torch.float8_e4m3fn: tl.uint8,  # bytes: see quantize.py
        torch.float8_e5m2: tl.uint8,
    }
    if dtype not in names:
        allowed = ", ".join(map(str, names))
        raise LayoutError(f"the triton backend cannot sweep {dtype}; allowed are {allowed}; use backend='torch'")
    return names[dtype]


def value_dtype(dtype: torch.dtype) -> tl.dtype:
    """The Triton dtype of tensors of values. Raises LayoutError for fp8, whose bytes Triton would read as integers."""
    if dtype not in VALUES:
        allowed = ", ".join(map(str, VALUES))
        raise LayoutError(
            f"the triton backend cannot sweep {dtype}; allowed for gradients, mains and outs are {allowed}; "
            "use backend='torch'"
        )
    return triton_dtype(dtype)
