"""Parameter groups that are stored and found by parameter name, never by position.

A saved group is found by the names of its parameters. Groups may therefore be reordered, split or merged, and
parameters may be added or removed: each current group takes the values of the saved groups of its parameters, if these
agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError, check_choice
from opt_checkpoint.state.sharded import EMPTY

Group: TypeAlias = dict[str, Any]
Conflict: TypeAlias = Literal["error", "saved", "current"]
NOT_STORED = frozenset({"params", "param_names"})


class GroupMismatchError(CheckpointValueError):
    """Saved and current groups do not match. The message names the field and two parameters, or possible matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """How saved groups were assigned to current groups.

    Args:
        new: names of parameters that were in no saved group; they keep the current values.
        gone: names of saved parameters that are in no current group.
        kept: fields, by current group number, that no saved group has (a newer torch has more); they keep their values.
        regrouped: numbers of current groups whose parameters come from more than one saved group.
    """

    new: tuple[str, ...]
    gone: tuple[str, ...]
    kept: dict[int, tuple[str, ...]]
    regrouped: tuple[int, ...]


def groups_to_saved(param_groups: Sequence[Group], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Convert groups to their stored form.

    Args:
        param_groups: torch's form; `params` and `param_names` are not stored.
        names: for each group, the names of its parameters in order. All ranks must store the same, so name every
            parameter of the group, not only this rank's.

    Returns:
        `{"groups": [hyper-parameters], "names": [names of the group's parameters]}`. Both are lists, and a list is one
        value of a state: `load` returns the saved lists, even if the current groups differ.

    Raises:
        GroupMismatchError: a name is in two groups, or the numbers of groups differ.
    """
    if len(param_groups) != len(names):
        raise GroupMismatchError(f"{len(param_groups)} groups, but {len(names)} list(s) of names; pass one per group")
    first: dict[str, int] = {}
    for number, own in enumerate(names):
        for name in own:
            if first.setdefault(name, number) != number:
                raise GroupMismatchError(f"parameter {name} is in groups {first[name]} and {number}")
    groups: list[Group] = []
    for group in param_groups:
        kept = {field: value for field, value in group.items() if field not in NOT_STORED}
        # Tensors, such as the lr of a captured optimizer, become CPU tensors and load as tensors.
        tensors = {field: v.detach().to("cpu").clone() for field, v in kept.items() if isinstance(v, Tensor)}
        groups.append(kept | tensors)
    return {"groups": groups, "names": [list(own) for own in names]}


def apply_saved_groups(
    param_groups: Sequence[Group],
    names: Sequence[Sequence[str]],
    saved: Mapping[str, Any],
    *,
    on_conflict: Conflict = "error",
    override: Mapping[str, Any] = EMPTY,
) -> GroupReport:
    """Write saved values to the fields of the current `param_groups`, in place. Changes nothing if it raises.

    Args:
        param_groups: torch's form; group dicts are updated, except `params`.
        names: for each group, the names of its parameters.
        saved: from `groups_to_saved`.
        on_conflict: what to do if the saved groups of one current group disagree on a field: raise an error, use the
            value of its first parameter's group, or keep the current value.
        override: fields that get this value instead of the saved one, for example `{"lr": 1e-4}`.

    Returns:
        A report of new, gone, kept and regrouped parameters and fields.

    Raises:
        GroupMismatchError: saved groups disagree on a field, and `on_conflict="error"`; or no group has a field of
            `override`.
        ValueError: `on_conflict` is unknown.
    """
    check_choice("on_conflict", on_conflict, get_args(Conflict), ValueError)
    groups = saved["groups"]
    fields = sorted({field for group in (*param_groups, *groups) for field in group} - NOT_STORED)
    unknown = sorted(set(override) - set(fields))
    if unknown and fields:  # they would have no effect
        raise GroupMismatchError(
            f"override of {', '.join(unknown)}: no group has this field; fields are {', '.join(fields)}"
        )
    where = {name: number for number, own in enumerate(saved["names"]) for name in own}
    updates = []
    kept = {}
    regrouped = []
    for number, (group, own) in enumerate(zip(param_groups, names, strict=True)):
        first: dict[int, str] = {}  # of each saved group that parameters were in, the first of them
        for name in own:
            if name in where:
                first.setdefault(where[name], name)
        sources = [(groups[saved_in], name) for saved_in, name in first.items()]
        update = _update(group, sources, on_conflict, override)
        update.update((k, v) for k, v in override.items() if k in group)
        updates.append(update)
        if len(sources) > 1:
            regrouped.append(number)
        unsaved = tuple(k for k in group if k not in NOT_STORED and k not in update)
        if sources and unsaved:
            kept[number] = unsaved
    for group, update in zip(param_groups, updates):
        for field, value in update.items():
            _set_(group, field, value)
    current = {name for own in names for name in own}
    new = tuple(name for own in names for name in own if name not in where)
    return GroupReport(new=new, gone=tuple(n for n in where if n not in current), kept=kept, regrouped=tuple(regrouped))


def _update(group: Group, sources: Sequence[tuple[Group, str]], policy: Conflict, override: Mapping[str, Any]) -> Group:
    """The values for the fields of `group` from saved groups, each with a parameter that was in it.

    A field of `override` is never a conflict.
    """
    update: Group = {}
    for field in dict.fromkeys(field for saved, _ in sources for field in saved):
        if field in override:
            update[field] = override[field]
            continue
        value, param = next((saved[field], param) for saved, param in sources if field in saved)
        if _is_nan(value) and policy != "current":
            raise GroupMismatchError(
                f"group field {field!r}: parameter {param} was saved with nan, which is not a hyper-parameter; "
                f"load with override={{{field!r}: ...}}"
            )
        others = [(saved.get(field), other) for saved, other in sources if not _equal(saved.get(field), value)]
        if not others or policy == "saved":
            update[field] = value
        elif policy == "error":
            other_value, other = others[0]
            raise GroupMismatchError(
                f"group field {field!r}: parameter {param} was saved with {value!r}, parameter {other} with "
                f"{other_value!r}, and now they share a group; load with on_conflict='saved' or 'current', or "
                f"override={{{field!r}: ...}}"
            )
        elif field in group:
            update[field] = group[field]
    return update


def _is_nan(value: Any) -> bool:
    """Whether a number or a one-element tensor is NaN."""
    is_single = not isinstance(value, Tensor) or value.numel() == 1
    return isinstance(value, float | Tensor) and is_single and bool(value != value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


def _set_(group: Group, field: str, value: Any) -> None:
    """Set a field. A tensor field is written in place, because a captured graph reads it; a 0-d tensor that was saved
    for a number field becomes a number."""
    held = group.get(field)
    if isinstance(held, Tensor):
        held.copy_(torch.as_tensor(value, dtype=held.dtype, device=held.device))
    else:
        group[field] = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
