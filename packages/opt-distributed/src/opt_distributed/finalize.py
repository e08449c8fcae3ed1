"""`finalize_model_grads`: completes the gradients of a parallel model between backward and step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.reduced import Part, sum_over_peers_
from opt_distributed.comm.collectives import ALONE, Comm, sum_together_
from opt_distributed.comm.groups import ProcessGroups, groups_of_collection
from opt_distributed.comm.roles import Roles, marks_of, peers_of

__all__ = ["ROUTER_BIAS_UPDATE_RATE", "finalize_model_grads", "unfinalized"]

Groups = ProcessGroups | Roles | Mapping[str, Comm] | None
ROUTER_BIAS_UPDATE_RATE = 1e-3
"""The default of Megatron-Core and of the paper (see `update_router_biases_`)."""


@torch.no_grad()
def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    num_tokens: Tensor | int | None = None,
    pg_collection: Groups = None,
    *,
    qk_layernorm: bool | None = None,
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
    5. update the biases of routers that balance their experts (`update_router_biases_`);
    6. divide by the number of tokens.

    A second call in an iteration leaves completed gradients as they are. A step without this call is refused where
    gradients would be incomplete (`unfinalized`).

    Parameters are marked by attributes of these names, set before they are wrapped. Every rank sends only the parts
    that it owns. These match, because peers shard equally, and a parameter that several stages hold is alone in its
    bucket.

    Args:
        model_chunks: the chunks of this rank.
        num_tokens: tokens in this rank's losses of the iteration, a number or a tensor of shape () or (1,). Only the
            value on the last stage is used. None: losses are means.
        pg_collection: process groups by role (`tp`, `expt_tp`, `embd`, `pos_embd` and `pp` are used), or a mapping of
            roles to `Comm`. None: the groups that the first chunk was wrapped with.
        qk_layernorm: each rank applies parameters with `q_layernorm` or `k_layernorm` in their names to its own heads,
            so that their gradients are partial even without sequence parallelism. None: `config.qk_layernorm` of the
            modules decides, as in Megatron-Core.
        router_bias_update_rate: the change of a router's biases in each step; 0 leaves them unchanged.

    Raises:
        ValueError: a chunk is not wrapped; `num_tokens` is given, but a chunk averages gradients already, so that they
            would be divided twice; a parameter is marked, but its group is not given; `router_bias_update_rate` is
            below 0, or differs between ranks in the first iteration.
        CollectiveError: a reduction failed, or exceeded the timeout of its group.
    """
    chunks = tuple(model_chunks)
    told = [chunk for chunk in chunks[:1] if isinstance(chunk, DistributedDataParallel)]
    with told[0].telling() if told else nullcontext():
        for index, chunk in enumerate(chunks):
            if not isinstance(chunk, DistributedDataParallel):
                raise ValueError(
                    f"model chunk {index} is a {type(chunk).__name__}; wrap it in DistributedDataParallel, or leave "
                    "plain modules to the optimizer's step"
                )
            if num_tokens is not None and not chunk.calculate_per_token_loss:
                raise ValueError(
                    f"num_tokens was given, but model chunk {index} averages gradients; wrap it with "
                    "calculate_per_token_loss=True"
                )
        given: Any = pg_collection
        if given is None:
            given = chunks[0].roles if chunks else {}
        elif not isinstance(given, Mapping | ProcessGroups | Roles):
            given = groups_of_collection(given)
        peers = given if isinstance(given, Mapping) else peers_of(given)
        if qk_layernorm is None:
            qk_layernorm = any(chunk.qk_layernorm for chunk in chunks)
        _check_peers(chunks, peers, qk_layernorm=qk_layernorm)
        for chunk in chunks:
            chunk.finish_grad_sync()
        incomplete = [chunk for chunk in chunks if not chunk.num_finalized]
        sum_over_peers_(_owned_parts(incomplete), peers, qk_layernorm=qk_layernorm)
        for chunk in incomplete:
            chunk.num_finalized = len(chunks)
        replicas = [comm for chunk in chunks[:1] for comm in (chunk.roles.dense.dp, chunk.roles.dense.inter)]
        comms = [peers.get("tp", ALONE), *replicas]
        is_first = any(chunk.grad_sync.iteration == 1 for chunk in chunks)
        update_router_biases_(chunks, rate=router_bias_update_rate, comms=comms, compares=is_first)
        unscaled = [chunk for chunk in chunks if not chunk.is_scaled]
        if num_tokens is not None and unscaled:
            device = next((param.device for chunk in chunks for param in chunk.parameters()), None)
            total = torch.as_tensor(num_tokens, dtype=torch.float32, device=device).detach().clone()
            stages = peers.get("pp", ALONE)
            stages.broadcast_(total, src=stages.size - 1)
            for comm in replicas:
                comm.all_reduce_(total)
            factor = total.clamp(min=1).reciprocal()  # without tokens, gradients are zeros
            for chunk in unscaled:
                chunk.scale_gradients(factor)


