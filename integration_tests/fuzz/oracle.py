"""Expected results of a case: one process, float64, plain torch, from the papers. Imports nothing of the project.

The whole model is updated by formulas of Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019), SGD with momentum
(torch.optim.SGD's form), Lion (Chen et al. 2023), Muon (Jordan 2024) with the scale of Moonlight (arXiv 2502.16982),
AdaMuon (arXiv 2507.11005) and NorMuon (arXiv 2510.05491). Gradients are exact (see `cases`), so that a result may
differ from these by what fp32 mains and state round, and by the rounding of a stored 16-bit parameter.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuzz.cases import (
    HYPER,
    Case,
    Param,
    cut,
    first_weight,
    gradient,
    is_held,
    is_used,
    local_gradient,
    num_parts,
    num_replicas,
    replica_of,
    tokens,
)

NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
EPS = 1e-7  # lower bound of a norm that is divided by
NEWTON_SCHULZ_SLACK = 5e-4  # the five maps together raise a small singular value, and its fp32 rounding, 500 times
Weights = dict[str, tuple[Tensor, Tensor]]
"""By parameter: main value, and by how much a correct result may miss it, element by element."""


@dataclass(slots=True)
class Expected:
    """A parameter and its state."""

    main: Tensor
    slack: Tensor
    step: int = 0
    has_grad: bool = False  # left from an earlier step, where gradients are set to zero and not to None
    state: dict[str, Tensor] = field(default_factory=dict)
    average: "Average | None" = None
    ahead: "Ahead | None" = None

    def kept(self, name: str) -> Tensor:
        return self.state.setdefault(name, torch.zeros_like(self.main))


@dataclass(slots=True)
class Average:
    """The average of a parameter's weights, and by how much a correct one may miss it."""

    value: Tensor
    slack: Tensor


