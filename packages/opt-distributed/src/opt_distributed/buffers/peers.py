"""`Peers`: ranks with other parts of the same model, and the sums over them that complete a gradient."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import Alone, Comm, comm_of, sum_together_
from opt_distributed.comm.groups import ProcessGroups, Roles
from opt_paramgroups import ParamMeta

QK_NORMS = ("q_layernorm", "k_layernorm")
"""Parts of the names of norms that every tensor-parallel rank applies to its own heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that hold other parts of the same model; worlds of one if there are none."""

    tensor: Comm = field(default_factory=Alone)  # tensor-parallel peers of dense parameters
    expert_tensor: Comm = field(default_factory=Alone)  # tensor-parallel peers of experts
    embedding: Comm = field(default_factory=Alone)  # stages that hold the tied embedding
    positions: Comm = field(default_factory=Alone)  # stages that hold the position embedding
    stages: Comm = field(default_factory=Alone)  # pipeline stages; the last one knows the loss

    @classmethod
    def of_groups(cls, groups: ProcessGroups) -> "Peers":
        """Derive the peers from process groups by role."""
        return cls(
            tensor=comm_of(groups.tp),
            expert_tensor=comm_of(groups.expt_tp),
            embedding=comm_of(groups.embd),
            positions=comm_of(groups.pos_embd),
            stages=comm_of(groups.pp),
        )

    @classmethod
    def of_roles(cls, roles: Roles) -> "Peers":
        """The peers that the roles of a step know; worlds of one where they know none."""
        return cls(
            tensor=roles.dense.tp,
            expert_tensor=roles.expert.tp,
            embedding=roles.embedding or Alone(),
            positions=roles.positions or Alone(),
            stages=roles.stages or Alone(),
        )

    def of_role(self, role: str) -> Comm:
        """The ranks of one role of `ProcessGroups`."""
        fields = {"tp": "tensor", "expt_tp": "expert_tensor", "embd": "embedding", "pos_embd": "positions"}
        comm: Comm = getattr(self, fields.get(role, "stages"))
        return comm


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
    axes, tp = (roles.expert, "expt_tp") if meta.is_expert else (roles.dense, "tp")
    is_qk_norm = qk_layernorm and any(norm in meta.id.name for norm in QK_NORMS)
    over_stages = roles.everyone.size > roles.dense.num_replicas * roles.dense.tp.size  # there are other stages
    found = [
        Mark(attr, role, comm)
        for is_marked, attr, role, comm, is_needed in (
            (meta.sequence_parallel, "sequence_parallel", tp, axes.tp, True),
            (meta.average_gradients_across_tp, "average_gradients_across_tp_domain", tp, axes.tp, True),
            (is_qk_norm, "qk_layernorm", tp, axes.tp, True),
            (meta.shared_embedding, "shared_embedding", "embd", roles.embedding, over_stages),
            (meta.shared_position_embedding, "shared_position_embedding", "pos_embd", roles.positions, over_stages),
            (meta.pipeline_parallel, "pipeline_parallel", "pp", roles.stages, over_stages),
        )
        if is_marked and (is_needed if comm is None else comm.size > 1)
    ]
    if meta.pipeline_parallel and num_chunks > 1 and not found:
        found.append(Mark("pipeline_parallel", "pp", Alone()))  # the chunks of this rank hold copies
    return found


class Part(NamedTuple):
    """A part of a gradient, which peers hold for their copies of the parameter."""

    meta: ParamMeta
    value: Tensor  # contiguous, updated


def sum_over_peers_(parts: Iterable[Part], peers: Peers, *, qk_layernorm: bool = False) -> None:
    """Replace parts of gradients by their sums or means over peers. Collective; all peers pass equal parts, in order.

    Writes the parts of marked parameters: sums of `pipeline_parallel` ones over stages, and over the chunks of a stage;
    sums of `sequence_parallel` ones over tensor-parallel ranks, or means of `average_gradients_across_tp_domain` ones,
    which takes precedence, as in Megatron-Core; sums of tied embeddings and position embeddings over their stages.

    Raises:
        CollectiveError: a sum failed, or exceeded the timeout of its group.
    """
    of_model = list(parts)

    def chosen(is_chosen: Callable[[ParamMeta], bool]) -> list[Tensor]:
        # Stages may hold copies in another order, because the other parameters of a stage decide on its layout.
        found = [part for part in of_model if is_chosen(part.meta)]
        return [part.value for part in sorted(found, key=lambda part: (part.meta.shape, part.meta.id.name))]

    def is_partial(meta: ParamMeta) -> bool:
        return meta.sequence_parallel or (qk_layernorm and any(norm in meta.id.name for norm in QK_NORMS))

    try:
        _sum_over_stages_([part for part in of_model if part.meta.pipeline_parallel], peers.stages)
        for is_expert, comm in ((False, peers.tensor), (True, peers.expert_tensor)):
            of_family = [part for part in of_model if part.meta.is_expert == is_expert]
            averaged = [value for meta, value in of_family if meta.average_gradients_across_tp]
            partial = [v for meta, v in of_family if is_partial(meta) and not meta.average_gradients_across_tp]
            sum_together_(partial, comm)
            sum_together_(averaged, comm, scale=1.0 / comm.size)
        for grad in chosen(lambda meta: meta.shared_embedding):
            peers.embedding.all_reduce_(grad)
        sum_together_(chosen(lambda meta: meta.shared_position_embedding), peers.positions)
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"sum of gradients over tensor-parallel ranks and stages: {error}") from error


def _sum_over_stages_(parts: Sequence[Part], stages: Comm) -> None:
    """Sum parts with equal names over all chunks of all stages."""
    copies: dict[str, list[Tensor]] = {}
    for meta, value in parts:
        copies.setdefault(meta.id.name, []).append(value)
    for first, *others in copies.values():
        for other in others:
            first.add_(other)
    sum_together_([copies[name][0] for name in sorted(copies)], stages)
    for first, *others in copies.values():
        for other in others:
            other.copy_(first)


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
    routers = list(_routers(modules))
    for comm in comms:
        sum_together_([tokens for _, tokens in routers], comm)
    for bias, tokens in routers:
        counts = tokens.to(torch.float32)
        bias.add_(torch.sign(counts.mean() - counts), alpha=rate)
        tokens.zero_()


def _routers(modules: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Biases and token counts of all routers. Routers whose bias is None are skipped."""
    for module in modules:
        for inner in module.modules():
            bias, tokens = getattr(inner, "expert_bias", None), getattr(inner, "local_tokens_per_expert", None)
            if isinstance(bias, Tensor) and isinstance(tokens, Tensor):
                yield bias, tokens
