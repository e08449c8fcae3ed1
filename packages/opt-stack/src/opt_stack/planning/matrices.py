"""Matrices that are cut over ranks: which rank computes each."""

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import NamedTuple

from opt_config import ConfigError
from opt_distributed.layout import ComputeLayout, Computes, SplitMatrix, compute_layout
from opt_kernels.matrices import TpMode
from opt_kernels.rules import AdaptiveMuonRule, Lines, MatrixRule, Rule, sums_over_blocks
from opt_kernels.works import MatrixSpec
from opt_paramgroups import TENSOR_PARALLEL_AXES, ParamId, ParamMeta

TENSOR_PARALLEL = "tensor parallel"
MAX_PEERS = 256
"""Ranks along an axis that exchange matrices directly; more are reached in two hops. Libraries need memory and
connections for each peer, and an all-to-all of a thousand ranks may fail: https://github.com/NVIDIA/nccl/issues/1191.
"""
NODE_RANKS = 8
"""Successive ranks of an axis that are likely to be connected closely."""

Splits = Mapping[ParamId, MatrixSpec]  # of parameters whose rows are several matrices


class CutAxis(NamedTuple):
    """An axis of ranks over which a matrix is cut, or one of two hops along it."""

    name: str
    size: int
    of_mesh: int | None  # which axis of the DTensor's mesh; None: the tensor-parallel group
    hop: tuple[range, ...] = ()  # if it is one of two hops: the ranks of the whole axis that exchange with each other

    @property
    def is_tensor_parallel(self) -> bool:
        return self.of_mesh is None or self.name in TENSOR_PARALLEL_AXES


class ComputePlan(NamedTuple):
    """Matrices that are cut over the same axes, and the ranks that compute them."""

    axes: tuple[CutAxis, ...]  # in the order in which they cut; first those over which nothing is gathered
    layout: ComputeLayout
    tp_mode: TpMode | None  # muon_tp_mode if tensor parallelism cuts rows or columns, else None: it has no effect

    @property
    def tensor_parallel_axis(self) -> int | None:
        """Index of the axis whose parts the rule treats as tensor-parallel parts; None if there is none."""
        kept = self.axes[: self.layout.kept]
        return next((number for number, axis in enumerate(kept) if axis.is_tensor_parallel), None)


class _Cut(NamedTuple):
    """An axis and the dim it cuts."""

    axis: CutAxis
    dim: int


class _Arranged(NamedTuple):
    """How a matrix is computed. Matrices with equal values share collectives."""

    axes: tuple[CutAxis, ...]
    kept: int
    computes: Computes
    team: int
    tp_mode: TpMode | None


def plan_compute(
    rule: Rule,
    metas: Iterable[ParamMeta],  # of the unit's parameters, in the order of their collectives
    *,
    tensor_parallel: int,  # ranks that hold the parts of a matrix that is marked as tensor parallel
    team_of: Mapping[ParamId, int],  # the shard that a parameter is in: only its ranks compute together
    splits: Splits,  # of parameters with rows that are matrices of their own
) -> tuple[ComputePlan, ...]:
    """Plan which ranks compute the parameters of a matrix rule. Parameters that are whole on their ranks are left out.

    Matrices that tensor parallelism alone cuts follow the rule's `tp_mode`. Every other matrix is gathered on one rank,
    except tensor-parallel blocks in mode "blockwise" and stacks of matrices, which may be cut anywhere.

    Raises:
        ConfigError: a matrix cannot be gathered, or it must be and the rule does not support that; or blocks are
            unequal, and the rule sums over them; or the longer side of a part is not that of the matrix.
        LayoutError: parts are unequal, but the mode needs equal ones.
    """
    found: dict[_Arranged, list[SplitMatrix]] = {}
    for meta in metas:
        if cuts := _cuts(meta, tensor_parallel):
            arranged, matrix = _arrange(rule, meta, cuts, team_of.get(meta.id, 0))
            found.setdefault(arranged, []).append(matrix)
            if meta.id in splits:
                _check_groups(meta, sum(splits[meta.id].split_rows), arranged, matrix)
    plans = []
    for (axes, kept, computes, _, tp_mode), matrices in found.items():
        layout = compute_layout(matrices, sizes=tuple(axis.size for axis in axes), computes=computes, kept=kept)
        if tp_mode is TpMode.BLOCKWISE and sums_over_blocks(rule):
            _check_blocks(layout)
        is_longer = isinstance(rule, AdaptiveMuonRule) and rule.lines is Lines.LONGER
        if is_longer and tp_mode in (TpMode.DISTRIBUTED, TpMode.BLOCKWISE):
            _check_longer_sides(layout, tp_mode)
        plans.append(ComputePlan(axes, layout, tp_mode))
    return tuple(plans)


