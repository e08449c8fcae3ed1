"""The numbers of recorded steps: as lines of JSON, and for the dashboards of `Optimizer.stats_every`."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

from opt_stack.diagnosis.tensor_stats import StepStats, TensorStats

_PLAIN = ("step", "updates", "success", "reason", "lr")
_FLOATS = ("grad_norm", "clip", "loss_scale")
_OPTIONAL = ("loss",)  # None, or not in older recordings
_TABLES = ("params", "groups")
_NOT_SHOWN = ("numel", "weight_sum", "update_sum")  # on dashboards


def to_line(stats: StepStats) -> str:
    """Return the numbers of a step as one line of JSON. NaN and infinity are strings, since JSON has neither."""
    line: dict[str, Any] = {name: getattr(stats, name) for name in _PLAIN}
    line |= {name: _plain(getattr(stats, name)) for name in (*_FLOATS, *_OPTIONAL)}
    line["ranks"] = {}
    for rank, norm in stats.rank_norms.items():
        line["ranks"][rank] = [_plain(norm), stats.replicas_of[rank]]
    line["settings"] = {}
    for group, numbers in stats.settings.items():  # in full: small changes of a schedule count
        line["settings"][group] = {key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}
    line["columns"] = TensorStats._fields
    for kind in _TABLES:
        rows = getattr(stats, kind)
        line[kind] = {name: [*map(_plain, row)] for name, row in rows.items()}
    return json.dumps(line) + "\n"


def from_line(text: str) -> StepStats | None:
    """Return the numbers of a line that `to_line` made; None for another line, such as the head of a recording."""
    line: dict[str, Any] = json.loads(text)
    if "params" not in line:
        return None
    stats: dict[str, Any] = {name: line[name] for name in _PLAIN}
    stats |= {name: float(line[name]) for name in _FLOATS}
    stats |= {name: _number(line.get(name)) for name in _OPTIONAL}
    stats["settings"] = {}
    for group, numbers in line.get("settings", {}).items():
        stats["settings"][group] = {key: float(value) for key, value in numbers.items()}
    for kind in _TABLES:
        stats[kind] = {name: TensorStats(*map(_number, row)) for name, row in line[kind].items()}  # type: ignore[arg-type]
    ranks = line["ranks"].items()
    stats["rank_norms"] = {int(rank): _number(norm) for rank, (norm, _) in ranks}
    stats["replicas_of"] = {int(rank): first for rank, (_, first) in ranks}
    return StepStats(**stats)


def _number(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value


def _plain(value: float | None) -> float | str | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


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
    found: dict[str, float | None] = {}
    for kind in (*_FLOATS, "success", *_OPTIONAL):
        found[f"optimizer/{kind}"] = getattr(stats, kind)
    for name, of in {**stats.params, **stats.groups}.items():
        numbers = of._asdict()
        numbers["update_over_weight"] = of.ratio
        for kind, value in numbers.items():
            if kind not in _NOT_SHOWN:
                found[f"{kind}/{name}"] = value
    for rank, norm in stats.rank_norms.items():
        found[f"rank_norm/{rank}"] = norm
    return {name: float(value) for name, value in found.items() if value is not None}
