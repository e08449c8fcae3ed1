"""A rule with hooks that need norms: writes the direction to a buffer, computes norms, then updates the weights.

    begin      the rule runs with weights of zero, lr = -1 and no decay, so that it writes u
    sums       |u|^2, |p|^2, <p, u> and counts of each work; the caller adds up those of the parts of a parameter
    finish_    p <- keep p - rate u, with keep and rate from the sums; one sweep in the storage format of the weights

The update of the rule must be p - lr wd p - lr u(g, states), or p - lr u(g + wd p, states). During the step the buffer
takes 4 bytes per element (8 for float64 weights). It is zeroed, read and written by the rule, and read for the norms
and by the last sweep: 20 bytes per element, plus the traffic of reading the weights for their norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import tensors_of, version
from opt_kernels.backends.elements import anchor_of, compute_dtype, read_main
from opt_kernels.codecs import Codecs
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.functions import sign, where
from opt_kernels.hooks.sums import (
    RowMeans,
    columns,
    moves_of,
    raise_rows_,
    share_that_decays,
    subtract_row_means_,
    sums_of,
)
from opt_kernels.hooks.values import (
    CautiousDecay,
    CautiousUpdate,
    CentralizeGradient,
    CoupledDecay,
    Hook,
    Hooks,
    RowFloor,
)
from opt_kernels.rules.base import Needs, Rule, init_state
from opt_kernels.works import NOT_SPLIT, Batch, Hyper, MatrixSpec, Scalar, Skip, States, StateSpec, Work

ALIGNED = 64  # each direction begins at a multiple of this many elements


def scalars(*, lr: float, weight_decay: float) -> dict[str, float]:
    return {"rate": lr, "keep": 1 - weight_decay}


def move(p: Any, g: Any, *, rate: Any, keep: Any) -> Any:
    return p * keep - rate * g


def move_cautiously(p: Any, g: Any, *, rate: Any, keep: Any) -> Any:
    return where(sign(g) * p >= 0, p * keep, p) - rate * g


# Updates weights along a direction that is passed as the gradient; lr is the rate, weight_decay is 1 - keep.
MOVE = Formula(name="move", states=(), scalars=scalars, update=move)
MOVE_CAUTIOUSLY = Formula(name="move_cautiously", states=(), scalars=scalars, update=move_cautiously)


class Begun(NamedTuple):
    """A step between `begin` and `finish_`."""

    batches: Sequence[Batch]  # the caller's
    directions: Sequence[Batch]  # inputs of the bare rule, with `grad_scale`
    grad_scale: Scalar
    updates: Sequence[Sequence[Tensor]]  # by batch: u of each work, once the rule has run; empty without a buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedUpdate:
    """`rule` with `hooks` applied to its update. It is a rule with the same name and states."""

    rule: Rule
    hooks: Hooks
    couples: bool = False  # the rule adds its decay to the gradient
    decays: bool = True  # the rule or one of the hooks reads weight_decay

    @property
    def name(self) -> str:
        """The name of the rule, so that checkpoints do not depend on hooks."""
        return self.rule.name

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    @property
    def codecs(self) -> Codecs:
        return self.rule.codecs

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.rule.state_specs

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The numbers that the rule reads from `Hyper.own`."""
        return tuple(getattr(self.rule, "hyper_names", ()))

    @property
    def backend(self) -> str | None:
        """The backend of the rule."""
        return getattr(self.rule, "backend", None)

    @property
    def stochastic_rounding(self) -> bool:
        """Whether the rule rounds stochastically."""
        return bool(getattr(self.rule, "stochastic_rounding", False))

    def init_state(self, main: Tensor, matrix: MatrixSpec = NOT_SPLIT) -> States:
        return init_state(self.rule, main, matrix)

    @property
    def is_measured(self) -> bool:
        """Whether directions go through a buffer. If not, all hooks act on the gradient."""
        return not self.hooks or any(not isinstance(hook, CentralizeGradient | CoupledDecay) for hook in self.hooks)

    @property
    def sums_norms(self) -> bool:
        """Whether `finish_` needs sums over whole parameters."""
        return any(hook.sums for hook in self.hooks)

    @property
    def centralizes(self) -> bool:
        """Whether `begin` subtracts row means from gradients."""
        return any(isinstance(hook, CentralizeGradient) for hook in self.hooks)

    @property
    def _decay(self) -> Hook | None:
        """The hook that replaces the weight decay of the rule."""
        return next((hook for hook in self.hooks if hook.decays), None)

    @property
    def _sign(self) -> float:
        """The factor of gradients: a rule that maximizes negates them."""
        return -1.0 if getattr(self.rule, "maximize", False) else 1.0

    def update_(self, batches: Sequence[Batch], *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
        begun = self.begin(batches, grad_scale=grad_scale)
        self.rule.update_(begun.directions, grad_scale=begun.grad_scale, skip=skip)
        self.finish_(begun, self.sums(begun), skip=skip)

    def begin(
        self,
        batches: Sequence[Batch],
        *,
        grad_scale: Scalar = 1.0,
        row_means: Sequence[RowMeans | None] = (),  # of all works; None: its rows are whole; (): all are
    ) -> Begun:
        """The inputs of the bare rule, with weights of zero, that make it write directions. Modifies nothing."""
        adds_decay = isinstance(self._decay, CoupledDecay) or (self.couples and self._decay is None)
        changes = self.centralizes or adds_decay
        means = iter(row_means or repeat(None))
        directions = []
        updates = []
        for hyper, works in batches:
            decay = self._sign * hyper.weight_decay if adds_decay else 0.0
            inputs = list(works)
            if changes:
                inputs = [replace(w, grad=self._gradient(w, grad_scale, decay, next(means))) for w in works]
            buffers = []
            if self.is_measured:  # the rule writes only the buffer and the states
                buffers = _zeros(works)
                inputs = [replace(w, main=u, out=None, remainder=None) for w, u in zip(inputs, buffers, strict=True)]
            directions.append(Batch(self._hyper(hyper), inputs))
            updates.append(buffers)
        return Begun(batches, directions, 1.0 if changes else grad_scale, updates)

    def _gradient(self, work: Work, scale: Scalar, decay: Scalar, means: RowMeans | None) -> Tensor:
        """scale * grad + decay * p, minus the mean of each row if it centralizes: a new tensor in the compute dtype.

        A row is one index of the first dim; in a stack of matrices, one index of all dims except the last.
        """
        main = read_main(work)
        grad = torch.empty_like(main).copy_(work.grad).mul_(scale)
        if means is not None:
            subtract_row_means_(grad, means, scale=scale)
        elif self.centralizes and grad.dim() > 1 and grad.numel():
            dims = (-1,) if self.needs is Needs.MATRICES else tuple(range(1, grad.dim()))
            grad -= grad.mean(dims, keepdim=True)
        if not isinstance(decay, float | int) or decay != 0:  # zero times an infinite parameter would be NaN
            grad += main * decay
        return grad

    def sums(self, begun: Begun) -> Tensor:
        """Sums over the local elements, (works of all batches, NUM_SUMS) float64. Masks the directions first."""
        needed = {name for hook in self.hooks for name in hook.sums}
        works: list[Work] = []
        grads = []
        updates: list[Tensor] = []
        if needed:
            for (_, given), (_, inputs), of_batch in zip(begun.batches, begun.directions, begun.updates):
                works += given
                grads += [work.grad for work in inputs]
                updates += of_batch
        kept = []
        if "kept" in needed:
            for update, grad in zip(updates, grads):
                mask = update.sign() * grad.sign() == self._sign  # false where they are opposed
                update.mul_(mask)
                kept.append(mask.sum())
        found = sums_of(works, updates, needed)
        if kept:
            columns(found).kept.copy_(torch.stack(kept))
        return found

    def finish_(self, begun: Begun, sums: Tensor, *, skip: Skip = None) -> None:
        """Update the weights. `sums` are the results of the method `sums`, over whole parameters."""
        if not self.is_measured:
            return
        moves: list[Batch] = []
        start = 0
        for (given, works), updates in zip(begun.batches, begun.updates):
            hyper = given
            if not self.decays:
                hyper = replace(given, weight_decay=_as(given.weight_decay, 0.0))
            of_batch = sums[start : start + len(works)]
            start += len(works)
            self._raise_rows_(works, updates, of_batch)
            if not self.sums_norms:
                share = share_that_decays(self.hooks, hyper, couples=self.couples)
                moved = [replace(work, grad=update) for work, update in zip(works, updates)]
                moves.append(Batch(replace(hyper, weight_decay=share), moved))
                continue
            keep, rate = moves_of(self.hooks, of_batch, hyper, couples=self.couples)
            for work, update, lr, share in zip(works, updates, rate.unbind(), (1 - keep).unbind()):
                numbers = replace(hyper, lr=lr, weight_decay=share)  # its own batch, as factors differ
                moves.append(Batch(numbers, [replace(work, grad=update, state={})]))
        sweep = version("update", "update_", backend=self.backend, tensors=tensors_of(moves))
        formula = MOVE_CAUTIOUSLY if isinstance(self._decay, CautiousDecay) else MOVE
        sweep(moves, formula, {}, stochastic_rounding=self.stochastic_rounding, grad_scale=1.0, skip=skip)

    def _raise_rows_(self, works: Sequence[Work], updates: Sequence[Tensor], sums: Tensor) -> None:
        """Apply RowFloor. CautiousUpdate multiplies updates later, by a factor that follows from the sums."""
        for floor in (hook for hook in self.hooks if isinstance(hook, RowFloor)):
            mask = tuple(hook for hook in self.hooks if isinstance(hook, CautiousUpdate))
            ratios: list[Scalar] = [floor.ratio] * len(works)
            if mask:
                _, factors = moves_of(mask, sums, Hyper(lr=1.0), couples=False)
                ratios = list((floor.ratio / factors).unbind())
            for work, update, ratio in zip(works, updates, ratios, strict=True):
                raise_rows_(update, read_main(work), ratio)

    def _hyper(self, hyper: Hyper) -> Hyper:
        """The numbers with which the bare rule runs."""
        if self.is_measured:
            return replace(hyper, lr=_as(hyper.lr, -1.0), weight_decay=_as(hyper.weight_decay, 0.0))
        if self._decay is not None:
            return replace(hyper, weight_decay=_as(hyper.weight_decay, 0.0))
        return hyper


def _as(value: Scalar, number: float) -> Scalar:
    """`number` on the device of `value`, because a captured step refuses host numbers."""
    return torch.full_like(value, number) if isinstance(value, Tensor) else number


def _zeros(works: Sequence[Work]) -> list[Tensor]:
    """Zeros of the layout and compute dtype of each work, in one allocation per dtype."""
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    places = []
    for work in works:
        anchor = anchor_of(work)
        kind = (compute_dtype(work), anchor.device)
        start = room.get(kind, 0)
        places.append((anchor, kind, start))
        room[kind] = start + -(-anchor.numel() // ALIGNED) * ALIGNED
    memory = {kind: torch.zeros(numel, dtype=kind[0], device=kind[1]) for kind, numel in room.items()}
    return [memory[kind].as_strided(anchor.shape, anchor.stride(), start) for anchor, kind, start in places]
