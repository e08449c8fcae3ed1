"""Layouts: which element of which parameter is on which rank. Pure functions of integers."""

from opt_distributed.layout.compute import Block, ComputeLayout, Computes, ComputeSlot, SplitMatrix, compute_layout
from opt_distributed.layout.layout import Bucket, Layout, LayoutError, Owned, ParamShape, Piece, Slot
from opt_distributed.layout.layouts import AS_IT_CAME, LAYOUTS, LayoutKind, LayoutSizes, Wanted, layout_kind
from opt_distributed.layout.planners import flat_layout, imbalance, replicated_layout, update_cost, whole_layout

__all__ = [
    "AS_IT_CAME", "LAYOUTS", "Block", "Bucket", "ComputeLayout", "ComputeSlot", "Computes", "Layout", "LayoutError",
    "LayoutKind", "LayoutSizes", "Owned", "ParamShape", "Piece", "Slot", "SplitMatrix", "Wanted", "compute_layout",
    "flat_layout", "imbalance", "layout_kind", "replicated_layout", "update_cost", "whole_layout",
]  # fmt: skip
