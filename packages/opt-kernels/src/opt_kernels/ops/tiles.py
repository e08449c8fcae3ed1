"""Cache tiles: a run is walked in pieces small enough to stay in the cache while several passes go over them.

A tile presents everything in the compute dtype: a view of the tensor itself where it is stored so, else a scratch copy
that is written back before the next tile. So a sweep over any mix of dtypes moves each byte to and from memory once.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.codecs import Plain, StateCodec, scale_name
from opt_kernels.ops.elements import Run, compute_dtype, rounds_by_chance
from opt_kernels.ops.remainder import torch_native as remainder
from opt_kernels.ops.rounding import torch_native as rounding

# Four float32 rows of this length are 4 MiB: within the cache of two cores, and long enough that the cost of starting
# an operation is small beside its work. A multiple of every codec's block and of 64: no vector straddles a cut.
TILE_NUMEL = 1 << 18


class Scratch:
    """Rows of one tile's length, each allocated when first asked for."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, torch.dtype], Tensor] = {}

    def row(self, name: str, dtype: torch.dtype, *, like: Tensor) -> Tensor:
        """As many elements of the row `name` as `like` has; what they hold is left over from an earlier tile."""
        key = (name, dtype)
        if key not in self._rows:
            self._rows[key] = torch.empty(TILE_NUMEL, dtype=dtype, device=like.device)
        return self._rows[key][: like.numel()]


class Tile(NamedTuple):
    """A piece of a run in the compute dtype. All (n,), n <= TILE_NUMEL."""

    main: Tensor  # updated by the sweep
    grad: Tensor  # scaled; may be the gradient itself: read only
    state: dict[str, Tensor]  # updated by the sweep, decoded, by name


class Divided(NamedTuple):
    """Runs by the way torch's fused sweeps can take them."""

    whole: list[Run]  # as they are
    cut: list[Run]  # a tile at a time


def divided(runs: Iterable[Run], codecs: Mapping[str, StateCodec], *, scale: float) -> Divided:
    """`runs` in two: those of one dtype throughout with nothing else to read or write, and the others."""
    parts = Divided([], [])
    for run in runs:
        (parts.whole if scale == 1.0 and _agrees(run, codecs) else parts.cut).append(run)
    return parts


def tiles(
    runs: Iterable[Run], codecs: Mapping[str, StateCodec], *, scale: float, stochastic_step: int | None = None
) -> Iterator[Tile]:
    """The tiles of all `runs` in order; what the caller does to one is stored when it asks for the next.

    With `stochastic_step`, the step, a bfloat16 main is rounded by chance.
    """
    scratch = Scratch()
    for run in runs:
        dtype = compute_dtype(run)
        for piece in _pieces(run, codecs):
            state = {name: _state(piece, name, codec, dtype, scratch) for name, codec in codecs.items()}
            tile = Tile(_main(piece, dtype, scratch), _grad(piece, scale, dtype, scratch), state)
            yield tile
            for name, codec in codecs.items():
                if state[name] is not piece.state[name]:
                    codec.encode_(piece.state[name], piece.state.get(scale_name(name)), state[name])
            _store_(piece, tile.main, scratch, stochastic_step)


def _agrees(run: Run, codecs: Mapping[str, StateCodec]) -> bool:
    dtype = compute_dtype(run)
    if run.main is None or run.out is not None or run.main.dtype is not dtype or run.grad.dtype is not dtype:
        return False
    return all(isinstance(codec, Plain) and run.state[name].dtype is dtype for name, codec in codecs.items())


def _pieces(run: Run, codecs: Mapping[str, StateCodec]) -> Iterator[Run]:
    if run.grad.numel() <= TILE_NUMEL:
        yield run
        return
    blocks = {scale_name(name): codec.block for name, codec in codecs.items() if codec.block}
    state = {name: torch.split(tensor, TILE_NUMEL // blocks.get(name, 1)) for name, tensor in run.state.items()}
    grads = torch.split(run.grad, TILE_NUMEL)
    mains = _split(run.main, len(grads))
    outs = _split(run.out, len(grads))
    remainders = _split(run.remainder, len(grads))
    for i, grad in enumerate(grads):
        states = {name: parts[i] for name, parts in state.items()}
        yield Run(grad, mains[i], outs[i], remainders[i], states, run.first + i * TILE_NUMEL)


def _split(tensor: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    return (None,) * count if tensor is None else torch.split(tensor, TILE_NUMEL)


def _state(piece: Run, name: str, codec: StateCodec, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    codes = piece.state[name]
    if isinstance(codec, Plain) and codes.dtype is dtype:
        return codes
    values = scratch.row(name, dtype, like=codes)
    codec.decode_(values, codes, piece.state.get(scale_name(name)))
    return values


def _main(piece: Run, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    if piece.main is not None and piece.main.dtype is dtype:
        return piece.main
    values = scratch.row("main", dtype, like=piece.grad)
    if piece.main is not None:
        return values.copy_(piece.main)
    assert piece.out is not None
    assert piece.remainder is not None
    remainder.join_(values, piece.out, piece.remainder)
    return values


def _grad(piece: Run, scale: float, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    if piece.grad.dtype is dtype and scale == 1.0:
        return piece.grad
    values = scratch.row("grad", dtype, like=piece.grad)
    if piece.grad.dtype is dtype:
        return torch.mul(piece.grad, scale, out=values)
    values.copy_(piece.grad)
    return values if scale == 1.0 else values.mul_(scale)


def _store_(piece: Run, main: Tensor, scratch: Scratch, stochastic_step: int | None) -> None:
    if piece.main is None:
        assert piece.out is not None
        assert piece.remainder is not None
        words = scratch.row("words", torch.int32, like=main)
        remainder.split_(piece.out, piece.remainder, main, scratch=words)
        return
    if stochastic_step is not None and rounds_by_chance(piece):
        rounding.round_(piece.main, main, first=piece.first, step=stochastic_step)
    elif main is not piece.main:
        piece.main.copy_(main)
    if piece.out is not None:
        piece.out.copy_(main)
