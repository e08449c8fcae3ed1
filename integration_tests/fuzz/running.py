"""Run cases, and compare every rank's results with the oracle."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import Case, Mistake, is_held
from fuzz.drawing import draw
from fuzz.failed import Failed
from fuzz.gradients import kept_part
from fuzz.oracle import ExpectedStep, Weights, expect, expected_loss, first_weights
from fuzz.rank import SeenStep
from fuzz.training import first_part, run_part, second_part


def failures(case: Case) -> list[str]:
    """A description of each failure of the case; empty if it passes."""
    expected = expect(case)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        first = run_part(case, case.setup, first_part, path)
        if case.mistake is not None:
            return _unless_refused(first, case.mistake)
        if case.setup.checks_nan and any(step.overflows for step in expected[: case.resume_at or case.steps]):
            return _unless_all_raise(first, "UnusableGradientError")
        if case.resume is None or _failed(first):
            return _failed(first) or list(_differences(case, expected, first, range(case.steps)))
        second = run_part(case, case.resume, second_part, path)
        if case.resume.checks_nan and any(step.overflows for step in expected[case.resume_at :]):
            return _unless_all_raise(second, "UnusableGradientError")
    found = list(_differences(case, expected, first, range(case.resume_at)))
    if _failed(second):
        return found + [f"resumed: {line}" for line in _failed(second)]
    return found + list(_differences(case, expected, second, range(case.resume_at, case.steps)))


def _unless_refused(by_rank: Sequence[Any], mistake: Mistake) -> list[str]:
    """Failures to refuse a mistake."""
    quiet = [rank for rank, seen in enumerate(by_rank) if not (isinstance(seen, Failed) and seen.is_refusal)]
    if quiet:
        return [f"should be refused on every rank ({mistake.words}), but not on {quiet}", *_failed(by_rank)]
    if not any(mistake.words in failed.text for failed in by_rank):
        return [f"the refusal does not mention {mistake.words!r}", *_failed(by_rank)]
    return []


def _unless_all_raise(by_rank: Sequence[Any], kind: str) -> list[str]:
    """Failures where every rank should have raised; ranks that lost another rank may report that instead."""
    allowed = [seen for seen in by_rank if isinstance(seen, Failed) and (seen.kind == kind or seen.is_consequence)]
    if len(allowed) == len(by_rank) and any(failed.kind == kind for failed in allowed):
        return []
    return [f"should be a {kind} on every rank: {_failed(by_rank) or 'none raised'}"]


def _failed(by_rank: Sequence[Any]) -> list[str]:
    """What ranks raised, without those that only lost another rank, where one is to blame."""
    broken = {rank: seen for rank, seen in enumerate(by_rank) if isinstance(seen, Failed)}
    causes = {rank: failed for rank, failed in broken.items() if not failed.is_consequence}
    return [f"rank {rank}: {failed}" for rank, failed in (causes or broken).items()]


def report(case: Case, found: Sequence[str]) -> str:
    """The report for a person: the case, its failures, and the command that runs it again."""
    lines = [str(case), *(f"  {line}" for line in found[:12])]
    lines += [f"  ... and {len(found) - 12} more"] if len(found) > 12 else []
    return "\n".join([*lines, f"again: pytest integration_tests/fuzz --fuzz-seed {case.seed}"])


def check_seed(seed: int) -> str | None:
    """The report of a seed whose case fails."""
    case = draw(seed)
    found = failures(case)
    return report(case, found) if found else None


def _differences(
    case: Case, expected: Sequence[ExpectedStep], by_rank: Sequence[Sequence[SeenStep]], steps: range
) -> Iterator[str]:
    for index, step in enumerate(steps):
        wanted = expected[step]
        before = expected[step - 1].weights if step else first_weights(case)
        of_step = [seen[index] for seen in by_rank]
        yield from (f"step {step}: {line}" for line in _of_results(wanted, of_step))
        for rank, seen in enumerate(of_step):
            wrong = _of_rank(case, wanted, before, seen, step, rank)
            yield from (f"step {step}, rank {rank}: {line}" for line in wrong)
        yield from (f"step {step}: {line}" for line in _of_copies(case, of_step, step))


def _of_results(wanted: ExpectedStep, seen: Sequence[SeenStep]) -> Iterator[str]:
    """Check a step's result: the same on every rank, and equal to the oracle's."""
    for name in ("success", "norm", "zeros", "scale"):
        values = [getattr(one, name) for one in seen]
        if any(repr(value) != repr(values[0]) for value in values):
            yield f"{name} differs between ranks: {values}"
    first = seen[0]
    if first.success != wanted.success:
        yield f"success is {first.success}, should be {wanted.success}"
    if not wanted.overflows and not math.isclose(first.norm, wanted.norm, rel_tol=1e-5, abs_tol=1e-9):
        yield f"grad_norm is {first.norm!r}, should be {wanted.norm!r}"
    if wanted.overflows and math.isfinite(first.norm):
        yield f"grad_norm is {first.norm!r} although gradients are not finite"
    if not wanted.overflows and first.zeros != wanted.zeros:
        yield f"num_zeros is {first.zeros}, should be {wanted.zeros}"
    if first.scale != wanted.scale:
        yield f"loss scale is {first.scale}, should be {wanted.scale}"


def _of_rank(case: Case, wanted: ExpectedStep, before: Weights, seen: SeenStep, step: int, rank: int) -> Iterator[str]:
    setup = case.setup_at(step)
    place = setup.grid.place(rank)
    for name, count in seen.steps.items():
        if count != wanted.steps[name]:
            yield f"{name} has had {count} updates, should be {wanted.steps[name]}"
    if not any(bad.step == step for bad in case.bad):
        loss, tolerance = expected_loss(case, rank, before, step)
        if not abs(seen.loss - loss) <= tolerance:
            yield f"the loss is {seen.loss}, should be {loss}: the forward did not read the present weights"
    for name, value in (seen.weights or {}).items():
        param = case.param(name)
        main, slack = (kept_part(whole, param, place, setup) for whole in wanted.weights[name])
        worst = _worst(value, main, slack)
        if worst:
            yield f"{name} {tuple(value.shape)} {worst}"


def _worst(value: Tensor, main: Tensor, slack: Tensor) -> str:
    """The largest difference of a stored value from the rounded expected value, as text; empty if they are equal."""
    low, high = ((main + sign * slack).to(value.dtype).double() for sign in (-1, 1))
    found = value.double()
    excess = torch.maximum(low - found, found - high)
    wrong = ~(excess <= 0)
    if not wrong.any():
        return ""
    index = int(torch.where(excess.isnan(), torch.inf, excess).flatten().argmax())
    shown = f"[{index}] is {found.flatten()[index].item():.7g}, should be {main.flatten()[index].item():.7g}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements wrong; {shown}"


def _of_copies(case: Case, seen: Sequence[SeenStep], step: int) -> Iterator[str]:
    """Copies of one part of a parameter must have the same bits on all ranks."""
    setup = case.setup_at(step)
    grid = setup.grid
    for param in case.params:
        copies: dict[int, tuple[int, Tensor]] = {}
        for rank, place in enumerate(grid.places()):
            weights = seen[rank].weights
            if weights is None or not is_held(param, place, grid):
                continue
            cut = (
                None
                if param.cut is None or setup.layout != "plain"
                else place.tp
                if param.expert is None
                else place.etp
            )
            first, value = copies.setdefault(cut, (rank, weights[param.name]))
            if not torch.equal(value.nan_to_num(), weights[param.name].nan_to_num()):
                yield f"{param.name} differs between ranks {first} and {rank}, which hold copies"