@dataclass(slots=True)
class Ahead:
    """EMA-Nesterov: the weights of the algorithm and the average of their changes; the model holds them ahead."""

    base: Tensor
    changes: Tensor
    base_slack: Tensor
    slack: Tensor  # of the changes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """The expected result of a step, and the weights after it."""

    success: bool
    overflows: bool
    norm: float  # of the model's own slot; not finite on an overflow
    zeros: int | None
    scale: float  # after the step
    weights: Weights
    evaluated: Weights  # what evaluation mode shows
    steps: dict[str, int]  # updates that each trained parameter has had


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling as Megatron-Core does it: a backoff does not refill the hysteresis."""

    scale: float
    window: int = 1000
    hysteresis: int = 2
    is_dynamic: bool = False
    forgiven: int = 0
    clean: int = 0

    def update(self, overflow: bool) -> None:
        if not self.is_dynamic:
            return
        if overflow:
            self.clean = 0
            self.forgiven = self.forgiven + 1
            self.scale = max(self.scale * 0.5, 1.0) if self.forgiven >= self.hysteresis else self.scale
        elif (clean := self.clean + 1) < self.window:
            self.clean = clean
        else:
            self.clean = 0
            self.forgiven = 0
            self.scale = self.scale * 2


def first_weights(case: Case) -> Weights:
    found = {param.name: first_weight(case, param) for param in case.params}
    return {name: (value, torch.zeros_like(value)) for name, value in found.items()}


def expect(case: Case) -> list[ExpectedStep]:
    held = {name: Expected(main, slack) for name, (main, slack) in first_weights(case).items()}
    scale = LossScale(case.fields.get("loss_scale", 1.0))
    if "initial_loss_scale" in case.fields:
        numbers = [case.fields[name] for name in ("initial_loss_scale", "loss_scale_window", "hysteresis")]
        scale = LossScale(*numbers, is_dynamic=True)
    found: list[ExpectedStep] = []
    for step in range(case.steps):
        num_made = 1 + sum(earlier.success for earlier in found)
        found.append(_step(case, held, scale, step, num_made))
    return found


def _step(case: Case, held: dict[str, Expected], scale: LossScale, step: int, num_made: int) -> ExpectedStep:
    """`num_made`: of steps that were not skipped, with this one if it is not."""
    trained = [param for param in case.params if param.is_trained]
    grads: dict[str, Tensor] = {}
    for param in trained:
        of = held[param.name]
        of.has_grad &= step not in (case.reload_at, case.resume_at if case.resume else None)
        grad = mean_gradient(case, param, step)
        if grad is not None or of.has_grad:
            grads[param.name] = torch.zeros_like(of.main) if grad is None else grad
            of.has_grad = case.keeps_grads
    norms = _norms(case, grads)
    overflows = any(bad.step == step for bad in case.bad) or _is_too_large(case, scale.scale, step)
    is_refused = not overflows and norms[""] > case.fields["grad_norm_skip_threshold"]
    for param in () if overflows or is_refused else trained:
        if (grad := grads.get(param.name)) is not None:
            norm = norms[slot_of(case, param)]
            limit = case.fields["clip_grad"]
            clip = 1.0 if limit == 0 or math.isinf(norm) else min(limit / (norm + 1e-6), 1.0)
            _update_(case, param, held[param.name], step, grad * clip)
        if "ema_decay" in case.fields:
            _average_(case, held[param.name], num_made)
    scale.update(overflows)
    return ExpectedStep(
        success=not (overflows or is_refused),
        overflows=overflows,
        norm=math.nan if overflows else norms[""],
        zeros=sum(int((grad == 0).sum()) for grad in grads.values()) if case.fields["log_num_zeros_in_grad"] else None,
        scale=scale.scale,
        weights={name: (of.main.clone(), of.slack.clone()) for name, of in held.items()},
        evaluated={name: _evaluated(case, of) for name, of in held.items()},
        steps={param.name: held[param.name].step for param in trained},
    )


def expected_loss(case: Case, rank: int, weights: Weights, step: int) -> tuple[float, float]:
    """A rank's loss of an iteration with these weights, summed over microbatches; and by how much it may be missed."""
    setup = case.setup_at(step)
    place = setup.grid.place(rank)
    loss = 0.0
    tolerance = 1e-4
    for param in (param for param in case.params if is_held(param, place, setup.grid)):
        main, slack = (cut(value, param, place, setup.grid) for value in weights[param.name])
        rounding = torch.finfo(case.dtype_of(param, setup)).eps
        for microbatch in range(setup.microbatches):
            if is_used(case, param, step=step, microbatch=microbatch, replica=replica_of(param, place)):
                grad = local_gradient(case, param, rank, step=step, microbatch=microbatch)
                loss += float((main * grad).sum())
                tolerance += float((grad.abs() * (slack + 2 * rounding * main.abs() + 1e-7)).sum())
    return loss, tolerance


# --- gradients --------------------------------------------------------------------------------------------------------


def mean_gradient(case: Case, param: Param, step: int) -> Tensor | None:
    """The mean gradient of the whole parameter over the dense replicas. None if no rank has a gradient.

    In a wrapped model, such a gradient is zero instead.
    """
    setup = case.setup_at(step)
    found = [
        gradient(case, param, step=step, microbatch=microbatch, replica=replica, tp=tp, is_copy=is_copy)
        for replica in range(num_replicas(param, setup.grid))
        for microbatch in range(setup.microbatches)
        for tp in range(setup.grid.tp if param.over_tp else 1)
        for is_copy in ((False, True) if param.tied and setup.grid.pp > 1 else (False,))
        if is_used(case, param, step=step, microbatch=microbatch, replica=replica)
    ]
    if not found:
        return torch.zeros(param.shape, dtype=torch.float64) if setup.wrapped else None
    total = torch.stack(found).sum(0)
    if param.over_tp == "average_gradients_across_tp_domain":
        total = total / setup.grid.tp
    replicas = range(setup.grid.dp)
    return total / (sum(tokens(case, step, at) for at in replicas) if setup.per_token else len(replicas))


