"""A kernel that is compiled ahead of time: what it is compiled for, and the gates on the result."""

from dataclasses import dataclass
from typing import Any

import torch

from opt_kernels.backends.triton.formats import BLOCK, NUM_WARPS, LaunchFormats, triton_dtype
from opt_kernels.codecs import StateCodec
from opt_kernels.codecs.narrow import REMAINDERS

CHUNK = 16384
# Lane-instructions that an H200 issues per byte moved: 132 processors of 4 warps of 32 lanes at 1.75 GHz, 4.3 TB/s.
ISSUED_PER_BYTE = 132 * 4 * 32 * 1.75e9 / 4.3e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Number of vector accesses of one thread to a tile on the full-chunk path, by width."""

    load_128: int = 0
    load_64: int = 0
    store_128: int = 0
    store_64: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel, its compile-time arguments, and the gates on the compiled result."""

    name: str
    kernel: Any  # a compiled-from-source function has no type that a checker knows
    signature: dict[str, str]  # of the arguments that are not constants
    constants: dict[str, Any]
    aligned: tuple[str, ...]  # arguments divisible by 16
    num_warps: int = NUM_WARPS
    num_stages: int = 3
    fusion: bool = False
    max_registers: int = 255
    widths: Widths | None = None  # None: not a sweep
    tile_read_bytes: int = 0  # by one program at a time; 0: not bound by memory
    max_instructions: float | None = None  # for each element of a full chunk; None: not counted
    matrix: bool = False  # uses tensor cores and shared memory
    targets: tuple[str, ...] | None = None  # None: all
    descriptors: bool = False  # for Hopper and the Blackwell of data centres only
    shared_allowed: bool = False


def widths(formats: LaunchFormats) -> Widths:
    """Expected accesses of a sweep: each column is accessed `vector` elements at a time, at most 16 bytes."""
    reads = [formats.grad.itemsize, *(d.itemsize for d in formats.states)]
    writes = [d.itemsize for d in formats.states]
    if formats.remainder:
        reads = [*reads, 2, formats.main.itemsize]
        writes = [*writes, 2, formats.main.itemsize]
    else:
        reads = [*reads, formats.main.itemsize]
        writes = [*writes, formats.main.itemsize]
        writes += [] if formats.out is None else [formats.out.itemsize]
    return widths_of(reads, writes, formats.vector)


def widths_of(reads: list[int], writes: list[int], vector: int) -> Widths:
    """Expected accesses to columns of these bytes per element, `vector` elements at a time."""
    elements = BLOCK // (NUM_WARPS * 32)

    def count(sizes: list[int], width: int) -> int:
        return sum(elements * size // width for size in sizes if min(16, vector * size) == width)

    return Widths(
        load_128=count(reads, 16), load_64=count(reads, 8), store_128=count(writes, 16), store_64=count(writes, 8)
    )


def sweep(
    name: str, kernel: Any, formats: LaunchFormats, codecs: dict[str, StateCodec], extra: dict[str, Any]
) -> Variant:
    """Variant of an elementwise sweep in these formats."""
    scaled = any(codec.block for codec in codecs.values())
    lanes = 2 + len(codecs) + sum(codec.block > 0 for codec in codecs.values()) + 3
    reads = formats.grad.itemsize + formats.main.itemsize
    if formats.remainder and formats.out is not None:
        reads += formats.out.itemsize  # the other half of the main
    return Variant(
        name=name,
        kernel=kernel,
        signature={"records": "*i64", "grads": "*i64", "block": "*fp32"},
        constants={
            "GRAD": triton_dtype(formats.grad),
            "MAIN": triton_dtype(formats.main),
            "OUT": None if formats.out is None else triton_dtype(formats.out),
            "REMAINDER": formats.remainder,
            "IEEE": formats.ieee,
            "WIDTH": 8 if lanes <= 8 else 16,
            "CHUNK": CHUNK,
            "BLOCK": BLOCK,
            "E": formats.vector,
        }
        | extra,
        aligned=("records", "grads", "block"),
        fusion=not formats.ieee,
        # With many states, fewer programs are enough for the bytes in flight, which a separate gate checks.
        max_registers=96 + 28 * max(0, len(codecs) - 2),
        widths=widths(formats) if formats.aligned else None,
        tile_read_bytes=BLOCK * (reads + sum(d.itemsize for d in formats.states)) if formats.aligned else 0,
        max_instructions=ISSUED_PER_BYTE * bytes_moved(formats, codecs) if formats.aligned else None,
        shared_allowed=scaled,
    )


def bytes_moved(formats: LaunchFormats, codecs: dict[str, StateCodec]) -> float:
    """Bytes read and written per element, block scales included."""
    return formats.bytes_moved + sum(2 * 4 / codec.block for codec in codecs.values() if codec.block)


def formats(
    grad: torch.dtype = torch.float32,
    main: torch.dtype = torch.float32,  # or that of a remainder
    out: torch.dtype | None = None,
    states: tuple[torch.dtype, ...] = (),
    aligned: bool = True,
) -> LaunchFormats:
    """LaunchFormats of a sweep; every dtype defaults to float32."""
    return LaunchFormats(grad, main, out, states, aligned, remainder=main in REMAINDERS)
