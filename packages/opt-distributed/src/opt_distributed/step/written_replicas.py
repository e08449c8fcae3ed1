"""Guard: copies on other ranks may lack what other code has written, to weights or state.

It compares copies of different ranks. Whether a parameter agrees with its own main value, on one rank, is the question
of another guard, `OptimizerStateGuard` (`opt_stack.state.weights`).

After a load on the first rank only, replicas would train differently, or ZeRO-1 would gather shards of different
weights; tensor-parallel ranks hold copies, too. Where any rank has written since its last step, all ranks compare what
was written: on a CPU in the same step. On an accelerator, where the host learns of it later, that step is made, and the
next one begins with the comparison.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import proxy

import torch
from torch import Tensor

from opt_distributed.comm.device import Device
from opt_distributed.pieces.piece import Groups
from opt_distributed.step.outcome import Outcome
from opt_paramgroups import ParamId


class Written(NamedTuple):
    """What other code wrote on a rank."""

    ids: frozenset[ParamId]  # parameters
    has_state: bool  # whether state of the optimizer, for which all of it is compared


NOTHING_WRITTEN = Written(ids=frozenset(), has_state=False)


class Replicas(Protocol):
    """The copies of parameters and state that ranks share."""

    def written(self) -> Written:
        """Return what other code wrote on this rank since its last step."""

    def compare(self, written: Written) -> None:
        """Raise ValueError, on every rank, if ranks hold different copies of what any of them passes. Collective."""


class WrittenReplicas:
    """Its flag: whether this rank has written."""

    num_flags = 1

    def __init__(self, replicas: Replicas, *, device: Device):
        """Does not keep `replicas` alive. `device` is that of the step."""
        self._replicas = proxy(replicas)
        self._at_once = not device.is_asynchronous  # every rank then asks for the error in the step that it refuses
        self._written = NOTHING_WRITTEN  # since the last comparison
        self._is_due = False  # whether ranks must be compared before the next step

    def flags(self, groups: Groups) -> Sequence[float]:
        written: Written = self._replicas.written()
        ids = self._written.ids | written.ids
        self._written = Written(ids=ids, has_state=self._written.has_state or written.has_state)
        return (float(any(written)),)

    def is_wrong(self, sums: Tensor) -> Tensor:
        if not self._at_once:
            return torch.zeros_like(sums, dtype=torch.bool)
        return sums > 0

    def error(self, sums: Sequence[float]) -> Exception | None:
        """None if copies turn out to be equal. Collective: on a CPU, every rank asks in the same step."""
        try:
            self._compare()
        except ValueError as error:
            return error
        return None

    def at_start(self, before: Outcome | None) -> None:
        """Compare copies if a rank had written before the last step, whose outcome is `before`. Collective.

        Raises the error of `Replicas.compare`, also in a retry.
        """
        if self._at_once:
            return
        sums = [] if before is None else before.sums_of(self)
        self._is_due = self._is_due or any(sums)
        if self._is_due:
            self._compare()
            self._is_due = False

    def _compare(self) -> None:
        self._replicas.compare(self._written)
        self._written = NOTHING_WRITTEN
