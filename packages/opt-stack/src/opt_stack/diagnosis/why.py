"""`why`: say in sentences what changed first in a recording, between two recordings, or between two checkpoints."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import NamedTuple

from opt_checkpoint import read_index
from opt_scheduler.draw import svg_plot, text_plot
from opt_stack.diagnosis.recorder import FOLDER, from_line, of_ranks
from opt_stack.diagnosis.tensor_stats import StepStats

JUMP = 5.0  # factor over the norms before, from which a norm has jumped
APART = 3.0  # factor by which a rank's norm leaves that of its replicas
LARGE_RATIO = 0.1  # update / weight
NUM_BEFORE = 20  # records that give the usual norm
# Relative differences of norms.
SAME = 1e-5  # at most: equal weights
OTHER = 1e-3  # at least: different weights
MAX_SHOWN = 20  # tensors of checkpoints that differ
Run = Sequence[StepStats]


class Finding(NamedTuple):
    """Something that changed, in a sentence."""

    step: int
    text: str


class Diagnosis:
    """The findings, in the order in which they happened. `str()` shows them with a plot in characters, notebooks with
    a drawing."""

    def __init__(self, head: str, findings: Sequence[Finding], run: Run = ()):
        self.head = head
        self.run = run
        self.findings = sorted(findings, key=lambda finding: finding.step)

    def __str__(self) -> str:
        lines = [self.head, *(fill(text, 100, subsequent_indent="  ") for text in self._sentences())]
        if self.run:
            curve = _logarithm([stats.grad_norm for stats in self.run])
            width = min(len(self.run) + 1, 72)
            plot = text_plot([curve], steps=max(len(self.run) - 1, 1), width=width, height=8)
            lines += ["", f"log10 of the gradient norm, steps {self.run[0].step} to {self.run[-1].step}:", plot]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape  # takes long to import

        return "".join(f"<p>{escape(text)}</p>" for text in (self.head, *self._sentences())) + self.svg()

    def _sentences(self) -> list[str]:
        firsts = ("First: ", *["Then: "] * len(self.findings))
        texts = [first + finding.text for first, finding in zip(firsts, self.findings)]
        return texts or ["Nothing unusual was found."] * bool(self.run)

    def svg(self) -> str:
        """Draw the gradient norm (blue) and the model's update/weight (yellow) as base-10 logarithms."""
        norms = [stats.grad_norm for stats in self.run]
        ratios = [_ratio(stats) for stats in self.run]
        return svg_plot([_logarithm(norms), _logarithm(ratios)], steps=max(len(norms) - 1, 1)) if norms else ""


def why(directory: str | Path, other: str | Path | None = None) -> Diagnosis:
    """Say what changed first in a recording, where, on which rank, and at which step.

    Args:
        directory: a directory with recordings (`stats_every(directory=)`), of which the newest is read, and compared
            with the one before it; or a file of JSON lines.
        other: another one, to compare the newest recordings of both. If neither holds recordings, both are checkpoints,
            whose tensors are compared by name.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: a recording cannot be read, or only one of the two is a recording.
        CheckpointingException: a checkpoint cannot be read.
    """
    runs = read_recordings(directory)
    if other is None:
        if not runs:
            raise FileNotFoundError(
                f"{directory} holds no recording; call optimizer.stats_every(1, directory={str(directory)!r})"
            )
        last = runs[-1]
        findings = [*_findings(last), *(_between(runs[-2], last) if len(runs) > 1 else ())]
        return Diagnosis(_head(directory, last), findings, last)
    others = read_recordings(other)
    if runs and others:
        head = f"{_head(directory, runs[-1])}\n{_head(other, others[-1])}"
        return Diagnosis(head, [*_between(runs[-1], others[-1]), *_findings(others[-1])], others[-1])
    if runs or others:
        raise ValueError(f"{other if runs else directory} holds no recording, but the other directory does")
    return _between_checkpoints(directory, other)


