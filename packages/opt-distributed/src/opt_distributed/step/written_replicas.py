"""Guard: other code has written weights or state on some replicas only.

After a load on the first rank only, replicas would train differently, or ZeRO-1 would gather shards of different
weights. Where only some replicas of a set have written since their last step, all ranks compare what they hold: on a
CPU in the same step. On an accelerator, where the host learns of it later, that step is made, and the next one begins
with the comparison.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.device import Device
from opt_distributed.comm.roles import Axes
from opt_distributed.step.outcome import Outcome


class WrittenReplicas:
    """Its flags: for each set of data-parallel replicas, whether this rank belongs to it and has written."""

    def __init__(self, axes: Axes, comm: Comm, optimizer: Any, *, device: Device):
        """Collective: all ranks of the step call it. Does not keep `optimizer` alive.

        Args:
            axes: those of the dense parameters.
            comm: all ranks, of all optimizer instances, over which flags are summed.
            optimizer: its `has_written` says whether other code has written weights or state on this rank since its
                last step; its `compare_replicas` raises ValueError, on every rank, if replicas differ. Collective.
            device: of the step.
        """
        self._optimizer = proxy(optimizer)
        self._at_once = not device.is_asynchronous  # every rank then asks for the error in the step that it refuses
        shard_ranks = tuple(axes.dp.gather_objects(comm.rank))
        replicas = tuple(sorted(rank for ranks in axes.inter.gather_objects(shard_ranks) for rank in ranks))
        sizes = sorted(Counter(comm.gather_objects(replicas)).items())  # of each set
        self._set = [members for members, _ in sizes].index(replicas)  # of this rank
        self._sizes = [float(size) for _, size in sizes]
        self.num_flags = len(sizes)
        self._is_due = False  # whether replicas must be compared before the next step

    def flags(self) -> Sequence[float]:
        flags = [0.0] * self.num_flags
        flags[self._set] = float(self._optimizer.has_written())
        return flags

    def is_wrong(self, sums: Tensor) -> Tensor:
        if not self._at_once:
            return torch.zeros_like(sums[:1], dtype=torch.bool)
        return ((sums > 0) & (sums < sums.new_tensor(self._sizes))).any(0, keepdim=True)

    def error(self, sums: Sequence[float]) -> Exception | None:
        """None if replicas turn out to be equal. Collective: on a CPU, every rank asks in the same step."""
        try:
            self._optimizer.compare_replicas()
        except ValueError as error:
            return error
        return None

    def at_start(self, before: Outcome | None) -> None:
        """Compare replicas if only some had written before the last step, whose outcome is `before`. Collective.

        Raises the error of `compare_replicas`, also in a retry.
        """
        if self._at_once:
            return
        sums = [] if before is None else before.sums_of(self)
        self._is_due = self._is_due or any(0 < count < size for count, size in zip(sums, self._sizes))
        if self._is_due:
            self._optimizer.compare_replicas()
            self._is_due = False
