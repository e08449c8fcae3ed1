"""Frozen parameters and persistent buffers: replicas start with equal ones, compared or broadcast."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opt_distributed.buffers.replicas import checksums, copies_by_comm, difference
from opt_distributed.comm.collectives import Comm, agree
from opt_distributed.comm.groups import Roles
from opt_kernels.quantized import quantized
from opt_paramgroups.meta import describe_untrained


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
            if (fp8 := quantized(tensor)) is not None:
                fp8.forget_initial()
                fp8.finish_()
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
