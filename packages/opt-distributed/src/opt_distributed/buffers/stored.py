"""Parameters as a buffer meets them: the bound `main_grad`, the stored form, and checks of the memory."""

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


class GradientError(RuntimeError):
    """A gradient arrived at the wrong time or in the wrong tensor, or a check rejected it."""


class UnusableGradientError(GradientError):
    """Gradients must not be used. Their reduction is complete, so that no rank waits for the one that raises."""


class SparseGradientError(UnusableGradientError, ValueError):
    """A gradient is sparse."""

    def __init__(self, name: str, layout: torch.layout):
        super().__init__(
            f"gradient of {name!r} is {layout}; dense (torch.strided) gradients are allowed: build nn.Embedding "
            "and nn.EmbeddingBag with sparse=False"
        )


# Attributes of parameters: `main_grad`, and the flags of fused weight-gradient kernels. Such a kernel adds its product
# directly to ``param.main_grad``, sets ``param.grad_added_to_main_grad = True`` and returns an arbitrary gradient to
# autograd, so that hooks still run. The returned gradient is dropped, or, if the kernel also set
# ``param.zero_out_wgrad = True`` because it is zero, added.
def bind_main_grad(param: nn.Parameter, view: Tensor) -> None:
    """Set ``param.main_grad`` to a view of a gradient buffer, in which the gradient accumulates."""
    param.main_grad = view  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def main_grad(param: nn.Parameter) -> Tensor:
    """The bound gradient of a parameter."""
    view: Tensor = param.main_grad  # type: ignore[attr-defined]
    return view


def is_bound(param: nn.Parameter) -> bool:
    """Whether the gradient accumulates in a buffer, so that ``param.grad`` stays None."""
    return getattr(param, "main_grad", None) is not None


def check_unbound(params: Mapping[ParamId, nn.Parameter]) -> None:
    """Raise ValueError if a gradient accumulates in another buffer already: it would be added to both."""
    bound = [str(id) for id, param in params.items() if is_bound(param)]
    if bound:
        raise ValueError(
            f"gradients of {bound[0]!r} (and {len(bound) - 1} more) accumulate in a buffer already: a model chunk is "
            "wrapped once; use that wrapper, or a new model"
        )


def begin_accumulation(param: nn.Parameter, view: Tensor) -> None:
    """Bind `view` again; reset the flag of fused kernels, and ``param.grad``, which a failed backward may have left."""
    param.grad = None
    bind_main_grad(param, view)


def is_rebound(param: nn.Parameter, view: Tensor) -> bool:
    """Whether ``param.main_grad`` is a tensor other than the view of the buffer."""
    return getattr(param, "main_grad", None) is not view


@torch.no_grad()
def adopt_main_grad_(param: nn.Parameter, view: Tensor, name: str) -> None:
    """If the caller bound another tensor to ``param.main_grad``, copy it to `view`, and bind `view` again.

    Callers of Megatron-Core rescale with ``param.main_grad = param.main_grad * factor``. Reductions use the buffer, so
    the value must be copied there.

    Raises:
        GradientError: ``param.main_grad`` is not a tensor of the parameter's shape.
    """
    current = getattr(param, "main_grad", None)
    if current is view:
        return
    if not isinstance(current, Tensor) or current.shape != view.shape:
        given = f"a tensor of shape {tuple(current.shape)}" if isinstance(current, Tensor) else repr(current)
        raise GradientError(
            f"main_grad of {name} was replaced by {given}; it must be a tensor of shape {tuple(view.shape)}: write "
            "into it (param.main_grad.mul_(2)), or assign a tensor of that shape"
        )
    view.copy_(current.detach().clone())  # a clone: `current` may be another view of the same memory
    param.main_grad = view  # type: ignore[attr-defined]


@torch.no_grad()
def take_grad_(param: nn.Parameter, name: str) -> None:
    """Add ``param.grad`` to ``param.main_grad``, unless a fused kernel has done so, and drop ``param.grad``.

    Autograd does not record the sum, even if ``backward(create_graph=True)`` gave the gradient a graph.

    Raises:
        SparseGradientError: the gradient is sparse.
    """
    grad = param.grad
    if grad is None:
        return
    if grad.layout is not torch.strided:
        raise SparseGradientError(name, grad.layout)
    fused = getattr(param, "grad_added_to_main_grad", False) and not getattr(param, "zero_out_wgrad", False)
    if not fused:
        main_grad(param).add_(grad)
    param.grad = None


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
