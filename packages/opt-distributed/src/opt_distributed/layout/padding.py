"""Alignment of flat buffers: the multiples that starts, buckets and shards are rounded up to, with reasons."""

from math import lcm

START_MULTIPLE = 64
"""Elements. Every parameter starts on a multiple of it: 128 bytes in 16-bit formats, a whole cache line."""

BUCKET_MULTIPLE = 128
"""Elements. Every bucket ends on a multiple of it, so that kernels can process it in rows of 128 elements."""

HIGH_BUSBW_MULTIPLE = 2**16
"""Elements. Collectives reach full bus bandwidth only if the chunk that each rank sends is a large power of two."""

SHARD_MULTIPLE = 64
"""Elements, the default. Shards cut on its multiples are vectorised equally, so that bits agree at any world size."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def start_multiple(shard_multiple: int) -> int:
    """The multiple, in elements, on which every parameter starts: lcm(64, ``shard_multiple``).

    If a start is a multiple of ``shard_multiple``, every cut is one too, counted from the parameter's own first
    element. So blocks of a block-quantised state are never split between ranks.
    """
    return lcm(START_MULTIPLE, shard_multiple)


def bucket_multiple(num_shards: int, *, shard_multiple: int, pad_for_high_busbw: bool) -> int:
    """The multiple, in elements, on which every bucket ends, so that it divides into ``num_shards`` aligned shards."""
    multiple = lcm(num_shards, BUCKET_MULTIPLE, num_shards * shard_multiple)
    return lcm(multiple, HIGH_BUSBW_MULTIPLE) if pad_for_high_busbw else multiple
