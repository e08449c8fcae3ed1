"""Replicas start from bitwise equal weights: trained parameters, frozen ones and persistent buffers are compared or
broadcast."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opt_config import ConfigError
from opt_distributed.buffers.stored import stored_bytes
from opt_distributed.comm.collectives import Alone, Comm, TorchComm, agree, group_of
from opt_distributed.comm.groups import mesh_of, replicas_outside, tensor_peers_outside
from opt_distributed.comm.roles import Axes, Roles
from opt_kernels.quantized import quantized
from opt_paramgroups import ParamId, ParamMeta, describe_untrained

CHUNK_NUMEL = 1 << 20  # elements that a checksum widens to 64 bits at a time
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, odd, as a signed 64-bit number
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Params = Mapping[ParamId, nn.Parameter]
Metas = Mapping[ParamId, ParamMeta]
Key = TypeVar("Key", bound=Hashable)


class ReplicaError(ConfigError):
    """Ranks that should hold copies of a parameter hold different values."""


def check_replicas(params: Params, metas: Metas, roles: Roles) -> None:
    """Compare the weights of all ranks that hold copies. Collective: every rank calls it.

    One small exchange for each group of ranks that hold copies. NaNs and signs of zeros are compared by their bits.

    Raises:
        ReplicaError, on every rank: a parameter differs, or some of the ranks do not train it. Names the first such
            parameter and the ranks.
    """
    sums = checksums({id: _stored(param, metas[id]) for id, param in params.items()})
    agree(roles.everyone, compare_copies(sums, params, metas, roles))


def compare_copies(sums: Mapping[ParamId, int], params: Params, metas: Metas, roles: Roles) -> ReplicaError | None:
    """Compare checksums of what ranks with copies of a parameter hold. Collective: every rank calls it.

    Parameters that `sums` lacks are not compared. Returns the error of this rank's groups, or None.
    """
    error = None
    for comm, ids in copies_by_comm(params, metas, roles).items():
        local = {str(id): sums[id] for id in ids if id in sums}
        per_rank = comm.gather_objects(sha256(repr(sorted(local.items())).encode()).hexdigest())
        if any(digest != per_rank[0] for digest in per_rank):
            found = difference(comm.gather_objects(local), comm)  # collective, so also if there is an error already
            error = error or found
    return error


@torch.no_grad()
def broadcast_replicas_(params: Params, metas: Metas, roles: Roles) -> None:
    """Copy every parameter from the first rank that holds a copy to the others. Collective: every rank calls it.

    Raises:
        ReplicaError, on every rank: some of the ranks do not train a parameter. Names the first one and the ranks.
    """
    error = None
    for comm, ids in copies_by_comm(params, metas, roles).items():
        per_rank = comm.gather_objects([str(id) for id in ids])
        error = error or _missing([dict.fromkeys(names, 0) for names in per_rank], comm)
    agree(roles.everyone, error)
    for id, param in params.items():
        for comm in _comms(param, metas[id], roles):
            for part in _parts(param):
                _broadcast_(part, comm)
        _finish_fp8_(param)


def _finish_fp8_(tensor: Any) -> None:
    """Derive what an fp8 tensor computes from its codes and scales, after these were received."""
    if (fp8 := quantized(tensor)) is not None:
        fp8.forget_initial()
        fp8.finish_()


def checksums(tensors: Mapping[Key, Tensor]) -> dict[Key, int]:
    """A 64-bit checksum of the bits of each tensor, in their order. One host read for each device."""
    by_device: dict[torch.device, list[Key]] = {}
    for id, tensor in tensors.items():
        if not tensor.is_meta:
            by_device.setdefault(tensor.device, []).append(id)
    found = dict.fromkeys(tensors, 0)
    for device, ids in by_device.items():
        longest = min(CHUNK_NUMEL, max(1, *(tensors[id].numel() for id in ids)))
        weights = _odd_weights(longest, device)
        found.update(zip(ids, torch.stack([_checksum(tensors[id], weights) for id in ids]).tolist(), strict=True))
    return found


def _odd_weights(numel: int, device: torch.device) -> Tensor:
    """(numel,) int64: pseudo-random odd numbers, so that no simple pattern of differences cancels."""
    weights = torch.arange(numel, device=device).mul_(_GOLDEN)
    weights ^= weights >> 29
    weights *= _GOLDEN
    weights ^= weights >> 32
    return weights.mul_(2).add_(1)


def _checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    """0-d int64. Products wrap around; odd weights lose no bit."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in torch.split(bits, CHUNK_NUMEL):
        wide = chunk.to(torch.int64)
        wide = wide ^ (wide >> 32)  # the sign of a float64 must not stay in the highest bit, where two of them cancel
        total = total * _GOLDEN + (wide * weights[: chunk.numel()]).sum()
    return total


