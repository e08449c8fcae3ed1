"""Parameters as ranks store them: checks of their memory, and of the copies that ranks hold.

Copies start from bitwise equal values: trained parameters, frozen ones and persistent buffers are compared or
broadcast.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opt_checkpoint.state import checksums
from opt_config import ConfigError
from opt_distributed.comm.collectives import Comm, TorchComm, agree, group_of, members
from opt_distributed.comm.groups import mesh_of, replicas_outside, tensor_peers_outside
from opt_distributed.comm.roles import Roles
from opt_kernels.params import overlapping
from opt_kernels.quantized import FP8, is_quantized, quantized
from opt_paramgroups import Metas, ParamId, ParamMeta, Params, describe, describe_untrained, parameters_by_id

ParamTensors = Mapping[ParamId, Tensor]


class StorageError(ValueError):
    """Parameters cannot be stored in one buffer, or have left the memory that updates write to."""


class ReplicaError(ConfigError):
    """Ranks that should hold copies of a parameter hold different values."""


def stored_dtype(param: Tensor) -> torch.dtype:
    """The stored dtype: float8_e4m3fn for an fp8 parameter, whose `dtype` is another one."""
    return FP8 if is_quantized(param) else param.dtype


def address(param: Tensor) -> int:
    """The address of its values or codes."""
    found = quantized(param)
    return param.data_ptr() if found is None else found.codes.data_ptr()


def describe_stored(
    model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0, by_name: bool
) -> dict[ParamId, ParamMeta]:
    """`opt_paramgroups.describe`, with the dtype of the codes for fp8 parameters.

    Raises:
        ConfigError: a DTensor has fp8 parts.
    """
    params = parameters_by_id(model_chunks, model_chunk_offset=model_chunk_offset)
    metas = describe(model_chunks, model_chunk_offset=model_chunk_offset, by_name=by_name)
    for id, meta in metas.items():
        param: Any = params[id]
        if meta.is_dtensor and is_quantized(param.to_local()):
            raise ConfigError(
                f"parameter {str(id)!r} is a DTensor whose parts are in fp8; fully_shard and tensor-parallel plans "
                "work with bf16, fp16 and fp32 parameters: use use_distributed_optimizer=True for fp8 ones"
            )
        if is_quantized(param):
            metas[id] = replace(meta, codes=FP8)
    return metas


def is_bound(param: Tensor) -> bool:
    """Whether the gradient accumulates in a buffer, so that ``param.grad`` stays None."""
    return getattr(param, "main_grad", None) is not None


def check_unbound(params: Params) -> None:
    """Raise ValueError if a gradient accumulates in another buffer already: it would be added to both."""
    bound = [str(id) for id, param in params.items() if is_bound(param)]
    if bound:
        raise ValueError(
            f"gradients of {bound[0]!r} (and {len(bound) - 1} more) accumulate in a buffer already: a model chunk is "
            "wrapped once; use that wrapper, or a new model; if it has none, as a model from torch.load, delete the "
            "attribute: del param.main_grad"
        )


def check_apart(params: ParamTensors, others: Iterable[tuple[str, Tensor]] = ()) -> None:
    """Check that no memory of `params` is also that of another of them or of `others`.

    Main values of such parameters overwrite each other, and a parameter that moves into a buffer leaves the others
    behind. `others`, for example frozen parameters, may share memory with each other. Tensors in fp8 are not checked.

    Raises:
        StorageError: two of them share memory.
    """
    named = [(str(id), param) for id, param in params.items()]
    named += others
    pair = overlapping([tensor for _, tensor in named], len(params))
    if pair is not None:
        first, second = (named[at][0] for at in pair)
        raise StorageError(
            f"{first} and {second} share memory; tie parameters by using one nn.Parameter twice, not by views"
        )


def not_trained(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The frozen parameters and the buffers of a module, with their names."""
    yield from nn.Module.named_buffers(module)
    for name, param in nn.Module.named_parameters(module):
        if not param.requires_grad:
            yield name, param


class Moved:
    """Detects a parameter whose `of(param)`, such as its address, has changed since construction."""

    def __init__(self, params: Params, of: Callable[[Tensor], object]):
        self.params = params
        self._of = of
        self.before = list(map(of, params.values()))

    def moved(self) -> ParamId | None:
        """Return the first such parameter; None if there is none."""
        now = list(map(self._of, self.params.values()))
        if now == self.before:
            return None
        return next(id for id, before, after in zip(self.params, self.before, now, strict=True) if before != after)


