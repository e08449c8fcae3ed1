"""Averages of weights among the states of optimizers in a checkpoint."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Final

from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointValueError

WEIGHT_STATES: Final = ("ema", "nesterov_base")
"""States that are weights: an exponential moving average, and those from which EMA-Nesterov looks ahead."""
_OF_STATE = re.compile(r"(?:.*\.)?state\.[^.]+\.(?:.*\.)?")
logger = logging.getLogger(__name__)


def warn_of_look_ahead(index: CheckpointIndex) -> None:
    """Log a warning if the weights of the checkpoint are ahead of those of EMA-Nesterov, which should be evaluated."""
    if any(".state.nesterov_base." in f".{key}" for key in index.tensors):
        logger.warning(
            "%s holds weights that are ahead of those of EMA-Nesterov; for these, choose the weights 'nesterov_base'",
            index.path,
        )


def with_averages(index: CheckpointIndex, name: str, prefix: str) -> CheckpointIndex:
    """Return one model of the checkpoint, with averages in place of weights, under the keys of these.

    The optimizer keeps one average of tied weights, which all of their keys get: their stored values are equal.
    Logs warnings that name these, and the weights without average: buffers and frozen parameters. `prefix` tells models
    with equal keys apart: it is what the keys of weights have in addition to those of averages.

    Raises:
        CheckpointValueError: this name is not one of `WEIGHT_STATES`, not just one optimizer kept such averages, or not
            just one model has their keys.
    """
    state = re.compile(rf"((?:.*?\.)??state\.){re.escape(name)}\.(.+)")
    found = list(filter(None, map(state.fullmatch, index.tensors)))
    optimizers = sorted({match[1] for match in found})
    if name not in WEIGHT_STATES or len(optimizers) != 1:
        raise CheckpointValueError(
            f"{index.path} holds averages of weights={name!r} in {', '.join(optimizers) or 'no optimizer'}; allowed "
            f"are {', '.join(WEIGHT_STATES)}, if one optimizer kept them (ema_decay, ema_nesterov_beta)"
        )
    averages = {match[2]: index.tensors[match[0]] for match in found}
    weights = {key: stored for key, stored in index.tensors.items() if not key.startswith(optimizers[0])}
    first = min(averages)
    models = sorted(key.removesuffix(first) for key in weights if f".{key}".endswith(f".{first}"))
    models = [own for own in models if all(own + param in weights for param in averages)]
    models = [own for own in models if _OF_STATE.fullmatch(own) is None] or models  # a module may be called state
    if prefix in models:
        models = [prefix]
    if len(models) != 1:
        raise CheckpointValueError(
            f"{index.path} holds {len(models)} models with the weights of these averages; pass the prefix of one of "
            f"them: {', '.join(models)}"
        )
    own = models[0]
    tensors = {key: stored for key, stored in weights.items() if key.startswith(own)}
    averaged = {own + param: stored for param, stored in averages.items()}
    by_values = {tensors[key].fingerprint: average for key, average in averaged.items()}
    by_values.pop(None, None)
    tied = sorted(key for key in tensors.keys() - averaged.keys() if tensors[key].fingerprint in by_values)
    if tied:
        averaged |= {key: by_values[tensors[key].fingerprint] for key in tied}
        logger.warning(
            "with the average of another key, whose values they had, as tied weights do: %s", ", ".join(tied)
        )
    if plain := sorted(tensors.keys() - averaged.keys()):
        logger.warning("without average, so as they were saved: %s", ", ".join(plain))
    return replace(index, tensors=tensors | averaged)
