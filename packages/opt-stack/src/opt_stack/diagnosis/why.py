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
from opt_stack.diagnosis.lines import from_line
from opt_stack.diagnosis.recorder import FOLDER, ranks_text
from opt_stack.diagnosis.tensor_stats import StepStats, non_finite

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
            norms = [stats.grad_norm for stats in self.run]
            title = f"log10 of the gradient norm, steps {self.run[0].step} to {self.run[-1].step}:"
            width = min(len(norms) + 1, 72)
            plot = text_plot([_logarithm(norms)], steps=max(len(norms) - 1, 1), width=width, height=8)
            lines += ["", title, plot]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape  # takes long to import

        return "".join(f"<p>{escape(text)}</p>" for text in (self.head, *self._sentences())) + self.svg()

    def _sentences(self) -> list[str]:
        if not self.findings:
            return ["Nothing unusual was found."] if self.run else []
        first, *others = self.findings
        return [f"First: {first.text}", *(f"Then: {finding.text}" for finding in others)]

    def svg(self) -> str:
        """Draw the gradient norm (blue) and the model's update/weight (yellow) as base-10 logarithms."""
        if not self.run:
            return ""
        norms = _logarithm([stats.grad_norm for stats in self.run])
        ratios = _logarithm([_ratio(stats) for stats in self.run])
        return svg_plot([norms, ratios], steps=max(len(self.run) - 1, 1))


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
        findings = list(_findings(last))
        if len(runs) > 1:
            findings += _between(runs[-2], last)
        return Diagnosis(_head(directory, last), findings, last)
    others = read_recordings(other)
    if not runs and not others:
        return _between_checkpoints(directory, other)
    if not runs or not others:
        raise ValueError(f"{other if runs else directory} holds no recording, but the other directory does")
    first = runs[-1]
    last = others[-1]
    findings = [*_between(first, last), *_findings(last)]
    return Diagnosis(f"{_head(directory, first)}\n{_head(other, last)}", findings, last)


def read_recordings(directory: str | Path) -> list[Run]:
    """Return the recordings in a directory, oldest first; those of one run once, from the rank that has most steps."""
    path = Path(directory)
    if path.is_file():
        runs = [_read(path)]
    else:
        numbered = [folder for folder in (path / FOLDER).glob("*") if folder.name.isdecimal()]
        numbered.sort(key=lambda folder: int(folder.name))
        runs = [max(map(_read, sorted(folder.glob("rank*.jsonl"))), key=len, default=[]) for folder in numbered]
    return [run for run in runs if run]


def _read(path: Path) -> Run:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # the process was killed while it wrote
        return [stats for line in lines if (stats := from_line(line)) is not None]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recording: {error!r}") from error


# --- one recording ----------------------------------------------------------------------------------------------------


def _findings(run: Run) -> Iterator[Finding]:
    yield from _overflow(run)
    yield from _ranks_apart(run)
    yield from _jump(run)
    for before, after in pairwise(run):
        for group, lr in after.lr.items():
            then = before.lr.get(group, 0.0)
            if 0 < then * APART < lr:
                text = f"at step {after.step} the learning rate of group {group!r} rose from {then:g} to {lr:g}."
                yield Finding(after.step, text)