def form_of(params: Params) -> Callable[[Tensor], object]:
    """Return a function that gives the stored dtype and the device of one of these parameters; with the address of the
    codes of an fp8 parameter, which its main value writes to."""
    if any(map(is_quantized, params.values())):
        return lambda param: (stored_dtype(param), param.device, address(param) if is_quantized(param) else None)
    return attrgetter("dtype", "device")


def check_replicas(params: Params, metas: Metas, roles: Roles, *, only: Collection[ParamId] | None = None) -> None:
    """Compare the weights of all ranks that hold copies. Collective: every rank calls it.

    `only` are the parameters to compare, the same on all ranks; None: all. One small exchange for each group of ranks
    that hold copies. NaNs and signs of zeros are compared by their bits.

    Raises:
        ReplicaError, on every rank: a parameter differs, or some of the ranks do not train it. Names the first such
            parameter and the ranks.
    """
    if roles.everyone.size == 1:
        return
    compared_ids = copied_ids(params, metas, roles)
    if only is not None:
        compared_ids &= set(only)
    compared = {id: param for id, param in params.items() if id in compared_ids}
    agree(roles.everyone, compare_copies(_sums(compared), compared, metas, roles))


def copied_ids(params: Params, metas: Metas, roles: Roles) -> frozenset[ParamId]:
    """The parameters of which other ranks hold copies."""
    return frozenset(id for id, param in params.items() if _comms(param, metas[id], roles))


@torch.no_grad()
def check_untrained(chunks: Sequence[nn.Module], roles: Roles, *, broadcast: bool, model_chunk_offset: int = 0) -> None:
    """Compare frozen parameters and persistent buffers of all ranks that hold copies, after a broadcast if `broadcast`.

    Collective. Names that only some of these ranks have are ignored.

    Raises:
        ReplicaError, on every rank: a tensor differs. Names the first one and the ranks.
    """
    if roles.everyone.size == 1:
        return
    found = describe_untrained(chunks, model_chunk_offset=model_chunk_offset)
    tensors = {id: untrained.tensor for id, untrained in found.items()}
    metas = {id: untrained.meta for id, untrained in found.items()}
    if broadcast:
        broadcast_replicas_(tensors, metas, roles, ignore_missing=True)
    agree(roles.everyone, compare_copies(_sums(tensors), tensors, metas, roles, ignore_missing=True))


def compare_copies(
    sums: Mapping[ParamId, object],
    tensors: ParamTensors,
    metas: Metas,
    roles: Roles,
    *,
    ignore_missing: bool = False,
) -> ReplicaError | None:
    """Compare checksums of what ranks with copies of a tensor hold. Collective: every rank calls it.

    Tensors that `sums` lacks are not compared. Returns the error of this rank's groups, or None.
    """
    error = None
    for comm, ids in _copies_by_comm(tensors, metas, roles).items():
        local = {str(id): sums[id] for id in ids if id in sums}
        digest = sha256(repr(sorted(local.items())).encode()).hexdigest()
        if len(set(comm.gather_objects(digest))) > 1:
            _, found = _difference(local, comm, ignore_missing=ignore_missing)  # collective, so also after an error
            error = error or found
    return error


@torch.no_grad()
def broadcast_replicas_(tensors: ParamTensors, metas: Metas, roles: Roles, *, ignore_missing: bool = False) -> None:
    """Copy every tensor from the first rank that holds a copy to the others. Collective: every rank calls it.

    Raises:
        ReplicaError, on every rank: some of the ranks lack a tensor, unless `ignore_missing`, or have it with another
            shape or dtype. Names the first one and the ranks.
    """
    parts = {str(id): list(_parts(tensor)) for id, tensor in tensors.items()}
    names: dict[Comm, list[str]] = {}
    error = None
    for comm, ids in _copies_by_comm(tensors, metas, roles).items():
        local = {str(id): _shapes(parts[str(id)]) for id in ids}
        names[comm], found = _difference(local, comm, ignore_missing=ignore_missing)
        error = error or found
    agree(roles.everyone, error)
    for comm, common in names.items():
        for name in common:
            for part in parts[name]:
                _broadcast_(part, comm)
    for tensor in tensors.values():
        if (fp8 := quantized(tensor)) is not None:  # derive what it computes from the codes and scales received
            fp8.forget_initial()
            fp8.finish_()


def _sums(tensors: ParamTensors) -> dict[ParamId, list[object]]:
    """The shapes of each tensor's parts, because zeros of any shape have the same sum, and their checksums."""
    sums: dict[ParamId, list[object]] = {}
    numbered: dict[tuple[ParamId, int], Tensor] = {}
    for id, tensor in tensors.items():
        parts = list(_parts(tensor))
        sums[id] = [_shapes(parts)]
        for number, part in enumerate(parts):
            numbered[id, number] = part
    for (id, _), checksum in checksums(numbered).items():
        sums[id].append(checksum)
    return sums


