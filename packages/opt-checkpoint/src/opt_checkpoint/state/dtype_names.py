"""Names of dtypes: those used in files, and the storage classes used in torch's own format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from opt_checkpoint.errors import CheckpointCorruptError

STORAGE_CLASSES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "DoubleStorage",
        torch.float32: "FloatStorage",
        torch.float16: "HalfStorage",
        torch.bfloat16: "BFloat16Storage",
        torch.int64: "LongStorage",
        torch.int32: "IntStorage",
        torch.int16: "ShortStorage",
        torch.int8: "CharStorage",
        torch.uint8: "ByteStorage",
        torch.bool: "BoolStorage",
        torch.complex64: "ComplexFloatStorage",
        torch.complex128: "ComplexDoubleStorage",
    }
)
_UNTYPED = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    # Dtypes of newer versions of torch. Two values of float4_e2m1fn_x2 share a byte and count as one element.
    *(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)),
)
_BY_NAME: Mapping[str, torch.dtype] = MappingProxyType(
    {str(d).removeprefix("torch."): d for d in (*STORAGE_CLASSES, *_UNTYPED)}
)
DTYPE_NAMES = MappingProxyType({dtype: name for name, dtype in _BY_NAME.items()})
BY_STORAGE_CLASS = MappingProxyType({name: dtype for dtype, name in STORAGE_CLASSES.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a name found in a file.

    Raises:
        CheckpointCorruptError: no dtype has this name.
    """
    if name not in _BY_NAME:
        raise CheckpointCorruptError(f"dtype {name!r} is not known; known are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]


def converts_exactly(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of one dtype has an equal value in the other: the same dtype, or a wider one of its kind."""
    if stored == wanted:
        return True
    if stored.is_floating_point and wanted.is_floating_point:
        held, other = torch.finfo(stored), torch.finfo(wanted)
        return held.eps >= other.eps and held.max <= other.max and held.smallest_normal >= other.smallest_normal
    if _is_integer(stored) and _is_integer(wanted):
        return torch.iinfo(stored).min >= torch.iinfo(wanted).min and torch.iinfo(stored).max <= torch.iinfo(wanted).max
    return False


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
