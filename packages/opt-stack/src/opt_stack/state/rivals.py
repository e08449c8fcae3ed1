"""Optimizers of the same parameters: an update by one would be lost in the next update by another that has main values.

An optimizer refuses to step once its main values do not agree with parameters that others wrote (`LoadedWeights`).
torch counts writes by its own operations only, so optimizers that share parameters count those of their kernels.
"""

from typing import Protocol
from weakref import WeakSet

from torch import nn


class Writer(Protocol):
    """An optimizer, as others of its parameters see it."""

    has_rivals: bool  # whether it must count its writes

    def updates(self, param: nn.Parameter) -> bool:
        """Whether it updates `param`."""
        ...

    def updates_any_of(self, other: "Writer") -> bool:
        """Whether both update a parameter."""
        ...

    def __hash__(self) -> int: ...


_living: WeakSet[Writer] = WeakSet()


def introduce(writer: Writer) -> None:
    """Let `writer`, and earlier ones of the same parameters that still exist, count their writes from now on."""
    for other in _living:
        if writer.updates_any_of(other):
            writer.has_rivals = other.has_rivals = True
    _living.add(writer)
