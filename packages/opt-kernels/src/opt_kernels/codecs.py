"""Codecs: in which numbers a state tensor is kept between steps, and how it is read and written."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opt_kernels.rules.base import StateKind, StateSpec


class StateCodec(Protocol):
    """How one state is stored: codes, one per element, and for some codecs a scale for each block of elements.

    Both methods work on flat runs that begin at a multiple of `block`, and write only their first argument(s).
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        ...

    @property
    def block(self) -> int:
        """Elements that share one float32 scale; 0 where there are no scales."""
        ...

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        """Writes `values` (n,), float32 or float64, from `codes` (n,) and `scales` (ceil(n / block),)."""
        ...

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
        """Writes `codes` and `scales` from `values`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The values themselves, rounded to nearest even in `dtype`; no scales."""

    dtype: torch.dtype = torch.float32

    @property
    def block(self) -> int:
        return 0

    def decode_(self, values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        values.copy_(codes)

    def encode_(self, codes: Tensor, scales: Tensor | None, values: Tensor) -> None:
        codes.copy_(values)


def scale_name(name: str) -> str:
    """The state that holds the block scales of the state `name`."""
    return f"{name}_scale"


def state_specs(name: str, codec: StateCodec) -> tuple[StateSpec, ...]:
    """What a rule declares for a state kept by `codec`: its codes under `name`, and their scales."""
    codes = StateSpec(name=name, dtype=codec.dtype)
    if not codec.block:
        return (codes,)
    return (codes, StateSpec(name=scale_name(name), kind=StateKind.BLOCK_SCALES, block=codec.block))


def init_state(name: str, codec: StateCodec, main: Tensor) -> dict[str, Tensor]:
    """The state `name` of one parameter, all zero, in the layout and on the device of `main`."""
    state = {name: torch.zeros_like(main, dtype=codec.dtype)}
    if codec.block:
        num_blocks = -(-main.numel() // codec.block)
        state[scale_name(name)] = torch.zeros(num_blocks, dtype=torch.float32, device=main.device)
    return state


class CodecError(ValueError):
    """A state was asked for in a dtype for which there is no codec."""


def codec_for(name: str, dtype: torch.dtype, *, signed: bool) -> StateCodec:
    """The codec that keeps the state `name` in `dtype`; `signed` unless the state is never negative.

    Raises CodecError for a dtype that has none.
    """
    if dtype in (torch.float32, torch.bfloat16):
        return Plain(dtype=dtype)
    raise CodecError(f"{name}_dtype={dtype} has no codec; give torch.float32 or torch.bfloat16")