def read_recordings(directory: str | Path) -> list[Run]:
    """Return the recordings in a directory, oldest first; those of one run once, from the rank that has most steps."""
    path = Path(directory)
    if path.is_file():
        return [run] if (run := _read(path)) else []
    numbered = [folder for folder in (path / FOLDER).glob("*") if folder.name.isdecimal()]
    files = [sorted(folder.glob("rank*.jsonl")) for folder in sorted(numbered, key=lambda folder: int(folder.name))]
    runs = [max(map(_read, of_run), key=len) for of_run in files if of_run]
    return [run for run in runs if run]


def _read(path: Path) -> Run:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = lines if not lines or lines[-1].endswith("\n") else lines[:-1]  # of a process killed while it wrote
        return [stats for line in whole if (stats := from_line(line)) is not None]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recording: {error!r}") from error


# --- one recording ----------------------------------------------------------------------------------------------------


def _findings(run: Run) -> Iterator[Finding]:
    yield from _overflow(run)
    yield from _ranks_apart(run)
    yield from _jump(run)
    for before, after in pairwise(run):
        for group, lr in after.lr.items():
            if 0 < before.lr.get(group, 0.0) * APART < lr:
                text = f"at step {after.step} the learning rate of group {group!r} rose from {before.lr[group]:g}"
                yield Finding(after.step, f"{text} to {lr:g}.")


def _overflow(run: Run) -> Iterator[Finding]:
    """The first step with NaN or infinite gradients."""
    bad = next((at for at, stats in enumerate(run) if stats.reason == "overflow"), None)
    if bad is None:
        return
    stats, num = run[bad], len(list(takewhile(lambda stats: stats.reason == "overflow", run[bad:])))
    norms = {name: of.grad_norm for name, of in stats.params.items() if of.grad_norm is not None}
    wrong = [name for name, norm in norms.items() if not math.isfinite(norm)]
    before = [r.grad_norm for r in run[max(bad - NUM_BEFORE, 0) : bad]]
    what = "NaN" if any(math.isnan(norms[name]) for name in wrong) else "infinite"
    sick = next((name for name, of in stats.params.items() if not math.isfinite(of.weight_norm)), None)
    ranks = [rank for rank, norm in stats.rank_norms.items() if norm is not None and not math.isfinite(norm)]
    text = f"at step {stats.step} the gradient of {_place(wrong[-1]) if wrong else 'a copy on another rank'} was {what}"
    if len(wrong) == len(norms) > 1:
        text = f"at step {stats.step} all gradients were {what}, so the loss or its forward pass was"
    elif len(wrong) > 1:
        text += f", and those of {len(wrong) - 1} parameters before it in the model, to which backward spread it"
    if ranks:
        only = "only " if len(ranks) < len(stats.rank_norms) else ""
        text += f"; {only}on {of_ranks(ranks)} before the mean over ranks"
    text += f". {num} step{'s were' if num > 1 else ' was'} skipped"
    recovers = bad + num < len(run)
    if sick is not None:
        text += f". The weights of {_place(sick)} were not finite before the step: go back to a checkpoint before it."
    elif stats.loss_scale > 1:
        last = run[bad + num - 1].loss_scale
        text += f" with loss scale {stats.loss_scale:g}" + (f" to {last:g}" if last != stats.loss_scale else "")
        text += ": it overflowed in fp16."
        if not recovers:
            text += " Lower scales did not help: the forward overflows. Use bf16, or smaller activations there."
    elif recovers:
        text += ", and the next was applied: a bad batch."
    elif before and before[-1] > JUMP * median(before):
        text += ", to the end: the gradients had grown in the steps before."
    else:
        text += ", to the end: NaN in the data or the forward pass" + (" of that rank." if ranks else ".")
    yield Finding(stats.step, text)