def _is_too_large(case: Case, scale: float, step: int) -> bool:
    """Whether the loss scale itself is infinite in fp16, and so are all gradients."""
    setup = case.setup_at(step)
    return scale >= 2**16 and any(
        is_used(case, param, step=step, microbatch=microbatch, replica=replica)
        for param in case.params
        if param.is_trained and case.dtype_of(param, setup) is torch.float16 and 0 not in param.shape
        for replica in range(num_replicas(param, setup.grid))
        for microbatch in range(setup.microbatches)
    )


def slot_of(case: Case, param: Param) -> str:
    """The gradient norm that a parameter belongs to: the model's, its norm group's, or that of a rule not clipped."""
    is_clipped = param.own_entries().get("clip_grad", True)
    return param.norm_group or "" if is_clipped else f"not clipped {case.rule_of(param)}"


def _norms(case: Case, grads: dict[str, Tensor]) -> dict[str, float]:
    squares = {"": 0.0}
    for param in case.params:
        slot = slot_of(case, param)
        of_param = float(grads[param.name].square().sum()) if param.name in grads else 0.0
        squares[slot] = squares.get(slot, 0.0) + of_param
    return {slot: math.inf if slot.startswith("not clipped") else math.sqrt(of) for slot, of in squares.items()}


# --- averages of weights ----------------------------------------------------------------------------------------------


def _average_(case: Case, held: Expected, num_made: int) -> None:
    """Average the weights after a step that was made, the first of which is 1."""
    value, slack = _of_algorithm(held)
    if held.average is None or num_made <= case.fields["ema_from_step"]:
        held.average = Average(value, slack)
        return
    average = held.average
    decay = case.fields["ema_decay"]
    rounding = 2.0**-22 * torch.maximum(average.value.abs(), value.abs())
    average.value = decay * average.value + (1 - decay) * value
    average.slack = decay * average.slack + (1 - decay) * slack + rounding


def _of_algorithm(held: Expected) -> tuple[Tensor, Tensor]:
    """The weights without their look-ahead."""
    return (held.main, held.slack) if held.ahead is None else (held.ahead.base, held.ahead.base_slack)


def _evaluated(case: Case, held: Expected) -> tuple[Tensor, Tensor]:
    value, slack = _of_algorithm(held)
    if held.average is None:
        return value.clone(), slack.clone()
    share = case.fields["ema_share"]
    shown = (1 - share) * value + share * held.average.value
    return shown, (1 - share) * slack + share * held.average.slack + 2.0**-22 * value.abs()


def _look_ahead_(case: Case, held: Expected, before: Tensor, before_slack: Tensor) -> None:
    """EMA-Nesterov after an update of the weights ahead, which `held.main` has; `before`, those of the algorithm."""
    gamma = case.fields["ema_nesterov_gamma"]
    beta = case.fields["ema_nesterov_beta"]
    ahead = held.ahead or Ahead(before, torch.zeros_like(before), before_slack, torch.zeros_like(before))
    ahead.changes = gamma * ahead.changes + (1 - gamma) * (held.main - before)
    ahead.slack = gamma * ahead.slack + (1 - gamma) * (held.slack + before_slack)
    ahead.base = held.main
    ahead.base_slack = held.slack
    held.main = ahead.base + beta * ahead.changes
    held.slack = ahead.base_slack + beta * ahead.slack
    held.ahead = ahead


# --- rules ------------------------------------------------------------------------------------------------------------


def _update_(case: Case, param: Param, held: Expected, step: int, grad: Tensor) -> None:
    own = param.own_entries()
    lr = own.get("max_lr", HYPER["lr"]) / (1 + step if case.schedules else 1)
    undecayed = case.standard_overrides and len(param.shape) == 1
    decay = 0.0 if undecayed else HYPER["weight_decay"] * own.get("wd_mult", 1.0)
    held.step += 1
    before = held.main
    of_algorithm = _of_algorithm(held)
    match case.rule_of(param):
        case "adam" | "adam_l2":
            slack = _adam_(case, held, grad, lr, decay, decoupled=case.rule != "adam_l2")
        case "sgd":
            slack = _sgd_(held, grad, lr, decay)
        case "lion":
            slack = _lion_(held, grad, lr, decay)
        case _:
            slack = _muon_(case, num_parts(param, case.setup_at(step).grid), param, held, grad, lr, decay)
    held.slack = held.slack + slack + _rounding(case, param, torch.maximum(before.abs(), held.main.abs()))
    if case.looks_ahead:
        _look_ahead_(case, held, *of_algorithm)
        held.slack = held.slack + _rounding(case, param, held.main.abs())  # main values are written once more


