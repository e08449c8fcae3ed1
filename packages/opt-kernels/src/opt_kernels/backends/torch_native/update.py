"""Runs a formula as torch operations over cache tiles, or as torch's fused optimizer if it implements the formula."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from opt_kernels.backends.elements import skipped
from opt_kernels.backends.torch_native.tiles import Tile, divided, tiles
from opt_kernels.codecs import StateCodec
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import Formula, number_of
from opt_kernels.formulas.sgd import SGD
from opt_kernels.works import Batch, Hyper

# Elements per call of a formula: its temporaries, some of them float64, must stay in the cache.
PIECE_NUMEL = 1 << 16

# Updates the mains and states of a tile.
Sweep = Callable[[Tile], None]


def update_(
    batches: Sequence[Batch],
    formula: Formula,
    codecs: Mapping[str, StateCodec],
    *,
    stochastic_rounding: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """Same as `reference.update_`, except for the last bits. Hyper-parameters are read on the host."""
    if skipped(skip):
        return
    scale = float(grad_scale)
    for hyper, works in batches:
        fused = _fused(formula, hyper)
        sweep = fused or _by_formula(formula, formula.scalars_of(hyper))
        whole, cut = divided(works, codecs, scale=scale)
        if fused is None:  # a formula allocates temporaries, which must not be as large as whole parameters
            whole, cut = [], [*whole, *cut]
        if whole:
            mains = [run.main for run in whole if run.main is not None]
            sweep(
                Tile(mains, [run.grad for run in whole], {name: [run.state[name] for run in whole] for name in codecs})
            )
        step = int(hyper.step) if stochastic_rounding else None
        for tile in tiles(cut, codecs, scale=scale, stochastic_step=step, flat_grads=True):
            sweep(tile)


def _by_formula(formula: Formula, scalars: Mapping[str, float]) -> Sweep:
    """Return a sweep that runs the formula on a tile, piece by piece."""
    names = [state.name for state in formula.states]

    def sweep(tile: Tile) -> None:
        for columns in zip(tile.mains, tile.grads, *(tile.states[name] for name in names), strict=True):
            for main, grad, *states in zip(*(torch.split(column.view(-1), PIECE_NUMEL) for column in columns)):
                targets = (main, *states)
                new = formula.updated(main, grad, dict(zip(names, states)), scalars)
                # A new value may be another target itself, as after `slow = p`. Copy it before that target is written.
                values = [value.clone() if any(value is old for old in targets) else value for value in new]
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value)

    return sweep


def _fused(formula: Formula, hyper: Hyper) -> Sweep | None:
    """Return a sweep by torch's fused optimizer, in one pass; None if it does not implement the formula.

    Its bits equal the formula's on processors with fused multiply-add.
    """
    constants = dict(formula.constants)
    if formula.update is ADAM.update and constants["order"] == "torch":
        decoupled, amsgrad = bool(constants["decoupled_weight_decay"]), bool(constants["amsgrad"])
        return _fused_adam(hyper, decoupled=decoupled, amsgrad=amsgrad)
    if formula.update is SGD.update:
        dampening, has_momentum = number_of(hyper, "dampening", formula), bool(constants["has_momentum"])
        return _fused_sgd(
            hyper,
            momentum=float(hyper.momentum) if has_momentum else 0.0,
            dampening=float(dampening),
            nesterov=bool(constants["nesterov"]) and has_momentum,
        )
    return None


def _fused_adam(hyper: Hyper, *, decoupled: bool, amsgrad: bool) -> Sweep:
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def sweep(tile: Tile) -> None:
        step = torch.full((), float(hyper.step), dtype=torch.float32, device=tile.mains[0].device)
        fused(
            tile.mains,
            tile.grads,
            tile.states["exp_avg"],
            tile.states["exp_avg_sq"],
            tile.states.get("max_exp_avg_sq", []),
            [step] * len(tile.mains),
            lr=float(hyper.lr),
            beta1=float(hyper.betas[0]),
            beta2=float(hyper.betas[1]),
            weight_decay=float(hyper.weight_decay),
            eps=float(hyper.eps),
            amsgrad=amsgrad,
            maximize=False,
        )

    return sweep


def _fused_sgd(hyper: Hyper, *, momentum: float, dampening: float, nesterov: bool) -> Sweep:
    def sweep(tile: Tile) -> None:
        torch._fused_sgd_(
            tile.mains,
            tile.grads,
            tile.states.get("momentum_buffer", []),
            weight_decay=float(hyper.weight_decay),
            momentum=momentum,
            lr=float(hyper.lr),
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
            is_first_step=int(hyper.step) == 1,
        )

    return sweep