def _ranks_apart(run: Run) -> Iterator[Finding]:
    """The first rank whose gradient left those of its replicas, by the range in which it was before."""
    apart = [_apart(stats) for stats in run]
    for at in range(3, len(run)):
        changes = {}
        for rank, ratio in apart[at].items():
            before = [of[rank] for of in apart[max(at - NUM_BEFORE, 0) : at] if rank in of] or [ratio]
            now = run[at].rank_norms[rank]
            then = run[at - 1].rank_norms.get(rank)
            # Two replicas leave each other: the one whose own norm changed most is named.
            own = abs(math.log(now / then)) if now and then and math.isfinite(then) else 0.0
            changes[rank] = max(math.log(ratio / max(before)), math.log(min(before) / ratio)), own
        worst = max(changes, key=lambda rank: sum(changes[rank]), default=None)
        if worst is None or changes[worst][0] < math.log(APART):
            continue
        later = [abs(math.log(of.get(worst, 1.0))) > math.log(APART) for of in apart[at + 1 :]]
        stays = len(later) >= 2 and sum(later[:10]) >= 0.8 * len(later[:10])
        if stays or changes[worst][0] > math.log(APART**3):  # small batches are noisy
            ratio = apart[at][worst] if apart[at][worst] > 1e-12 else 0.0
            text = f"at step {run[at].step} the gradient of rank {worst}, before the mean, was {ratio:.3g} times "
            often = f"and in {sum(later)} of the {len(later)} records after it: check its data and its hardware."
            text += f"that of its replicas, {often if stays else 'but it did not stay so: check its batch.'}"
            yield Finding(run[at].step, text)
            return


def _apart(stats: StepStats) -> dict[int, float]:
    """By rank: its norm over the median of the other ranks that hold the same parameters."""
    known = {rank: norm for rank, norm in stats.rank_norms.items() if norm is not None and math.isfinite(norm)}
    found = {}
    for rank, norm in known.items():
        others = [n for r, n in known.items() if n and r != rank and stats.replicas_of[r] == stats.replicas_of[rank]]
        if others:
            found[rank] = max(norm, 1e-30) / median(others)
    return found


def _jump(run: Run) -> Iterator[Finding]:
    """The first gradient norm far above those before it, and whether it came back."""
    for at, stats in enumerate(run):
        before = [r for r in run[max(at - NUM_BEFORE, 0) : at] if math.isfinite(r.grad_norm)]
        norms = [r.grad_norm for r in before]
        after = run[at + 1 :]
        usual = median(norms) if len(norms) >= 3 else 0.0
        if not (usual and math.isfinite(stats.grad_norm) and stats.grad_norm > JUMP * usual):
            continue
        recovers = any(math.isfinite(r.grad_norm) and r.grad_norm < JUMP / 2 * usual for r in after[:3])
        if recovers and stats.grad_norm < APART * max(norms):
            continue  # small batches are noisy
        where = max(stats.params, key=lambda name: _growth(name, before, stats))
        text = f"at step {stats.step} the gradient norm was {stats.grad_norm:.3g}, {stats.grad_norm / usual:.3g} times"
        text += f" the usual; it grew most in {_place(where)}"
        around = [r for r in run[max(at - 5, 0) : at + 3] if r.success]
        # Small vectors, which start at zero, have large ratios in healthy runs: the largest parameters count.
        most = max(of.numel for of in stats.params.values())
        ratios = {
            name: max((r.params[name].ratio or 0.0 for r in around if name in r.params), default=0.0)
            for name, of in stats.params.items()
            if of.numel * 10 >= most
        }
        steepest = max(ratios, key=ratios.__getitem__)
        if not after:
            text += ", in the last recorded step."
        elif recovers:
            text += ", and it came back in the next steps: a bad batch."
        elif ratios[steepest] > LARGE_RATIO:
            text += f", and it did not come back. Around it, an update changed {_place(steepest)} by "
            text += f"{ratios[steepest]:.0%} of its norm: the learning rate is too high."
        else:
            text += ", and it did not come back."
        yield Finding(stats.step, text)
        return


def _growth(name: str, before: Run, stats: StepStats) -> float:
    usual = [of.grad_norm for r in before if (of := r.params.get(name)) is not None and of.grad_norm]
    return (stats.params[name].grad_norm or 0.0) ** 2 - (median(usual) if usual else 0.0) ** 2


