"""`PeerSums`: completes the gradients of plain modules, as `finalize_model_grads` completes those of wrapped ones."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from opt_config import ConfigError
from opt_distributed.buffers.peers import Mark, Part, Peers, marks_of, sum_over_peers_
from opt_distributed.comm.groups import Roles
from opt_distributed.comm.mesh import tensor_peers_outside
from opt_distributed.pieces.sources import BufferedGrads, Source
from opt_paramgroups import ParamId, ParamMeta


class PeerSums:
    """Sums the reduced gradients of marked parameters over tensor-parallel ranks and stages, in every step.

    It writes the buffers of the reduction, not `param.grad`, so that a step may be repeated.
    """

    def __init__(
        self, sources: Iterable[Source], metas: Mapping[ParamId, ParamMeta], roles: Roles, *, qk_layernorm: bool
    ):
        self._peers, self._qk_layernorm = Peers.of_roles(roles), qk_layernorm
        self._marked: dict[BufferedGrads, list[ParamMeta]] = {}
        ids = marked_ids(metas, roles, qk_layernorm=qk_layernorm)
        for source in sources:
            if isinstance(source, BufferedGrads) and not ids.isdisjoint(source.params):
                self._marked[source] = [metas[id] for id in source.unresolved if id in ids]

    def add_(self) -> None:
        """Sum the reduced gradients, and which ranks have one: a peer may have used a parameter that this rank did not.

        Collective. Raises CollectiveError if a sum failed, or exceeded the timeout of its group.
        """
        if not self._marked:
            return
        parts = [
            Part(meta, source.reduced.piece(meta.id, of_param))
            for source, marked in self._marked.items()
            for meta in marked
            for of_param in source.owned(meta.id)
        ]
        uses = [Part(meta, _uses(source.params[meta.id])) for source, marked in self._marked.items() for meta in marked]
        sum_over_peers_(parts, self._peers, qk_layernorm=self._qk_layernorm)
        sum_over_peers_(uses, self._peers, qk_layernorm=self._qk_layernorm)
        for source in self._marked:
            source.uses_of_peers = {meta.id: count for meta, count in uses if meta.id in source.params}


def marked_ids(metas: Mapping[ParamId, ParamMeta], roles: Roles, *, qk_layernorm: bool) -> frozenset[ParamId]:
    """Parameters whose gradients are complete only after a sum or mean over peers."""
    num_chunks = len({id.chunk for id in metas})
    return frozenset(
        id for id, meta in metas.items() if marks_of(meta, roles, qk_layernorm=qk_layernorm, num_chunks=num_chunks)
    )


def check_marks(
    params: Mapping[ParamId, nn.Parameter], metas: Mapping[ParamId, ParamMeta], roles: Roles, *, qk_layernorm: bool
) -> None:
    """Check that the step can complete the gradients of plain parameters.

    Raises:
        ConfigError: the peers of a marked parameter are unknown, or it is a DTensor whose mesh does not contain them.
    """
    for id in params:
        for mark in marks_of(metas[id], roles, qk_layernorm=qk_layernorm):
            if metas[id].is_dtensor and _is_outside(params[id], metas[id], mark, roles):
                raise ConfigError(
                    f"{str(id)!r} is a DTensor marked {mark.attr}: its gradient would not be summed over the group "
                    f"{mark.role}, which is not part of its mesh; use a mesh with these ranks, or a plain parameter"
                )
            if mark.comm is None:
                raise ConfigError(
                    f"{str(id)!r} is marked {mark.attr}, but the group {mark.role} is not given, so that copies of it "
                    f"would diverge; pass pg_collection=opt_stack.ProcessGroups({mark.role}=..., ...), with None if "
                    "this rank holds the only copy"
                )


def _is_outside(param: nn.Parameter, meta: ParamMeta, mark: Mark, roles: Roles) -> bool:
    axes = roles.expert if meta.is_expert else roles.dense
    return mark.role not in ("tp", "expt_tp") or bool(tensor_peers_outside(param, axes.tp))


def _uses(param: Tensor) -> Tensor:
    """(1,) float32: 1 if this rank has a gradient, else 0."""
    return torch.full((1,), float(param.grad is not None), device=param.device)
