"""Guard: a parameter group has no learning rate yet, or lacks the entries that the optimizer was built with.

Numbers are read in every step. Everything else was read when the optimizer was built, such as the rule of a group, so
a change of it would have no effect.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any

from torch import Tensor

from opt_distributed.step.guards.guard import Groups, Inputs, Refusal
from opt_distributed.step.hyper import FIELDS, check_rate
from opt_kernels.formulas import NumberError
from opt_kernels.hooks import check_unread, reads_weight_decay
from opt_kernels.rules import Rule

FIXED = ("optimizer", "name", "is_expert_parallel", "clip_grad", "hooks")
"""Entries that decide how parameters are laid out, clipped and updated."""
CHOICES = "choices"  # the entry that records the structure of the rule: ("maximize=False", ...)
WEIGHT_DECAY = "weight_decay"
_SCHEDULED = ("lr", WEIGHT_DECAY)
NO_RULES: Mapping[int, Rule] = MappingProxyType({})
_FLAGS = ("amsgrad", "maximize", "nesterov", "differentiable")  # of torch's optimizers


class GroupError(ValueError):
    """An entry of a parameter group was changed in a way that no step supports."""


class UsableGroups(Refusal):
    """Knows the entries of the groups as they were built (none before `compare`), and as the last step saw them."""

    def __init__(self, inputs: Inputs, applied: Collection[int]):
        """`applied` are the indices of the groups that this rank's pieces belong to."""
        self._inputs, self._applied = inputs, applied
        self.compare(())

    def compare(self, groups: Groups, rules: Mapping[int, Rule] = NO_RULES) -> None:
        """Compare the entries of later groups with the present ones.

        `rules` are those that update this rank's parameters, by the indices of their groups.
        """
        self._rules = rules
        self._built = [{name: group[name] for name in group if name != "params"} for group in groups]
        # Schedulers write the others in every step; they may be any number, if the rule reads them.
        unread = {index for index, rule in rules.items() if not reads_weight_decay(rule)}
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
            groups = self._as_built(self._inputs.groups)
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
        for index in self._applied:
            check_rate(groups[index])

    def _without_effect(self, index: int, group: Mapping[str, Any]) -> Iterator[str]:
        """Yield why weight decay or betas that were changed would have no effect."""
        built = self._built[index]
        changed = {name: group[name] for name in (WEIGHT_DECAY, "betas") if name in group and name in built}
        changed = {name: value for name, value in changed.items() if _on_host(value) and value != built[name]}
        if changed and index in self._rules:
            try:
                check_unread(self._rules[index], changed)
            except NumberError as error:
                yield str(error)

    def _as_built(self, groups: Groups) -> Groups:
        if not self._built:
            return groups
        return [{**group, **built} for group, built in zip(groups, self._built, strict=True)]

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
            yield f"{name}={group[name]!r} was added, but its rule does not read it; it reads {_numbers(built)}"
        if name in group and name in built and not _has_form_of(group[name], built[name]):
            yield f"{name}={group[name]!r} was set where the optimizer was built with {built[name]!r}"
    for name in _FLAGS:
        if name in group and group[name] is not built.get(name, False):
            yield f"{name}={group[name]!r} was set after the optimizer was built, which has no effect"
    for name, _, chosen in (text.partition("=") for text in built.get(CHOICES, ())):
        if name in group and name not in built and name not in _FLAGS and repr(group[name]) != chosen:
            yield f"{name}={group[name]!r} was added, but it was chosen when the optimizer was built: {built[CHOICES]}"


def _numbers(built: Mapping[str, Any]) -> str:
    return ", ".join(name for name in FIELDS if name in built)


def _has_form_of(value: Any, built: Any) -> bool:
    """Whether both are single numbers, or rows of as many. A learning rate may be None until a scheduler sets it."""
    if isinstance(built, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(built) and all(map(_is_number, value))
    return value is None or _is_number(value)


def _on_host(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
