"""`finalize_model_grads`: what a parallel model's gradients need between backward and step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone, Comm, comm_of
from opt_distributed.comm.groups import ProcessGroups
from opt_paramgroups import ParamMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that hold other parts of the same model; a world of one where there are none."""

    tensor: Comm = field(default_factory=Alone)  # tensor-parallel peers of dense parameters
    expert_tensor: Comm = field(default_factory=Alone)  # tensor-parallel peers of experts
    embedding: Comm = field(default_factory=Alone)  # stages that hold the tied embedding
    stages: Comm = field(default_factory=Alone)  # pipeline stages; the last one knows the loss

    @classmethod
    def of_groups(cls, groups: ProcessGroups | None) -> "Peers":
        """From process groups by role; None: no such peers."""
        if groups is None:
            return cls()
        return cls(
            tensor=comm_of(groups.tp),
            expert_tensor=comm_of(groups.expt_tp),
            embedding=comm_of(groups.embd),
            stages=comm_of(groups.pp),
        )


@torch.no_grad()
def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    num_tokens: Tensor | None = None,
    *,
    pg_collection: ProcessGroups | Peers | None = None,
) -> None:
    """Completes gradients, on every rank alike: writes the gradient buffers of `model_chunks`.

    In order: finishes the data-parallel reduction; sums over tensor-parallel ranks what sequence parallelism left
    partial (`sequence_parallel` parameters) and averages what is kept equal there
    (`average_gradients_across_tp_domain`); sums the tied embedding's gradients over the stages that hold it
    (`shared_embedding`); divides by the number of tokens.

    Only this rank's own parts travel: peers shard alike, so they own the same parts, and a tied embedding is alone in
    its bucket on every stage.

    Args:
        model_chunks: the chunks of this rank.
        num_tokens: () or (1,) tokens in this rank's losses of the iteration; read on the last stage only, and not
        written.
            None: losses were means.
        pg_collection: process groups by role (`tp`, `expt_tp`, `embd`, `pp` are read), or ready `Peers`.

    Raises:
        ValueError: a chunk is not wrapped; `num_tokens` is given for chunks that take means, which would divide twice.
        CollectiveError: a reduction failed, or ran into the group's timeout.
    """
    chunks = tuple(model_chunks)
    _check(chunks, num_tokens)
    peers = pg_collection if isinstance(pg_collection, Peers) else Peers.of_groups(pg_collection)
    for chunk in chunks:
        chunk.finish_grad_sync()
    for is_expert, comm in ((False, peers.tensor), (True, peers.expert_tensor)):
        sum_together_(_owned_grads(chunks, partial(_is_partial, is_expert=is_expert)), comm)
        sum_together_(_owned_grads(chunks, partial(_is_equal, is_expert=is_expert)), comm, scale=1.0 / comm.size)
    for grad in _owned_grads(chunks, lambda meta: meta.shared_embedding):
        peers.embedding.all_reduce_(grad)
    if num_tokens is not None:
        _divide_by_tokens_(chunks, num_tokens, peers)


def sum_together_(tensors: Iterable[Tensor], comm: Comm, *, scale: float = 1.0) -> None:
    """Writes small contiguous tensors: `scale` times their sums over ranks, in one all-reduce per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        joined = torch.cat([tensor.view(-1) for tensor in same])
        comm.all_reduce_(joined)
        joined.mul_(scale)
        start = 0
        for tensor in same:
            tensor.view(-1).copy_(joined[start : start + tensor.numel()])
            start += tensor.numel()


def _is_partial(meta: ParamMeta, *, is_expert: bool) -> bool:
    return meta.is_expert == is_expert and meta.sequence_parallel


def _is_equal(meta: ParamMeta, *, is_expert: bool) -> bool:
    return meta.is_expert == is_expert and meta.average_gradients_across_tp


def _owned_grads(chunks: Sequence[DistributedDataParallel], chosen: Callable[[ParamMeta], bool]) -> Iterator[Tensor]:
    """What this rank owns of the gradients of some parameters, in the order of the layouts. Views."""
    for chunk in chunks:
        for buffer in chunk.synced_buffers:
            for piece in buffer.owned():
                if chosen(chunk.metas[piece.id]):
                    yield buffer.memory.grad_piece(piece.id, piece.of_param)


def _divide_by_tokens_(chunks: Sequence[DistributedDataParallel], num_tokens: Tensor, peers: Peers) -> None:
    """A batch without any token leaves its gradients, which are zeros then, as they are."""
    total = num_tokens.detach().clone().to(torch.float32)
    peers.stages.broadcast_(total, src=peers.stages.size - 1)
    for chunk in chunks[:1]:
        chunk.roles.dense.dp.all_reduce_(total)
        chunk.roles.dense.inter.all_reduce_(total)
    factor = total.clamp(min=1).reciprocal()
    for chunk in chunks:
        chunk.scale_gradients(factor)


def _check(chunks: Sequence[DistributedDataParallel], num_tokens: Tensor | None) -> None:
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel):
            raise ValueError(
                f"model chunk {index} is a {type(chunk).__name__}; wrap it in DistributedDataParallel, or leave plain "
                "modules to the optimizer's step"
            )
        if num_tokens is not None and not chunk.calculate_per_token_loss:
            raise ValueError(
                f"num_tokens was given, but model chunk {index} takes means; wrap it with calculate_per_token_loss=True"
            )
