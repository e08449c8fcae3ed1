"""Evaluation weights, for rules that evaluate other weights than they train: `eval()` sets, `train()` restores."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opt_distributed.pieces import OwnedPiece, QuantizedMain, local
from opt_distributed.saving import decoded, kept_states
from opt_distributed.step import Stepper, Unit, read_hyper
from opt_kernels.formulas import Formula
from opt_kernels.hooks import bare
from opt_kernels.rules import ElementwiseRule

Groups = Sequence[Mapping[str, Any]]


class Evaluation:
    """Switches parameters between training and evaluation weights; for most rules the two are the same."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._formulas = {unit.name: _formula(unit) for unit in stepper.units}
        self.rules = {unit.rule.name for unit in stepper.units if _formula(unit) is not None}  # with evaluation weights
        self._trained: dict[Tensor, Tensor] | None = None  # copies of the trained weights, in evaluation mode

    def check_training(self, what: str) -> None:
        """Raise RuntimeError in evaluation mode; `what` names the call for the message."""
        if self._trained is not None:
            raise RuntimeError(
                f"{what} in evaluation mode: the parameters hold averaged weights; call optimizer.train() first, and "
                "optimizer.eval() for evaluation"
            )

    @property
    def is_evaluating(self) -> bool:
        """Whether the parameters hold the evaluation weights."""
        return self._trained is not None

    def keeps_weights_of(self, unit: Unit) -> bool:
        """Return whether the rule of `unit` keeps weights of its own in its state."""
        return self._formulas[unit.name] is not None

    def replaces_weights_of(self, unit: Unit) -> bool:
        """Return whether the parameters of `unit` hold evaluation weights now."""
        return self.is_evaluating and self.keeps_weights_of(unit)

    @contextmanager
    def with_trained_weights(self) -> Iterator[None]:
        """Show the trained weights in this rank's parameters inside the context; no communication."""
        trained = self._trained or {}
        shown = {param: local(param).detach().clone() for param in trained}
        try:
            _write_(trained)
            yield
        finally:
            _write_(shown)

    @torch.no_grad()
    def resume_(self, groups: Groups) -> None:
        """Begin evaluation after a load that set only the main values of each rank's own pieces. Collective."""
        for unit in self.stepper.units:
            for source in unit.completes if self._formulas[unit.name] is not None else ():
                source.publish_()
        self.begin_(groups)

    @torch.no_grad()
    def begin_(self, groups: Groups) -> None:
        """Write the evaluation weights to the parameters of all ranks. Collective."""
        if self._trained is not None or not self.rules:
            return
        moved = [param for group in groups if group["optimizer"] in self.rules for param in group["params"]]
        self._trained = {param: local(param).detach().clone() for param in moved}
        for unit in self.stepper.units:
            formula = self._formulas[unit.name]
            for piece in unit.pieces if formula is not None else ():
                if piece.step:
                    assert formula is not None
                    assert not isinstance(piece.main, QuantizedMain)
                    piece.main.target.copy_(_evaluated(formula, unit, piece, groups))
            for source in unit.completes:
                source.publish_()

    def end_(self) -> None:
        """Restore the trained weights in the parameters, bit for bit; no communication."""
        _write_(self._trained or {})
        self._trained = None


@torch.no_grad()
def _write_(weights: Mapping[Tensor, Tensor]) -> None:
    """Copy values to the local part of each parameter."""
    for param, values in weights.items():
        local(param).copy_(values)


def _formula(unit: Unit) -> Formula | None:
    """The formula of a unit whose rule evaluates other weights than it trains; None for all other rules."""
    rule = bare(unit.rule)
    return rule.formula if isinstance(rule, ElementwiseRule) and rule.formula.evaluation is not None else None


def _evaluated(formula: Formula, unit: Unit, piece: OwnedPiece, groups: Groups) -> Tensor:
    value = piece.main.value()
    if unit.host is None:
        return _from(formula, unit, piece, groups, value)
    device = unit.host.device
    here = device.to_host(value)
    with device.on_host():
        return _from(formula, unit, piece, unit.host.numbers_of(groups), here)


def _from(formula: Formula, unit: Unit, piece: OwnedPiece, groups: Groups, value: Tensor) -> Tensor:
    hyper = read_hyper(groups[piece.group], step=piece.step, own=formula.own_numbers)
    states = {spec.name: decoded(unit, piece, spec).float() for spec in kept_states(unit, piece)}
    return formula.evaluated(value.float(), states, hyper)
