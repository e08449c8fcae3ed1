"""Layouts: which element of which parameter is on which rank. Pure functions of integers."""

from opt_distributed.layout.layout import (
    Bucket,
    Layout,
    LayoutError,
    ParamShape,
    Piece,
    Shape,
    Slot,
    flat_layout,
    replicated_layout,
)
from opt_distributed.layout.whole import (
    Block,
    ComputeLayout,
    Computes,
    OwnerLoad,
    SplitMatrix,
    compute_layout,
    owner_load,
    update_cost,
    whole_layout,
)

__all__ = [
    "Block", "Bucket", "ComputeLayout", "Computes", "Layout", "LayoutError", "OwnerLoad", "ParamShape",
    "Piece", "Shape", "Slot", "SplitMatrix", "compute_layout", "flat_layout", "owner_load", "replicated_layout",
    "update_cost", "whole_layout",
]  # fmt: skip
