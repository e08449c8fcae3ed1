"""The groups of an optimizer: overrides of one group, how an entry is set, and the base class of the schedulers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, cast

from .errors import ScheduleError
from .schedule import Plain

Group: TypeAlias = MutableMapping[str, Any]
Entries: TypeAlias = Mapping[str, Any]  # of a group that is only read, or of a saved state

VERSION = 1  # of the states; those of Megatron-Core have none


class HasParamGroups(Protocol):
    """What a scheduler needs of an optimizer: its groups, which are read at every step."""

    @property
    def param_groups(self) -> Iterable[Group]: ...


Optimizers: TypeAlias = HasParamGroups | Sequence[HasParamGroups]


def set_(group: Group, key: str, value: float, filled: set[int]) -> None:
    """Set one entry of a group, in place if it is a tensor. Writes `group`, and adds the tensor's id to `filled`."""
    group[key] = new_entry(group.get(key), value, filled)


def new_entry(old: Any, value: float, filled: set[int]) -> Any:
    """Return the entry that replaces `old`: the number `value`, or the tensor `old`, filled with it.

    A tensor keeps its identity, because captured graphs and compiled steps read from its address. It is recognized by
    its `fill_`, so torch need not be imported. A tensor that another group has filled already is cloned first: torch
    gives all groups the one tensor that was passed as lr, and they would all end with the last group's value.
    """
    if not hasattr(old, "fill_"):
        return value
    tensor = old.clone() if id(old) in filled else old
    filled.add(id(tensor))
    return tensor.fill_(value)


def plain(number: Any) -> Any:
    """Return a number of Python, which a state can hold, of a NumPy scalar or a tensor of one element."""
    return number.item() if hasattr(number, "item") else number


def check_state(where: str, state: Entries, keys: Iterable[str]) -> None:
    """Raise `ScheduleError` if `state` lacks one of `keys` or is of a newer version."""
    if missing := sorted(set(keys) - set(state)):
        raise ScheduleError(f"{where}: the state lacks {missing}; it has {sorted(state)}")
    if (version := state.get("version", VERSION)) > VERSION:
        raise ScheduleError(f"{where}: {version=} of the state is newer than {VERSION}, the last that is read here")


class GroupScheduler(ABC):
    """Counts steps and writes the values for the present step into the groups of one optimizer, or of a list of them.

    Has the attributes and methods that trainers need of a scheduler that is not torch's: `optimizer`, `base_lrs`,
    `last_epoch`, `get_last_lr`, `step`, `state_dict` and `load_state_dict`. For trainers that accept only torch's
    class, use `opt_scheduler.as_lr_scheduler`.
    """

    def __init__(self, optimizer: Optimizers) -> None:
        self.optimizer = optimizer
        self.num_steps: float = 0

    def step(self, increment: float = 1) -> None:
        """Advance by `increment` steps (or samples, or tokens) and write the groups.

        Raises:
            ScheduleError: `increment` is negative (`seek` can go back), or a group has invalid overrides. Then neither
                the count nor any group has changed.
        """
        increment = plain(increment)
        if not 0 <= increment < math.inf:
            raise ScheduleError(f"step: increment={increment!r} must be at least 0 and finite; seek() can go back")
        self.seek(self.num_steps + increment)

    def seek(self, num_steps: float) -> None:
        """Go to step `num_steps`, forwards or backwards, and write the groups.

        Raises:
            ScheduleError: `num_steps` is negative.
        """
        num_steps = plain(num_steps)
        if not 0 <= num_steps < math.inf:
            raise ScheduleError(f"seek: num_steps={num_steps!r} must be at least 0 and finite")
        self._write(self.param_groups, num_steps)
        self.num_steps = num_steps

    @property
    def param_groups(self) -> list[Group]:
        """The present groups, of one optimizer or of several.

        Raises:
            ScheduleError: an optimizer has no `param_groups`, for example because parameters were passed.
        """
        groups: list[Group] = []
        optimizers: Sequence[Any] = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        for each in optimizers:
            if getattr(each, "param_groups", None) is None:
                raise ScheduleError(
                    f"optimizer={each!r} ({type(each).__name__}) has no param_groups; pass an optimizer such as "
                    "torch.optim.AdamW, or a list of optimizers"
                )
            groups += each.param_groups
        return groups

    @property
    def last_epoch(self) -> float:
        """`num_steps` under torch's name for it."""
        return self.num_steps

    @property
    def base_lrs(self) -> list[float]:
        """The base learning rate of each group: the value that its schedule multiplies, or the schedule's peak."""
        return [self._base_lr(place, group) for place, group in enumerate(self.param_groups)]

    def get_last_lr(self) -> list[float]:
        """Return the present learning rate of each group."""
        return [float(group["lr"]) for group in self.param_groups]

    def writes_lr(self, group: Group) -> bool:
        """Whether a step sets the learning rate of `group`."""
        return True

    @abstractmethod
    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        """Set all groups to their values at `num_steps`, or on an error none."""

    @abstractmethod
    def _base_lr(self, place: int, group: Group) -> float: ...

    @abstractmethod
    def state_dict(self) -> Plain:
        """Return everything that cannot be recomputed, in plain types."""

    @abstractmethod
    def load_state_dict(self, state_dict: Entries) -> None:
        """Set everything to the saved state, or on an error nothing."""


