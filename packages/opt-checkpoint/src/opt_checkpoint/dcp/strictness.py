"""What to do about keys that are only requested, or only stored."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from enum import Enum

from opt_checkpoint.errors import CheckpointKeyError
from opt_checkpoint.state.state_spec import LAYOUT_MARK, SPLIT_MARK

logger = logging.getLogger(__name__)
_SHOWN = 12
_SPLIT = re.compile(rf"{SPLIT_MARK}([\w-]+)")
_MAIN_NAMES = frozenset({"fp32_param", "param"})  # names of main weights: ours, and Megatron-Core's other one
_MAIN = tuple(f"optimizer.state.{name}." for name in _MAIN_NAMES)


class StrictHandling(Enum):
    """What to do about keys on one side only, with Megatron-Core's names.

    For Megatron-Core, an *unexpected* key is requested but not stored, and a *missing* key is stored but requested by
    no rank. torch's `load_state_dict` and `LoadReport` call the first one missing. `parse` also accepts names in
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

    @classmethod
    def parse(cls, value: str | StrictHandling) -> StrictHandling:
        """A mode from its name.

        Raises:
            ValueError: no mode has this name.
        """
        try:
            return cls(_IN_TORCHS_WORDS.get(value, value) if isinstance(value, str) else value)
        except ValueError:
            allowed = ", ".join([*_IN_TORCHS_WORDS, *(m.value for m in cls)])
            raise ValueError(f"strict={value!r}; allowed: {allowed}") from None

    @property
    def raises_missing(self) -> bool:
        """Return whether a key that is not stored is an error."""
        return self in (
            StrictHandling.ASSUME_OK_UNEXPECTED,
            StrictHandling.RAISE_UNEXPECTED,
            StrictHandling.RAISE_ALL,
        )


_IN_TORCHS_WORDS = {
    "raise_missing": "raise_unexpected",
    "log_missing": "log_unexpected",
    "return_missing": "return_unexpected",
}


def judge_missing(mode: StrictHandling, missing: Sequence[str], stored: Sequence[str], where: str) -> None:
    """Raise or log, depending on the mode, about keys that are requested but not stored.

    Raises:
        CheckpointKeyError: there are some, and the mode is strict about them.
    """
    if not missing:
        return
    text = f"{len(missing)} requested key(s) are not in {where}: {_some(missing)}{_hint(missing, stored)}"
    if mode.raises_missing:
        raise CheckpointKeyError(f"{text}; load with strict='return_missing' to continue without them")
    if mode in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        logger.warning(text)


def judge_unexpected(mode: StrictHandling, unexpected: Sequence[str], where: str) -> None:
    """Raise or log, depending on the mode, about keys that are stored but requested by no rank.

    Raises:
        CheckpointKeyError: there are some, and the mode is strict about them.
    """
    if not unexpected:
        return
    text = f"{len(unexpected)} key(s) of {where} are requested by no rank: {_some(unexpected)}"
    if mode is StrictHandling.RAISE_ALL:
        raise CheckpointKeyError(f"{text}; load with strict='return_all' to continue without them")
    if mode is StrictHandling.LOG_ALL:
        logger.warning(text)


def warn_of_empty(empty: Iterable[str], unexpected: Sequence[str], where: str) -> None:
    """Warn where the state has an empty dict and the checkpoint has values that no rank asks for."""
    for path in empty:
        inside = [key for key in unexpected if not path or key.startswith(f"{path}.")]
        if path and inside:
            logger.warning(
                "the state has an empty dict at %s, which loads nothing; %s holds %s there. Pass None in its place to "
                "load all of it",
                path,
                where,
                _some(inside),
            )


def warn_of_none(nones: Iterable[str], unexpected: Sequence[str], where: str) -> None:
    """Warn where the state has None and the checkpoint has sharded values, which None does not load."""
    for path in nones:
        inside = [key for key in unexpected if not path or key.startswith(f"{path}.")]
        if inside:
            logger.warning(
                "None at %s loads plain values and plain tensors only; %s holds sharded tensors there, which were not "
                "loaded: %s. Describe them, as sharded_model(model) does",
                path or "the top of the state",
                where,
                _some(inside),
            )


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
    by_split = {_unsplit(key): key for key in stored if key.startswith("optimizer.state.")}
    bound = {key.split(LAYOUT_MARK)[0] for key in stored if LAYOUT_MARK in key}
    for key in missing:
        name, mark, _ = key.partition(LAYOUT_MARK)
        if mark and name in bound:
            return f" ({name} was saved, but on another layout, and cannot be loaded on this one; reset it)"
        saved = by_split.get(_unsplit(key))
        if saved is not None and _split_of(saved) != _split_of(key):
            return (
                f" (it was saved for {_split_of(saved)}, and is asked for {_split_of(key)}: set soap_split_qkv, "
                "head_rows and split_sizes as in the run that saved it, or reset the state)"
            )
        others = _other_states(key, stored)
        if others and (not key.startswith(_MAIN) or _MAIN_NAMES.intersection(others)):
            return (
                f" (this parameter was saved by another rule, with {', '.join(others)}; reset its state, or map one of "
                f"them by aliases={{'optimizer.state.<wanted>.': 'optimizer.state.<saved>.'}})"
            )
    if any(key.startswith(_MAIN) for key in missing):
        return (
            " (no main weights were saved, e.g. by an fp32 run; leave them out: they are made from the model's weights)"
        )
    return _path_hint(missing[0], stored)


def _unsplit(key: str) -> str:
    """The key without the part that describes how rows are split."""
    return _SPLIT.sub("", key)


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
    prefix = "optimizer.state."
    name, dot, param = key.removeprefix(prefix).partition(".")
    if not key.startswith(prefix) or not dot:
        return []
    ending = "." + param
    found = (k.removeprefix(prefix).removesuffix(ending) for k in stored if k.startswith(prefix) and k.endswith(ending))
    return sorted(n for n in found if "." not in n and n != name)
