"""What to do about keys that are only requested, or only stored."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from opt_checkpoint.errors import CheckpointKeyError
from opt_checkpoint.state.state_spec import LAYOUT_MARK, SPLIT_MARK

logger = logging.getLogger(__name__)
_SHOWN = 12
_SPLIT = re.compile(rf"{SPLIT_MARK}([\w-]+)")
_STATE = "optimizer.state."
_MAIN_NAMES = frozenset({"fp32_param", "param"})  # names of main weights: ours, and Megatron-Core's other one


class StrictHandling(Enum):
    """What to do about keys on one side only, with Megatron-Core's names.

    For Megatron-Core, an *unexpected* key is requested but not stored, and a *missing* key is stored but requested by
    no rank. torch's `load_state_dict` and `LoadReport` call the first one missing. `strict=` also accepts names in
    torch's sense: `raise_missing`, `log_missing`, `return_missing`.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"  # keys that are not stored raise
    LOG_UNEXPECTED = "log_unexpected"  # keys that are not stored are left out with a warning
    LOG_ALL = "log_all"  # both with a warning
    RAISE_UNEXPECTED = "raise_unexpected"  # keys that are not stored raise
    RAISE_ALL = "raise_all"  # both raise
    RETURN_UNEXPECTED = "return_unexpected"  # keys that are not stored are left out and reported
    RETURN_ALL = "return_all"  # both are reported
    IGNORE_ALL = "ignore_all"  # keys that are not stored are left out


Reaction: TypeAlias = Literal["raise", "log", "allow"]


class Strictness(NamedTuple):
    """What to do about keys on one side only, in torch's words.

    Args:
        missing: requested, but not stored.
        unexpected: stored, but requested by no rank.
    """

    missing: Reaction
    unexpected: Reaction

    @classmethod
    def parse(cls, value: str | StrictHandling) -> Strictness:
        """From the name of a mode.

        Raises:
            ValueError: no mode has this name.
        """
        name = value.value if isinstance(value, StrictHandling) else value
        allowed = [*_TORCHS_NAMES, *(mode.value for mode in StrictHandling)]
        if name not in allowed:
            raise ValueError(f"strict={value!r}; allowed: {', '.join(allowed)}")
        reaction, _, side = name.rpartition("_")
        missing = _REACTIONS[reaction]
        return cls(missing, missing if side == "all" else "allow")


_TORCHS_NAMES = ("raise_missing", "log_missing", "return_missing")
_REACTIONS: dict[str, Reaction] = {
    "raise": "raise",
    "assume_ok": "raise",  # Megatron-Core lets its load raise
    "log": "log",
    "return": "allow",
    "ignore": "allow",
}


def report_missing(reaction: Reaction, missing: Sequence[str], stored: Sequence[str], where: str) -> None:
    """Raise or log about keys that are requested but not stored.

    Raises:
        CheckpointKeyError: there are some, and they are an error.
    """
    if missing and reaction != "allow":
        text = f"{len(missing)} requested key(s) are not in {where}: {_some(missing)}{_hint(missing, stored)}"
        if reaction == "raise":
            raise CheckpointKeyError(f"{text}; load with strict='return_missing' to continue without them")
        logger.warning(text)


def report_unexpected(reaction: Reaction, unexpected: Sequence[str], where: str) -> None:
    """Raise or log about keys that are stored but requested by no rank.

    Raises:
        CheckpointKeyError: there are some, and they are an error.
    """
    if unexpected and reaction != "allow":
        text = f"{len(unexpected)} key(s) of {where} are requested by no rank: {_some(unexpected)}"
        if reaction == "raise":
            raise CheckpointKeyError(f"{text}; load with strict='return_all' to continue without them")
        logger.warning(text)