class ParamGroupOverride(TypedDict, total=False):
    """Values of one parameter group that replace the scheduler's.

    It is a dict that is merged into the group. Other keys are merged too, for a custom optimizer or scheduler to read.

    >>> ParamGroupOverride(max_lr=1e-4, wd_mult=0.0)
    {'max_lr': 0.0001, 'wd_mult': 0.0}
    """

    max_lr: float  # peak of the learning rate
    min_lr: float  # floor of the learning rate
    start_wd: float  # weight decay at step 0
    end_wd: float  # weight decay at the end of its ramp
    wd_mult: float  # multiplies the weight decay; 0 turns it off
    optimizer: str  # the rule that updates the group


def param_group_override_to_tuple(
    param_group_override: ParamGroupOverride | None,
) -> tuple[tuple[str, Hashable], ...] | None:
    """Return the override as a dict key: pairs sorted by name, so that their order does not matter.

    Lists, sets and dicts among the values become tuples. None stays None.

    >>> param_group_override_to_tuple({"min_lr": 0.0, "max_lr": 1e-3})
    (('max_lr', 0.001), ('min_lr', 0.0))

    Raises:
        ScheduleError: a value cannot be hashed, for example an array.
    """
    if param_group_override is None:
        return None
    return tuple((key, _hashable(value, key=key)) for key, value in sorted(param_group_override.items()))


def combine_param_group_overrides(
    param_group_overrides: Sequence[ParamGroupOverride | None],
) -> ParamGroupOverride:
    """Return the union of several overrides. None counts as empty. Two may set the same key to the same value.

    >>> combine_param_group_overrides([{"wd_mult": 0.0}, None, {"max_lr": 1e-4}])
    {'wd_mult': 0.0, 'max_lr': 0.0001}

    Raises:
        ScheduleError: two overrides set one key to different values; names the key and both values.
    """
    combined: dict[str, object] = {}
    for override in param_group_overrides:
        for key, value in (override or {}).items():
            if key in combined and combined[key] is not value and combined[key] != value:
                raise ScheduleError(
                    f"parameter group override {key!r} is set twice, to {combined[key]!r} and to {value!r}: "
                    "a parameter matched by both would have two values; make the matches disjoint or the values equal"
                )
            combined[key] = value
    return cast(ParamGroupOverride, combined)


def _hashable(value: object, *, key: str) -> Hashable:
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=repr)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return tuple(_hashable(v, key=key) for v in value)
    if isinstance(value, Hashable):
        return value
    raise ScheduleError(
        f"parameter group override {key!r} is {value!r} ({type(value).__name__}), which cannot be part of a key: "
        "use numbers, strings, tuples, lists, sets or dicts"
    )