def _cuts(meta: ParamMeta, tensor_parallel: int) -> list[_Cut]:
    """Return the cuts of a parameter, in the order in which they are applied."""
    if not meta.is_dtensor:
        if not meta.tensor_parallel or meta.partition_dim is None or tensor_parallel == 1:
            return []
        return [_Cut(CutAxis(TENSOR_PARALLEL, tensor_parallel, None), meta.partition_dim)]
    first = []
    last = []
    for number, placed in enumerate(meta.placements):
        if placed.shard_dim is not None and placed.size > 1:
            cut = _Cut(CutAxis(placed.axis, placed.size, number), placed.shard_dim)
            if placed.cuts_last:
                last.append(cut)
            else:
                first.append(cut)
    return [*first, *reversed(last)]


def _arrange(rule: Rule, meta: ParamMeta, cuts: list[_Cut], team: int) -> tuple[_Arranged, SplitMatrix]:
    sides = [cut for cut in cuts if cut.dim >= len(meta.shape) - 2]  # the others assign whole matrices of a stack
    mode = rule.tp_mode if isinstance(rule, MatrixRule) else None
    by_mode = all(cut.axis.is_tensor_parallel for cut in sides) and len(sides) <= 1
    takes_parts = mode is TpMode.BLOCKWISE or not isinstance(rule, MatrixRule)  # the rule communicates itself
    kept = list(cuts)
    if not sides or (by_mode and takes_parts):
        computes = Computes.PART
    elif by_mode and mode is TpMode.DISTRIBUTED:
        computes = Computes.JOINT
    else:
        computes = Computes.OWNER
        for cut in sides:
            is_block = cut.axis.is_tensor_parallel and mode is TpMode.BLOCKWISE
            if not is_block:
                kept.remove(cut)
    listed = ", ".join(f"along dim {cut.dim} over {cut.axis.size} ranks ({cut.axis.name})" for cut in cuts)
    if computes is Computes.OWNER and not isinstance(rule, MatrixRule):
        raise ConfigError(
            f"optimizer={rule.name!r} needs whole matrices, but {meta.id} is cut {listed}, and only for an "
            "opt_kernels.rules.base.MatrixRule parts can be gathered; use 'muon', 'adaptive_muon' or 'soap'"
        )
    gathered_dims = set[int]()
    for cut in cuts:  # tensor parallelism must come first, so that its blocks are rows or columns
        if cut not in kept:
            gathered_dims.add(cut.dim)
        elif cut.dim in gathered_dims:
            raise ConfigError(
                f"muon_tp_mode='blockwise', but {meta.id} is cut {listed}: what one rank of {cut.axis.name!r} holds is "
                "not a block of rows or columns; set muon_tp_mode='duplicated', or apply tensor parallelism first"
            )
    # Under tensor parallelism by attributes, the shape in `meta` is that of the local part.
    shape = list(meta.shape)
    if not meta.is_dtensor:
        shape[cuts[0].dim] *= cuts[0].axis.size
    ordered = list(kept)
    for cut in cuts:
        num_parts = prod(other.axis.size for other in cuts if other.dim == cut.dim)
        has_equal_parts = shape[cut.dim] % num_parts == 0
        if cut not in kept:
            ordered += _hops(cut) if has_equal_parts else [cut]
    axes = tuple(cut.axis for cut in ordered)
    matrix = SplitMatrix(id=meta.id, shape=tuple(shape), dims=tuple(cut.dim for cut in ordered))
    in_effect = mode if any(cut.axis.is_tensor_parallel for cut in sides) else None
    return _Arranged(axes, len(kept), computes, team, in_effect), matrix


