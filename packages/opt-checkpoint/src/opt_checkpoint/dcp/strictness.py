"""What to do about keys that are only here, or only in the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum

from opt_checkpoint.errors import CheckpointKeyError
from opt_checkpoint.state.state_spec import LAYOUT_MARK

logger = logging.getLogger(__name__)
_SHOWN = 12
_MAIN_NAMES = frozenset({"fp32_param", "param"})  # of main weights: ours, and the reference's other one
_MAIN = tuple(f"optimizer.state.{name}." for name in _MAIN_NAMES)


class StrictHandling(Enum):
    """Megatron-Core's modes. *Unexpected*: asked for here, not stored. *Missing*: stored, asked for by no rank."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"  # unexpected raise, missing are ignored
    LOG_UNEXPECTED = "log_unexpected"  # unexpected are dropped with a warning
    LOG_ALL = "log_all"  # both with a warning
    RAISE_UNEXPECTED = "raise_unexpected"  # unexpected raise, missing are ignored
    RAISE_ALL = "raise_all"  # both raise
    RETURN_UNEXPECTED = "return_unexpected"  # unexpected are dropped and reported
    RETURN_ALL = "return_all"  # both are reported
    IGNORE_ALL = "ignore_all"  # unexpected are dropped

    @classmethod
    def parse(cls, value: str | StrictHandling) -> StrictHandling:
        """A mode from its name.

        Raises:
            ValueError: no mode is called that.
        """
        try:
            return cls(value)
        except ValueError:
            raise ValueError(f"strict={value!r}; allowed: {', '.join(m.value for m in cls)}") from None

    @property
    def raises_unexpected(self) -> bool:
        """Whether a key that is not stored is an error."""
        return self in (
            StrictHandling.ASSUME_OK_UNEXPECTED,
            StrictHandling.RAISE_UNEXPECTED,
            StrictHandling.RAISE_ALL,
        )


def judge_unexpected(mode: StrictHandling, unexpected: Sequence[str], stored: Sequence[str], where: str) -> None:
    """Raise or log, as the mode says, about keys that are asked for and not stored.

    Raises:
        CheckpointKeyError: there are some, and the mode is strict about them.
    """
    if not unexpected:
        return
    text = f"{len(unexpected)} key(s) asked for are not in {where}: {_some(unexpected)}{_hint(unexpected, stored)}"
    if mode.raises_unexpected:
        raise CheckpointKeyError(f"{text}; load with strict='return_unexpected' to go on without them")
    if mode in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        logger.warning(text)


def judge_missing(mode: StrictHandling, missing: Sequence[str], where: str) -> None:
    """Raise or log, as the mode says, about keys that are stored and asked for by no rank.

    Raises:
        CheckpointKeyError: there are some, and the mode is strict about them.
    """
    if not missing:
        return
    text = f"{len(missing)} key(s) of {where} are asked for by no rank: {_some(missing)}"
    if mode is StrictHandling.RAISE_ALL:
        raise CheckpointKeyError(f"{text}; load with strict='return_all' to go on without them")
    if mode is StrictHandling.LOG_ALL:
        logger.warning(text)


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _hint(unexpected: Sequence[str], stored: Sequence[str]) -> str:
    """State of a parameter that was saved under other names is not simply absent: say what is there."""
    if any(".bucket_idx_" in key for key in stored):
        return (
            " (it holds buckets as they lay in memory, Megatron-Core's dp_reshardable, where parameters have no names; "
            "convert it first: optckpt convert ... --from megatron --slots ...)"
        )
    bound = {key.split(LAYOUT_MARK)[0] for key in stored if LAYOUT_MARK in key}
    for key in unexpected:
        name, mark, _ = key.partition(LAYOUT_MARK)
        if mark and name in bound:
            return f" ({name} was saved, but on another layout, and cannot be loaded on this one; reset it)"
        others = _other_states(key, stored)
        if others and (not key.startswith(_MAIN) or _MAIN_NAMES.intersection(others)):
            return (
                f" (this parameter was saved by another rule, with {', '.join(others)}; reset its state, or map one of "
                f"them by aliases={{'optimizer.state.<wanted>.': 'optimizer.state.<saved>.'}})"
            )
    if any(key.startswith(_MAIN) for key in unexpected):
        return " (main weights: saved were none, as by an fp32 run; without them they are made from the loaded weights)"
    return ""


def _other_states(key: str, stored: Sequence[str]) -> list[str]:
    """Names of the states that are stored for the parameter of a key `optimizer.state.<name>.<parameter>`."""
    prefix = "optimizer.state."
    name, dot, param = key.removeprefix(prefix).partition(".")
    if not key.startswith(prefix) or not dot:
        return []
    ending = "." + param
    found = (k.removeprefix(prefix).removesuffix(ending) for k in stored if k.startswith(prefix) and k.endswith(ending))
    return sorted(n for n in found if "." not in n and n != name)
