"""The planner of buffers: which parameters share one, and its layout. Pure functions of parameter metadata.

Wrapped chunks and plain ones ask the same function, so that the optimizer's plan and a wrapper's buffers are one thing.
To add a layout, write its planner in a file of `opt_distributed/layout`, and a `LayoutKind` that `kind_of` returns.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm

import torch

from opt_config import Replicated, Sharding, WholeParams
from opt_distributed.comm.roles import Roles
from opt_distributed.layout import Layout, ParamShape, Piece, flat_layout, replicated_layout, update_cost, whole_layout
from opt_distributed.layout.layout import SHARD_MULTIPLE
from opt_kernels.codecs import BLOCK
from opt_paramgroups import Metas, ParamMeta

CODED_MULTIPLE = lcm(SHARD_MULTIPLE, BLOCK)
"""Elements. Cuts on its multiples divide no block of any built-in format, whatever rule is chosen later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKind:
    """One of the layouts that `kind_of` chooses from."""

    name: str  # in plans
    plan: Callable[..., Layout]  # takes the arguments of `flat_layout`
    is_sharded: bool  # whether parameters move into a buffer of which each rank owns a shard
    cuts: bool = False  # whether a parameter may be cut at any element: refused for rules that need whole matrices

    @property
    def assigns_whole(self) -> bool:
        """Whether every parameter is in the shard of one rank."""
        return self.is_sharded and not self.cuts


def _whole_copies(params: Iterable[ParamShape], *, bucket_size: int | None, **unused: object) -> Layout:
    return replicated_layout(params, bucket_size=bucket_size)


# The local shard of the caller's DTensor, which is not sharded again.
PRE_SHARDED = LayoutKind(name="as it came", plan=_whole_copies, is_sharded=False)
REPLICATED = LayoutKind(name="replicated", plan=_whole_copies, is_sharded=False)
WHOLE = LayoutKind(name="whole parameters", plan=whole_layout, is_sharded=True)
FLAT = LayoutKind(name="flat shards", plan=flat_layout, is_sharded=True, cuts=True)


def kind_of(sharding: Sharding, meta: ParamMeta, *, needs_whole: bool) -> LayoutKind:
    """Choose the layout of a parameter, given whether its rule updates whole matrices."""
    if meta.is_dtensor:
        return PRE_SHARDED
    if isinstance(sharding, Replicated):
        return REPLICATED
    if isinstance(sharding, WholeParams) and needs_whole:
        return WHOLE
    return FLAT


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSizes:
    """Sizes of the data-parallel groups of dense parameters and experts, and of their tensor-parallel groups."""

    dense: int = 1
    expert: int = 1
    dense_tp: int = 1
    expert_tp: int = 1

    @classmethod
    def of(cls, roles: Roles) -> "WorldSizes":
        """Return the sizes of the groups of `roles`."""
        dense = roles.dense
        expert = roles.expert
        return cls(dense=dense.dp.size, expert=expert.dp.size, dense_tp=dense.tp.size, expert_tp=expert.tp.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """Parameters whose gradients are communicated together: one dtype, one family, one layout."""

    chunk: int | None  # the wrapped model chunk whose buffer this is; None: of plain chunks
    dtype: torch.dtype  # as the parameters are stored
    grad_dtype: torch.dtype
    is_expert: bool
    kind: LayoutKind
    params: tuple[ParamShape, ...]  # in registration order
    layout: Layout

    @property
    def name(self) -> str:
        """For plans and errors; unique in a plan."""
        of_chunk = "" if self.chunk is None else f"chunk {self.chunk}, "
        family = "experts" if self.is_expert else "dense"
        grads = "" if self.chunk is None else f", {short(self.grad_dtype)} gradients"
        return f"{of_chunk}{short(self.dtype)} {family}, {self.kind.name}{grads}"

    def owned(self, rank: int) -> Iterator[tuple[int, Piece]]:
        """Yield what shard `rank` keeps, as `Layout.owned`. DTensor parameters are included even if their local shard
        is empty, because this rank may still compute the update of such a matrix."""
        if self.kind is PRE_SHARDED:
            wholes = ((param.id, slice(0, param.numel)) for param in self.params)
            return ((0, Piece(id, whole, whole)) for id, whole in wholes)
        return self.layout.owned(rank % self.layout.num_shards)


def short(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `fp32`, `bf16`, `fp16`, else torch's name without `torch.`."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def default_bucket_size(num_ranks: int) -> int:
    """Elements after which a bucket closes: large enough that every rank sends a million of them in each bucket."""
    return max(40_000_000, 1_000_000 * num_ranks)


def plan_buffers(
    metas: Metas,
    *,
    sharding: Sharding,
    sizes: WorldSizes,
    needs_whole: Callable[[ParamMeta], bool],  # whether the rule of a parameter updates whole matrices
    grad_dtype: Callable[[ParamMeta], torch.dtype],
    bucket_size: Callable[[int], int | None],  # given the elements of all dense parameters or of all experts
    shard_multiple: int = CODED_MULTIPLE,
    pad_for_high_busbw: bool = False,
    chunk: int | None = None,
) -> tuple[BufferPlan, ...]:
    """Plan the buffers of these parameters, in order of first appearance.

    The sizes of buckets of dense parameters and of experts are separate, because dense replicas may hold different
    experts and must cut their buffers equally.

    Raises:
        LayoutError: ``shard_multiple`` is below 1.
    """
    found: dict[tuple[torch.dtype, torch.dtype, bool, LayoutKind], list[ParamShape]] = {}
    numels = {False: 0, True: 0}
    for id, meta in metas.items():
        kind = kind_of(sharding, meta, needs_whole=needs_whole(meta))
        numels[meta.is_expert] += meta.numel
        stored = meta.local_shape if meta.is_dtensor else meta.shape
        shape = ParamShape(id=id, shape=tuple(stored), shared_embedding=meta.is_on_several_stages)
        if isinstance(sharding, WholeParams) and sharding.by_owner:
            # On all tensor-parallel ranks: one of them updates a matrix that is cut, each any other.
            tp = sizes.expert_tp if meta.is_expert else sizes.dense_tp
            whole = list(stored)
            num_updates = tp
            if meta.tensor_parallel and meta.partition_dim is not None:
                whole[meta.partition_dim] *= tp
                num_updates = 1
            shape = replace(shape, work=update_cost(tuple(whole)) * num_updates)
        found.setdefault((meta.stored_dtype, grad_dtype(meta), meta.is_expert, kind), []).append(shape)
    plans = []
    for (dtype, grads, is_expert, kind), params in found.items():
        layout = kind.plan(
            params,
            num_shards=sizes.expert if is_expert else sizes.dense,
            bucket_size=bucket_size(numels[is_expert]),
            shard_multiple=shard_multiple,
            pad_for_high_busbw=pad_for_high_busbw,
        )
        plan = BufferPlan(
            chunk=chunk,
            dtype=dtype,
            grad_dtype=grads,
            is_expert=is_expert,
            kind=kind,
            params=tuple(params),
            layout=layout,
        )
        plans.append(plan)
    return tuple(plans)
