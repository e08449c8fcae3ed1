"""The memory of parameters: the stored form of each, and checks that nothing else shares, moves or converts it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opt_config import ConfigError
from opt_kernels.quantized import FP8, is_quantized, quantized
from opt_paramgroups import ParamId, ParamMeta, describe, parameters_by_id

__all__ = ["FP8", "StorageError", "address", "describe_stored", "is_quantized", "stored_bytes", "stored_dtype"]


_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


class StorageError(ValueError):
    """Parameters cannot be stored in one buffer, or have left the memory that updates write to."""


def stored_dtype(param: Tensor) -> torch.dtype:
    """The stored dtype: float8_e4m3fn for an fp8 parameter, whose `dtype` is another one."""
    return FP8 if is_quantized(param) else param.dtype


def address(param: Tensor) -> int:
    """The address of its values or codes."""
    found = quantized(param)
    return param.data_ptr() if found is None else found.codes.data_ptr()


def stored_bytes(param: Tensor) -> Tensor | None:
    """(n,) uint8: a copy of everything that is stored of an fp8 parameter; None for others."""
    found = quantized(param)
    if found is None:
        return None
    return torch.cat(
        [part.reshape(-1).view(torch.uint8) for part in (found.codes, found.scales, *found.extra().values())]
    )


def describe_stored(model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0) -> dict[ParamId, ParamMeta]:
    """`opt_paramgroups.describe`, with the dtype of the codes for fp8 parameters.

    Raises:
        ConfigError: a DTensor has fp8 parts.
    """
    params = parameters_by_id(model_chunks, model_chunk_offset=model_chunk_offset)
    metas = describe(model_chunks, model_chunk_offset=model_chunk_offset)
    for id, meta in metas.items():
        if meta.is_dtensor and is_quantized(params[id].to_local()):  # type: ignore[attr-defined]
            raise ConfigError(
                f"parameter {str(id)!r} is a DTensor whose parts are in fp8; fully_shard and tensor-parallel plans "
                "work with bf16, fp16 and fp32 parameters: use use_distributed_optimizer=True for fp8 ones"
            )
    return {id: replace(meta, codes=FP8) if is_quantized(params[id]) else meta for id, meta in metas.items()}


class _Range(NamedTuple):
    """The addresses of one tensor's bytes."""

    start: int
    stop: int
    name: str
    is_param: bool


def check_apart(params: Mapping[ParamId, Tensor], others: Iterable[tuple[str, Tensor]] = ()) -> None:
    """Check that no memory of `params` is also that of another of them or of `others`.

    Main values of such parameters overwrite each other, and a parameter that moves into a buffer leaves the others
    behind. `others`, for example frozen parameters, may share memory with each other. Tensors in fp8 are not checked.

    Raises:
        StorageError: two of them share memory.
    """
    named = [*((str(id), param, True) for id, param in params.items()), *((*pair, False) for pair in others)]
    found: dict[torch.device, list[_Range]] = {}
    for name, tensor, is_param in named:
        stored = _stored(tensor)
        if stored is not None:
            found.setdefault(stored.device, []).append(_range(name, stored, is_param=is_param))
    for ranges in found.values():
        for one, other in _overlaps(sorted(ranges)):
            raise StorageError(
                f"{one.name} and {other.name} share memory; tie parameters by using one nn.Parameter twice, not by "
                "views"
            )


def not_trained(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The frozen parameters and the buffers of a module, with their names."""
    yield from nn.Module.named_buffers(module)
    yield from (named for named in nn.Module.named_parameters(module) if not named[1].requires_grad)


def _overlaps(ranges: Iterable[_Range]) -> Iterator[tuple[_Range, _Range]]:
    """Pairs of overlapping ranges, at least one of which is a parameter, given all ranges by their start."""
    furthest = furthest_param = _Range(0, 0, "", False)
    for one in ranges:
        before = furthest if one.is_param else furthest_param
        if one.start < before.stop:
            yield before, one
        furthest = max(furthest, one, key=lambda it: it.stop)
        if one.is_param:
            furthest_param = max(furthest_param, one, key=lambda it: it.stop)


def _stored(tensor: Tensor) -> Tensor | None:
    """The memory of this rank, or None if there is nothing to compare."""
    if is_quantized(tensor):
        return None
    found = tensor.detach()
    found = found.to_local() if isinstance(found, DTensor) else found
    return found if found.layout is torch.strided and not found.is_meta and found.numel() else None


def _range(name: str, stored: Tensor, *, is_param: bool) -> _Range:
    last = sum((size - 1) * stride for size, stride in zip(stored.shape, stored.stride(), strict=True))
    start = stored.data_ptr()
    return _Range(start, start + (last + 1) * stored.element_size(), name, is_param)


class Converted:
    """Detects a parameter that no longer has this dtype or device."""

    def __init__(self, params: Mapping[ParamId, nn.Parameter], *, dtype: torch.dtype, device: torch.device):
        self._params, self._dtype, self._device = params, dtype, device

    def first(self) -> ParamId | None:
        """The first such parameter; None if there is none."""
        values = self._params.values()
        if set(map(_DTYPE, values)) <= {self._dtype} and set(map(_DEVICE, values)) <= {self._device}:
            return None
        moved = (id for id, param in self._params.items() if param.device != self._device)
        other = (id for id, param in self._params.items() if stored_dtype(param) is not self._dtype)
        return next(moved, None) or next(other, None)


class Left:
    """Detects later whether a parameter has left its present address."""

    def __init__(self, params: Mapping[ParamId, nn.Parameter]):
        self._params = params
        self._addresses = [address(param) for param in params.values()]

    def first(self) -> ParamId | None:
        """The first such parameter; None if there is none."""
        values = list(self._params.values())
        if set(map(type, values)) <= {nn.Parameter} and list(map(Tensor.data_ptr, values)) == self._addresses:
            return None
        addresses = zip(self._params.items(), self._addresses, strict=True)
        return next((id for (id, param), before in addresses if address(param) != before), None)
