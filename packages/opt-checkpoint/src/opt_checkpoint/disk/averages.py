"""Averages of weights among the states of optimizers in a checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointValueError

AVERAGES: Final = ("ema", "nesterov_base")
"""States that are weights: an exponential moving average, and those from which EMA-Nesterov looks ahead."""
_STATE = re.compile(r"(?:.*?\.)??state\.([^.]+)\.(.+)")


def with_averages(index: CheckpointIndex, name: str, prefix: str = "") -> tuple[CheckpointIndex, list[str]]:
    """Return the index with averages under the keys of their weights, without the states of optimizers, and the keys of
    weights without average: buffers and frozen parameters.

    `prefix` tells models with equal keys apart: it is what the keys of weights have in addition to those of averages.

    Raises:
        CheckpointValueError: there are no averages of this name, which is not one of `AVERAGES`, or was not kept; or
            several models have their keys.
    """
    states = {key: match for key in index.tensors if (match := _STATE.fullmatch(key)) is not None}
    averages = {match[2]: index.tensors[key] for key, match in states.items() if match[1] == name}
    if name not in AVERAGES or not averages:
        raise CheckpointValueError(
            f"{index.path} holds no averages of weights={name!r}; allowed are {', '.join(AVERAGES)}, where the "
            "optimizer kept them (ema_decay, ema_nesterov_beta)"
        )
    first = min(averages)
    found = [key.removesuffix(first) for key in index.tensors.keys() - states.keys() if f".{key}".endswith(f".{first}")]
    prefixes = [own for own in found if all(own + key in index.tensors for key in averages)]
    if len(prefixes) > 1 and prefix not in prefixes:
        raise CheckpointValueError(
            f"{index.path} holds several models with the weights of these averages; pass the prefix of one of them: "
            f"{', '.join(sorted(prefixes))}"
        )
    own = prefixes[0] if len(prefixes) == 1 else prefix
    replaced = {own + key: stored for key, stored in averages.items()}
    kept = {key for key in index.tensors if key not in states or own + states[key][2] not in replaced}
    weights = {key: index.tensors[key] for key in kept}
    return replace(index, tensors={**weights, **replaced}), sorted(kept - replaced.keys())
