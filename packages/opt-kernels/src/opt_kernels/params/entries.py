"""Entries of parameter groups: their names, those that changed between steps, and the numbers that a rule reads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from opt_kernels.works import HYPER_FIELDS, Hyper, as_float

Group = Mapping[str, Any]
Groups = Sequence[Group]
HELD = ("params", "param_ids", "param_names")  # list the parameters of the group: too long to be compared
RULE = "optimizer"  # names the rule; groups of torch's optimizers have none
HOOKS = "hooks"  # a group's own hooks; in a state_dict, a record of them
CHOICES = "choices"  # records the structure of the rule: ("maximize=False", ...)
WEIGHT_DECAY = "weight_decay"
SCHEDULED = ("lr", WEIGHT_DECAY)  # read in every step; they change too often to be compared
FIXED = (RULE, "name", "is_expert_parallel", "clip_grad", HOOKS)
"""Entries that decide how parameters are laid out, clipped and updated."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "capturable": (None, False),
    "differentiable": (None, False),
    "amsgrad": (None, False),
    "maximize": (None, False),
}
"""Arguments of torch.optim that choose an implementation, and the values that are accepted without effect."""


class Change(NamedTuple):
    """A group of which entries were changed, added or removed."""

    number: int  # of the group
    former: Group  # the watched entries as they were accepted, lists as tuples
    names: frozenset[str]  # of the watched entries that were changed or added


class GroupEntries:
    """The entries of groups when they were last accepted, to find those that other code has changed since.

    What follows is the caller's: a drop-in adopts a change that it supports; a stepper refuses one of structure on
    every rank. Groups that are unchanged cost one pass in C each.
    """

    def __init__(self, is_watched: Callable[[int, str], bool]):
        """`is_watched` returns whether an entry is compared, from the index of its group and its name."""
        self._is_watched = is_watched
        self._accepted: dict[int, tuple[Sequence[str], Group]] = {}  # all names, and the watched entries

    def accept(self, index: int, group: Group) -> None:
        """Accept the present entries of a group; `changes` compares it with them from now on."""
        watched = {name: frozen(value) for name, value in group.items() if self._is_watched(index, name)}
        self._accepted[index] = list(group), watched

    def changes(self, groups: Groups) -> list[Change]:
        """Return the groups that changed since they were accepted, or were never accepted."""
        changed_groups = []
        for index, group in enumerate(groups):
            names, former = self._accepted.get(index, ((), {}))
            are_same = map(is_, map(group.get, former), former.values())
            if list(group) == names and all(are_same):
                continue
            changed = set()
            for name, value in group.items():
                if self._is_watched(index, name) and not (name in former and _is_same(frozen(value), former[name])):
                    changed.add(name)
            if changed or group.keys() != set(names):
                changed_groups.append(Change(index, former, frozenset(changed)))
        return changed_groups


def frozen(value: object) -> object:
    """Return `value` itself if it cannot change in place, else lists as tuples and mappings as tuples of items."""
    if isinstance(value, Mapping):
        return tuple((name, frozen(entry)) for name, entry in value.items())
    if not isinstance(value, list | tuple):
        return value
    parts = tuple(map(frozen, value))
    return value if isinstance(value, tuple) and all(map(is_, value, parts)) else parts


def _is_same(value: Any, before: Any) -> bool:
    """Whether two frozen values are equal. Tensors are compared by identity: their numbers may be on a device."""
    if value is before:
        return True
    if type(value) is not type(before) or isinstance(value, Tensor):
        return False
    if isinstance(value, tuple):
        return len(value) == len(before) and all(map(_is_same, value, before))
    return bool(value == before)


def check_rate(group: Group) -> None:
    """Raise ValueError if the group has no learning rate yet."""
    if group["lr"] is None:
        raise ValueError(f"lr of group {group['name']!r} is None: set lr in the configuration, or attach a scheduler")


def read_hyper(group: Group, *, step: int | Tensor, own: Iterable[str] = ()) -> Hyper:
    """Return a group's row for this step (counted from 1). Fields that the group lacks have their defaults.

    `own` names further entries that the rule reads.

    Raises ValueError if the group has no learning rate yet.
    """
    check_rate(group)
    numbers = {name: as_float(group[name]) for name in HYPER_FIELDS if name in group}
    others = {name: as_float(group[name]) for name in own if name in group}
    return Hyper(step=step, own=others, **numbers)
