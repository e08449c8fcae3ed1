"""Alignment of flat buffers: the multiples that starts, buckets and shards are rounded up to, and why each is there."""

from math import lcm

START_MULTIPLE = 64
"""Elements. Every parameter starts on a multiple of it: 128 bytes in 16-bit formats, a whole cache line."""

BUCKET_MULTIPLE = 128
"""Elements. Every bucket ends on a multiple of it, so a kernel may walk it in rows of 128 without a tail."""

HIGH_BUSBW_MULTIPLE = 2**16
"""Elements. Collectives reach full bus bandwidth only when the chunk each rank sends is a large power of two."""

SHARD_MULTIPLE = 64
"""Elements, the default. Shards cut on multiples of it are vectorised alike, so their bits agree at any world size."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def start_multiple(shard_multiple: int) -> int:
    """Elements that every parameter's start is a multiple of; with 64 or less it is 64.

    A start that is a multiple of ``shard_multiple`` keeps every cut, counted from the parameter's own first element,
    on that multiple too: blocks of a block-quantised state are then never split between ranks.
    """
    return lcm(START_MULTIPLE, shard_multiple)


def bucket_multiple(num_shards: int, *, shard_multiple: int, pad_for_high_busbw: bool) -> int:
    """Elements that every bucket's end is a multiple of, such that ``num_shards`` equal shards of it are well cut."""
    multiple = lcm(num_shards, BUCKET_MULTIPLE, num_shards * shard_multiple)
    return lcm(multiple, HIGH_BUSBW_MULTIPLE) if pad_for_high_busbw else multiple


def whole_shard_multiple(num_shards: int, *, shard_multiple: int, pad_for_high_busbw: bool) -> int:
    """Elements that every *shard* of a whole-parameter bucket is a multiple of, so that shards start aligned."""
    bucket = bucket_multiple(num_shards, shard_multiple=1, pad_for_high_busbw=pad_for_high_busbw)
    return lcm(start_multiple(shard_multiple), bucket // num_shards)
