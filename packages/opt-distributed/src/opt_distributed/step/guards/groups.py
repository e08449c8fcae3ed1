"""Guards of `param_groups`: entries that no step supports, and numbers that differ between ranks.

Numbers are read in every step. Everything else was read when the optimizer was built, such as the rule of a group, so
a change of it would have no effect. If a scheduler follows the loss of one rank, or only some ranks edit
`param_groups`, replicas would drift apart: the sums of checksums and of their squares show whether all are equal.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import Comm
from opt_distributed.pieces.piece import Groups
from opt_distributed.step.guards.guard import Inputs, Refusal
from opt_distributed.step.unit import FIELDS, check_rate
from opt_kernels.formulas import NumberError
from opt_kernels.hooks import check_unread, reads_weight_decay
from opt_kernels.rules import Rule

FIXED = ("optimizer", "name", "is_expert_parallel", "clip_grad", "hooks")
"""Entries that decide how parameters are laid out, clipped and updated."""
CHOICES = "choices"  # the entry that records the structure of the rule: ("maximize=False", ...)
WEIGHT_DECAY = "weight_decay"
_SCHEDULED = ("lr", WEIGHT_DECAY)
_FLAGS = ("amsgrad", "maximize", "nesterov", "differentiable")  # of torch's optimizers


class GroupError(ValueError):
    """An entry of a parameter group was changed in a way that no step supports."""


class UsableGroups(Refusal):
    """Knows the entries of the groups as they were built (none before `compare`), and as the last step saw them."""

    def __init__(self, inputs: Inputs, rules: Mapping[int, Rule]):
        """`rules` are those that update this rank's parameters, by the indices of their groups."""
        self._inputs, self._rules = inputs, rules
        self.compare(())

    def compare(self, groups: Groups) -> None:
        """Compare the entries of later groups with the present ones."""
        self._built = [{name: group[name] for name in group if name != "params"} for group in groups]
        # Schedulers write the others in every step; they may be any number, if the rule reads them.
        unread = {index for index, rule in self._rules.items() if not reads_weight_decay(rule)}
        self._watched = [
            [name for name in built if name not in _SCHEDULED or (name == WEIGHT_DECAY and index in unread)]
            for index, built in enumerate(self._built)
        ]
        self._seen: list[tuple[Any, ...]] = [() for _ in groups]

    def find(self) -> ValueError | None:
        """Return the error of `check`. The step then goes on with the groups as they were built: its update is skipped,
        but this rank joins its collectives."""
        try:
            self.check(self._inputs.groups)
        except ValueError as error:
            groups = self._inputs.groups
            if self._built:
                groups = [{**group, **built} for group, built in zip(groups, self._built, strict=True)]
            self._inputs.groups = [{**group, "lr": 0.0} if group["lr"] is None else group for group in groups]
            return error.with_traceback(None)  # its frames keep the groups, and so the parameters
        return None

    def check(self, groups: Groups) -> None:
        """Raise ValueError for a group without a learning rate, and GroupError for an entry that was removed, for a
        fixed one that was changed or added, and for betas or other numbers of another form. Unchanged groups cost one
        pass in C each."""
        for index, group in enumerate(groups if self._built else ()):
            seen, present = self._seen[index], (len(group), *map(group.get, self._watched[index]))
            if len(seen) != len(present) or not all(map(is_, seen, present)):
                built = self._built[index]
                for problem in chain(_problems(built, group), self._without_effect(index, group)):
                    raise GroupError(f"group {built.get('name', index)!r}: {problem}")
                self._seen[index] = present
        for index in self._rules:
            check_rate(groups[index])

    def _without_effect(self, index: int, group: Mapping[str, Any]) -> Iterator[str]:
        """Yield why weight decay or betas that were changed would have no effect."""
        built, changed = self._built[index], {}
        for name in (WEIGHT_DECAY, "betas"):
            value = group.get(name)
            on_device = isinstance(value, Tensor) and value.device.type != "cpu"
            if name in group and name in built and not on_device and value != built[name]:
                changed[name] = value
        if changed and index in self._rules:
            try:
                check_unread(self._rules[index], changed)
            except NumberError as error:
                yield str(error)

    def accept_loaded(self, groups: Groups) -> None:
        """Keep torch's flags that a load wrote to the groups, which the load has checked, and numbers without effect:
        they do not make a checkpoint unreadable."""
        for built, group in zip(self._built, groups, strict=bool(self._built)):
            built.update({name: group[name] for name in _FLAGS if name in group})
            for name in (WEIGHT_DECAY, "betas"):
                if name in group and name in built and _has_form_of(group[name], built[name]):
                    built[name] = group[name]


def _problems(built: Mapping[str, Any], group: Mapping[str, Any]) -> Iterator[str]:
    for name in built:
        if name not in group:
            yield f"it has no entry {name!r} any more; groups keep the entries that they were built with"
    for name in (*FIXED, CHOICES):
        if group.get(name) != built.get(name):
            yield (
                f"{name}={group.get(name)!r} was set after the optimizer was built with {built.get(name)!r}, which has "
                "no effect; build another optimizer, with config_overrides, and load this one's state_dict"
            )
    for name in FIELDS:
        if name in group and name not in built:
            read = ", ".join(name for name in FIELDS if name in built)
            yield f"{name}={group[name]!r} was added, but its rule does not read it; it reads {read}"
        if name in group and name in built and not _has_form_of(group[name], built[name]):
            yield f"{name}={group[name]!r} was set where the optimizer was built with {built[name]!r}"
    for name in _FLAGS:
        if name in group and group[name] is not built.get(name, False):
            yield f"{name}={group[name]!r} was set after the optimizer was built, which has no effect"
    for name, _, chosen in (text.partition("=") for text in built.get(CHOICES, ())):
        if name in group and name not in built and name not in _FLAGS and repr(group[name]) != chosen:
            yield f"{name}={group[name]!r} was added, but it was chosen when the optimizer was built: {built[CHOICES]}"


