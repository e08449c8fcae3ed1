"""Finds an optimizer in a checkpoint: its groups, the names of its parameters and states, and where these are stored.

Five forms are read: that of `sharded_optimizer`; that of opt-stack's optimizers, whose groups alone are plain values;
that of `torch.distributed.checkpoint.state_dict.get_state_dict`, as torchtitan saves it, with the states
`state.<parameter>.<state>` and groups by number or flattened by parameter; the same as saved by `save`; and that of
Megatron-Core and of what was converted from it, with the states `state.<state>.<parameter>` and no names in groups.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from opt_checkpoint.dcp.names import merged, some_of
from opt_checkpoint.disk.checkpoint import Opened, read_object, read_objects
from opt_checkpoint.disk.index import CheckpointIndex, Kind
from opt_checkpoint.errors import CheckpointKeyError, CheckpointValueError
from opt_checkpoint.run.save_load import load_alone, read_tensors
from opt_checkpoint.state.groups import Group
from opt_checkpoint.state.sharded import Path, items_of, path_text
from opt_checkpoint.state.tree import lookup
from opt_checkpoint.state.wrappers import former_names

PREFIX = "optimizer.state."
_GROUPS_OBJECT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*\.optimizer/shard_[\d.]+_[\d.]+")
_LAYER = re.compile(r"(?<=\blayers\.)\d+\.")
T = TypeVar("T")
ByParam: TypeAlias = dict[str, dict[str, T]]  # by parameter and state, or field


class SavedOptimizer(NamedTuple):
    """An optimizer in a checkpoint.

    Args:
        groups: hyper-parameters of each group.
        names: names of each group's parameters.
        plain_state: states that are not tensors, by parameter.
        param_shapes: shapes of the parameters, where they were recorded.
        keys: the stored key of each tensor of state, by parameter and state.
    """

    groups: Sequence[Mapping[str, Any]]
    names: Sequence[Sequence[str]]
    plain_state: ByParam[Any]
    param_shapes: Mapping[str, Sequence[int]]
    keys: ByParam[str]

    @property
    def params(self) -> list[str]:
        """The names of all parameters, in the order of the groups."""
        in_groups = (name for own in self.names for name in own)
        return list(dict.fromkeys((*in_groups, *self.keys, *self.plain_state)))

    def states_of(self, name: str) -> set[str]:
        """Return the names of the states of a parameter; empty for one without."""
        return {*self.keys.get(name, ()), *self.plain_state.get(name, ())}


def with_current_names(saved: SavedOptimizer, names: Iterable[str]) -> SavedOptimizer:
    """Return the optimizer with the current names of parameters where it was saved under former ones, see
    `former_names`."""
    now = {old: name for name, old in former_names(set(names), set(saved.params).__contains__).items()}

    def renamed(by_name: Mapping[str, T]) -> dict[str, T]:
        return {now.get(name, name): value for name, value in by_name.items()}

    return saved._replace(
        names=[[now.get(name, name) for name in own] for own in saved.names],
        plain_state=renamed(saved.plain_state),
        param_shapes=renamed(saved.param_shapes),
        keys=renamed(saved.keys),
    )


def find_optimizer(opened: Opened, at: Path, names: Iterable[str] = ()) -> SavedOptimizer:
    """Find the optimizer under these keys of the saved state, such as `("optimizer",)`.

    Args:
        opened: the checkpoint.
        at: the keys.
        names: of the parameters of the present optimizer. States are stored by parameter or by name of state, which the
            names of parameters, these and those of stored weights, tell apart.

    Raises:
        CheckpointKeyError: nothing is there that is an optimizer, or a state of it is incomplete.
    """
    saved = lookup(opened.common, at)
    index = opened.index
    prefix = "".join(f"{key}." for key in at)
    groups = lookup(saved, ("groups",))
    has_names = isinstance(groups, dict) and bool(groups.get("names"))  # none in converted checkpoints
    if isinstance(saved, dict) and ("state_names" in saved or has_names):
        return _ours(opened, saved, at)
    keys = _by_param(index.tensors, f"{prefix}state.")
    by_state: ByParam[str] = defaultdict(dict)  # by parameter and state, in a chain of optimizers too
    state_key = re.compile(rf"(?:chained_\d+\.)?{re.escape(prefix)}state\.([^.]+)\.(.+)")
    for match in filter(None, map(state_key.fullmatch, sorted(index.tensors))):
        by_state[match[2]][match[1]] = match[0]
    known = {*names, *index.tensors}
    if known & by_state.keys() and not known & keys.keys():
        return _of_megatron(opened, by_state, names)
    groups, saved_names = _stock_groups(opened, at, saved)
    if not keys and not groups:
        raise CheckpointKeyError(_found_nothing(index, at))
    plain = _fields(opened, at, saved, "state.")
    numbers = lookup(saved, ("state",))  # in a state dict that our `save` stored
    if isinstance(numbers, dict):
        for name, own in numbers.items():
            of_param = plain.setdefault(str(name), {})
            if isinstance(own, dict):
                of_param |= own
    with_states = keys.keys() | plain.keys()
    members = {name for own in saved_names for name in own} or with_states
    # Names that a state of a parameter contains; others are of parameters that are gone.
    strange = [
        name
        for name in sorted(with_states - members)
        if not members.isdisjoint(accumulate(name.split("."), "{}.{}".format))
    ]
    if strange:
        raise CheckpointKeyError(
            f"{index.path} holds states that are lists or dicts: {some_of(strange)}; they are read from checkpoints of "
            f"sharded_optimizer only"
        )
    # At the root, weights of a module that is called state look like states.
    keys = {name: keys[name] for name in keys if name in members}
    plain = {name: plain[name] for name in plain if name in members}
    return SavedOptimizer(groups=groups, names=saved_names, plain_state=plain, param_shapes={}, keys=keys)


def _found_nothing(index: CheckpointIndex, at: Path) -> str:
    """The message that no optimizer is stored at a place, with places where one may be."""
    prefixes = set()
    for key in index.tensors:
        prefix, dot, _ = f".{key}".partition(".state.")
        if dot:
            prefixes.add(prefix)
    places = ", ".join(str(tuple(prefix.split(".")[1:])) for prefix in sorted(prefixes)[:4])
    hint = f". There are states at {places}" if places else ""
    where = path_text(at) or "its root"
    return f"{index.path} holds no optimizer at {where}; pass its place as at=(...){hint}"


def _of_megatron(opened: Opened, by_state: ByParam[str], names: Iterable[str]) -> SavedOptimizer:
    """The states that Megatron-Core stored, by parameter, without main weights: a torch optimizer has none.

    The step count, which is stored once or, in a converted checkpoint, by parameter, is a float32 tensor as in torch.
    """
    index = opened.index
    missing = [name for name in names if name not in by_state]
    stacked = [name for name in missing if _LAYER.sub("", name) in by_state]
    if stacked:
        raise CheckpointKeyError(
            f"{index.path} holds the states of {some_of(stacked)} stacked with those of other layers, which a torch "
            f"optimizer cannot represent; load them with an optimizer of opt_stack, from what optckpt convert --from "
            f"megatron writes"
        )
    step = read_step(index, opened.common) if index.kind is Kind.MEGATRON else None
    stored = {name: states.pop("step") for name, states in by_state.items() if "step" in states}
    steps = read_tensors(opened, stored.values())
    keys: ByParam[str] = {}
    plain: ByParam[Any] = {}
    for name, states in by_state.items():
        keys[name] = {state: key for state, key in states.items() if state not in ("param", "fp32_param")}
        if name in stored:
            plain[name] = {"step": steps[stored[name]].float()}
        elif step is not None:
            plain[name] = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
    return SavedOptimizer((), (), plain, {}, keys)


def _ours(opened: Opened, saved: Mapping[str, Any], at: Path) -> SavedOptimizer:
    """The optimizer of `sharded_optimizer`; or of opt-stack, whose states are known by their keys."""
    index = opened.index
    prefixes = (f"{path_text(at)}.state." if at else PREFIX, PREFIX)
    groups = _stored_value((*at, "groups"), opened)
    if "state_names" not in saved:
        names: dict[str, list[str]] = {name: [] for own in groups["names"] for name in own}
        stacked = [name for name in names if "/" in name]
        if stacked:
            raise CheckpointKeyError(
                f"{stacked[0]} shares a stacked key with other layers, which a torch optimizer cannot represent"
            )
        # Another optimizer's states may be under the other prefix.
        stored_under = next((p for p in prefixes if any(key.startswith(p) for key in index.tensors)), PREFIX)
        for key in index.tensors:
            state, _, name = key.removeprefix(stored_under).partition(".")
            if key.startswith(stored_under) and name in names:
                names[name].append(state)
        saved = {**groups, "state_names": names, "plain_state": {}}
        groups = groups["groups"]
    elif any(saved["plain_state"].values()):
        saved = {**saved, "plain_state": _stored_value((*at, "plain_state"), opened)}
    keys: ByParam[str] = defaultdict(dict)
    lost = []
    for name, states in saved["state_names"].items():
        plain = saved["plain_state"].get(name, {})
        for state in states:
            if state in plain:
                continue
            candidates = [f"{prefix}{state}.{name}" for prefix in prefixes]
            stored = [key for key in candidates if key in index.tensors]
            if stored:
                keys[name][state] = stored[0]
            else:
                lost.append(f"{state} of {name}")
    if lost:
        raise CheckpointKeyError(f"{index.path} lacks states that its optimizer was saved with: {some_of(lost)}")
    return SavedOptimizer(
        groups=groups,
        names=saved["names"],
        plain_state=saved["plain_state"],
        param_shapes=saved.get("param_shapes", {}),  # older checkpoints lack them
        keys=keys,
    )


def _stored_value(path: Path, opened: Opened) -> Any:
    """The plain value at a path, with the tensors in its lists read; `ABSENT` if there is none."""
    if opened.index.kind is not Kind.OURS:
        return lookup(opened.common, path)
    wanted = merged(None, {path: None})  # a state of None at the path, which stands for any value
    return lookup(load_alone(wanted, opened, strict="return_missing"), path)


def _by_param(stored: Mapping[str, Any], prefix: str) -> ByParam[str]:
    """The keys of the form `<prefix><parameter>.<name>`, by parameter and name."""
    found: ByParam[str] = defaultdict(dict)
    for key in sorted(stored):
        name, dot, last = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and dot:
            found[name][last] = key
    return found


def _fields(opened: Opened, at: Path, saved: Any, of: str) -> ByParam[Any]:
    """Values of the keys `<of><parameter or number>.<field>`: stored objects, tensors if they are of groups, and what
    our `save` stored of a flattened state dict."""
    index = opened.index
    prefix = "".join(f"{key}." for key in at)
    values = read_objects(index, [key for key in index.objects if key.startswith(prefix + of)])
    for key, value in saved.items() if isinstance(saved, dict) else ():
        if str(key).startswith(of):
            may_hold_tensors = isinstance(value, list | tuple)
            values[f"{prefix}{key}"] = _stored_value((*at, key), opened) if may_hold_tensors else value
    if of == "param_groups.":
        of_groups = [key for key in index.tensors if key.startswith(prefix + of)]
        found = [key for key in of_groups if key.rpartition(".")[0] not in values]
        lists = [key for key in found if key.rpartition(".")[2].isdigit()]
        if lists:
            raise CheckpointKeyError(
                f"{index.path} holds groups with tensors in lists: {some_of(lists)}; they are read from checkpoints of "
                f"sharded_optimizer only"
            )
        values |= read_tensors(opened, found)
    fields = _by_param(values, prefix + of)
    return {name: {field: values[key] for field, key in own.items()} for name, own in fields.items()}


def _stock_groups(opened: Opened, at: Path, saved: Any) -> tuple[list[Group], list[list[str]]]:
    """Groups and the names of their parameters, which are stored by number or flattened by parameter."""
    listed = lookup(saved, ("param_groups",))
    if isinstance(listed, list):
        listed = _stored_value((*at, "param_groups"), opened)
        rows = [dict(group) for group in listed]
    else:
        read = _fields(opened, at, saved, "param_groups.")
        if all(name.isdigit() and "params" in own for name, own in read.items()):
            rows = [read[name] for name in sorted(read, key=int)]
        else:  # parameters with equal fields are a group
            by_fields: dict[str, Group] = {}
            for name, fields in read.items():
                values = {field: v.tolist() if isinstance(v, Tensor) else v for field, v in sorted(fields.items())}
                by_fields.setdefault(repr(values), {**fields, "params": []})["params"].append(name)
            rows = list(by_fields.values())
    names = [list(group.get("params", ())) for group in rows]
    if not all(isinstance(name, str) for of_group in names for name in of_group):
        raise CheckpointKeyError(
            f"{opened.index.path} holds an optimizer's state_dict, whose parameters have numbers in place of names; "
            f"save sharded_optimizer(model, optimizer)"
        )
    groups = [{field: value for field, value in group.items() if field != "params"} for group in rows]
    return groups, names


def read_step(index: CheckpointIndex, common: Any) -> int | None:
    """Return the step count of the whole optimizer; None if none is stored.

    Megatron-Core stores it in the parameter groups (in the common state, or in an object of its own), or as
    `common_step` next to the optimizer's states.

    Args:
        index: a Megatron-Core directory.
        common: its common state.

    Raises:
        CheckpointingException: parameters have different step counts.
    """
    places = [lookup(common, ("optimizer",))]
    places += [read_object(index, key) for key in sorted(index.objects) if _GROUPS_OBJECT.fullmatch(key)]
    steps: set[int] = set()
    for place in places:
        for name in ("step", "common_step"):
            steps |= set(map(int, values_of(place, name)))
    if len(steps) > 1:
        raise CheckpointValueError(f"{index.path} holds different step counts: {sorted(steps)}; pass step= (--step)")
    return steps.pop() if steps else None


def dicts_of(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the dicts under a key of this name, anywhere in a nested dict."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == name and isinstance(inner, dict):
            yield inner
        else:
            yield from dicts_of(inner, name)


def values_of(value: Any, name: str) -> Iterator[Any]:
    """Yield numbers, strings and one-element tensors under a key of this name, anywhere in a nested value."""
    for key, inner in items_of(value) if isinstance(value, dict | list | tuple) else ():
        is_single = isinstance(inner, int | float | str) or (isinstance(inner, Tensor) and inner.numel() == 1)
        if key == name and is_single:
            yield inner
        else:
            yield from values_of(inner, name)