def _hops(cut: _Cut) -> list[_Cut]:
    """Divide an axis along which more than `MAX_PEERS` ranks would exchange into two.

    Only where the ranks along all axes that cut a dim have equal parts, which are then those of two cuts, too.
    """
    axis = cut.axis
    size = axis.size
    if size <= MAX_PEERS:
        return [cut]
    usable = [n for n in range(2, MAX_PEERS + 1) if size % n == 0 and size // n <= MAX_PEERS]
    if not usable:
        return [cut]
    local = next((n for n in usable if n >= NODE_RANKS), usable[-1])
    nodes = tuple(range(place, size, local) for place in range(local))
    within = tuple(range(first, first + local) for first in range(0, size, local))
    between = CutAxis(f"{axis.name} nodes", size // local, axis.of_mesh, nodes)
    inside = CutAxis(f"{axis.name} local", local, axis.of_mesh, within)
    return [_Cut(between, cut.dim), _Cut(inside, cut.dim)]


def split_rows(metas: Iterable[ParamMeta], *, split_qkv: bool) -> dict[ParamId, MatrixSpec]:
    """Return the parameters whose rows form several matrices for a matrix rule: heads, matrices of any sizes, matrices
    that have rows in turn, or with `split_qkv` fused q, k and v."""
    found = {}
    for meta in metas:
        if meta.head_rows:
            found[meta.id] = MatrixSpec(split_rows=meta.head_group, by_group=True)
        elif rows := meta.split_sizes or meta.split_rows or (meta.qkv_split_shapes if split_qkv else ()):
            found[meta.id] = MatrixSpec(split_rows=rows)
    return found


def _check_groups(meta: ParamMeta, rows: int, arranged: _Arranged, matrix: SplitMatrix) -> None:
    """Raise unless every block that the rule treats as one matrix contains whole groups of rows."""
    sizes = tuple(axis.size for axis in arranged.axes)
    kinds = {
        "head_rows": "heads",
        "split_sizes": "matrices",
        "split_rows": "groups",
        "qkv_split_shapes": "query groups",
    }
    name = next(name for name in kinds if getattr(meta, name))
    words = f"{name}={getattr(meta, name)}: {kinds[name]}"
    for at in product(*map(range, sizes[: arranged.kept])):
        block = matrix.block(sizes, at)
        local_rows = block.shape[-2]
        if local_rows % rows or block.offset[-2] % rows:
            raise ConfigError(
                f"{meta.id}: {words} of {rows} rows are cut: {local_rows} of {matrix.shape[-2]} rows are on one rank; "
                "give each rank whole groups, or set muon_tp_mode='duplicated'"
            )


def _check_blocks(layout: ComputeLayout) -> None:
    """Raise unless the tensor-parallel blocks of each matrix are equal."""
    sizes = layout.sizes
    positions = list(product(*map(range, sizes[: layout.kept])))
    for matrix in layout.matrices:
        shapes = {matrix.block(sizes, at).shape[-2:] for at in positions}
        if len(shapes) > 1:
            raise ConfigError(
                f"muon_tp_mode='blockwise', but {matrix.id} of shape {matrix.shape} is cut into unequal "
                "blocks, and this adaptive_muon_moment2_method sums over them; set muon_tp_mode='duplicated'"
            )


def _check_longer_sides(layout: ComputeLayout, tp_mode: TpMode) -> None:
    """Raise unless parts have their longer side, whose lines have second moments, where the matrix has its own."""
    for matrix in layout.matrices:
        rows, cols = matrix.shape[-2:]
        part_rows, part_cols = matrix.block(layout.sizes, (0,) * layout.kept).shape[-2:]
        if (part_rows < part_cols) != (rows < cols):
            raise ConfigError(
                f"adaptive_muon_lines='longer', but muon_tp_mode={tp_mode.value!r} cuts {matrix.id} of shape "
                f"{matrix.shape} into parts of {(part_rows, part_cols)}, of which the longer side is the other one; "
                "set adaptive_muon_lines to 'rows' or 'cols', or muon_tp_mode='duplicated'"
            )