def _overflow(run: Run) -> Iterator[Finding]:
    """Find the first step with NaN or infinite gradients."""
    bad = next((at for at, stats in enumerate(run) if stats.reason == "overflow"), None)
    if bad is None:
        return
    skipped = list(takewhile(lambda stats: stats.reason == "overflow", run[bad:]))
    stats = skipped[0]
    norms = stats.grad_norms
    wrong = non_finite(norms)
    what = "NaN" if any(math.isnan(norms[name]) for name in wrong) else "infinite"
    if len(wrong) == len(norms) > 1:
        text = f"at step {stats.step} all gradients were {what}, so the loss or its forward pass was"
    else:
        # Backward spreads a NaN to the parameters before it in the model.
        where = _place(wrong[-1]) if wrong else "a copy on another rank"
        text = f"at step {stats.step} the gradient of {where} was {what}"
        if len(wrong) > 1:
            text += f", and those of {len(wrong) - 1} parameters before it in the model, to which backward spread it"
    ranks = non_finite(stats.rank_norms)
    if ranks:
        only = "only " if len(ranks) < len(stats.rank_norms) else ""
        text += f"; {only}on {ranks_text(ranks)} before the mean over ranks"
    were = "s were" if len(skipped) > 1 else " was"
    text += f". {len(skipped)} step{were} skipped"
    recovers = bad + len(skipped) < len(run)
    before = [earlier.grad_norm for earlier in run[max(bad - NUM_BEFORE, 0) : bad]]
    bad_weights = non_finite({name: of.weight_norm for name, of in stats.params.items()})
    if bad_weights:
        place = _place(bad_weights[0])
        text += f". The weights of {place} were not finite before the step: go back to a checkpoint before it."
    elif stats.loss_scale > 1:
        last = skipped[-1].loss_scale
        text += f" with loss scale {stats.loss_scale:g}"
        if last != stats.loss_scale:
            text += f" to {last:g}"
        text += ": it overflowed in fp16."
        if not recovers:
            text += " Lower scales did not help: the forward overflows. Use bf16, or smaller activations there."
    elif recovers:
        text += ", and the next was applied: a bad batch."
    elif before and before[-1] > JUMP * median(before):
        text += ", to the end: the gradients had grown in the steps before."
    else:
        text += ", to the end: NaN in the data or the forward pass"
        text += " of that rank." if ranks else "."
    yield Finding(stats.step, text)


def _ranks_apart(run: Run) -> Iterator[Finding]:
    """Find the first rank whose gradient left those of its replicas, by the range in which it was before."""
    apart = [_apart(stats) for stats in run]
    for at in range(3, len(run)):
        stats = run[at]
        earlier = apart[max(at - NUM_BEFORE, 0) : at]
        changes = {}
        for rank, ratio in apart[at].items():
            before = [ratios[rank] for ratios in earlier if rank in ratios] or [ratio]
            now = stats.rank_norms[rank]
            then = run[at - 1].rank_norms.get(rank)
            # Two replicas leave each other: the one whose own norm changed most is named.
            own = abs(math.log(now / then)) if now and then and math.isfinite(then) else 0.0
            left = max(math.log(ratio / max(before)), math.log(min(before) / ratio))
            changes[rank] = (left, own)
        worst = max(changes, key=lambda rank: sum(changes[rank]), default=None)
        if worst is None or changes[worst][0] < math.log(APART):
            continue
        ratios_after = (ratios.get(worst, 1.0) for ratios in apart[at + 1 :])
        later = [abs(math.log(ratio)) > math.log(APART) for ratio in ratios_after]
        soon = later[:10]
        stays = len(soon) >= 2 and sum(soon) >= 0.8 * len(soon)
        if not stays and changes[worst][0] <= math.log(APART**3):
            continue  # small batches are noisy
        end = "but it did not stay so: check its batch."
        if stays:
            end = f"and in {sum(later)} of the {len(later)} records after it: check its data and its hardware."
        ratio = apart[at][worst]
        if ratio <= 1e-12:
            ratio = 0.0
        text = f"at step {stats.step} the gradient of rank {worst}, before the mean, was {ratio:.3g} times that of its "
        yield Finding(stats.step, f"{text}replicas, {end}")
        return


def _apart(stats: StepStats) -> dict[int, float]:
    """Return the norm of each rank over the median of the other ranks that hold the same parameters."""
    norms = stats.rank_norms
    first_of = stats.replicas_of
    known = {rank: norm for rank, norm in norms.items() if norm is not None and math.isfinite(norm)}
    found = {}
    for rank, norm in known.items():
        peers = (peer for peer in known if peer != rank and first_of[peer] == first_of[rank])
        others = [known[peer] for peer in peers if known[peer]]
        if others:
            found[rank] = max(norm, 1e-30) / median(others)
    return found


