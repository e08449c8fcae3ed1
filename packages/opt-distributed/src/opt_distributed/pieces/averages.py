"""Averages of weights, which a unit writes after its rule: an exponential moving average, and that of EMA-Nesterov.

With W the weights after step t, d the decay, and s the step after which the average begins:

    E <- W if t <= s, else E + (1 - d) (W - E)

as `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`, bit for bit in fp32; 1 - d is formed in float64.
EMA-Nesterov (arXiv 2605.25395) takes gradients ahead of the weights. With A the step of the rule, and B zero at first:

    W' = A(W + beta B)      B <- gamma B + (1 - gamma) (W' - W)      W <- W'

There, main values and the parameter are W + beta B, and W is a state, because it is not recovered from them to the bit.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.pieces.offload import HostMain
from opt_distributed.pieces.piece import OwnedPiece, Update
from opt_kernels.params import Main
from opt_kernels.works import StateKind, StateSpec

EMA = "ema"
BASE = "nesterov_base"  # W
CHANGES = "nesterov_ema"  # B
STEPS = "ema_steps"  # how many steps were averaged, 0-d int64
AVERAGES = (EMA, STEPS, BASE, CHANGES)
"""The names of all averages."""


class WeightAverages:
    """The averages of a unit, which are among the states of its pieces."""

    def __init__(self, config: OptimizerConfig):
        self.config = config
        self.looks_ahead = config.ema_nesterov_beta is not None  # whether main values are ahead of the weights
        self.specs: list[StateSpec] = []  # the states of each piece: float32 like it, and a count of steps
        if config.ema_decay is not None:
            self.specs.append(StateSpec(name=EMA))
        if self.looks_ahead:
            self.specs += [StateSpec(name=BASE), StateSpec(name=CHANGES)]
        if self.specs:
            self.specs.append(StateSpec(name=STEPS, kind=StateKind.SCALAR, dtype=torch.int64))
        self.names = [spec.name for spec in self.specs]

    def init_(self, piece: OwnedPiece, main: Tensor) -> None:
        """Create the averages of a piece, whose main values these are."""
        piece.state |= {name: torch.zeros_like(main, dtype=torch.float32) for name in self.names}
        piece.state[STEPS] = main.new_zeros((), dtype=torch.int64)
        self.restart_(piece)

    def restart_(self, piece: OwnedPiece, loaded: Collection[str] = ()) -> None:
        """Let the averages begin anew with the weights, at the piece's number of steps, except those `loaded`.

        They follow later writes of other code until the next step, as after a load of state before that of weights.
        """
        beginning = set(self.names).difference(loaded)
        if STEPS in beginning:
            piece.state[STEPS].fill_(piece.step)
        elif not int(piece.state.get(STEPS, 1)):  # it was loaded before a step was averaged
            beginning = set(self.names)
        piece.following = beginning
        self.follow_([piece])

    @torch.no_grad()
    def follow_(self, pieces: Iterable[OwnedPiece]) -> None:
        """Let averages that no step has written since they began take the present weights."""
        for piece in pieces:
            if BASE in piece.following:
                piece.state[BASE].copy_(piece.main.value())
            if CHANGES in piece.following:
                piece.state[CHANGES].zero_()
            if EMA in piece.following:
                piece.state[EMA].copy_(_weights(piece, piece.main))

    def follow_until_begun_(self, piece: OwnedPiece) -> None:
        """Let averages that have not begun take the present weights, which other code may have written. The host waits
        for the number of steps."""
        if EMA in self.names and int(piece.state[STEPS]) < self.config.ema_from_step:
            piece.following.add(EMA)
        self.follow_([piece])

    def shown(self, piece: OwnedPiece) -> Tensor:
        """Return the weights to evaluate, in the shape of the piece, where its averages are kept."""
        self.follow_until_begun_(piece)
        weights = _weights(piece, piece.main)
        return torch.lerp(weights, piece.state[EMA], self.config.ema_share) if EMA in self.names else weights

    def scheduled(self, pieces: Sequence[OwnedPiece]) -> list[float]:
        """The decay of each piece in the next step, by a schedule; empty without one.

        The host waits for the numbers of steps. Raises ConfigError for a decay that is not allowed.
        """
        schedule = self.config.ema_decay
        if not callable(schedule) or not pieces:
            return []
        numbers = (torch.stack([piece.state[STEPS] for piece in pieces]) + 1).tolist()
        decays = {}
        for number in set(numbers):
            decays[number] = decay = float(schedule(number))
            if not 0 <= decay < 1:
                raise ConfigError(f"ema_decay: the schedule returned {decay!r} for step {number}; must be in [0, 1)")
        return [decays[number] for number in numbers]

    def update_(self, pieces: Sequence[OwnedPiece], update: Update, scheduled: Sequence[float]) -> None:
        """Average all `pieces` of a unit, of which a rule has updated those that are ready.

        If `update.skip` is set, nothing changes.
        """
        if not pieces:
            return
        steps = [piece.state[STEPS] for piece in pieces]
        skip = torch.zeros_like(steps[0], dtype=torch.bool) if update.skip is None else update.skip
        torch._foreach_add_(steps, [(~skip).long()] * len(steps))  # one tensor would be read by the host
        if self.looks_ahead:
            self._look_ahead_(update, skip)
        if EMA not in self.names:
            return
        # A schedule that raised an error has none: the step is skipped.
        decays = scheduled or [update.groups[piece.group].get("ema_decay", 0.0) for piece in pieces]
        shares = {decay: _share(1.0 - decay, skip) for decay in set(decays)}
        updated = set(map(id, update.ready.pieces))
        has_begun = torch.stack(steps) > self.config.ema_from_step
        for piece, decay, begun in zip(pieces, decays, has_begun.unbind(), strict=True):
            weights = _weights(piece, piece.main.updated if id(piece) in updated else piece.main)
            piece.state[EMA].lerp_(weights, torch.where(begun, shares[decay], ~skip))

    def _look_ahead_(self, update: Update, skip: Tensor) -> None:
        share = _share(1.0 - self.config.ema_nesterov_gamma, skip)
        for piece in update.ready.pieces:
            main = piece.main.updated
            base = piece.state[BASE]
            changes = piece.state[CHANGES]
            new = main.value()
            changes.lerp_(new - base, share)
            # In two steps, since a fused product would depend on how tensors are cut.
            ahead = (changes * update.groups[piece.group]["ema_nesterov_beta"]).add_(new)
            base.copy_(torch.where(skip, base, new))
            main.set_(torch.where(skip, new, ahead))


NO_AVERAGES = WeightAverages(OptimizerConfig())


def _weights(piece: OwnedPiece, main: Main) -> Tensor:
    """Return the weights after the last step, given the main values, which may be ahead of them.

    They are where the averages are kept: on the device, or in host memory, for which the host waits.
    """
    if BASE in piece.state:
        return piece.state[BASE]
    value = main.value().detach()
    return main.device.to_host(value) if isinstance(main, HostMain) else value


def _share(number: float | Tensor, skip: Tensor) -> Tensor:
    """Return a number, or zero if `skip` is set, as 0-d float32 on its device, without a copy from the host.

    A tensor has one element.
    """
    if isinstance(number, Tensor):
        number = number.reshape(())
    return torch.zeros((), dtype=torch.float32, device=skip.device).add_(number).masked_fill_(skip, 0.0)
