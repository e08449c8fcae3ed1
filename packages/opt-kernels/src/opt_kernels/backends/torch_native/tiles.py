"""Cache tiles: pieces of runs that are small enough to stay in the cache during several passes.

All tensors of a tile are in the compute dtype. A tensor that is stored in this dtype appears as a view, any other as a
scratch copy that is written back before the next tile. A sweep over any mix of dtypes therefore reads and writes each
byte of memory once. Small tensors share a tile, because on a CPU starting a pass takes nearly as long as the pass.

Pieces begin at multiples of TILE_NUMEL, and no operation combines two pieces. The bits of an element therefore do not
depend on other tensors in its tile, nor on how its parameter is sharded if shards begin at multiples of 64 elements.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from opt_kernels.backends.elements import Run, compute_dtype, dense_run_of, rounds_stochastically
from opt_kernels.backends.torch_native.narrow_mains import join_, round_, split_
from opt_kernels.codecs import Plain, StateCodec, scale_name
from opt_kernels.works import Work

# A row is 2 MiB of float32 and there are at most five, which fits a cache of 16 MiB shared by two cores. It is long
# enough that the overhead of an operation is small. A multiple of every codec's block.
TILE_NUMEL = 1 << 19
FEW = 8  # for fewer tensors, concatenating them costs more than it saves


class Tile(NamedTuple):
    """Pieces of runs in their compute dtype: lists of tensors (n,) in the same order, at most TILE_NUMEL elements."""

    mains: list[Tensor]  # updated by the sweep
    grads: list[Tensor]  # scaled; may be the gradients themselves: read only
    states: dict[str, list[Tensor]]  # updated by the sweep, decoded, by name


class Divided(NamedTuple):
    """Runs of any shape, sorted by the way in which torch's fused optimizers can update them."""

    whole: list[Run]  # directly
    cut: list[Run]  # tile by tile


def divided(works: Iterable[Work], codecs: Mapping[str, StateCodec], *, scale: float) -> Divided:
    """Divide `works` into those whose tensors all have the compute dtype and that have no out, and the others."""
    codes, scales = list(codecs), [scale_name(name) for name, codec in codecs.items() if codec.block]
    # In reverse order: the gradients that the statistics read last are still in the cache.
    runs = [dense_run_of(work, codes, scales) for work in works][::-1]
    if scale != 1.0:
        return Divided([], runs)
    parts = Divided([], [])
    for run in runs:
        (parts.whole if _agrees(run, codecs) else parts.cut).append(run)
    return parts


def tiles(
    runs: Iterable[Run],
    codecs: Mapping[str, StateCodec],
    *,
    scale: float,
    stochastic_step: int | None = None,
    flat_grads: bool = False,
) -> Iterator[Tile]:
    """Yield the tiles of all `runs`. The caller's changes to a tile are stored when it requests the next one.

    With `flat_grads`, scaled gradients may be flat even if mains are not; for sweeps that ignore shapes, because
    restoring the shapes of thousands of gradients takes longer than the sweep.
    `stochastic_step` is the step, and selects stochastic rounding of bfloat16 mains.
    """
    scratch = Scratch()
    for pieces in _gathered(runs, codecs):
        dtype = compute_dtype(pieces[0])
        if not _is_computable(pieces[0], codecs, dtype):
            # Scratch copies are flat, so the tensors used together with them must be flat too.
            pieces = [_flat(piece) for piece in pieces]
        stage = _Stage(pieces=pieces, dtype=dtype, scratch=scratch)
        states = {name: stage.decoded(name, codec) for name, codec in codecs.items()}
        tile = Tile(stage.mains(), stage.grads(scale, flat=flat_grads), states)
        yield tile
        for name, codec in codecs.items():
            stage.encode_(name, codec, states[name])
        stage.store_mains_(tile.mains, stochastic_step)