def _shapes(parts: Iterable[Tensor]) -> str:
    return str([(part.dtype, part.shape) for part in parts])


def _copies_by_comm(tensors: ParamTensors, metas: Metas, roles: Roles) -> dict[Comm, list[ParamId]]:
    """The parameters that are compared over each group, in one order on all ranks. Groups may have none on a rank."""
    pairs: list[tuple[Comm, list[ParamId]]] = []
    pairs += [(comm, []) for comm in roles.comms if comm.size > 1]  # first, so that ranks without tensors join, too
    for id, tensor in tensors.items():
        pairs += [(comm, [id]) for comm in _comms(tensor, metas[id], roles)]
    first_view: dict[object, Comm] = {}  # by process group, of which there may be several views
    by_comm: dict[Comm, list[ParamId]] = {}
    for comm, ids in pairs:
        view = first_view.setdefault(group_of(comm) or comm, comm)
        by_comm.setdefault(view, []).extend(ids)
    return by_comm


def _comms(tensor: Tensor, meta: ParamMeta, roles: Roles) -> list[Comm]:
    """The groups along which the tensor is copied."""
    axes = roles.expert if meta.is_expert else roles.dense
    comms: list[Comm] = []
    if meta.is_dtensor:
        mesh = mesh_of(tensor)
        for number, placed in enumerate(meta.placements):
            if placed.shard_dim is None:
                comms.append(TorchComm(mesh.get_group(number)))
        comms += replicas_outside(tensor, (axes.dp, axes.inter), name=str(meta.id))
        comms += tensor_peers_outside(tensor, axes.tp)
    else:
        comms += (axes.dp, axes.inter)
        if not meta.tensor_parallel:
            comms.append(axes.tp)
    return [comm for comm in comms if comm.size > 1]


def _difference(
    local: Mapping[str, object], comm: Comm, *, ignore_missing: bool
) -> tuple[list[str], ReplicaError | None]:
    """The names that all ranks have, and the error for the first value that differs or is missing. Collective."""
    per_rank: list[Mapping[str, object]] = comm.gather_objects(local)
    numbers = members(comm) or list(range(comm.size))
    common = [name for name in per_rank[0] if all(name in values for values in per_rank)]
    for name in () if ignore_missing else dict.fromkeys(name for values in per_rank for name in values):
        without = [number for number, values in zip(numbers, per_rank, strict=True) if name not in values]
        if without:
            return common, ReplicaError(
                f"{name!r} is not trained on ranks {without} of {numbers}, which hold copies of each other's "
                "parameters; pass it on all of these ranks with the same requires_grad, or set "
                "tensor_model_parallel=True on it where each rank holds another part"
            )
    for name in common:
        differing = [n for n, values in zip(numbers, per_rank, strict=True) if values[name] != per_rank[0][name]]
        if differing:
            return common, ReplicaError(
                f"ranks hold different values of {name!r}: {differing} differ from rank {numbers[0]}, but copies must "
                "start equal; call torch.manual_seed with the same seed on all ranks before the model is made, load "
                "the same checkpoint, or pass broadcast_params=True to get_optimizer (or DistributedDataParallel) to "
                "start from the first rank's values"
            )
    return common, None


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors in which a tensor is stored on this rank."""
    if (fp8 := quantized(tensor)) is not None:
        yield from (fp8.codes, fp8.scales, *fp8.extra().values())
    elif is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, Tensor):  # a DTensor of newer versions of torch names its mesh, too
                yield from _parts(part)
    elif tensor.is_quantized:
        yield tensor.dequantize()  # a copy, so that these are compared after a broadcast, but not broadcast
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor.detach()._indices(), tensor.detach()._values())
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor.detach()


def _broadcast_(part: Tensor, comm: Comm) -> None:
    """Copy a plain tensor of any dtype and strides from the first rank of `comm` to the others. Collective."""
    value = part.resolve_conj().resolve_neg()
    value = (torch.view_as_real(value) if value.is_complex() else value).contiguous()
    comm.broadcast_(value.view(-1).view(torch.uint8))  # in bytes: no backend sends every dtype
    if comm.rank != 0:
        received = torch.view_as_complex(value) if part.is_complex() else value
        for dim, stride in enumerate(part.stride()):
            if stride == 0 and part.shape[dim]:  # an expanded tensor is written once
                part = part.narrow(dim, 0, 1)
                received = received.narrow(dim, 0, 1)
        part.copy_(received)
