"""Notice in the reduction of a step that other code has written weights or state on some replicas only.

After a load on the first rank only, replicas would train differently, or ZeRO-1 would gather shards of different
weights. So each rank reports whether anything was written since its last step. Where only some replicas of a set report
that, all ranks compare what they hold.
"""

from collections.abc import Callable, Sequence

from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.groups import Axes


class WriteCheck:
    """Sets of data-parallel replicas, and which ranks of each have written."""

    def __init__(self, axes: Axes, everyone: Comm, *, compare: Callable[[], None]):
        """Collective: all ranks of `everyone` call it.

        Args:
            axes: those of the dense parameters.
            everyone: all ranks of the step.
            compare: raises if replicas differ. Collective over `everyone`.
        """
        self._compare = compare
        shard_ranks = tuple(axes.dp.gather_objects(everyone.rank))
        replicas = tuple(sorted(rank for ranks in axes.inter.gather_objects(shard_ranks) for rank in ranks))
        per_rank: list[tuple[int, ...]] = everyone.gather_objects(replicas)
        sets = sorted(set(per_rank))
        self._sizes = list(map(len, sets))
        self._own = sets.index(replicas)  # the set of this rank

    def flags(self, *, has_written: bool) -> list[float]:
        """This rank's summands, one for each set."""
        flags = [0.0] * len(self._sizes)
        flags[self._own] = float(has_written)
        return flags

    def check(self, flags: Sequence[float]) -> None:
        """Compare replicas if only some ranks of a set have written. Collective.

        `flags` are the sums over all ranks; those of `flags` are their last elements. Raises the error of `compare`.
        """
        sums = flags[len(flags) - len(self._sizes) :]
        if any(0 < count < size for count, size in zip(sums, self._sizes, strict=True)):
            self._compare()
