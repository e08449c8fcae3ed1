"""Norms of parameters, and rows of gradients, that hooks sum over ranks."""

from collections.abc import Sequence
from math import prod

from opt_distributed.buffers import PRE_SHARDED, BufferPlan
from opt_distributed.comm import Comm, group_of, is_outside, mesh_of
from opt_distributed.pieces import mesh_comms
from opt_distributed.step import CutParams, CutRows
from opt_kernels.hooks import HookedUpdate, SpannedRows
from opt_kernels.rules import Needs
from opt_paramgroups import ParamId
from opt_stack.planning.design import Design
from opt_stack.planning.plan import UnitPlan


def cut_params(unit: UnitPlan, design: Design) -> tuple[Sequence[CutParams], Sequence[CutRows]]:
    """Return the parameters of a unit whose norms are summed over ranks, and those whose gradient rows span ranks, each
    by group of ranks; equal on all of them."""
    rule = unit.rule
    assert isinstance(rule, HookedUpdate)
    norms: dict[tuple[int, ...], CutParams] = {}
    spans: dict[tuple[int, ...], CutRows] = {}
    for buffer, id in unit.placed(design.plan.buffers):
        meta = design.metas[id]
        if rule.sums_norms and (comms := (*_cuts(buffer, id, design, 0), *_tensor_cuts(buffer, id, design, 0))):
            before = norms.get(_key(comms), CutParams((), comms))
            norms[_key(comms)] = CutParams((*before.ids, id), before.comms)
        if rule.centralizes and len(meta.shape) > 1 and meta.numel:
            dims = len(meta.shape) - 1 if rule.needs is Needs.MATRICES else 1
            peers = _tensor_cuts(buffer, id, design, dims)
            if comms := (*_cuts(buffer, id, design, dims), *peers):
                cut = spans.setdefault(_key(comms), CutRows({}, comms))
                cut.rows[id] = SpannedRows(
                    num=prod(meta.local_shape[:dims]),
                    dims=dims,
                    local_numel=prod(meta.local_shape[dims:]),
                    # The shape of `meta` is that of one tensor-parallel part.
                    whole_numel=prod(meta.shape[dims:]) * prod(comm.size for comm in peers),
                )
    return tuple(norms.values()), tuple(spans.values())


def _key(comms: tuple[Comm, ...]) -> tuple[int, ...]:
    return tuple(id(group_of(comm) or comm) for comm in comms)


def _cuts(buffer: BufferPlan, id: ParamId, design: Design, from_dim: int) -> Sequence[Comm]:
    """The groups of its mesh or buffer over which a parameter is cut along dim `from_dim` or later."""
    if buffer.kind is PRE_SHARDED:
        dims = [placed.shard_dim if placed.size > 1 else None for placed in design.metas[id].placements]
        return mesh_comms(
            design.params[id], [axis for axis, dim in enumerate(dims) if dim is not None and dim >= from_dim]
        )
    return (design.axes_of(buffer).dp,) if buffer.kind.cuts and buffer.layout.num_shards > 1 else ()


def _tensor_cuts(buffer: BufferPlan, id: ParamId, design: Design, from_dim: int) -> tuple[Comm, ...]:
    """The tensor-parallel group if it is outside the parameter's mesh and cuts dim `from_dim` or later."""
    meta = design.metas[id]
    peers = design.axes_of(buffer).tp
    cuts = meta.tensor_parallel and (meta.partition_dim is None or meta.partition_dim >= from_dim)
    outside = buffer.kind is not PRE_SHARDED or is_outside(peers, mesh_of(design.params[id]))
    return (peers,) if cuts and peers.size > 1 and outside else ()