# --- two recordings, two checkpoints ----------------------------------------------------------------------------------


def _between(first: Run, second: Run) -> Iterator[Finding]:
    """The first difference between two runs, matched by the number of updates."""
    step = second[0].step
    start = second[0].updates
    end = first[-1].updates
    matches = [stats.updates for stats in first if _weights_match(stats, second[0])]
    if matches and start not in matches:
        text = f"the second run begins after {start} updates with the weights that the first had after {matches[-1]}: "
        yield Finding(step, f"{text}weights and optimizer state come from different checkpoints.")
    elif first[0].updates < start < end:
        yield Finding(step, f"the second run goes on after {start} updates; the first had made {end}.")
    known = {stats.updates: stats for stats in first if stats.success}
    for stats in second:
        then = known.get(stats.updates)
        if then is None or not stats.success:
            continue
        where = f"after {stats.updates} updates (step {stats.step} of the second run)"
        for group, lr in stats.lr.items():
            if then.lr.get(group, lr) != lr:
                text = f"{where} the learning rate of group {group!r} is {lr:g}, and was {then.lr[group]:g}."
                yield Finding(stats.step, text)
                return
        for kind in ("weight_norm", "grad_norm", "update_norm"):
            for name in (name for name in stats.params if name in then.params):  # in the order of the model
                old = getattr(then.params[name], kind)
                new = getattr(stats.params[name], kind)
                if None not in (old, new) and not math.isclose(old, new, rel_tol=OTHER, abs_tol=1e-12):
                    text = f"{where} the {kind.replace('_', ' ')} of {_place(name)} is {new:.4g}, and was {old:.4g}."
                    yield Finding(stats.step, text)
                    return


def _weights_match(one: StepStats, other: StepStats) -> bool:
    shared = one.params.keys() & other.params.keys()
    return bool(shared) and all(
        math.isclose(one.params[n].weight_norm, other.params[n].weight_norm, rel_tol=SAME) for n in shared
    )


def _between_checkpoints(first: str | Path, second: str | Path) -> Diagnosis:
    from opt_checkpoint import differences  # imports `convert`, which training does not need

    one = read_index(first)
    two = read_index(second)
    found = sorted(differences(one, two), key=lambda difference: "NaN" not in difference.text)
    keys = one.tensors.keys() | two.tensors.keys()
    num_nan = sum("NaN" in difference.text for difference in found)
    head = f"{first} and {second}: {len(found)} of {len(keys)} tensors differ, {num_nan} of them in NaN"
    lines = [f"{key}: {text}" for key, text in found[:MAX_SHOWN]]
    more = [f"... and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
    return Diagnosis("\n".join([head, *lines, *more]), [])


# --- words and numbers ------------------------------------------------------------------------------------------------


def _head(directory: str | Path, run: Run) -> str:
    skipped = sum(not stats.success for stats in run)
    return f"{directory}: {len(run)} recorded steps, {run[0].step} to {run[-1].step}, {skipped} of them skipped"


def _place(name: str) -> str:
    layer, _, _ = name.rpartition(".")
    return f"{name!r} (layer {layer!r})" if layer else repr(name)


def _ratio(stats: StepStats) -> float:
    update = math.hypot(*(of.update_norm or 0.0 for of in stats.groups.values()))
    weight = math.hypot(*(of.weight_norm for of in stats.groups.values()))
    return update / weight if weight else 0.0


def _logarithm(values: Sequence[float]) -> Callable[[float], float]:
    """The logarithm by position; NaN and infinite values are above the others."""
    logs = [math.log10(value) if 0 < value < math.inf else math.inf if value else -math.inf for value in values]
    known = [log for log in logs if math.isfinite(log)] or [0.0]
    logs = [min(max(log, min(known)), max(known) + 1) for log in logs]
    return lambda x: logs[min(round(x), len(logs) - 1)]
