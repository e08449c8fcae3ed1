"""`finalize_model_grads`: completes the gradients of a parallel model between backward and step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone, Comm, comm_of
from opt_distributed.comm.groups import ProcessGroups
from opt_distributed.comm.joined import sum_together_
from opt_distributed.routers import update_router_biases_
from opt_paramgroups import ParamMeta

QK_NORMS = ("q_layernorm", "k_layernorm")
"""Parts of the names of norms that every tensor-parallel rank applies to its own heads."""
ROUTER_BIAS_UPDATE_RATE = 1e-3
"""The default of Megatron-Core and of the paper (see `routers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that hold other parts of the same model; worlds of one if there are none."""

    tensor: Comm = field(default_factory=Alone)  # tensor-parallel peers of dense parameters
    expert_tensor: Comm = field(default_factory=Alone)  # tensor-parallel peers of experts
    embedding: Comm = field(default_factory=Alone)  # stages that hold the tied embedding
    positions: Comm = field(default_factory=Alone)  # stages that hold the position embedding
    stages: Comm = field(default_factory=Alone)  # pipeline stages; the last one knows the loss

    @classmethod
    def of_groups(cls, groups: ProcessGroups | None) -> "Peers":
        """Derive the peers from process groups by role. None: there are none."""
        if groups is None:
            return cls()
        return cls(
            tensor=comm_of(groups.tp),
            expert_tensor=comm_of(groups.expt_tp),
            embedding=comm_of(groups.embd),
            positions=comm_of(groups.pos_embd),
            stages=comm_of(groups.pp),
        )


@torch.no_grad()
def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    num_tokens: Tensor | int | None = None,
    pg_collection: ProcessGroups | Peers | None = None,
    *,
    qk_layernorm: bool = False,
    router_bias_update_rate: float = ROUTER_BIAS_UPDATE_RATE,
) -> None:
    """Complete the gradients. Collective. Writes the gradient buffers of `model_chunks`, and biases of routers.

    In this order:

    1. finish the data-parallel reduction;
    2. sum `pipeline_parallel` parameters, which all stages hold, over the stages and over the chunks of a stage;
    3. over tensor-parallel ranks, sum partial gradients (`sequence_parallel` parameters, and norms of queries and keys
       with `qk_layernorm`), and average gradients of `average_gradients_across_tp_domain` parameters;
    4. sum the tied embedding (`shared_embedding`) and the position embedding (`shared_position_embedding`) over the
       stages that hold them;
    5. update the biases of routers that balance their experts (`routers.update_router_biases_`);
    6. divide by the number of tokens.

    Parameters are marked by attributes of these names, set before they are wrapped. Every rank sends only the parts
    that it owns. These match, because peers shard equally, and a parameter that several stages hold is alone in its
    bucket.

    Args:
        model_chunks: the chunks of this rank.
        num_tokens: tokens in this rank's losses of the iteration, a number or a tensor of shape () or (1,). Only the
            value on the last stage is used. None: losses are means.
        pg_collection: process groups by role (`tp`, `expt_tp`, `embd`, `pos_embd` and `pp` are used), or `Peers`.
        qk_layernorm: each rank applies parameters with `q_layernorm` or `k_layernorm` in their names to its own heads,
            so that their gradients are partial even without sequence parallelism.
        router_bias_update_rate: the change of a router's biases in each step; 0 leaves them unchanged.

    Raises:
        ValueError: a chunk is not wrapped; `num_tokens` is given, but a chunk averages gradients already, so that they
            would be divided twice; `router_bias_update_rate` is below 0.
        CollectiveError: a reduction failed, or exceeded the timeout of its group.
    """
    chunks = tuple(model_chunks)
    _check(chunks, num_tokens)
    peers = pg_collection if isinstance(pg_collection, Peers) else Peers.of_groups(pg_collection)
    for chunk in chunks:
        chunk.finish_grad_sync()
    _sum_over_stages_(chunks, peers.stages)
    for is_expert, comm in ((False, peers.tensor), (True, peers.expert_tensor)):
        partly = partial(_is_partial, is_expert=is_expert, qk_layernorm=qk_layernorm)
        sum_together_(_grads(chunks, partly), comm)
        sum_together_(_grads(chunks, partial(_is_equal, is_expert=is_expert)), comm, scale=1.0 / comm.size)
    for grad in _grads(chunks, lambda meta: meta.shared_embedding):
        peers.embedding.all_reduce_(grad)
    sum_together_(_grads(chunks, lambda meta: meta.shared_position_embedding), peers.positions)
    update_router_biases_(chunks, rate=router_bias_update_rate, comms=[peers.tensor, *_replicas(chunks)])
    if num_tokens is not None:
        _divide_by_tokens_(chunks, num_tokens, peers)


def _is_partial(meta: ParamMeta, *, is_expert: bool, qk_layernorm: bool) -> bool:
    """A gradient marked both partial and averaged is averaged, as in Megatron-Core."""
    is_marked = meta.sequence_parallel or (qk_layernorm and any(norm in meta.id.name for norm in QK_NORMS))
    return meta.is_expert == is_expert and is_marked and not meta.average_gradients_across_tp


def _is_equal(meta: ParamMeta, *, is_expert: bool) -> bool:
    return meta.is_expert == is_expert and meta.average_gradients_across_tp


class _Owned(NamedTuple):
    name: str  # of the parameter in its chunk
    grad: Tensor  # the part that this rank owns, a view


def _owned(chunks: Sequence[DistributedDataParallel], chosen: Callable[[ParamMeta], bool]) -> Iterator[_Owned]:
    """The parts that this rank owns of the chosen parameters' gradients, in the order of the layouts."""
    for chunk in chunks:
        for buffer in chunk.synced_buffers:
            for piece in buffer.owned():
                if chosen(chunk.metas[piece.id]):
                    yield _Owned(piece.id.name, buffer.memory.grad_piece(piece.id, piece.of_param))


def _grads(chunks: Sequence[DistributedDataParallel], chosen: Callable[[ParamMeta], bool]) -> Iterator[Tensor]:
    return (owned.grad for owned in _owned(chunks, chosen))


def _sum_over_stages_(chunks: Sequence[DistributedDataParallel], stages: Comm) -> None:
    """Sum gradients of `pipeline_parallel` parameters with equal names, over all chunks of all stages."""
    copies: dict[str, list[Tensor]] = {}
    for name, grad in _owned(chunks, lambda meta: meta.pipeline_parallel):
        copies.setdefault(name, []).append(grad)
    for first, *others in copies.values():
        for other in others:
            first.add_(other)
    sum_together_([copies[name][0] for name in sorted(copies)], stages)
    for first, *others in copies.values():
        for other in others:
            other.copy_(first)


def _divide_by_tokens_(chunks: Sequence[DistributedDataParallel], num_tokens: Tensor | int, peers: Peers) -> None:
    """Divide gradients by the total number of tokens, or by 1 if there are none."""
    device = next((param.device for chunk in chunks for param in chunk.parameters()), None)
    total = torch.as_tensor(num_tokens, device=device).detach().to(torch.float32, copy=True)
    peers.stages.broadcast_(total, src=peers.stages.size - 1)
    for comm in _replicas(chunks):
        comm.all_reduce_(total)
    factor = total.clamp(min=1).reciprocal()
    for chunk in chunks:
        chunk.scale_gradients(factor)


def _replicas(chunks: Sequence[DistributedDataParallel]) -> Sequence[Comm]:
    """The groups of data-parallel ranks, over which sums are taken in order."""
    return [comm for chunk in chunks[:1] for comm in (chunk.roles.dense.dp, chunk.roles.dense.inter)]


def _check(chunks: Sequence[DistributedDataParallel], num_tokens: Tensor | int | None) -> None:
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel):
            raise ValueError(
                f"model chunk {index} is a {type(chunk).__name__}; wrap it in DistributedDataParallel, or leave plain "
                "modules to the optimizer's step"
            )
        if num_tokens is not None and not chunk.calculate_per_token_loss:
            raise ValueError(
                f"num_tokens was given, but model chunk {index} averages gradients; wrap it with "
                "calculate_per_token_loss=True"
            )
