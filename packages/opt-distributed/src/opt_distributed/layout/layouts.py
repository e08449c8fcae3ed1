"""The table of layouts: which parameters each is for, what it costs, and what it excludes.

To add a layout, write its planner in a file of this folder, and a row here. The first row that applies is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opt_config import Replicated, Sharding, WholeParams
from opt_distributed.layout.layout import Layout, ParamShape
from opt_distributed.layout.planners import flat_layout, replicated_layout, whole_layout
from opt_paramgroups import ParamMeta


class LayoutSizes(NamedTuple):
    """The numbers that a planner takes; see `flat_layout`."""

    num_shards: int
    bucket_size: int | None
    shard_multiple: int
    pad_for_high_busbw: bool = False


class Wanted(NamedTuple):
    """What decides on the layout of a parameter."""

    sharding: Sharding
    meta: ParamMeta
    needs_whole: bool  # whether its rule updates whole matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKind:
    """A row of the table."""

    name: str  # in plans
    plan: Callable[[Sequence[ParamShape], LayoutSizes], Layout]
    applies: Callable[[Wanted], bool]
    is_sharded: bool  # whether parameters move into a buffer of which each rank owns a shard
    cuts: bool = False  # whether a parameter may be cut at any element: refused for rules that need whole matrices
    costs: str = ""  # in addition to the state of the parameters

    def __repr__(self) -> str:
        return f"LayoutKind({self.name!r})"


AS_IT_CAME = LayoutKind(
    name="as it came",  # the local shard of the caller's DTensor
    plan=lambda params, sizes: replicated_layout(params, bucket_size=sizes.bucket_size),
    applies=lambda wanted: wanted.meta.is_dtensor,
    is_sharded=False,
    costs="what the caller's mesh shards is not sharded again",
)
REPLICATED = LayoutKind(
    name="replicated",
    plan=lambda params, sizes: replicated_layout(params, bucket_size=sizes.bucket_size),
    applies=lambda wanted: isinstance(wanted.sharding, Replicated),
    is_sharded=False,
    costs="the whole state on every rank",
)
WHOLE = LayoutKind(
    name="whole parameters",
    plan=lambda params, sizes: whole_layout(params, **sizes._asdict()),
    applies=lambda wanted: isinstance(wanted.sharding, WholeParams) and wanted.needs_whole,
    is_sharded=True,
    costs="shards of unequal size: a chunk of each bucket travels twice, and a rank owns up to its share and a matrix",
)
FLAT = LayoutKind(
    name="flat shards",
    plan=lambda params, sizes: flat_layout(params, **sizes._asdict()),
    applies=lambda wanted: True,
    is_sharded=True,
    cuts=True,
    costs="the rounding of starts and bucket ends",
)
LAYOUTS = (AS_IT_CAME, REPLICATED, WHOLE, FLAT)


def layout_kind(wanted: Wanted) -> LayoutKind:
    """Return the first layout that applies."""
    return next(kind for kind in LAYOUTS if kind.applies(wanted))