def copies_by_comm(params: Mapping[ParamId, Tensor], metas: Metas, roles: Roles) -> dict[Comm, list[ParamId]]:
    """The parameters that are compared over each group, in one order on all ranks. Groups may have none on a rank."""
    same: dict[object, Comm] = {}
    found: dict[Comm, list[ParamId]] = {}

    def ids_over(comm: Comm) -> list[ParamId]:
        key: object = comm.group if isinstance(comm, TorchComm) else comm
        return found.setdefault(same.setdefault(key, comm), [])

    for axes in (roles.dense, roles.expert):
        for comm in _copies((axes.dp, axes.inter, axes.tp)):
            ids_over(comm)
    for id, param in params.items():
        for comm in _comms(param, metas[id], roles):
            ids_over(comm).append(id)
    return found


def _comms(param: Tensor, meta: ParamMeta, roles: Roles) -> tuple[Comm, ...]:
    """The groups along which the parameter is copied."""
    axes = roles.expert if meta.is_expert else roles.dense
    if meta.is_dtensor:
        return tuple(_copies(_comms_of_dtensor(param, meta, axes)))
    return tuple(_copies((axes.dp, axes.inter, Alone() if meta.tensor_parallel else axes.tp)))


def _comms_of_dtensor(param: Tensor, meta: ParamMeta, axes: Axes) -> Iterator[Comm]:
    mesh = mesh_of(param)
    for number, placed in enumerate(meta.placements):
        if placed.shard_dim is None:
            yield TorchComm(mesh.get_group(number))
    yield from replicas_outside(param, (axes.dp, axes.inter), name=str(meta.id))
    yield from tensor_peers_outside(param, axes.tp)


def _copies(comms: Iterable[Comm]) -> Iterator[Comm]:
    return (comm for comm in comms if comm.size > 1)


def _stored(param: nn.Parameter, meta: ParamMeta) -> Tensor:
    """The stored form that replicas must have equal: values, or codes and scales."""
    stored: Tensor | None = stored_bytes(param)
    if stored is None:
        stored = param.detach().to_local() if meta.is_dtensor else param.detach()  # type: ignore[attr-defined]
    return stored


def difference(per_rank: Sequence[Mapping[str, object]], comm: Comm) -> ReplicaError | None:
    """The error for the first parameter whose values differ between ranks; None if all are equal."""
    if missing := _missing(per_rank, comm):
        return missing
    for name, checksum in per_rank[0].items():
        others = [rank for rank, sums in enumerate(per_rank) if sums[name] != checksum]
        if others:
            numbers = _numbers(comm)
            return ReplicaError(
                f"ranks hold different values of {name!r}: {[numbers[rank] for rank in others]} differ from rank "
                f"{numbers[0]}, but copies must start equal; call torch.manual_seed with the same seed on all ranks "
                "before the model is made, load the same checkpoint, or pass broadcast_params=True to get_optimizer "
                "(or DistributedDataParallel) to start from the first rank's values"
            )
    return None


