"""Saved groups and their parameters, matched with the present groups.

An earlier release may have saved a parameter in another group, because `opt_paramgroups` recognises more names now, and
groups under other names.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opt_checkpoint.state import former_names
from opt_distributed.saving import MAIN, STEP
from opt_kernels.params import RULE, Group
from opt_paramgroups import ParamGroup, plain_name
from opt_paramgroups.vocabulary import is_regrouped
from opt_stack.rules.built_in import HYPER_KEYS
from opt_stack.rules.entries import NOT_LOADED, RULE_RECORDS, Pair, ParamGroups
from opt_stack.state import AnyState
from opt_stack.state.described import Description

_FORMER_WORDS = {  # in names of groups
    "*.bias or 1-D": "bias or vector",
    "bias or 1-D, no qk layernorm": "bias or vector, no QK norm",
    "not 2-D or use_muon=False": "not for Muon",
    "not 2-D": "not a matrix",
}
_IDENTITY = (RULE, "wd_mult", "lr_mult")  # entries that overrides set and training does not change


class Regrouped(NamedTuple):
    """The saved groups with their parameters in the present groups."""

    groups: list[Group]
    moved: Mapping[str, bool]  # parameters that were in other groups, and whether their rule is the same


def has_layer_decay(name: str) -> bool:
    """Return whether a group of this name has a factor of `get_layer_decay_overrides`."""
    return "depth " in name


def is_same(group: Group, saved: Group) -> bool:
    """Return whether a saved group has the rule and the factors of `group`. An entry that was not saved is the same."""
    return all(saved.get(key, group.get(key)) == group.get(key) for key in _IDENTITY)


def continued(group: Group, saved: Group) -> ParamGroup:
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


def renamed(saved: ParamGroups, groups: ParamGroups) -> list[Group]:
    """Return saved groups under their present names, and parameters under names without wrappers."""
    present = {group["name"] for group in groups}
    by_keys = {_keys_of(name): name for name in present}
    found = []
    for group in saved:
        name = group.get("name")
        if isinstance(name, str) and name not in present:
            for former, word in _FORMER_WORDS.items():
                name = name.replace(former, word)
            group = {**group, "name": by_keys.get(_keys_of(name), name)}
        if "param_names" in group:
            group = {**group, "param_names": list(map(plain_name, group["param_names"]))}
        found.append(group)
    return found


def _keys_of(name: str) -> tuple[bool, int, tuple[str, ...]]:
    """What a name of a group consists of, whatever the order of its keys, which is that of their words."""
    of_keys = name.removesuffix(" (experts)")
    return of_keys != name, name.count(" and "), tuple(sorted(re.split(" and |, ", of_keys)))


def regroup(saved: ParamGroups, groups: ParamGroups, names: Sequence[Sequence[str]]) -> Regrouped:
    """Return saved groups with moved parameters in their present groups. Groups without names stay as they are.

    `names` are those of the parameters of each of `groups`.
    """
    if not all("name" in group and "param_names" in group for group in saved):
        return Regrouped(list(saved), {})
    source: dict[str, Group] = {}  # the saved group of each parameter
    index: dict[str, Any] = {}  # and its index in `params`
    for group in saved:
        source |= dict.fromkeys(group["param_names"], group)
        index |= zip(group["param_names"], group["params"], strict=True)
    target = {}  # the present group of each parameter that was in another one
    for group, own in zip(groups, names, strict=True):
        for name, id, param in zip(own, group["param_ids"], group["params"], strict=True):
            before = source.get(name, group)["name"]
            is_of_decay = has_layer_decay(group["name"]) or has_layer_decay(before)
            if before != group["name"] and (is_regrouped(param, id.name) or is_of_decay):
                target[name] = group
    if not target:
        return Regrouped(list(saved), {})
    by_name = {group["name"]: group for group in saved}
    present: list[Group] = []
    for group in groups:
        then = by_name.pop(group["name"], None)
        members = [name for name in then["param_names"] if name not in target] if then is not None else []
        members += [name for name, now in target.items() if now is group]
        if then is None or not is_same(group, then):
            then = continued(group, source[members[0]] if members else group)
        params = [index[name] for name in members]
        present.append({**then, "name": group["name"], "params": params, "param_names": members})
    present += [group for group in by_name.values() if not target.keys() >= set(group["param_names"])]
    moved = {name: source[name].get(RULE) == group[RULE] for name, group in target.items()}
    return Regrouped(present, moved)


# --- groups of a sharded state ----------------------------------------------------------------------------------------


def regroup_described(
    saved: AnyState,
    groups: ParamGroups,
    described: Description,
) -> tuple[dict[str, Any], list[str]]:
    """Return saved groups without the parameters that earlier releases put into other groups, and their names.

    If all parameters of a present group moved, they are in an additional saved group with its factors.
    """
    stored = list(saved.get("groups", ()))
    names = list(saved.get("names", ()))
    source = {name: number for number, own in enumerate(names) for name in own}
    moved: list[str] = []
    added = []
    for group, of_group, present in zip(groups, described.groups, described.names_on_all_ranks, strict=True):
        moved_here = []
        num_saved = 0
        for own, param in zip(of_group, group["params"], strict=True):
            number = source.get(own.name)
            if number is None:
                continue
            num_saved += 1
            if is_same(group, stored[number]):
                continue
            has_same_params = set(names[number]) == set(present)  # the caller changed only the factors
            if is_regrouped(param, own.id.name) or (has_layer_decay(group["name"]) and not has_same_params):
                moved_here.append(own.name)
        if moved_here and len(moved_here) == num_saved:
            stored.append(continued(group, stored[source[moved_here[0]]]))
            added.append(moved_here)
        moved += moved_here
    names = [[name for name in own if name not in moved] for own in names]
    return {"groups": stored, "names": names + added}, moved


def match_saved(
    loaded: AnyState, groups: ParamGroups, names: Sequence[Sequence[str]]
) -> tuple[dict[str, Any], list[Pair], dict[tuple[str, str], list[str]]]:
    """Match the saved groups with `groups` by the names of their parameters. Converted checkpoints have no groups.

    Returns:
        The saved groups without `NOT_LOADED` and without parameters that another rule updates now, because learning
        rates of one rule do not fit another; each current group with the saved groups of its parameters, one for each
        record of a rule; and the parameters that continue from the state of another rule, by (saved rule, rule),
        because its names may have other meanings: SOAP's moments are in its eigenbasis.
    """
    saved_names = loaded["groups"].get("names", ())
    known = {name for own in saved_names for name in own}
    now = {name: group.get(RULE) for group, own in zip(groups, names, strict=True) for name in own}
    current = {former: name for name, former in former_names(now, known.__contains__).items()}
    then: dict[str, Group] = {}  # the saved group of each parameter
    kept = []
    without = []
    for group, own in zip(loaded["groups"].get("groups", ()), saved_names, strict=True):
        present = [current.get(name, name) for name in own]
        then |= dict.fromkeys(present, group)
        kept.append([name for name in present if RULE not in group or now.get(name) in (None, group[RULE])])
        without.append({key: value for key, value in group.items() if key not in NOT_LOADED})
    pairs: list[Pair] = []
    for group, own in zip(groups, names, strict=True):
        found = {}
        for saved in (then[name] for name in own if name in then):
            found[str([saved.get(key) for key in (RULE, *RULE_RECORDS)])] = saved
        pairs += [(group, saved) for saved in found.values()]
    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, after in now.items():
        before = then.get(name, {}).get(RULE)
        if before and after and before != after and loaded["state"].get(name, {}).keys() - {STEP, MAIN}:
            moved[before, after].append(name)
    return {"groups": without, "names": kept}, pairs, moved
