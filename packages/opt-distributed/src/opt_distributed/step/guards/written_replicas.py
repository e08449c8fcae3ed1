"""Guard: other code has written weights or state on some replicas only.

After a load on the first rank only, replicas would train differently, or ZeRO-1 would gather shards of different
weights. Where only some replicas of a set have written since their last step, all ranks compare what they hold: on a
CPU in the same step. On an accelerator, where the host learns of it later, that step changes nothing, and the next one
begins with the comparison.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.device import Device
from opt_distributed.comm.groups import Axes


class Replica(Protocol):
    """This rank's weights and state."""

    def has_written(self) -> bool:
        """Whether other code has written weights or state on this rank since its last step."""
        ...

    def compare_replicas(self) -> None:
        """Raise ValueError, on every rank, if replicas differ. Collective."""
        ...


class WrittenReplicas:
    """Its flags: for each set of data-parallel replicas, whether this rank belongs to it and has written."""

    def __init__(self, axes: Axes, comm: Comm, replica: Replica, *, device: Device):
        """Collective: all ranks of the step call it. Does not keep `replica` alive.

        Args:
            axes: those of the dense parameters.
            comm: the ranks over which statistics are summed.
            device: of the sums.
        """
        self._replica = ref(replica)
        self._at_once = not device.is_asynchronous  # every rank then asks for the error in the step that it refuses
        shard_ranks = tuple(axes.dp.gather_objects(comm.rank))
        replicas = tuple(sorted(rank for ranks in axes.inter.gather_objects(shard_ranks) for rank in ranks))
        sizes = Counter(comm.gather_objects(replicas))  # of each set
        self._set = sorted(sizes).index(replicas)  # of this rank
        self.num_flags = len(sizes)
        self._sizes = device.upload(torch.tensor([sizes[key] for key in sorted(sizes)], dtype=torch.float64))
        self._is_due = False

    def flags(self) -> Sequence[float]:
        flags = [0.0] * self.num_flags
        flags[self._set] = float(self._present().has_written())
        return flags

    def is_wrong(self, sums: Tensor) -> Tensor:
        return ((sums > 0) & (sums < self._sizes)).any(0, keepdim=True)

    def error(self, sums: Sequence[float]) -> Exception | None:
        """None if replicas turn out to be equal, or are still to be compared."""
        self._is_due = not self._at_once
        try:
            if self._at_once:
                self._present().compare_replicas()
        except ValueError as error:
            return error
        return None

    def at_start(self) -> None:
        """Compare replicas if the step before has refused an update. Collective.

        Raises the error of `compare_replicas`, also in a retry.
        """
        if self._is_due:
            self._present().compare_replicas()
            self._is_due = False
            warnings.warn(
                "the step before changed nothing, because other code had written weights or state on some replicas "
                "only; they were compared now, and are equal",
                RuntimeWarning,
                stacklevel=2,
            )

    def _present(self) -> Replica:
        replica = self._replica()
        assert replica is not None  # it asks for the step
        return replica
