"""Fused projections of queries, keys and values, whose rows are found in the configuration of their layer."""

from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["fused_qkv_rows"]

_NAME = "linear_qkv.weight"  # in Megatron-Core's attention


def fused_qkv_rows(roots: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """The rows of q, k and v in one query group, by the `id()` of a fused weight; with an output gate also its rows.

    As in Megatron-Core, a fused weight is a matrix called `*linear_qkv.weight`. The innermost module around it with a
    transformer `config` says how many heads there are. A weight whose rows, on this rank, are not whole query groups is
    left out: it is one matrix.

    `roots` are the chunks of a model without wrappers.
    """
    found: dict[int, tuple[int, ...]] = {}
    for root in roots:
        for name, param in root.named_parameters():
            if not name.endswith(_NAME) or param.dim() != 2:
                continue
            rows = _rows_of_config(_config_around(root, name))
            if rows and param.shape[0] % sum(rows) == 0:
                found[id(param)] = rows
    return found


def _config_around(root: nn.Module, name: str) -> Any:
    """The transformer configuration of the innermost module that contains a parameter; None without one."""
    path = name.rpartition(".")[0]
    while True:
        config = getattr(root.get_submodule(path), "config", None)
        if all(getattr(config, field, None) for field in ("num_attention_heads", "num_query_groups", "kv_channels")):
            return config
        if not path:
            return None
        path = path.rpartition(".")[0]


def _rows_of_config(config: Any) -> tuple[int, ...]:
    if config is None:
        return ()
    of_queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gate = (of_queries,) if getattr(config, "attention_output_gate", False) else ()
    return (of_queries, *gate, config.kv_channels, config.kv_channels)
