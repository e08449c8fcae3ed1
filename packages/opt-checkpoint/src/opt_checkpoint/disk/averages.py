"""Averages of weights among the states of optimizers in a checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final, NamedTuple

from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointValueError

AVERAGES: Final = ("ema", "nesterov_base")
"""States that are weights: an exponential moving average, and those from which EMA-Nesterov looks ahead."""
_STATE = re.compile(r"(?:.*?\.)??state\.([^.]+)\.(.+)")


class Averaged(NamedTuple):
    """A checkpoint with averages in place of weights.

    Args:
        checkpoint: averages under the keys of their weights, without the states of optimizers.
        plain: the keys of weights without average: buffers, frozen parameters, other models.
        others: the keys that were left out as states of parameters that have no average here.
    """

    checkpoint: CheckpointIndex
    plain: list[str]
    others: list[str]


def with_averages(index: CheckpointIndex, name: str, prefix: str = "") -> Averaged:
    """Replace weights by their averages.

    `prefix` tells models with equal keys apart: it is what the keys of weights have in addition to those of averages.

    Raises:
        CheckpointValueError: there are no averages of this name, which is not one of `AVERAGES`, or was not kept;
            two optimizers have averages of one key; or several models have the keys of the averages.
    """
    states = {key: match for key in index.tensors if (match := _STATE.fullmatch(key)) is not None}
    stored_as: dict[str, str] = {}
    for key, match in states.items():
        if match[1] == name and (other := stored_as.setdefault(match[2], key)) != key:
            raise CheckpointValueError(
                f"{index.path} holds two averages of {match[2]}: {other} and {key}; export from a checkpoint in which "
                "the parameters of each optimizer have keys of their own"
            )
    averages = {param: index.tensors[key] for param, key in stored_as.items()}
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
    own = prefix
    if len(prefixes) == 1:
        own = prefixes[0]
    replaced = {own + key: stored for key, stored in averages.items()}
    # The key of a buffer may look like that of a state: model.state.rotary.frequencies.
    known = index.tensors.keys() | replaced.keys()
    with_weight = {key for key, match in states.items() if own + match[2] in known}
    outside = {key for key in states.keys() - with_weight if not key.startswith(own)}
    kept = index.tensors.keys() - with_weight - outside
    others = outside | {key for key in with_weight if own + states[key][2] not in replaced}
    tensors = {key: index.tensors[key] for key in kept} | replaced
    return Averaged(replace(index, tensors=tensors), sorted(kept - replaced.keys()), sorted(others))