def _jump(run: Run) -> Iterator[Finding]:
    """Find the first gradient norm far above those before it, and whether it came back."""
    for at, stats in enumerate(run):
        window = run[max(at - NUM_BEFORE, 0) : at]
        before = [earlier for earlier in window if math.isfinite(earlier.grad_norm)]
        norms = [earlier.grad_norm for earlier in before]
        usual = median(norms) if len(norms) >= 3 else 0.0
        if not usual or not JUMP * usual < stats.grad_norm < math.inf:
            continue
        after = run[at + 1 :]
        recovers = any(later.grad_norm < JUMP / 2 * usual for later in after[:3])
        if recovers and stats.grad_norm < APART * max(norms):
            continue  # small batches are noisy
        where = _place(max(stats.params, key=lambda name: _growth(name, before, stats)))
        text = f"at step {stats.step} the gradient norm was {stats.grad_norm:.3g}, {stats.grad_norm / usual:.3g} times"
        text += f" the usual; it grew most in {where}"
        around = [near for near in run[max(at - 5, 0) : at + 3] if near.success]
        # Small vectors, which start at zero, have large ratios in healthy runs: the largest parameters count.
        most = max(of.numel for of in stats.params.values())
        ratios = {}
        for name, of in stats.params.items():
            if of.numel * 10 >= most:
                present = (near.params[name].ratio or 0.0 for near in around if name in near.params)
                ratios[name] = max(present, default=0.0)
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
    present = (earlier.params[name].grad_norm for earlier in before if name in earlier.params)
    norms = [norm for norm in present if norm]
    usual = median(norms) if norms else 0.0
    now = stats.params[name].grad_norm or 0.0
    return now**2 - usual**2


# --- two recordings, two checkpoints ----------------------------------------------------------------------------------


def _between(first: Run, second: Run) -> Iterator[Finding]:
    """Find the first difference between two runs, matched by the number of updates."""
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
        difference = _difference(then, stats) if then is not None and stats.success else None
        if difference is not None:
            where = f"after {stats.updates} updates (step {stats.step} of the second run)"
            yield Finding(stats.step, f"{where} the {difference}.")
            return


def _difference(then: StepStats, now: StepStats) -> str | None:
    """Return the first number that differs, in the order of the model; None if all are the same."""
    for group, lr in now.lr.items():
        if then.lr.get(group, lr) != lr:
            return f"learning rate of group {group!r} is {lr:g}, and was {then.lr[group]:g}"
    for kind in ("weight_norm", "grad_norm", "update_norm"):
        for name in (name for name in now.params if name in then.params):
            old = getattr(then.params[name], kind)
            new = getattr(now.params[name], kind)
            if None not in (old, new) and not math.isclose(old, new, rel_tol=OTHER, abs_tol=1e-12):
                return f"{kind.replace('_', ' ')} of {_place(name)} is {new:.4g}, and was {old:.4g}"
    return None


def _weights_match(one: StepStats, other: StepStats) -> bool:
    shared = one.params.keys() & other.params.keys()
    norms = ((one.params[name].weight_norm, other.params[name].weight_norm) for name in shared)
    return bool(shared) and all(math.isclose(ours, theirs, rel_tol=SAME) for ours, theirs in norms)


def _between_checkpoints(first: str | Path, second: str | Path) -> Diagnosis:
    from opt_checkpoint import differences  # imports `convert`, which training does not need

    one = read_index(first)
    two = read_index(second)
    found = sorted(differences(one, two), key=lambda difference: "NaN" not in difference.text)
    num_tensors = len(one.tensors.keys() | two.tensors.keys())
    num_nan = sum("NaN" in difference.text for difference in found)
    lines = [f"{first} and {second}: {len(found)} of {num_tensors} tensors differ, {num_nan} of them in NaN"]
    lines += [f"{key}: {text}" for key, text in found[:MAX_SHOWN]]
    if len(found) > MAX_SHOWN:
        lines.append(f"... and {len(found) - MAX_SHOWN} more")
    return Diagnosis("\n".join(lines), [])


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
    """Return the logarithm by position; NaN and infinite values are above the others."""
    known = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
    logs = []
    for value in values:
        if 0 < value < math.inf:
            logs.append(math.log10(value))
        else:
            logs.append(max(known) + 1 if value else min(known))
    return lambda x: logs[min(round(x), len(logs) - 1)]
