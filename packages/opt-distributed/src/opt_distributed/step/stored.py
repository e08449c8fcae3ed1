"""State as it is saved: block-scaled codes are decoded to fp32, and encoded again when they are loaded."""

from collections.abc import Iterator

import torch
from torch import Tensor

from opt_distributed.step.unit import OwnedPiece, Unit
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.works import StateKind
from opt_kernels.works import StateSpec as Declared


def kept_states(unit: Unit, piece: OwnedPiece) -> Iterator[Declared]:
    """The states that a rule keeps of a piece on this rank, without block scales: the values are saved decoded."""
    for spec in unit.rule.state_specs:
        if spec.kind is not StateKind.BLOCK_SCALES and spec.name in piece.state:
            yield spec


def _codec(unit: Unit, name: str) -> StateCodec | None:
    """The codec of a state that is stored by block; None where its memory holds the values themselves."""
    found = unit.rule.codecs.get(name)
    return found if found is not None and found.block else None


def decoded(unit: Unit, piece: OwnedPiece, spec: Declared) -> Tensor:
    """The values of one state: its own memory, or a new fp32 tensor where codes were decoded."""
    codec = _codec(unit, spec.name)
    codes = piece.state[spec.name]
    return codes if codec is None else _values(codec, codes, piece.state[scale_name(spec.name)])


def _values(codec: StateCodec, codes: Tensor, scales: Tensor) -> Tensor:
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    codec.decode_(values, codes.view(-1), scales)
    return values.view(codes.shape)


def store_(unit: Unit, piece: OwnedPiece, name: str, value: Tensor) -> None:
    """Write one state of `piece` from its values."""
    codec = _codec(unit, name)
    target = piece.state[name]
    if codec is None:
        target.copy_(value.view(target.shape))
    else:
        _encode_again_(codec, target.view(-1), piece.state[scale_name(name)], value.reshape(-1).float())


def _encode_again_(codec: StateCodec, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Writes `codes` and `scales`, so that what was decoded from these very blocks keeps its values.

    A scale follows from a block's largest value. Where that was rounded up to a power of two when it was first encoded,
    it asks for twice its scale now, and the smallest codes would lose a bit. A hair smaller, it is rounded up again.
    """
    codec.encode_(codes, scales, values)
    came_back = _values(codec, codes, scales) == values
    if came_back.all():
        return
    sizes = _rows(values.abs(), codec.block)
    is_top = (sizes == sizes.amax(1, keepdim=True)).view(-1)[: len(values)]
    smaller = torch.where(is_top, values * (1 - 2.0**-20), values)
    codec.encode_(codes, scales, smaller)
    comes_back = _values(codec, codes, scales) == values
    is_kept = (_rows(came_back, codec.block).sum(1) >= _rows(comes_back, codec.block).sum(1)).repeat_interleave(
        codec.block
    )
    codec.encode_(codes, scales, torch.where(is_kept[: len(values)], values, smaller))


def _rows(flat: Tensor, block: int) -> Tensor:
    """One row for each block of a run; the last is filled up with zeros."""
    return torch.cat([flat, flat.new_zeros(-len(flat) % block)]).view(-1, block)