def _rounding(case: Case, param: Param, largest: Tensor) -> Tensor:
    """The rounding of a main value. Those in scaled fp16 share the scale of a block, here of the largest value."""
    numbers = () if param.wide else (case.numbers, case.resume_numbers)
    if "bf16_scaled" in numbers and largest.numel():
        return torch.full_like(largest, 2.0**-11 * float(largest.max()))
    return (2.0**-16 if "bf16_short" in numbers else 2.0**-22) * largest


def _adam_(case: Case, held: Expected, grad: Tensor, lr: float, decay: float, *, decoupled: bool) -> Tensor:
    beta1 = HYPER["adam_beta1"]
    beta2 = HYPER["adam_beta2"]
    terms = grad.abs()
    if not decoupled:
        terms = terms + decay * held.main.abs()
        grad = grad + decay * held.main
    m = held.kept("m").mul_(beta1).add_((1 - beta1) * grad)
    v = held.kept("v").mul_(beta2).add_((1 - beta2) * grad**2)
    largest = held.kept("terms")
    largest.copy_(torch.maximum(largest, terms))
    root = (v / (1 - beta2**held.step)).sqrt() + HYPER["adam_eps"]
    if decoupled:
        held.main = held.main * (1 - lr * decay)
    held.main = held.main - lr * (m / (1 - beta1**held.step)) / root
    kept = 2.0**-7 if case.numbers == "bf16_narrow" else 2.0**-21
    return lr * (kept + kept * largest / root) * (1 if kept < 1e-3 else 4)


def _sgd_(held: Expected, grad: Tensor, lr: float, decay: float) -> Tensor:
    grad = grad + decay * held.main
    buffer = held.kept("buffer")
    buffer.copy_(grad if held.step == 1 else HYPER["sgd_momentum"] * buffer + grad)
    held.main = held.main - lr * buffer
    return lr * 2.0**-20 * (buffer.abs() + grad.abs() + 1e-3)


def _lion_(held: Expected, grad: Tensor, lr: float, decay: float) -> Tensor:
    beta1 = HYPER["lion_beta1"]
    beta2 = HYPER["lion_beta2"]
    m = held.kept("m")
    mixed = beta1 * m + (1 - beta1) * grad
    terms = beta1 * m.abs() + (1 - beta1) * grad.abs()
    held.main = held.main * (1 - lr * decay) - lr * mixed.sign()
    m.mul_(beta2).add_((1 - beta2) * grad)
    unsure = (mixed.abs() < 1e-5 * terms) & (terms > 0)  # rounding may decide on the sign
    return lr * (2.0**-20 + 2.0 * unsure)


def _muon_(case: Case, parts: int, param: Param, held: Expected, grad: Tensor, lr: float, decay: float) -> Tensor:
    """`parts`: into which tensor parallelism cuts the matrix."""
    if 0 in param.shape:
        return torch.zeros_like(held.main)
    momentum = HYPER["muon_momentum"]
    m = held.kept("m").mul_(momentum).add_((1 - momentum) * grad)
    direction = grad + momentum * (m - grad) if case.fields["muon_nesterov"] else m
    if case.fields["muon_tp_mode"] == "blockwise" and parts > 1:
        assert param.cut is not None
        blocks = [_directions(case, param, block) for block in direction.chunk(parts, param.cut)]
        found = torch.cat(blocks, param.cut)
    else:
        found = _directions(case, param, direction)
    update, slack = found.unbind(-1)
    if update.numel():
        slack = slack.clamp_min(NEWTON_SCHULZ_SLACK * float(update.abs().max()))
    if case.rule_of(param) == "adaptive_muon":
        update, slack = _adapted(case, held, update, slack)
    scale = _scales(case, param)
    held.main = held.main * (1 - lr * decay) - lr * scale * update
    return lr * scale * slack


