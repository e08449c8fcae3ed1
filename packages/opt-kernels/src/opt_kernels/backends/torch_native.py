"""Sweeps made of torch operations, for any device: formulas piece by piece, torch's fused optimizers where these
implement the formula, and gradient statistics by torch's reductions.

No operation combines two pieces, which begin at multiples of their length. The bits of an element therefore do not
depend on how its parameter is sharded if shards begin at multiples of 64 elements.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends import elements, reference
from opt_kernels.backends.reference import GradStats, check_norm_type, decoded, write_
from opt_kernels.codecs import Codecs, Plain
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import Formula, number_of
from opt_kernels.formulas.sgd import SGD
from opt_kernels.works import Batch, Hyper, Scalar, Skip, Work

# Elements that are converted at a time: 512 KiB of float32, so that later passes read the cache. A multiple of every
# codec's block.
PIECE_NUMEL = 1 << 17
# Elements per call of a formula: its temporaries, some of them float64, must stay in the cache.
FORMULA_NUMEL = 1 << 16
# One thread sums a row in float32, and rows are summed in float64: the same bits for any number of threads.
ROW_NUMEL = 1 << 12
# Between these bounds, no float32 square that affects the sum has overflowed or underflowed.
SMALLEST_SAFE = 1e-24
LARGEST_SAFE = 1e36

Tensors = Sequence[Tensor]
# Updates mains and states, by name, from gradients: lists of tensors of one dtype.
Update = Callable[[Tensors, Tensors, Mapping[str, Tensors]], None]


def update_(
    batches: Sequence[Batch],
    formula: Formula,
    codecs: Codecs,
    *,
    stochastic_rounding: bool = False,
    grad_scale: Scalar = 1.0,
    skip: Skip = None,
) -> None:
    """Same as `reference.update_`, except for the last bits. Hyper-parameters are read on the host."""
    if elements.skipped(skip):
        return
    scale = float(grad_scale)
    scales = elements.block_scales(codecs)
    for hyper, works in batches:
        fused = _fused(formula, hyper)
        update = fused or _by_formula(formula, formula.scalars_of(hyper))
        whole: list[Work] = []
        pieces: list[Work] = []
        # In reverse order: the gradients that the statistics read last are still in the cache.
        for work in reversed(works):
            run = elements.dense_run_of(work, codecs, scales)
            # A formula allocates temporaries, which must not be as large as whole parameters.
            if fused is not None and scale == 1.0 and _is_direct(run, codecs):
                whole.append(run)
            else:
                pieces += _pieces(run, codecs)
        if whole:
            mains = list(map(elements.anchor_of, whole))
            states = {name: [run.state[name] for run in whole] for name in codecs}
            update(mains, [run.grad for run in whole], states)
        for piece in pieces:
            main = elements.read_main(piece)
            grad = piece.grad
            if grad.dtype is not main.dtype or scale != 1.0:
                grad = elements.scaled_grad(piece, scale)
            values = decoded(piece, codecs, in_place=True)
            update([main], [grad], {name: [value] for name, value in values.items()})
            updated = list(values.values())
            write_(piece, main, updated, codecs, step=hyper.step, stochastic_rounding=stochastic_rounding)


def _is_direct(run: Work, codecs: Codecs) -> bool:
    """Whether a fused optimizer can update a run's tensors in place: all of them have the compute dtype, and there is
    no `out` to write."""
    dtype = elements.compute_dtype(run)
    if run.out is not None or run.main is None:
        return False
    if run.main.dtype is not dtype or run.grad.dtype is not dtype:
        return False
    return all(isinstance(codec, Plain) and codec.dtype is dtype for codec in codecs.values())


def _pieces(run: Work, codecs: Codecs) -> Iterator[Work]:
    """Split a run into flat pieces of at most `PIECE_NUMEL` elements."""
    if run.grad.dim() == 1 and run.grad.numel() <= PIECE_NUMEL:
        yield run
        return
    blocks = elements.block_scales(codecs)
    states = {}
    for name, tensor in run.state.items():
        states[name] = torch.split(tensor.view(-1), PIECE_NUMEL // blocks.get(name, 1))
    mains = {}
    for name, tensor in elements.tensors_of_main(run).items():
        mains[name] = torch.split(tensor.view(-1), PIECE_NUMEL)
    for index, grad in enumerate(torch.split(run.grad.view(-1), PIECE_NUMEL)):
        state = {name: parts[index] for name, parts in states.items()}
        changed: dict[str, Any] = {name: parts[index] for name, parts in mains.items()}
        changed["first"] = run.first + index * PIECE_NUMEL
        yield replace(run, grad=grad, state=state, **changed)


def _by_formula(formula: Formula, scalars: Mapping[str, float]) -> Update:
    """An update that runs the formula."""
    names = [state.name for state in formula.states]

    def update(mains: Tensors, grads: Tensors, states: Mapping[str, Tensors]) -> None:
        for columns in zip(mains, grads, *(states[name] for name in names), strict=True):
            parts = [torch.split(column.view(-1), FORMULA_NUMEL) for column in columns]
            for main, grad, *state in zip(*parts):
                targets = (main, *state)
                values = formula.updated(main, grad, dict(zip(names, state)), scalars)
                # A new value may be another target itself, as after `slow = p`. Copy it before that target is written.
                for index, value in enumerate(values):
                    if any(value is target for target in targets):
                        values[index] = value.clone()
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value)

    return update


def _fused(formula: Formula, hyper: Hyper) -> Update | None:
    """An update by torch's fused optimizer, in one pass; None if it does not implement the formula.

    Its bits equal the formula's on processors with fused multiply-add.
    """
    constants = dict(formula.constants)
    numbers: dict[str, Any] = {"lr": float(hyper.lr), "weight_decay": float(hyper.weight_decay)}
    if formula.update is ADAM.update and constants["order"] == "torch":
        fused_adam = torch._fused_adamw_ if constants["decoupled_weight_decay"] else torch._fused_adam_
        beta1, beta2 = hyper.betas
        numbers |= {"beta1": float(beta1), "beta2": float(beta2), "eps": float(hyper.eps)}
        amsgrad = bool(constants["amsgrad"])

        def adam(mains: Tensors, grads: Tensors, states: Mapping[str, Tensors]) -> None:
            step = torch.full((), float(hyper.step), dtype=torch.float32, device=mains[0].device)
            moments = [list(states.get(name, ())) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
            tensors = (list(mains), list(grads), *moments, [step] * len(mains))
            fused_adam(*tensors, amsgrad=amsgrad, maximize=False, **numbers)

        return adam
    # torch refuses a momentum of 0 if there is a buffer; a momentum given as a tensor may be 0.
    if formula.update is SGD.update and (float(hyper.momentum) or not constants["has_momentum"]):
        has_momentum = bool(constants["has_momentum"])
        numbers["momentum"] = float(hyper.momentum) if has_momentum else 0.0
        numbers["dampening"] = float(number_of(hyper, "dampening", formula))
        nesterov = bool(constants["nesterov"]) and has_momentum
        is_first = int(hyper.step) == 1

        def sgd(mains: Tensors, grads: Tensors, states: Mapping[str, Tensors]) -> None:
            tensors = (list(mains), list(grads), list(states.get("momentum_buffer", ())))
            torch._fused_sgd_(*tensors, nesterov=nesterov, maximize=False, is_first_step=is_first, **numbers)

        return sgd
    return None


@torch.no_grad()
def grad_stats(grads: Tensors, *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """Same as `reference.grad_stats`, with a relative error of the sum of squares of 2e-6.

    If the sum of squares is finite, all elements are finite. Single elements are therefore checked only if the sum is
    not finite, or so small that squares may have underflowed. For this the sum is read on the host.
    """
    check_norm_type(norm_type)
    pieces: list[Tensor] = []
    for grad in grads:
        if grad.numel():
            pieces += torch.split(elements.in_memory_order(grad), PIECE_NUMEL)
    if norm_type != 2.0 or not pieces:
        return reference.grad_stats(grads, count_zeros=count_zeros, norm_type=norm_type)
    norms = []
    zeros = []
    for piece in pieces:
        x = piece if piece.dtype is torch.float64 else piece.float()
        full = x.numel() // ROW_NUMEL * ROW_NUMEL
        for rows in (x[:full].view(-1, ROW_NUMEL), x[full:].view(1, -1)):
            if rows.numel():
                norms.append(torch.linalg.vector_norm(rows, dim=1))
        if count_zeros:
            zeros.append(x.numel() - torch.count_nonzero(x))
    total = torch.cat(norms).double().square().sum()
    if not is_safe(float(total)):
        return reference.grad_stats(grads, count_zeros=count_zeros, norm_type=norm_type)
    zero = torch.zeros((), dtype=torch.int64, device=total.device)
    num_zeros = torch.stack(zeros).sum() if zeros else zero
    return GradStats(sum_of_squares=total, nonfinite=zero, zeros=num_zeros)


def is_safe(sum_of_squares: float) -> bool:
    """Whether every element is finite and no float32 square that affects the sum has overflowed or underflowed."""
    return SMALLEST_SAFE < sum_of_squares < LARGEST_SAFE
