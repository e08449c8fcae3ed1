"""Megatron-Core's formulas as `Schedule`s, with the numbers of `Settings`."""

from .compose import clip, join
from .curves import constant, inverse_sqrt, linear, piecewise_linear, ramp
from .schedule import Schedule
from .settings import Settings


def lr_schedule(settings: Settings, *, max_lr: float, min_lr: float) -> Schedule:
    """Return the learning rate of a group with these bounds."""
    warmup = settings.lr_warmup_steps
    if warmup <= 0:
        return _after_warmup(settings, max_lr=max_lr, min_lr=min_lr)
    lead = min(settings.warmup_lead, warmup)
    first = settings.init_lr + (max_lr - settings.init_lr) * lead / warmup
    rise = [linear(first, max_lr, steps=warmup - lead)] if lead < warmup else []
    hold = [constant(max_lr, steps=lead)] if lead > 0 else []
    return join(*rise, *hold, _after_warmup(settings, max_lr=max_lr, min_lr=min_lr))


def wd_schedule(settings: Settings, *, start_wd: float, end_wd: float, wd_mult: float = 1.0) -> Schedule:
    """Return the weight decay of a group with these bounds."""
    if settings.wd_incr_style == "constant":
        return constant(end_wd * wd_mult)
    return ramp(start_wd * wd_mult, end_wd * wd_mult, steps=settings.wd_incr_steps, shape=settings.wd_incr_style)


def _after_warmup(settings: Settings, *, max_lr: float, min_lr: float) -> Schedule:
    """The decay, whose step 0 is the end of the warmup."""
    steps = settings.lr_decay_steps - settings.lr_warmup_steps
    match settings.lr_decay_style:
        case "constant":
            return constant(max_lr)
        case "inverse-square-root":
            return clip(_inverse_sqrt(settings, max_lr=max_lr), low=min_lr)
        case "WSD":
            assert settings.wsd_decay_steps is not None  # as validated
            assert settings.lr_wsd_decay_style is not None
            stable = steps - settings.wsd_decay_steps
            anneal = ramp(max_lr, min_lr, steps=settings.wsd_decay_steps, shape=settings.lr_wsd_decay_style)
            return join(constant(max_lr, steps=stable), anneal) if stable > 0 else anneal
        case style:
            return ramp(max_lr, min_lr, steps=steps, shape=style)


def _inverse_sqrt(settings: Settings, *, max_lr: float) -> Schedule:
    """max_lr · √(warmup / step), with a warmup or a step below 1 taken as 1."""
    timescale = max(settings.lr_warmup_steps, 1)
    held = timescale - settings.lr_warmup_steps
    steps = settings.lr_decay_steps - timescale
    if steps <= 0:
        return piecewise_linear((0, max_lr))
    tail = inverse_sqrt(max_lr, timescale=timescale, steps=steps)
    return join(constant(max_lr, steps=held), tail) if held > 0 else tail
