"""Describe for `QKClip` which rows of attention weights produce the queries and keys of which heads."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from torch import nn


class Role(Enum):
    """What the output of a row is used for."""

    QUERY = auto()  # scaled by gamma^alpha
    KEY = auto()  # scaled by gamma^(1 - alpha)
    ROTARY_QUERY = auto()  # multiplied by a key that all heads share: scaled by gamma
    OTHER = auto()  # values, gates

    def exponent(self, alpha: float) -> float:
        """Return the exponent of gamma for rows of this role."""
        return {Role.QUERY: alpha, Role.KEY: 1.0 - alpha, Role.ROTARY_QUERY: 1.0, Role.OTHER: 0.0}[self]


class Segment(NamedTuple):
    """Consecutive rows of one role."""

    num_rows: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """The rows of a weight (rows, in) or a bias (rows,): `segments`, repeated for each query group."""

    param: nn.Parameter
    segments: tuple[Segment, ...]

    @property
    def rows_per_group(self) -> int:
        """The number of rows of one query group, of all roles."""
        return sum(segment.num_rows for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention layer. All numbers are those of the whole layer, also under tensor parallelism."""

    num_heads: int
    num_query_groups: int
    rows: tuple[HeadRows, ...]


def fused_qkv(
    weight: nn.Parameter,  # (rows, in); query, key and value of the first query group, then of the second, ...
    bias: nn.Parameter | None = None,  # (rows,)
    *,
    num_heads: int,
    num_query_groups: int | None = None,  # None: `num_heads`
    head_dim: int,
    value_dim: int | None = None,  # None: `head_dim`
    gate_dim: int = 0,  # rows per head, between query and key, of a gate on the attention output
) -> Attention:
    """Describe attention with one fused projection, in Megatron-Core's order of rows."""
    groups = num_query_groups or num_heads
    heads_per_group = num_heads // groups
    segments = (
        Segment(heads_per_group * head_dim, Role.QUERY),
        Segment(heads_per_group * gate_dim, Role.OTHER),
        Segment(head_dim, Role.KEY),
        Segment(head_dim if value_dim is None else value_dim, Role.OTHER),
    )
    return Attention(num_heads=num_heads, num_query_groups=groups, rows=_alike(segments, weight, bias))


def separate_qk(
    query: nn.Parameter,  # (num_heads * head_dim, in)
    key: nn.Parameter,  # (num_query_groups * head_dim, in)
    query_bias: nn.Parameter | None = None,
    key_bias: nn.Parameter | None = None,
    *,
    num_heads: int,
    num_query_groups: int | None = None,  # None: `num_heads`
    head_dim: int,
) -> Attention:
    """Describe attention with separate projections for queries and keys."""
    groups = num_query_groups or num_heads
    queries = (Segment(num_heads // groups * head_dim, Role.QUERY),)
    rows = (*_alike(queries, query, query_bias), *_alike((Segment(head_dim, Role.KEY),), key, key_bias))
    return Attention(num_heads=num_heads, num_query_groups=groups, rows=rows)


def latent_attention(
    query_up: nn.Parameter,  # (num_heads * (nope_dim + rope_dim), in)
    key_value_up: nn.Parameter,  # (num_heads * (nope_dim + value_dim), in)
    *,
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
) -> Attention:
    """Describe multi-head latent attention by the up-projections of queries, and of non-rotary keys and values."""
    queries = (Segment(nope_dim, Role.QUERY), Segment(rope_dim, Role.ROTARY_QUERY))
    keys = (Segment(nope_dim, Role.KEY), Segment(value_dim, Role.OTHER))
    rows = (*_alike(queries, query_up), *_alike(keys, key_value_up))
    return Attention(num_heads=num_heads, num_query_groups=num_heads, rows=rows)


def _alike(segments: tuple[Segment, ...], *params: nn.Parameter | None) -> tuple[HeadRows, ...]:
    return tuple(HeadRows(param=param, segments=segments) for param in params if param is not None)
