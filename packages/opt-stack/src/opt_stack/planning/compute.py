"""`plan_compute`: which rank computes each matrix that is cut over ranks, as `ComputeLayout`s."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from opt_config import ConfigError
from opt_distributed.layout import ComputeLayout, Computes, SplitMatrix, compute_layout
from opt_kernels.matrices import TpMode
from opt_kernels.rules import MatrixRule, Rule
from opt_kernels.works import MatrixSpec
from opt_paramgroups import TENSOR_PARALLEL_AXES, ParamId, ParamMeta

TENSOR_PARALLEL = "tensor parallel"


class CutAxis(NamedTuple):
    """An axis of ranks over which a matrix is cut."""

    name: str
    size: int
    of_mesh: int | None  # which axis of the DTensor's mesh; None: the tensor-parallel group

    @property
    def is_tensor_parallel(self) -> bool:
        return self.of_mesh is None or self.name in TENSOR_PARALLEL_AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan:
    """Matrices that are cut over the same axes, and the ranks that compute them."""

    axes: tuple[CutAxis, ...]  # in the order in which they cut; first those over which nothing is gathered
    layout: ComputeLayout
    tp_mode: TpMode | None = None  # muon_tp_mode if it has an effect, else None

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
    splits: Mapping[ParamId, MatrixSpec],  # of parameters with rows that are matrices of their own
) -> tuple[ComputePlan, ...]:
    """Plan which ranks compute the parameters of a matrix rule. Parameters that are whole on their ranks are left out.

    Matrices that tensor parallelism alone cuts follow the rule's `tp_mode`. Every other matrix is gathered on one rank,
    except tensor-parallel blocks in mode "blockwise" and stacks of matrices, which may be cut anywhere.

    Raises:
        ConfigError: a matrix cannot be gathered, or it must be and the rule does not support that.
        LayoutError: parts are unequal, but the mode needs equal ones.
    """
    found: dict[_Arranged, list[SplitMatrix]] = {}
    for meta in metas:
        cuts = _cuts(meta, tensor_parallel)
        if cuts:
            arranged, matrix = _arrange(rule, meta, cuts, team_of.get(meta.id, 0))
            found.setdefault(arranged, []).append(matrix)
            if meta.id in splits:
                _check_groups(meta, sum(splits[meta.id].split_rows), arranged, matrix)
    return tuple(
        ComputePlan(
            axes=arranged.axes,
            layout=compute_layout(
                matrices,
                sizes=tuple(axis.size for axis in arranged.axes),
                computes=arranged.computes,
                kept=arranged.kept,
            ),
            tp_mode=arranged.tp_mode,
        )
        for arranged, matrices in found.items()
    )


def _cuts(meta: ParamMeta, tensor_parallel: int) -> list[_Cut]:
    """The cuts of a parameter, in the order in which they are applied."""
    if not meta.is_dtensor:
        if not meta.tensor_parallel or meta.partition_dim is None or tensor_parallel == 1:
            return []
        return [_Cut(CutAxis(TENSOR_PARALLEL, tensor_parallel, None), meta.partition_dim)]
    first: list[_Cut] = []
    last: list[_Cut] = []
    for number, placed in enumerate(meta.placements):
        if placed.shard_dim is not None and placed.size > 1:
            cut = _Cut(CutAxis(placed.axis, placed.size, number), placed.shard_dim)
            (last if placed.cuts_last else first).append(cut)
    return [*first, *reversed(last)]


def _arrange(rule: Rule, meta: ParamMeta, cuts: list[_Cut], team: int) -> tuple[_Arranged, SplitMatrix]:
    sides = [cut for cut in cuts if cut.dim >= len(meta.shape) - 2]  # the others assign whole matrices of a stack
    by_mode = all(cut.axis.is_tensor_parallel for cut in sides) and len(sides) <= 1
    mode = rule.tp_mode if isinstance(rule, MatrixRule) else None
    kept = [cut for cut in cuts if cut not in sides or (cut.axis.is_tensor_parallel and mode is TpMode.BLOCKWISE)]
    computes = Computes.OWNER
    takes_parts = mode is TpMode.BLOCKWISE or not isinstance(rule, MatrixRule)  # the rule communicates itself
    if not sides or (by_mode and takes_parts):
        kept, computes = cuts, Computes.PART
    elif by_mode and mode is TpMode.DISTRIBUTED:
        kept, computes = cuts, Computes.JOINT
    elif by_mode and mode is TpMode.DUPLICATED:
        computes = Computes.EVERY
    if computes.gathers and not isinstance(rule, MatrixRule):
        raise ConfigError(
            f"optimizer={rule.name!r} needs whole matrices, but {_described(meta, cuts)}, and only for an "
            "opt_kernels.rules.base.MatrixRule parts can be gathered; use 'muon', 'adaptive_muon' or 'soap'"
        )
    gathered = [cut for cut in cuts if cut not in kept]
    for number, cut in enumerate(cuts):  # tensor parallelism must come first, so that its blocks are rows or columns
        if cut in kept and any(other.dim == cut.dim and other not in kept for other in cuts[:number]):
            raise ConfigError(
                f"muon_tp_mode='blockwise', but {_described(meta, cuts)}: what one rank of {cut.axis.name!r} holds is "
                "not a block of rows or columns; set muon_tp_mode='duplicated', or apply tensor parallelism first"
            )
    ordered = [*kept, *gathered]
    # Under tensor parallelism by attributes, the shape in `meta` is that of the local part.
    shape = list(meta.shape)
    if not meta.is_dtensor:
        shape[cuts[0].dim] *= cuts[0].axis.size
    matrix = SplitMatrix(id=meta.id, shape=tuple(shape), dims=tuple(cut.dim for cut in ordered))
    blocks = mode is TpMode.BLOCKWISE and any(cut in sides for cut in kept)
    in_effect = mode if blocks or computes in (Computes.EVERY, Computes.JOINT) else None
    return _Arranged(tuple(cut.axis for cut in ordered), len(kept), computes, team, in_effect), matrix


def split_rows(metas: Iterable[ParamMeta], *, split_qkv: bool) -> dict[ParamId, MatrixSpec]:
    """The parameters whose rows form several matrices for a matrix rule: heads, matrices of any sizes, or with
    `split_qkv` fused q, k and v."""
    found = {}
    for meta in metas:
        if meta.head_rows:
            found[meta.id] = MatrixSpec(split_rows=(meta.head_rows,), by_group=True)
        elif rows := meta.split_sizes or (meta.qkv_split_shapes if split_qkv else ()):
            found[meta.id] = MatrixSpec(split_rows=rows)
    return found


def _check_groups(meta: ParamMeta, rows: int, arranged: _Arranged, matrix: SplitMatrix) -> None:
    """Raise unless every block that the rule treats as one matrix contains whole groups of rows."""
    sizes, words = tuple(axis.size for axis in arranged.axes), f"qkv_split_shapes={meta.qkv_split_shapes}: query groups"
    if meta.head_rows or meta.split_sizes:
        heads, parts = f"head_rows={meta.head_rows}: heads", f"split_sizes={meta.split_sizes}: matrices"
        words = heads if meta.head_rows else parts
    for at in product(*map(range, sizes[: arranged.kept])):
        block = matrix.block(sizes, at)
        if block.shape[-2] % rows or block.offset[-2] % rows:
            raise ConfigError(
                f"{meta.id}: {words} of {rows} rows are cut: "
                f"{block.shape[-2]} of {matrix.shape[-2]} rows are on one rank; give each rank whole groups, or set "
                "muon_tp_mode='duplicated'"
            )


def _described(meta: ParamMeta, cuts: Iterable[_Cut]) -> str:
    listed = ", ".join(f"along dim {cut.dim} over {cut.axis.size} ranks ({cut.axis.name})" for cut in cuts)
    return f"{meta.id} is cut {listed}"


WORDS: Mapping[Computes, str] = {
    Computes.PART: "each rank computes its own block",
    Computes.EVERY: "all ranks gather them, compute all, keep their parts",
    Computes.JOINT: "ranks compute their parts, products are summed",
    Computes.OWNER: "one rank gathers, computes and returns each, balanced by cost",
}


def compute_lines(plans: Iterable[ComputePlan]) -> Iterator[str]:
    """Lines for a printed plan: matrices by axes and by computing ranks, with muon_tp_mode if it has an effect."""
    counts: dict[str, int] = {}
    for plan in plans:
        ranks, names = " x ".join(str(axis.size) for axis in plan.axes), ", ".join(axis.name for axis in plan.axes)
        line = f"cut over {ranks} ranks ({names}): {WORDS[plan.layout.computes]}"
        line += ", each tensor-parallel block as a separate matrix" * (plan.tp_mode is TpMode.BLOCKWISE)
        line += "" if plan.tp_mode is None else f" (muon_tp_mode={plan.tp_mode.value!r})"
        counts[line] = counts.get(line, 0) + len(plan.layout.slots)
    for line, count in counts.items():
        yield f"{count} matri{'x' if count == 1 else 'ces'} {line}"
