"""A matrix rule in phases: parts prepared and applied where they lie, whole matrices transformed elsewhere."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from opt_kernels.matrices import MatmulPrecision, ScaleMode, squares_in_float64
from opt_kernels.rules import (
    GRAD_SQUARES,
    Adam,
    AdaptiveMuonRule,
    Lines,
    MatrixRule,
    MuonRule,
    Order,
    SecondMoment,
    SOAPMuonRule,
    SOAPRule,
    init_state,
    sums_gradients,
)
from opt_kernels.works import Batch, Hyper, MatrixPart, MatrixSpec, Task, Work

MUON = MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST, scale_mode=ScaleMode.UNIT_RMS_NORM, nesterov=True)
RULES: dict[str, MatrixRule] = {
    "muon": MUON,
    "adamuon": AdaptiveMuonRule(muon=MUON),
    "normuon": AdaptiveMuonRule(muon=MUON, second_moment=SecondMoment.NORMUON),
    "normuon of columns": AdaptiveMuonRule(muon=MUON, second_moment=SecondMoment.NORMUON, lines=Lines.COLS),
    "namo": AdaptiveMuonRule(second_moment=SecondMoment.NAMO, muon=MUON),
    "soap": SOAPRule(),
    "soap_muon": SOAPMuonRule(),
    "soap in megatron's order": SOAPRule(order=Order.MEGATRON),
}
SPLIT = (4, 1, 1)
MATRIX = MatrixSpec(split_rows=SPLIT)
CUTS = {"rows": [(0, 5), (5, 11), (11, 24)], "one": [(0, 24)], "none and all": [(0, 0), (0, 24)]}  # through groups of 6


def tensor(seed: int) -> Tensor:
    return torch.randn(24, 24, generator=torch.Generator().manual_seed(seed))


class Part(NamedTuple):
    """Some rows, with the state of their elements."""

    first: int
    stop: int
    main: Tensor
    state: dict[str, Tensor]


def in_phases(rule: MatrixRule, main: Tensor, grads: list[Tensor], cuts: list[tuple[int, int]]) -> Tensor:
    """The main after a step for each of `grads`, its rows being kept apart."""
    whole = {spec.name for spec in rule.state_specs if spec.whole}
    state = {name: value for name, value in init_state(rule, main, MATRIX).items() if name in whole}
    parts = []
    for first, stop in cuts:
        rows = main[first:stop].clone()
        parts.append(Part(first, stop, rows, {n: v for n, v in rule.init_state(rows).items() if n not in whole}))
    for step, grad in enumerate(grads, start=1):
        hyper = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.9, 0.95), step=step)
        tasks, inputs, squares = [], [], []
        for part in parts:
            spec = MatrixSpec(split_rows=SPLIT, part=MatrixPart("w", (24, 24), part.first))
            rows = grad[part.first : part.stop].clone()
            squares.append(squares_in_float64(rows))
            tasks.append(Task(hyper, Work(grad=rows, main=part.main, state=part.state, matrix=spec)))
            rule.prepare_(tasks[-1], rows, None)
            inputs.append(rows)
        of_grad = {GRAD_SQUARES: torch.stack(squares).sum()} if sums_gradients(rule) else {}
        work = Work(grad=torch.cat(inputs), main=None, state=state | of_grad, matrix=MATRIX)
        (update,) = rule.transform_([Task(hyper, work)], work.grad.unsqueeze(0), None)
        for part, task in zip(parts, tasks, strict=True):
            rule.apply_(task, update[part.first : part.stop].clone(), None)
    return torch.cat([part.main for part in parts])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", RULES)
def test_parts_move_as_the_whole_does(name: str, cut: str) -> None:
    """To the bit, however rows are cut: also those of q, k and v, which have scales of their own."""
    rule, main, grads = RULES[name], tensor(0), [tensor(seed) for seed in (1, 2, 3)]
    got = in_phases(rule, main, grads, CUTS[cut])
    state = init_state(rule, main, MATRIX)
    for step, grad in enumerate(grads, start=1):
        hyper = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.9, 0.95), step=step)
        rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state, matrix=MATRIX)])])
    assert torch.equal(got, main)


def test_rules_of_elements_have_no_phases() -> None:
    assert not isinstance(Adam(), MatrixRule)
    assert all(isinstance(rule, MatrixRule) for rule in RULES.values())
