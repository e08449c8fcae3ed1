"""Numbers of parameter groups in one device tensor, which a captured step reads at every replay.

**What a captured step freezes, and what it does not.** A graph stores the addresses that its kernels read and write,
and every number that the host passed to them.

Not frozen: the contents of these addresses. Gradients, weights and states; step counts; the loss scale, the clip
coefficient and the skip flag; and the numbers of the groups that a rule uses (lr, weight_decay, betas, eps, momentum,
and its own), after `HyperTable.refresh_` has written them. Schedulers work as without a graph.

Frozen: which parameters have gradients, and the addresses of all tensors; hooks, choices and other entries of groups
that are not numbers; whether a number that switches off a part of a formula is zero, such as the momentum of SGD;
`max_norm`, and everything else that is passed when an optimizer is built. `HyperTable.frozen` identifies what is frozen
of the groups, so that the caller can capture again if it changed.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.works import HYPER_FIELDS, Scalar, is_number

Groups = Sequence[Mapping[str, Any]]


class HyperTable:
    """The numbers of all groups that these rules read. `upload` copies a host tensor to the device."""

    def __init__(
        self,
        rules: Sequence[object],  # without hooks
        *,
        device: torch.device,
        upload: Callable[[Tensor], Tensor],
        more: Sequence[str] = (),  # further names of numbers
    ) -> None:
        self.groups: list[dict[str, Any]] = []
        """The entries of these names by group. Numbers are 0-d float64 views of the table."""
        self.frozen: Hashable = None
        """Unchanged between two refreshes if nothing changed that a capture freezes."""
        own = [name for rule in rules for name in getattr(rule, "hyper_names", ())]
        self._names = (*HYPER_FIELDS, *more, *own)
        # Names whose zero is frozen, because it selects another formula.
        self._choosing = frozenset(name for rule in rules for name in getattr(rule, "choosing_numbers", ()))
        self._device = device
        self._upload = upload
        self._table = torch.empty(0, dtype=torch.float64, device=device)
        self._numbers: list[float] | None = None  # contents of the table

    def refresh_(self, groups: Groups) -> None:
        """Write the current numbers of the groups to the device if they changed, without synchronizing the host.

        Device tensors are read directly, and their addresses are frozen."""
        entries = self._entries(groups)
        frozen = (len(groups), *(entry.frozen for entry in entries))
        if frozen != self.frozen:
            self.frozen = frozen
            self.groups = [{} for _ in groups]
            self._lay_out(entries)
        numbers = _host_numbers(entries)
        if numbers != self._numbers:
            self._table.copy_(self._upload(torch.tensor(numbers, dtype=torch.float64, device="cpu")))
            self._numbers = numbers

    def is_behind(self, groups: Groups) -> bool:
        """Whether the groups have other numbers than `refresh_` wrote last. Nothing is read from the device."""
        return _host_numbers(self._entries(groups)) != self._numbers

    def _entries(self, groups: Groups) -> list["_Entry"]:
        entries = []
        for number, group in enumerate(groups):
            for name in filter(group.__contains__, self._names):
                value = group[name]
                entries.append(_Entry(number, name, value, self._parts(name, value)))
        return entries

    def _parts(self, name: str, value: Any) -> tuple[Scalar, ...]:
        """The numbers of an entry, including device tensors; none if the entry is frozen."""
        values = value if isinstance(value, tuple | list) else (value,)
        if not all(map(is_number, values)):
            return ()
        parts: list[Scalar] = []
        for number in values:
            is_tensor = isinstance(number, Tensor)
            if is_tensor and number.device == self._device:
                parts.append(number)
            elif is_tensor or number != 0 or name not in self._choosing:
                parts.append(float(number))
        return tuple(parts)

    def _lay_out(self, entries: Sequence["_Entry"]) -> None:
        size = len(_host_numbers(entries))
        with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
            self._table = torch.zeros(size, dtype=torch.float64, device=self._device)
            places = iter(self._table.unbind())
        self._numbers = None
        for entry in entries:
            value = entry.value
            if entry.parts:
                views = tuple(part if isinstance(part, Tensor) else next(places) for part in entry.parts)
                value = views if entry.is_row else views[0]
            self.groups[entry.group][entry.name] = value


class _Entry(NamedTuple):
    """An entry of a group."""

    group: int
    name: str
    value: Any
    parts: tuple[Scalar, ...]  # its numbers; empty if it is frozen

    @property
    def is_row(self) -> bool:
        """Whether the value is a tuple or a list."""
        return isinstance(self.value, tuple | list)

    @property
    def frozen(self) -> Hashable:
        if not self.parts:
            return self.group, self.name, f"{type(self.value).__name__} {self.value!r}"
        places = tuple(part.data_ptr() if isinstance(part, Tensor) else None for part in self.parts)
        return self.group, self.name, self.is_row, places


def _host_numbers(entries: Sequence[_Entry]) -> list[float]:
    return [part for entry in entries for part in entry.parts if not isinstance(part, Tensor)]
