"""Overrides of one parameter group: a typed dict, its form as a dict key, and the union of several."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypedDict, cast

from .errors import ScheduleError


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
    items = cast(Mapping[str, object], param_group_override).items()
    return tuple((key, _hashable(value, key=key)) for key, value in sorted(items))


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
        for key, value in cast(Mapping[str, object], override or {}).items():
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