class Scratch:
    """Scratch rows of one tile's length, each allocated on first use."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, torch.dtype], Tensor] = {}

    def row(self, name: str, dtype: torch.dtype, *, numel: int, device: torch.device) -> Tensor:
        """The first `numel` elements of the row `name`, uninitialised: they hold values of an earlier tile."""
        key = (name, dtype)
        if key not in self._rows:
            self._rows[key] = torch.empty(TILE_NUMEL, dtype=dtype, device=device)
        return self._rows[key][:numel]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Conversion of the pieces of one tile, which have the same dtypes, to the compute dtype and back."""

    pieces: Sequence[Run]
    dtype: torch.dtype
    scratch: Scratch

    def decoded(self, name: str, codec: StateCodec) -> list[Tensor]:
        codes = [piece.state[name] for piece in self.pieces]
        if _is_direct(codec, self.dtype):
            return codes
        values = self._parts(self._row(name, self.dtype))
        if isinstance(codec, Plain):
            torch._foreach_copy_(values, codes)
            return values
        for piece, into, code in zip(self.pieces, values, codes):
            codec.decode_(into, code, piece.state.get(scale_name(name)))
        return values

    def encode_(self, name: str, codec: StateCodec, values: list[Tensor]) -> None:
        if _is_direct(codec, self.dtype):
            return
        codes = [piece.state[name] for piece in self.pieces]
        if isinstance(codec, Plain):
            torch._foreach_copy_(codes, values)
            return
        for piece, code, value in zip(self.pieces, codes, values):
            codec.encode_(code, piece.state.get(scale_name(name)), value)

    def grads(self, scale: float, *, flat: bool) -> list[Tensor]:
        grads = [piece.grad for piece in self.pieces]
        if grads[0].dtype is self.dtype:
            return grads if scale == 1.0 else _scaled(grads, scale, flat=flat)
        row = self._row("grad", self.dtype)
        parts = self._parts(row)
        torch._foreach_copy_(parts, grads)
        if scale != 1.0:
            row.mul_(scale)
        return parts

    def mains(self) -> list[Tensor]:
        mains = [piece.main for piece in self.pieces if piece.main is not None]
        if mains and mains[0].dtype is self.dtype:
            return mains
        row = self._row("main", self.dtype)
        parts = self._parts(row)
        if mains:
            torch._foreach_copy_(parts, mains)
        else:
            join_(parts, self._outs(), self._remainders())
        return parts

    def store_mains_(self, values: list[Tensor], stochastic_step: int | None) -> None:
        if self.pieces[0].main is None:
            # The sweep has finished with the gradients, so their row, which is in the cache, is reused.
            row, words = self._row("main", self.dtype), self._row("grad", self.dtype).view(torch.int32)
            split_(self._outs(), self._remainders(), row, words=words)
            return
        for piece, value in zip(self.pieces, values):
            assert piece.main is not None
            if stochastic_step is not None and rounds_stochastically(piece):
                round_(piece.main, value, first=piece.first, step=stochastic_step)
            elif value is not piece.main:
                piece.main.copy_(value)
        if self.pieces[0].out is not None:
            torch._foreach_copy_(self._outs(), values)

    def _outs(self) -> list[Tensor]:
        return [piece.out for piece in self.pieces if piece.out is not None]

    def _remainders(self) -> list[Tensor]:
        return [piece.remainder for piece in self.pieces if piece.remainder is not None]

    def _row(self, name: str, dtype: torch.dtype) -> Tensor:
        numel = sum(piece.grad.numel() for piece in self.pieces)
        return self.scratch.row(name, dtype, numel=numel, device=self.pieces[0].grad.device)

    def _parts(self, row: Tensor) -> list[Tensor]:
        """Views of `row` with the sizes of the pieces."""
        return list(torch.split(row, [piece.grad.numel() for piece in self.pieces]))


def _scaled(grads: list[Tensor], scale: float, *, flat: bool) -> list[Tensor]:
    """New tensors `grads * scale`. Many small ones are views of one allocation and take one multiplication."""
    if len(grads) < FEW or not (flat or all(grad.dim() == 1 for grad in grads)):
        return list(torch._foreach_mul(grads, scale))
    row = _flatten_dense_tensors(grads).mul_(scale)  # type: ignore[no-untyped-call]
    return list(torch.split(row, [grad.numel() for grad in grads]))


def _agrees(run: Run, codecs: Mapping[str, StateCodec]) -> bool:
    return run.out is None and _is_computable(run, codecs, compute_dtype(run))


def _is_computable(run: Run, codecs: Mapping[str, StateCodec], dtype: torch.dtype) -> bool:
    """Whether main, gradient and states are stored in the compute dtype."""
    if run.main is None or run.main.dtype is not dtype or run.grad.dtype is not dtype:
        return False
    return all(_is_direct(codec, dtype) for codec in codecs.values())


def _flat(run: Run) -> Run:
    grad, main, out, remainder = (
        None if tensor is None else tensor.view(-1) for tensor in (run.grad, run.main, run.out, run.remainder)
    )
    assert grad is not None
    return Run(grad, main, out, remainder, {name: t.view(-1) for name, t in run.state.items()}, run.first)


def _is_direct(codec: StateCodec, dtype: torch.dtype) -> bool:
    """Whether the codes are values of this dtype, which a sweep can use without decoding."""
    return isinstance(codec, Plain) and codec.dtype is dtype


def _gathered(runs: Iterable[Run], codecs: Mapping[str, StateCodec]) -> Iterator[list[Run]]:
    """Yield lists of pieces with the same dtypes, at most TILE_NUMEL elements each."""
    lists: dict[tuple[torch.dtype | None, ...], list[Run]] = {}
    room: dict[tuple[torch.dtype | None, ...], int] = {}  # elements that still fit into the list
    for run in runs:
        kind = _kind(run)
        for piece in (run,) if run.grad.numel() <= TILE_NUMEL else _pieces(run, codecs):
            numel = piece.grad.numel()
            left = room.get(kind, -1) - numel
            if left < 0:
                if kind in lists:
                    yield lists[kind]
                lists[kind], left = [], TILE_NUMEL - numel
            lists[kind].append(piece)
            room[kind] = left
    yield from lists.values()


def _kind(run: Run) -> tuple[torch.dtype | None, ...]:
    """The dtypes that must be equal for runs to share a tile."""
    others = (run.main, run.out, run.remainder)
    return (run.grad.dtype, *(None if tensor is None else tensor.dtype for tensor in others))


def _pieces(run: Run, codecs: Mapping[str, StateCodec]) -> Iterable[Run]:
    """A run that is longer than a tile, in pieces of one tile."""
    blocks = {scale_name(name): codec.block for name, codec in codecs.items() if codec.block}
    states = {name: _split(tensor, TILE_NUMEL // blocks.get(name, 1)) for name, tensor in run.state.items()}
    grads, mains, outs, remainders = (_split(t, TILE_NUMEL) for t in (run.grad, run.main, run.out, run.remainder))
    return (
        Run(
            grad,
            next(mains, None),
            next(outs, None),
            next(remainders, None),
            {name: next(parts) for name, parts in states.items()},
            run.first + index * TILE_NUMEL,
        )
        for index, grad in enumerate(grads)
    )


def _split(tensor: Tensor | None, numel: int) -> Iterator[Tensor]:
    """Flat pieces of `tensor` with `numel` elements each; none for None."""
    return iter(()) if tensor is None else iter(torch.split(tensor.view(-1), numel))
