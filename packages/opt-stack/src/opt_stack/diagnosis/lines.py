"""The numbers of recorded steps: as lines of JSON, and for the dashboards of `Optimizer.stats_every`."""

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_map

from opt_stack.diagnosis.tensor_stats import StepStats, TensorStats

_NOT_SHOWN = ("numel", "weight_sum", "update_sum")  # on dashboards


def to_line(stats: StepStats) -> str:
    """Return the numbers of a step as one line of JSON. NaN and infinity are strings, since JSON has neither."""
    line = {field.name: getattr(stats, field.name) for field in fields(stats)}
    exact = {"settings": line.pop("settings"), "lr": stats.lr}  # schedules change slowly
    norms = line.pop("rank_norms")
    line["ranks"] = {rank: [norms[rank], first] for rank, first in line.pop("replicas_of").items()}
    line["columns"] = TensorStats._fields
    return json.dumps({**tree_map(_rounded, line), **tree_map(_text, exact)}, allow_nan=False) + "\n"


def from_line(line: Mapping[str, Any]) -> StepStats:
    """Return the numbers of a parsed line that `to_line` made."""
    values = dict(line)
    tensors: dict[str, Any] = {}
    for kind in ("params", "groups"):
        tensors[kind] = {name: TensorStats(*map(_number, row)) for name, row in values.pop(kind).items()}
    values = tree_map(_number, values)
    rates = values.pop("lr")
    ranks = values.pop("ranks")
    values.pop("columns")
    values["rank_norms"] = {int(rank): norm for rank, (norm, _) in ranks.items()}
    values["replicas_of"] = {int(rank): first for rank, (_, first) in ranks.items()}
    values.setdefault("settings", {group: {"lr": rate} for group, rate in rates.items()})  # not in older recordings
    return StepStats(**values, **tensors)


def _rounded(value: Any) -> Any:
    return _text(float(f"{value:.6g}")) if isinstance(value, float) else value


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


# --- callbacks for `Optimizer.stats_every`: call them on one rank -----------------------------------------------------


class JsonLines:
    """Appends one line for each step to a file, which `python -m opt_stack why FILE` reads."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        if self._path.exists() and not (found := self._path.read_bytes()).endswith(b"\n"):
            self._path.write_bytes(found[: found.rfind(b"\n") + 1])  # a process was killed while it wrote a line

    def __call__(self, stats: StepStats) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_line(stats))


class TensorBoard:
    """Writes to `writer`, a `torch.utils.tensorboard.SummaryWriter` (extra: `opt-stack[tensorboard]`)."""

    def __init__(self, writer: Any):
        self._writer = writer

    def __call__(self, stats: StepStats) -> None:
        for name, value in scalars(stats).items():
            self._writer.add_scalar(name, value, stats.step)


class WeightsAndBiases:
    """Logs to `run`, the result of `wandb.init`; None: the present run (extra: `opt-stack[wandb]`)."""

    def __init__(self, run: Any = None):
        self._log = importlib.import_module("wandb").log if run is None else run.log

    def __call__(self, stats: StepStats) -> None:
        self._log(scalars(stats), step=stats.step)


def scalars(stats: StepStats) -> dict[str, float]:
    """Return the numbers of a step under the names that dashboards show: `update_norm/0.weight`, ..."""
    found = {
        f"optimizer/{kind}": getattr(stats, kind) for kind in ("grad_norm", "clip", "loss_scale", "success", "loss")
    }
    for name, of in {**stats.params, **stats.groups}.items():
        numbers = {**of._asdict(), "update_over_weight": of.ratio}
        found |= {f"{kind}/{name}": value for kind, value in numbers.items() if kind not in _NOT_SHOWN}
    found |= {f"rank_norm/{rank}": norm for rank, norm in stats.rank_norms.items()}
    return {name: float(value) for name, value in found.items() if value is not None}
