"""Which rows of an attention layer's weights make the queries and keys of which heads, for `QKClip`."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from torch import nn


class Role(Enum):
    """What rows of a weight contribute to the logits of their heads."""

    QUERY = auto()  # scaled by gamma^alpha
    KEY = auto()  # scaled by gamma^(1 - alpha)
    ROTARY_QUERY = auto()  # meets a key that all heads share: scaled by gamma
    OTHER = auto()  # values, gates

    def exponent(self, alpha: float) -> float:
        """Of gamma."""
        return {Role.QUERY: alpha, Role.KEY: 1.0 - alpha, Role.ROTARY_QUERY: 1.0, Role.OTHER: 0.0}[self]


class Segment(NamedTuple):
    """Consecutive rows of one role."""

    num_rows: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """How the rows of a weight (rows, in) or a bias (rows,) belong to heads: `segments`, once for each query group."""

    param: nn.Parameter
    segments: tuple[Segment, ...]

    @property
    def rows_per_group(self) -> int:
        """Of all roles."""
        return sum(segment.num_rows for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention layer. All numbers are those of the whole layer, also where tensor parallelism cuts it."""

    num_heads: int
    num_query_groups: int
    rows: tuple[HeadRows, ...]


def fused_qkv(
    weight: nn.Parameter,  # (rows, in); query, key and value of the first query group, then of the second, ...
    bias: nn.Parameter | None = None,  # (rows,)
    *,
    num_heads: int,
    num_query_groups: int | None = None,  # None: as many as heads
    head_dim: int,
    value_dim: int | None = None,  # None: `head_dim`
    gate_dim: int = 0,  # rows for each head between query and key, of a gate on the attention's output
) -> Attention:
    """Attention with one fused projection, in Megatron-Core's order of rows."""
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
    num_query_groups: int | None = None,  # None: as many as heads
    head_dim: int,
) -> Attention:
    """Attention with projections of their own for queries and keys."""
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
    """Multi-head latent attention: what makes each head's query, and its key and value without the rotary part."""
    queries = (Segment(nope_dim, Role.QUERY), Segment(rope_dim, Role.ROTARY_QUERY))
    keys = (Segment(nope_dim, Role.KEY), Segment(value_dim, Role.OTHER))
    rows = (*_alike(queries, query_up), *_alike(keys, key_value_up))
    return Attention(num_heads=num_heads, num_query_groups=num_heads, rows=rows)


def _alike(segments: tuple[Segment, ...], *params: nn.Parameter | None) -> tuple[HeadRows, ...]:
    return tuple(HeadRows(param=param, segments=segments) for param in params if param is not None)