def _has_form_of(value: Any, built: Any) -> bool:
    """Whether both are single numbers, or rows of as many. A learning rate may be None until a scheduler sets it."""
    if isinstance(built, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(built) and all(map(_is_number, value))
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


_Numbers = list[tuple[str, Any]]
_BITS = 20  # the sum of squares stays exact in float64 on up to 8,192 ranks


class HyperError(ValueError):
    """Ranks would update the same parameters with different numbers."""


class EqualGroups:
    """Compares the numbers of groups whose parameters several ranks update, by position and name.

    Its flags: 1, the checksum and its square for each compared group of this rank, else zeros. Groups that
    differ between ranks from the start, such as those of different pipeline stages, are not compared.
    """

    def __init__(
        self, inputs: Inputs, groups: Groups, *, local: Collection[int], own: Iterable[str] = (), everyone: Comm
    ):
        """Collective: all ranks of `everyone` call it.

        Args:
            inputs: those of the step, with the present groups.
            groups: `param_groups`.
            local: indices of the groups that this rank's pieces belong to.
            own: further entries that rules read, which are not fields of `Hyper`.
            everyone: all ranks of the step.
        """
        self._inputs = inputs
        self._entries = (*FIELDS, *FIXED, *sorted(set(own)))
        here = {(i, str(groups[i].get("name", ""))): _checksum(self._numbers_of(groups[i])) for i in sorted(local)}
        values: dict[tuple[int, str], list[int]] = {}
        for of_rank in everyone.gather_objects(here) if everyone.size > 1 else ():
            for key, checksum in of_rank.items():
                values.setdefault(key, []).append(checksum)
        self._keys = sorted(key for key, found in values.items() if len(found) > 1 and len(set(found)) == 1)
        self._is_local = [key in here for key in self._keys]
        # Of the groups in the last step, for `error`. Groups would keep parameters alive.
        self._numbers: list[_Numbers] = []

    @property
    def num_flags(self) -> int:
        return 3 * len(self._keys)

    def flags(self) -> Sequence[float]:
        self._numbers = [self._numbers_of(self._inputs.groups[index]) for index, _ in self._keys]
        flags: list[float] = []
        for numbers, is_local in zip(self._numbers, self._is_local, strict=True):
            checksum = _checksum(numbers) if is_local else 0
            flags += [float(is_local), float(checksum), float(checksum**2)]
        return flags

    def is_wrong(self, sums: Tensor) -> Tensor:
        differ: Tensor = _differ(*sums.to(torch.int64).view(-1, 3).unbind(1))
        return differ.any(0, keepdim=True)

    def error(self, sums: Sequence[float]) -> Exception | None:
        for number, (_, name) in enumerate(self._keys):
            if _differ(*map(int, sums[3 * number : 3 * number + 3])):
                return self._error(name, self._numbers[number])
        return None

    def local(self, groups: Groups) -> dict[tuple[int, str], int]:
        """The checksums of the compared groups of this rank."""
        keys = [key for key, is_local in zip(self._keys, self._is_local, strict=True) if is_local]
        return {key: _checksum(self._numbers_of(groups[key[0]])) for key in keys}

    def difference(self, groups: Groups, per_rank: Sequence[Mapping[tuple[int, str], int]]) -> HyperError | None:
        """The error if the ranks' `local` differ in a group."""
        for key in self._keys:
            if len({of_rank[key] for of_rank in per_rank if key in of_rank}) > 1:
                return self._error(key[1], self._numbers_of(groups[key[0]]))
        return None

    def _error(self, name: str, numbers: _Numbers) -> HyperError:
        return HyperError(
            f"group {name!r} has different numbers on the ranks that update its parameters (here {dict(numbers)}); "
            "they must be equal on all ranks: make the same edits of param_groups everywhere, and give schedulers such "
            "as ReduceLROnPlateau a metric that is averaged over the ranks. Nothing was updated"
        )

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


def check_second_half(
    groups: Groups, max_norm: float, *, usable: UsableGroups, equal: EqualGroups | None, ranks: tuple[Comm, Comm]
) -> None:
    """Raise ValueError on every rank if one cannot use its groups, or ranks would update with different numbers: both
    may have changed since the guards were asked.

    Collective: one small exchange between `ranks`, those of the optimizer instance and those of the other instances.
    """
    error: Exception | None = None
    checksums: dict[tuple[int, str], int] = {}
    try:
        usable.check(groups)
        checksums = {} if equal is None else equal.local(groups)
    except Exception as refusal:  # of any kind, because the other ranks wait
        error = refusal
    everyone, instances = ranks
    try:
        of_instances = instances.gather_objects(everyone.gather_objects((checksums, max_norm, error and str(error))))
    except Exception as lost:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"comparison of groups: {lost}") from lost
    per_rank = [of_rank for of_instance in of_instances for of_rank in of_instance]
    texts = [text for _, _, text in per_rank if text is not None]
    if error is None and texts:
        error = GroupError(f"another rank refused its parameter groups: {texts[0]}. Nothing was updated")
    if error is None and len(norms := {norm for _, norm, _ in per_rank}) > 1:
        error = HyperError(f"ranks clip to different norms: {sorted(norms)}; pass one to all. Nothing was updated")
    if error is None and equal is not None:
        error = equal.difference(groups, [of_rank for of_rank, _, _ in per_rank])
    if error is not None:
        raise error