def _adapted(case: Case, held: Expected, update: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """The update divided by its own history, and what an error of `slack` in it becomes."""
    weight = 1 - HYPER["adaptive_muon_beta2"]
    eps = HYPER["adaptive_muon_eps"]
    if case.fields["adaptive_muon_moment2_method"] == "adamuon":
        root = held.kept("v").lerp_(update**2, weight).sqrt() + eps
        largest = 2 / math.sqrt(weight)  # a small element may change its sign
        return update / root, (2 * slack / root).clamp_max(largest)
    v = held.state.setdefault("v", torch.zeros(update.shape[0], dtype=torch.float64))
    v.lerp_((update**2).mean(-1), weight)
    divided = update * v.clamp_min(eps).rsqrt().unsqueeze(-1)
    factor = update.norm() / divided.norm().clamp_min(eps)
    return divided * factor, 4 * slack * float((divided * factor).abs().max() / update.abs().max().clamp_min(1e-30))


def _scales(case: Case, param: Param) -> Tensor:
    """The factor of each row, (rows, 1): of a fused matrix each part by its own size."""
    rows, cols = param.shape
    by, sizes = param.fused if param.qkv else ("", (1,))
    of_group = []
    for size in sizes:
        of_part = size if by == "head_rows" else size * rows // sum(sizes)
        squares = {"spectral": max(of_part, cols), "unit_rms_norm": of_part / cols}
        of_group += [squares.get(case.fields["muon_scale_mode"], max(1.0, of_part / cols)) ** 0.5] * size
    return torch.tensor(of_group, dtype=torch.float64).repeat(rows // sum(sizes)).unsqueeze(-1)


def _directions(case: Case, param: Param, x: Tensor) -> Tensor:
    """The orthogonalised matrix, each of several that are fused by itself, and its slack: (rows, cols, 2)."""

    def of_one(matrix: Tensor) -> Tensor:
        if case.fields.get("muon_pre_norm") == "rows":
            matrix = matrix / matrix.norm(dim=1, keepdim=True).clamp_min(EPS)
        update = _orthogonal(matrix)
        slack = torch.full_like(update, NEWTON_SCHULZ_SLACK * float(update.abs().max()) if update.numel() else 0.0)
        return torch.stack(_post_normed(update, slack, case.fields.get("muon_post_norm", "none")), -1)

    if not param.qkv:
        return of_one(x)
    by, sizes = param.fused
    if by == "head_rows":
        return torch.cat([of_one(part) for part in x.split(sizes * (len(x) // sum(sizes)))])
    groups = x.unflatten(0, (-1, sum(sizes)))
    parts = [of_one(part.flatten(0, 1)).unflatten(0, (len(groups), -1)) for part in groups.split(sizes, 1)]
    return torch.cat(parts, 1).flatten(0, 1)


def _post_normed(update: Tensor, slack: Tensor, post_norm: str) -> tuple[Tensor, Tensor]:
    """Rows and columns divided by their norms, one after the other, or the whole matrix by its Frobenius norm."""
    if post_norm == "frobenius":
        factor = min(update.shape) ** 0.5 / update.norm().clamp_min(EPS)
        return update * factor, 2 * slack * factor
    for word in post_norm.split("_") if post_norm != "none" else ():
        norms = update.norm(dim=1 if word == "rows" else 0, keepdim=True).clamp_min(EPS)
        update = update / norms
        slack = 2 * slack / norms
        if slack.numel() and slack.max() > 0.1:  # a row of rounding errors has become one of length 1
            slack = torch.full_like(slack, 4.0)
    return update, slack


def _orthogonal(x: Tensor) -> Tensor:
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp_min(EPS)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