def warn_of_left_out(empty: Iterable[str], nones: Iterable[str], unexpected: Sequence[str], where: str) -> None:
    """Warn where an empty dict or a None of the state stands for stored values that it does not load.

    Args:
        empty: paths of empty dicts.
        nones: paths of None, which loads plain values and plain tensors only.
        unexpected: stored keys that no rank requests.
        where: the checkpoint.
    """
    for path in filter(None, empty):
        if inside := _inside(path, unexpected):
            logger.warning(
                "the state has an empty dict at %s, which loads nothing; %s holds %s there. Pass None in its place to "
                "load all of it",
                path,
                where,
                _some(inside),
            )
    for path in nones:
        if inside := _inside(path, unexpected):
            logger.warning(
                "None at %s loads plain values and plain tensors only; %s holds sharded tensors there, which were not "
                "loaded: %s. Describe them, as sharded_model(model) does",
                path or "the top of the state",
                where,
                _some(inside),
            )


def _inside(path: str, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if not path or key.startswith(f"{path}.")]


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _hint(missing: Sequence[str], stored: Sequence[str]) -> str:
    """A hint at the cause, for example that the state is stored under other names."""
    if any(".bucket_idx_" in key for key in stored):
        return (
            " (it holds buckets as they lay in memory, Megatron-Core's dp_reshardable, where parameters have no names; "
            "convert it first: optckpt convert ... --from megatron --slots ...)"
        )
    by_split = {_SPLIT.sub("", key): key for key in stored if key.startswith(_STATE)}
    bound = {key.split(LAYOUT_MARK)[0] for key in stored if LAYOUT_MARK in key}
    mains = [key for key in missing if any(key.startswith(f"{_STATE}{name}.") for name in _MAIN_NAMES)]
    for key in missing:
        name, mark, _ = key.partition(LAYOUT_MARK)
        if mark and name in bound:
            return f" ({name} was saved, but on another layout, and cannot be loaded on this one; reset it)"
        saved = by_split.get(_SPLIT.sub("", key))
        if saved is not None and _split_of(saved) != _split_of(key):
            return (
                f" (it was saved for {_split_of(saved)}, and is asked for {_split_of(key)}: set soap_split_qkv, "
                "head_rows and split_sizes as in the run that saved it, or reset the state)"
            )
        others = _other_states(key, stored)
        if others and (key not in mains or _MAIN_NAMES.intersection(others)):
            return (
                f" (this parameter was saved by another rule, with {', '.join(others)}; reset its state, or map one of "
                f"them by aliases={{'optimizer.state.<wanted>.': 'optimizer.state.<saved>.'}})"
            )
    if mains:
        return (
            " (no main weights were saved, e.g. by an fp32 run; leave them out: they are made from the model's weights)"
        )
    return _path_hint(missing[0], stored)


def _split_of(key: str) -> str:
    found = _SPLIT.search(key)
    return f"rows split as {found[1]!r}" if found else "whole matrices"


def _path_hint(key: str, stored: Sequence[str]) -> str:
    """A hint for a key that is stored under another path: the alias to pass."""
    names = set(stored)
    cuts = [position + 1 for position, letter in enumerate(key) if letter == "."]
    aliases = [(key[:cut], "") for cut in cuts if key[cut:] in names]
    aliases += [("", name.removesuffix(key)) for name in sorted(stored, key=len) if name.endswith(f".{key}")]
    if not aliases:
        return ""
    old, new = aliases[0]
    return f" ({key} is stored as {new}{key.removeprefix(old)}; pass aliases={{{old!r}: {new!r}}})"


def _other_states(key: str, stored: Sequence[str]) -> list[str]:
    """Names of the states that are stored for the parameter of a key `optimizer.state.<name>.<parameter>`."""
    name, dot, param = key.removeprefix(_STATE).partition(".")
    if not key.startswith(_STATE) or not dot:
        return []
    ending = f".{param}"
    found = (k.removeprefix(_STATE).removesuffix(ending) for k in stored if k.startswith(_STATE) and k.endswith(ending))
    return sorted(n for n in found if "." not in n and n != name)