def _missing(per_rank: Sequence[Mapping[str, object]], comm: Comm) -> ReplicaError | None:
    """The error for the first parameter that only some ranks train: its copies would diverge. None if all do."""
    for name in dict.fromkeys(name for sums in per_rank for name in sums):
        numbers = _numbers(comm)
        without = [number for number, sums in zip(numbers, per_rank, strict=True) if name not in sums]
        if without:
            return ReplicaError(
                f"{name!r} is not trained on ranks {without} of {numbers}, which hold copies of each other's "
                "parameters; pass it on all of these ranks with the same requires_grad, or set "
                "tensor_model_parallel=True on it where each rank holds another part"
            )
    return None


def _numbers(comm: Comm) -> list[int]:
    """The global ranks of a group, or ranks in the group if it is not a process group."""
    group = group_of(comm)
    return list(range(comm.size)) if group is None else dist.get_process_group_ranks(group)


@torch.no_grad()
def check_untrained(
    chunks: Sequence[nn.Module], roles: Roles, *, broadcast: bool = False, model_chunk_offset: int = 0
) -> None:
    """Compare frozen parameters and persistent buffers of all ranks that hold copies, after a broadcast if `broadcast`.

    Collective. Names that only some of these ranks have are ignored.

    Raises:
        ReplicaError, on every rank: a tensor differs. Names the first one and the ranks.
    """
    if roles.everyone.size == 1:
        return
    found = describe_untrained(chunks, model_chunk_offset=model_chunk_offset)
    tensors = {id: one.tensor for id, one in found.items()}
    parts = {str(id): list(_parts(tensor)) for id, tensor in tensors.items()}
    by_comm = copies_by_comm(tensors, {id: one.meta for id, one in found.items()}, roles)
    names = {comm: [str(id) for id in ids] for comm, ids in by_comm.items()}
    shapes = {name: str([(part.dtype, part.shape) for part in of_name]) for name, of_name in parts.items()}
    if broadcast:
        per_comm = {comm: _common([shapes[name] for name in of_comm], of_comm, comm) for comm, of_comm in names.items()}
        errors = (difference(per_rank, comm) for comm, per_rank in per_comm.items())
        agree(roles.everyone, next((error for error in errors if error is not None), None))
        for comm, per_rank in per_comm.items():
            for name in per_rank[0]:
                for part in parts[name]:
                    _broadcast_(part, comm)
        for tensor in tensors.values():
            _finish_fp8_(tensor)
        parts = {str(id): list(_parts(tensor)) for id, tensor in tensors.items()}  # copies are not written to
    bits = {(name, number): _bits(part) for name, of_name in parts.items() for number, part in enumerate(of_name)}
    sums: dict[str, list[object]] = {name: [shapes[name]] for name in parts}  # zeros of any shape have the same sum
    for (name, _), checksum in checksums(bits).items():
        sums[name].append(checksum)
    differences = [
        difference(_common([sums[name] for name in of_comm], of_comm, comm), comm) for comm, of_comm in names.items()
    ]
    agree(roles.everyone, next((error for error in differences if error is not None), None))


def _common(values: Sequence[object], names: Sequence[str], comm: Comm) -> list[dict[str, object]]:
    """The values of every rank, in the first rank's order, for names that all ranks of the group have. Collective."""
    per_rank: list[dict[str, object]] = comm.gather_objects(dict(zip(names, values, strict=True)))
    common = [name for name in per_rank[0] if all(name in of_rank for of_rank in per_rank)]
    return [{name: of_rank[name] for name in common} for of_rank in per_rank]


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


def _bits(part: Tensor) -> Tensor:
    """The values in a dtype whose bits are compared."""
    value = part.resolve_conj().resolve_neg()
    return torch.view_as_real(value) if value.is_complex() else value


def _broadcast_(part: Tensor, comm: Comm) -> None:
    value = _bits(part).contiguous()
    comm.broadcast_(value.view(-1).view(torch.uint8))  # in bytes: no backend sends every dtype
    if comm.rank != 0:
        received = torch.view_as_complex(value) if part.is_complex() else value
        for dim in (dim for dim, stride in enumerate(part.stride()) if stride == 0 and part.shape[dim]):
            part, received = part.narrow(dim, 0, 1), received.narrow(dim, 0, 1)  # an expanded tensor is written once
        part.copy_(received)
