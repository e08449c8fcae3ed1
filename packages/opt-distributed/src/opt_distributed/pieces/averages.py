"""Averages of weights, which a unit writes after its rule: an exponential moving average, and that of EMA-Nesterov.

With W the weights after step t, d the decay, and s the step after which the average begins:

    E <- W if t <= s, else E + (1 - d) (W - E)

as `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`, bit for bit in fp32; 1 - d is formed in float64.
EMA-Nesterov (arXiv 2605.25395) takes gradients ahead of the weights. With A the step of the rule, and B zero at first:

    W' = A(W + beta B)      B <- gamma B + (1 - gamma) (W' - W)      W <- W'

There, main values and the parameter are W + beta B, and W is a state, because it is not recovered from them to the bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opt_config import Averages
from opt_distributed.pieces.offload import HostMain
from opt_distributed.pieces.piece import Groups, OwnedPiece
from opt_kernels.formulas import Number
from opt_kernels.works import StateKind, StateSpec

DECAY = Number("ema_decay", 0.999, low=0.0, below=1.0)
BETA = Number("ema_nesterov_beta", 0.3, low=0.0, below=1.0)
NUMBERS = {number.name: number for number in (DECAY, BETA)}
"""The entries of groups that averages read, if a number was configured and not a function of the step."""
EMA = "ema"
STEPS = "ema_steps"  # how many steps were averaged, 0-d int64
BASE = "nesterov_base"  # W
CHANGES = "nesterov_ema"  # B
_NONE = Averages()
AVERAGES = (EMA, STEPS, BASE, CHANGES)
"""The names of all averages."""


@dataclass(frozen=True, slots=True)
class WeightAverages:
    """The averages of a unit. Its methods read and write `OwnedPiece.averages`."""

    chosen: Averages = _NONE
    has_ema: bool = field(init=False)
    looks_ahead: bool = field(init=False)  # whether main values are ahead of the weights
    specs: tuple[StateSpec, ...] = field(init=False)  # the states of each piece: float32 like it, and a count of steps

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_ema", self.chosen.decay is not None)
        object.__setattr__(self, "looks_ahead", self.chosen.beta is not None)
        names = ((EMA,) if self.has_ema else ()) + ((BASE, CHANGES) if self.looks_ahead else ())
        count = StateSpec(name=STEPS, kind=StateKind.SCALAR, dtype=torch.int64)
        object.__setattr__(self, "specs", (*(StateSpec(name=name) for name in names), count) if names else ())

    def numbers(self) -> dict[str, float]:
        """Return the entries of groups with the configured numbers. A function of the step is not one."""
        given = {DECAY.name: self.chosen.decay, BETA.name: self.chosen.beta}
        return {name: value for name, value in given.items() if isinstance(value, int | float)}

    def init_state(self, value: Tensor) -> dict[str, Tensor]:
        """Return the averages before the first step, given the main values: copies of these, and zeros."""
        states = {}
        for spec in self.specs:
            if spec.name == STEPS:
                states[STEPS] = torch.zeros((), dtype=torch.int64, device=value.device)
            else:
                states[spec.name] = value.detach().to(torch.float32, copy=True)
        if CHANGES in states:
            states[CHANGES].zero_()
        return states

    @torch.no_grad()
    def restart_(self, piece: OwnedPiece, names: Iterable[str] | None = None) -> None:
        """Let averages, or those of these names, begin anew with the weights, at the piece's number of steps.

        They follow later writes of other code until the next step, as after a load of state before that of weights.
        """
        if not piece.averages:
            return
        piece.following = set(piece.averages if names is None else names)
        steps = piece.averages[STEPS]
        if STEPS in piece.following:
            steps.fill_(piece.step)
        elif not int(steps):
            piece.following = set(piece.averages)
        self.begin_([piece])

    @torch.no_grad()
    def follow_(self, piece: OwnedPiece) -> None:
        """Let averages that have not begun take the present weights, which other code may have written."""
        self.begin_([piece])
        if self.has_ema and int(piece.averages[STEPS]) < self.chosen.from_step:
            with _where_kept(piece) as main:
                piece.averages[EMA].copy_(_weights(piece, main))

    @torch.no_grad()
    def shown(self, piece: OwnedPiece) -> Tensor:
        """Return the weights to evaluate, in the shape of the piece, where its averages are kept."""
        with _where_kept(piece) as main:
            weights = _weights(piece, main)
            return torch.lerp(weights, piece.averages[EMA], self.chosen.share) if self.has_ema else weights

    # --- a step -----------------------------------------------------------------------------------------------------

    def check(self, pieces: Sequence[OwnedPiece]) -> None:
        """Call the configured functions for the next step. The host waits for the number of steps.

        Raises NumberError for a value that is not allowed.
        """
        given = (DECAY, self.chosen.decay, 1), (BETA, self.chosen.beta, 2)
        for number, value, later in given:
            if callable(value):
                for step in set(_steps(pieces)):
                    number.check(value(step + later))

    @torch.no_grad()
    def begin_(self, pieces: Sequence[OwnedPiece]) -> None:
        """Let averages that no step has written since they began take the present weights."""
        for piece in pieces:
            if not piece.following:
                continue
            with _where_kept(piece) as main:
                if BASE in piece.following:
                    piece.averages[BASE].copy_(main)
                    piece.averages[CHANGES].zero_()
                if EMA in piece.following:
                    piece.averages[EMA].copy_(_weights(piece, main))

    @torch.no_grad()
    def update_(
        self, pieces: Sequence[OwnedPiece], ready: Sequence[OwnedPiece], groups: Groups, skip: Tensor | None
    ) -> None:
        """Average all `pieces` of a unit, of which a rule has updated those that are `ready`.

        If `skip`, 0-d bool on the device, is set, nothing changes.
        """
        if not pieces:
            return
        steps = [piece.averages[STEPS] for piece in pieces]
        if skip is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, [(~skip).to(torch.int64)] * len(steps))
        if self.looks_ahead:
            for piece, beta in zip(ready, _numbers(BETA, self.chosen.beta, ready, groups, later=1), strict=True):
                self._look_ahead_(piece, beta, skip)
        for piece, weight in zip(pieces, self._shares(pieces, groups, skip) if self.has_ema else ()):
            piece.averages[EMA].lerp_(_weights(piece, piece.main.updated.value()), weight)

    def _shares(self, pieces: Sequence[OwnedPiece], groups: Groups, skip: Tensor | None) -> Sequence[float | Tensor]:
        """Return the share of the weights in the new average of each piece: 1 - decay, and 1 until it begins."""
        decays = _numbers(DECAY, self.chosen.decay, pieces, groups)
        from_step = self.chosen.from_step
        if skip is None:
            numbers = zip(_steps(pieces), decays, strict=True)
            return [1.0 if step <= from_step else 1.0 - float(decay) for step, decay in numbers]
        shares = [_on_device(1.0 - decay, skip.device) for decay in decays]
        has_begun = torch.stack([piece.averages[STEPS] for piece in pieces]) > from_step
        return torch.where(has_begun, torch.stack(shares), 1.0).masked_fill(skip, 0.0).unbind()

    def _look_ahead_(self, piece: OwnedPiece, beta: float | Tensor, skip: Tensor | None) -> None:
        main = piece.main.updated
        base = piece.averages[BASE]
        changes = piece.averages[CHANGES]
        new = main.value()
        share = 1.0 - self.chosen.gamma
        changes.lerp_(new - base, share if skip is None else _on_device(share, skip.device).masked_fill(skip, 0.0))
        # In two steps, since a fused product would depend on how tensors are cut.
        ahead = (changes * beta).add_(new)
        if skip is None:
            base.copy_(new)
            main.set_(ahead)
        else:
            ahead = torch.where(skip, new, ahead)
            base.copy_(torch.where(skip, base, new))
            main.set_(ahead)


NO_AVERAGES = WeightAverages()


@contextmanager
def _where_kept(piece: OwnedPiece) -> Iterator[Tensor]:
    """Give the main values where the averages are kept: on the device, or in host memory, for which the host waits."""
    value = piece.main.value().detach()
    if isinstance(piece.main, HostMain):
        here = piece.main.device.to_host(value)
        with piece.main.device.on_host():
            yield here
    else:
        yield value


def _steps(pieces: Sequence[OwnedPiece]) -> list[int]:
    """The number of steps that each piece's averages contain. The host waits for them, once."""
    return torch.stack([piece.averages[STEPS] for piece in pieces]).tolist() if pieces else []


def _numbers(
    number: Number, chosen: object, pieces: Sequence[OwnedPiece], groups: Groups, *, later: int = 0
) -> list[float | Tensor]:
    """Return the number of each piece's group, or that of the configured function, `later` steps from now."""
    found = [groups[piece.group].get(number.name, chosen) for piece in pieces]
    if not any(map(callable, found)):
        return found
    return [value(step + later) if callable(value) else value for value, step in zip(found, _steps(pieces))]


def _weights(piece: OwnedPiece, main: Tensor) -> Tensor:
    """Return the weights after the last step, given the main values, which may be ahead of them."""
    return piece.averages.get(BASE, main)


def _on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as 0-d float32 on the device, without a copy from the host."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float32)
    return torch.full((), number, dtype=torch.float32, device=device)
