"""Check that parameters do not share memory with other tensors of a model."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opt_distributed.buffers.stored import StorageError, is_quantized
from opt_paramgroups import ParamId


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
