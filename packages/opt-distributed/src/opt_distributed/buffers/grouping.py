"""Which parameters share a buffer, and the layout of each buffer. Pure functions of parameter metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from opt_config import DistributedDataParallelConfig
from opt_distributed.layout import Layout, LayoutError, ParamShape, flat_layout, replicated_layout, whole_layout
from opt_distributed.layout.padding import SHARD_MULTIPLE
from opt_paramgroups import ParamId, ParamMeta

IsWhole = Callable[[ParamMeta], bool]
"""Whether a rule needs the parameter whole, so that sharding must not cut it."""


def nothing_whole(meta: ParamMeta) -> bool:
    """Cut any parameter: for elementwise rules, which can update any part of it."""
    return False


def matrices_whole(meta: ParamMeta) -> bool:
    """Keep the parameters of matrix rules whole: matrices that are neither embedding nor output."""
    return meta.moved_as_matrix


class BufferKey(NamedTuple):
    """Parameters with the same key share a buffer."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool
    is_whole: bool

    def __str__(self) -> str:
        kind = ("expert" if self.is_expert else "dense") + (" whole" if self.is_whole else "")
        dtypes = f"{self.param_dtype}, {self.grad_dtype} gradients".replace("torch.", "")
        return f"{kind} {dtypes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """One buffer: its key, its parameters in registration order, its layout."""

    key: BufferKey
    params: tuple[ParamShape, ...]
    layout: Layout


class NumShards(NamedTuple):
    """The number of ranks that shard each kind of buffer; 1 if it is not sharded."""

    dense: int
    expert: int


def default_bucket_size(num_ranks: int) -> int:
    """Elements after which a bucket closes: large enough that every rank sends a million of them in each bucket."""
    return max(40_000_000, 1_000_000 * num_ranks)


def plan_buffers(
    metas: Mapping[ParamId, ParamMeta],
    config: DistributedDataParallelConfig,
    *,
    num_shards: NumShards,
    num_ranks: int,  # dense replicas, over all instances
    is_whole: IsWhole = nothing_whole,
    shard_multiple: int = SHARD_MULTIPLE,
) -> tuple[BufferPlan, ...]:
    """The buffers of a model chunk, in order of first appearance.

    Without overlap, every buffer has one bucket. `num_buckets` applies to dense buckets and to those of experts
    separately, because dense replicas may hold different experts and must cut their buffers equally.

    Raises:
        LayoutError: a parameter is a DTensor, which is laid out already; or ``shard_multiple`` is below 1.
    """
    by_key: dict[BufferKey, list[ParamShape]] = {}
    for meta in metas.values():
        if meta.is_dtensor:
            raise LayoutError(
                f"{meta.id} is a DTensor, laid out already; leave the model unwrapped, the step takes it as is"
            )
        key = _key(meta, config, is_whole)
        shape = ParamShape(id=meta.id, shape=meta.shape, shared_embedding=meta.is_on_several_stages)
        by_key.setdefault(key, []).append(shape)
    sizes = {
        is_expert: _bucket_size(
            config, numel=sum(meta.numel for meta in metas.values() if meta.is_expert == is_expert), num_ranks=num_ranks
        )
        for is_expert in (False, True)
    }
    return tuple(
        BufferPlan(
            key=key,
            params=tuple(params),
            layout=_layout(
                key, params, config, num_shards=num_shards, size=sizes[key.is_expert], multiple=shard_multiple
            ),
        )
        for key, params in by_key.items()
    )


def _key(meta: ParamMeta, config: DistributedDataParallelConfig, is_whole: IsWhole) -> BufferKey:
    return BufferKey(
        param_dtype=meta.stored_dtype,
        grad_dtype=torch.float32 if config.grad_reduce_in_fp32 else meta.dtype,
        is_expert=meta.is_expert,
        is_whole=config.use_distributed_optimizer and is_whole(meta),
    )


def _bucket_size(config: DistributedDataParallelConfig, *, numel: int, num_ranks: int) -> int | None:
    if not (config.overlap_grad_reduce or config.overlap_param_gather):
        return None
    if config.num_buckets is not None:
        return max(-(-numel // config.num_buckets), 1)
    return config.bucket_size if config.bucket_size is not None else default_bucket_size(num_ranks)


def _layout(
    key: BufferKey,
    params: list[ParamShape],
    config: DistributedDataParallelConfig,
    *,
    num_shards: NumShards,
    size: int | None,
    multiple: int,
) -> Layout:
    if not config.use_distributed_optimizer:
        return replicated_layout(params, bucket_size=size)
    planner = whole_layout if key.is_whole else flat_layout
    shards = num_shards.expert if key.is_expert else num_shards.dense
    return planner(
        params,
        num_shards=shards,
        bucket_size=size,
        shard_multiple=multiple,
        pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
    )
