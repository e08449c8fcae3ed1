"""Callbacks for `Optimizer.stats_every`: JSON lines, TensorBoard, Weights & Biases. Call them on one rank."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opt_distributed.step import StepStats
from opt_stack.diagnosis.recorder import to_line


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
        for name, value in scalars(stats):
            self._writer.add_scalar(name, value, stats.step)


class WeightsAndBiases:
    """Logs to `run`, the result of `wandb.init`; None: the present run (extra: `opt-stack[wandb]`)."""

    def __init__(self, run: Any = None):
        self._log = importlib.import_module("wandb").log if run is None else run.log

    def __call__(self, stats: StepStats) -> None:
        self._log(dict(scalars(stats)), step=stats.step)


def scalars(stats: StepStats) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a step under the names that dashboards show: `update_norm/0.weight`, ..."""
    yield from (("optimizer/grad_norm", stats.grad_norm), ("optimizer/clip", stats.clip))
    yield from (("optimizer/loss_scale", stats.loss_scale), ("optimizer/success", float(stats.success)))
    for name, of in {**stats.params, **stats.groups}.items():
        numbers = {**of._asdict(), "update_over_weight": of.ratio}
        yield from (
            (f"{kind}/{name}", value) for kind, value in numbers.items() if value is not None and kind != "numel"
        )
    yield from ((f"rank_norm/{rank}", norm) for rank, norm in stats.rank_norms.items() if norm is not None)
