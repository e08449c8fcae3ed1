"""Sums over peers, ranks with other parts of the same model, that complete a gradient; biases of routers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import ALONE, Comm, sum_together_
from opt_distributed.comm.groups import Roles, peers_of
from opt_paramgroups import ParamMeta

QK_NORMS = ("q_layernorm", "k_layernorm")
"""Parts of the names of norms that every tensor-parallel rank applies to its own heads."""


class Mark(NamedTuple):
    """Why a gradient is complete only after a sum or mean over peers."""

    attr: str  # of the parameter
    role: str  # of the process group
    comm: Comm | None  # None: the groups do not say which ranks are the peers


def uses_qk_layernorm(chunk: nn.Module) -> bool:
    """Whether a model says, by `config.qk_layernorm` as Megatron-Core's models, that it norms queries and keys."""
    modules = (module for module in chunk.modules() if hasattr(module, "config"))
    return any(getattr(module.config, "qk_layernorm", None) is True for module in modules)


def is_marked(meta: ParamMeta) -> bool:
    """Whether the gradient of a parameter may need a sum or mean over other ranks than its replicas."""
    over_tp = meta.sequence_parallel or meta.average_gradients_across_tp or any(n in meta.id.name for n in QK_NORMS)
    return over_tp or meta.is_on_several_stages


def marks_of(meta: ParamMeta, roles: Roles, *, qk_layernorm: bool = False, num_chunks: int = 1) -> list[Mark]:
    """Why the gradient of a parameter must be summed or averaged over other ranks; empty if it must not."""
    tp, peers = "expt_tp" if meta.is_expert else "tp", peers_of(roles)
    is_qk_norm = qk_layernorm and any(norm in meta.id.name for norm in QK_NORMS)
    over_stages = roles.everyone.size > roles.dense.num_replicas * roles.dense.tp.size  # there are other stages
    found = [
        Mark(attr, role, peers.get(role))
        for is_marked, attr, role in (
            (meta.sequence_parallel, "sequence_parallel", tp),
            (meta.average_gradients_across_tp, "average_gradients_across_tp_domain", tp),
            (is_qk_norm, "qk_layernorm", tp),
            (meta.shared_embedding, "shared_embedding", "embd"),
            (meta.shared_position_embedding, "shared_position_embedding", "pos_embd"),
            (meta.pipeline_parallel, "pipeline_parallel", "pp"),
        )
        if is_marked and (peers[role].size > 1 if role in peers else over_stages)
    ]
    if meta.pipeline_parallel and num_chunks > 1 and not found:
        found.append(Mark("pipeline_parallel", "pp", ALONE))  # the chunks of this rank hold copies
    return found


class Part(NamedTuple):
    """A part of a gradient, which peers hold for their copies of the parameter."""

    meta: ParamMeta
    value: Tensor  # contiguous, updated


def sum_over_peers_(parts: Iterable[Part], peers: Mapping[str, Comm], *, qk_layernorm: bool = False) -> None:
    """Replace parts of gradients by their sums or means over `peers`, which are groups by role.

    Collective; all peers pass equal parts, in order. Writes the parts of marked parameters: sums of `pipeline_parallel`
    ones over stages, and over the chunks of a stage; sums of `sequence_parallel` ones over tensor-parallel ranks, or
    means of `average_gradients_across_tp_domain` ones, which takes precedence, as in Megatron-Core; sums of tied
    embeddings and position embeddings over their stages.

    Raises:
        CollectiveError: a sum failed, or exceeded the timeout of its group.
    """
    # Stages may hold copies in another order, because the other parameters of a stage decide on its layout.
    of_model = list(parts)
    by_shape = sorted(of_model, key=lambda part: (part.meta.shape, part.meta.id.name))
    copies: dict[str, list[Tensor]] = {}
    for meta, value in of_model:
        if meta.pipeline_parallel:
            copies.setdefault(meta.id.name, []).append(value)
    try:
        for first, *others in copies.values():
            for other in others:
                first.add_(other)
        sum_together_([copies[name][0] for name in sorted(copies)], peers.get("pp", ALONE))
        for first, *others in copies.values():
            for other in others:
                other.copy_(first)
        for is_expert, role in ((False, "tp"), (True, "expt_tp")):
            comm, of_family = peers.get(role, ALONE), [part for part in of_model if part.meta.is_expert == is_expert]
            averaged = [value for meta, value in of_family if meta.average_gradients_across_tp]
            partial = [
                value
                for meta, value in of_family
                if not meta.average_gradients_across_tp
                and (meta.sequence_parallel or (qk_layernorm and any(norm in meta.id.name for norm in QK_NORMS)))
            ]
            sum_together_(partial, comm)
            sum_together_(averaged, comm, scale=1.0 / comm.size)
        for meta, value in by_shape:
            if meta.shared_embedding:
                peers.get("embd", ALONE).all_reduce_(value)
        positions = [value for meta, value in by_shape if meta.shared_position_embedding]
        sum_together_(positions, peers.get("pos_embd", ALONE))
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"sum of gradients over tensor-parallel ranks and stages: {error}") from error


# Load balancing without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664) adds a bias to each expert's score when
# experts are chosen. The bias follows token counts instead of gradients. Such a router is a module with two tensors of
# shape (num_experts,): `expert_bias`, floating point and not trained, and `local_tokens_per_expert`, to which its
# forward adds this rank's token counts.
@torch.no_grad()
def update_router_biases_(modules: Iterable[nn.Module], *, rate: float, comms: Sequence[Comm]) -> None:
    """Update the `expert_bias` of every router among `modules` and their submodules; reset `local_tokens_per_expert`.

    bias += rate * sign(mean(tokens) - tokens): up where an expert had fewer tokens than the mean, down where it had
    more. Tokens are summed over `comms`: all ranks that route with the same bias, which are the data-, context- and
    tensor-parallel ones. All of them call this function, so that their biases stay equal.

    Raises:
        ValueError: `rate` is below 0.
    """
    if rate < 0:
        raise ValueError(f"router_bias_update_rate={rate}; pass a rate above 0, or 0 to leave biases unchanged")
    routers = []
    for inner in (inner for module in modules for inner in module.modules()):
        bias, tokens = getattr(inner, "expert_bias", None), getattr(inner, "local_tokens_per_expert", None)
        if isinstance(bias, Tensor) and isinstance(tokens, Tensor):  # the bias of a router may be None
            routers.append((bias, tokens))
    for comm in comms:
        sum_together_([tokens for _, tokens in routers], comm)
    for bias, tokens in routers:
        counts = tokens.to(torch.float32)
        bias.add_(torch.sign(counts.mean() - counts), alpha=rate)
        tokens.zero_()
