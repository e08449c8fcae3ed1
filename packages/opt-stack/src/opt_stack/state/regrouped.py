"""States that an earlier release saved in other groups: `opt_paramgroups` recognises more names than it did then."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from opt_kernels.params import RULE
from opt_paramgroups.vocabulary import is_regrouped
from opt_stack.rules.entries import HYPER_KEYS

Group = Mapping[str, Any]
_IDENTITY = (RULE, "wd_mult", "lr_mult")  # entries that overrides set and training does not change


class Regrouped(NamedTuple):
    """The saved groups with their parameters in the present groups."""

    groups: list[Group]
    moved: Mapping[str, bool]  # parameters that were in other groups, and whether their rule is the same


def is_of_layer_decay(name: str) -> bool:
    """Return whether a group of this name has a factor of `get_layer_decay_overrides`."""
    return "depth " in name


def is_same(group: Group, saved: Group) -> bool:
    """Return whether a saved group has the rule and the factors of `group`. An entry that was not saved is the same."""
    return all(saved.get(key, group.get(key)) == group.get(key) for key in _IDENTITY)


def continued(group: Group, saved: Group) -> dict[str, Any]:
    """Return the numbers with which `group` continues from a saved group that had other factors or another rule.

    Rates keep the fraction of their peak that the schedule had reached.
    """
    numbers = {key: group[key] for key in (*_IDENTITY, "weight_decay", "lr") if key in group}
    if saved.get("lr") is not None and saved.get("max_lr") and group.get("max_lr") is not None:
        numbers["lr"] = saved["lr"] * (group["max_lr"] / saved["max_lr"])
    if saved.get("weight_decay") is not None and saved.get("wd_mult"):
        numbers["weight_decay"] = saved["weight_decay"] * (group["wd_mult"] / saved["wd_mult"])
    if saved.get(RULE) == group.get(RULE):
        numbers |= {key: saved[key] for key in HYPER_KEYS if key in saved}
    return numbers


def regroup(saved: Sequence[Group], groups: Sequence[Group], names: Sequence[Sequence[str]]) -> Regrouped:
    """Return saved groups with moved parameters in their present groups. Groups without names stay as they are.

    `names` are those of the parameters of each of `groups`.
    """
    if not all("name" in group and "param_names" in group for group in saved):
        return Regrouped(list(saved), {})
    source = {name: group for group in saved for name in group["param_names"]}
    index = {name: at for group in saved for name, at in zip(group["param_names"], group["params"], strict=True)}
    target = {
        name: group
        for group, own in zip(groups, names, strict=True)
        for name, id, param in zip(own, group["param_ids"], group["params"], strict=True)
        if name in source
        and source[name]["name"] != group["name"]
        and (is_regrouped(param, id.name) or any(map(is_of_layer_decay, (group["name"], source[name]["name"]))))
    }
    if not target:
        return Regrouped(list(saved), {})
    by_name = {group["name"]: group for group in saved}
    present: list[Group] = []
    for group in groups:
        then = by_name.pop(group["name"], None)
        members = [name for name in (then or {}).get("param_names", ()) if name not in target]
        members += [name for name, now in target.items() if now is group]
        if then is None or not is_same(group, then):
            then = continued(group, source[members[0]] if members else group)
        place = {"name": group["name"], "params": [index[name] for name in members], "param_names": members}
        present.append({**then, **place})
    present += [group for group in by_name.values() if not target.keys() >= set(group["param_names"])]
    moved = {name: source[name].get(RULE) == group[RULE] for name, group in target.items()}
    return Regrouped(present, moved)


def sentence(moved: Collection[str]) -> str:
    """Return what is said of parameters that changed groups."""
    shown = ", ".join(map(repr, list(moved)[:4])) + ", ..." * (len(moved) > 4)
    return (
        f"{len(moved)} parameters changed groups since this state was saved, because their names or marks are "
        f"recognised now ({shown}): they continue with the weight decay, the factors of rates and the rule of their "
        "present groups, without the state of another rule"
    )