def _owned_parts(chunks: Iterable[DistributedDataParallel]) -> Iterator[Part]:
    """The parts of gradients that this rank owns, in the order of the layouts."""
    for chunk in chunks:
        for buffer in chunk.synced_buffers:
            for piece in buffer.owned():
                yield Part(chunk.metas[piece.id], buffer.grad(piece.id, piece.of_param))


def unfinalized(chunks: Sequence[DistributedDataParallel], roles: Roles) -> UnusableGradientError | None:
    """Return why the gradients of these chunks, which share an optimizer, must not be used yet; None if they may be.

    A gradient that needs a sum over peers would make copies of its parameter diverge, and a sum over tokens would be
    taken for a mean.
    """
    num_chunks = len(chunks)
    for chunk in chunks:
        for meta in chunk.marked if chunk.num_finalized < num_chunks else ():
            if chunk.num_finalized and not meta.pipeline_parallel:
                continue
            for groups in (roles, chunk.roles):
                marks = marks_of(meta, groups, qk_layernorm=chunk.qk_layernorm, num_chunks=num_chunks)
                if marks:
                    return UnusableGradientError(
                        f"the gradient of {str(meta.id)!r} is not complete, because it is marked {marks[0].attr}: its "
                        "copies would diverge; call opt_stack.finalize_model_grads(model_chunks) with all "
                        f"{num_chunks} chunks between backward and the step (or chunk.mark_finalized(), if other code "
                        f"has summed it over the group {marks[0].role})"
                    )
        if chunk.calculate_per_token_loss and not chunk.is_scaled:
            return UnusableGradientError(
                "gradients are sums over tokens (calculate_per_token_loss=True), but were not divided by their number; "
                "call opt_stack.finalize_model_grads(model_chunks, num_tokens) between backward and the step (or "
                "chunk.scale_gradients(1.0), if the losses were divided)"
            )
    return None


def _check_peers(chunks: Sequence[DistributedDataParallel], peers: Mapping[str, Comm], *, qk_layernorm: bool) -> None:
    """Raise ValueError if a gradient needs a sum over a group that is not given."""
    for chunk in chunks:
        for meta in chunk.marked:
            for mark in marks_of(meta, chunk.roles, qk_layernorm=qk_layernorm):
                # A group of one rank is accepted if the wrapper does not know a larger one.
                if mark.role not in peers or (mark.comm is not None and peers[mark.role].size == 1):
                    raise ValueError(
                        f"parameter {str(meta.id)!r} is marked {mark.attr}, but the group {mark.role} is not given; "
                        "pass pg_collection=opt_stack.ProcessGroups(...) with it to finalize_model_grads or to "
                        f"DistributedDataParallel ({mark.role}=None if this rank holds the only copy)"
                    )


# Load balancing without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664) adds a bias to each expert's score when
# experts are chosen. The bias follows token counts instead of gradients. Such a router is a module with two tensors of
# shape (num_experts,): `expert_bias`, floating point and not trained, and `local_tokens_per_expert`, to which its
# forward adds this rank's token counts.
@torch.no_grad()
def update_router_biases_(modules: Iterable[nn.Module], *, rate: float, comms: Sequence[Comm], compares: bool) -> None:
    """Update the `expert_bias` of every router among `modules` and their submodules; reset `local_tokens_per_expert`.

    bias += rate * sign(mean(tokens) - tokens): up where an expert had fewer tokens than the mean, down where it had
    more. Tokens are summed over `comms`: all ranks that route with the same bias, which are the data-, context- and
    tensor-parallel ones. All of them call this function, so that their biases stay equal; `compares` rates first.

    Raises:
        ValueError: `rate` is below 0, or, on every rank, is not the same on all of them.
    """
    routers = []
    for module in modules:
        for inner in module.modules():
            bias = getattr(inner, "expert_bias", None)
            tokens = getattr(inner, "local_tokens_per_expert", None)
            if isinstance(bias, Tensor) and isinstance(tokens, Tensor):  # the bias of a router may be None
                routers.append((bias, tokens))
    rates = {rate}
    for comm in comms if compares and routers else ():
        rates = set().union(*comm.gather_objects(rates))
    if len(rates) > 1:
        raise ValueError(f"router_bias_update_rate is {sorted(rates)} on ranks that share routers; pass one on all")
    if rate < 0:
        raise ValueError(f"router_bias_update_rate={rate}; pass a rate above 0, or 0 to leave biases unchanged")
    for comm in comms:
        sum_together_([tokens for _, tokens in routers], comm)
    for bias, tokens in routers:
        counts = tokens.to(torch.float32)
        bias.add_(torch.sign(counts.mean() - counts), alpha=rate)
        tokens.zero_()
