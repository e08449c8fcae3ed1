"""Guard: ranks would update the same parameters with different numbers.

If a scheduler follows the loss of one rank, or only some ranks edit `param_groups`, replicas drift apart. So each rank
contributes a checksum of the numbers of every group that it applies. The sums of checksums and of their squares show
whether all are equal.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from opt_distributed.comm.collectives import Comm
from opt_distributed.step.guards.guard import Groups, Inputs
from opt_distributed.step.guards.usable_groups import FIXED
from opt_distributed.step.hyper import FIELDS

_Numbers = list[tuple[str, Any]]
_BITS = 20  # the sum of squares stays exact in float64 on up to 8,192 ranks


class HyperError(ValueError):
    """Ranks would update the same parameters with different numbers."""


class EqualGroups:
    """Compares groups that several ranks apply, by position and name.

    Its flags: 1, the checksum and its square for each compared group that this rank applies, else zeros. Groups that
    differ between ranks from the start, such as those of different pipeline stages, are not compared.
    """

    def __init__(
        self, inputs: Inputs, groups: Groups, *, applied: Collection[int], own: Iterable[str] = (), everyone: Comm
    ):
        """Collective: all ranks of `everyone` call it.

        Args:
            inputs: those of the step, with the present groups.
            groups: `param_groups`.
            applied: indices of the groups that this rank's pieces belong to.
            own: further entries that rules read, which are not fields of `Hyper`.
            everyone: all ranks of the step.
        """
        self._inputs = inputs
        self._entries = (*FIELDS, *FIXED, *sorted(set(own)))
        applied_here = {
            (i, str(groups[i].get("name", ""))): _checksum(self._numbers_of(groups[i])) for i in sorted(applied)
        }
        per_rank: list[dict[tuple[int, str], int]] = [] if everyone.size == 1 else everyone.gather_objects(applied_here)
        values: dict[tuple[int, str], list[int]] = {}
        for of_rank in per_rank:
            for key, checksum in of_rank.items():
                values.setdefault(key, []).append(checksum)
        self._keys = sorted(key for key, found in values.items() if len(found) > 1 and len(set(found)) == 1)
        self._applied = [key in applied_here for key in self._keys]
        # Of the groups in the last step, for `error`. Groups would keep parameters alive.
        self._numbers: list[_Numbers] = []

    @property
    def num_compared(self) -> int:
        """The number of compared groups. The same on every rank."""
        return len(self._keys)

    @property
    def num_flags(self) -> int:
        return 3 * len(self._keys)

    def flags(self) -> Sequence[float]:
        self._numbers = [self._numbers_of(self._inputs.groups[index]) for index, _ in self._keys]
        flags: list[float] = []
        for numbers, applied in zip(self._numbers, self._applied, strict=True):
            checksum = _checksum(numbers) if applied else 0
            flags += [float(applied), float(checksum), float(checksum**2)]
        return flags

    def is_wrong(self, sums: Tensor) -> Tensor:
        differ: Tensor = _differ(*sums.to(torch.int64).view(-1, 3).unbind(1))
        return differ.any(0, keepdim=True)

    def error(self, sums: Sequence[float]) -> Exception | None:
        for number, (_, name) in enumerate(self._keys):
            if _differ(*map(int, sums[3 * number : 3 * number + 3])):
                return HyperError(
                    f"group {name!r} has different numbers on the ranks that update its parameters (here "
                    f"{dict(self._numbers[number])}); they "
                    "must be equal on all ranks: make the same edits of param_groups everywhere, and give schedulers "
                    "such as ReduceLROnPlateau a metric that is averaged over the ranks. Nothing was updated"
                )
        return None

    def _numbers_of(self, group: Mapping[str, Any]) -> _Numbers:
        return [(entry, _plain(group[entry])) for entry in self._entries if entry in group]


def _checksum(numbers: _Numbers) -> int:
    return crc32(repr(numbers).encode()) >> (32 - _BITS)


def _differ(count: Any, total: Any, squares: Any) -> Any:
    """Whether checksums differ, given integers or tensors of them.

    Up to 2,048 ranks every product fits into 64 bits; beyond, tensors are compared modulo 2**64.
    """
    return count * squares != total * total


def _plain(value: Any) -> Any:
    """A value with the same `repr` on every rank. Tensors on an accelerator are not read, and so not compared."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, int | float) else str(value) if isinstance(value, str) else None
