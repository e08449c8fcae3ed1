"""Well-known schedules, composed of the others: wsd, one_cycle, cyclic, piecewise_constant, step_decay."""

from collections.abc import Sequence
from itertools import pairwise

from .compose import join, warmup
from .curves import constant, linear, ramp
from .errors import ScheduleError
from .restarts import repeat
from .schedule import Schedule, check_number


def wsd(
    peak: float,
    *,
    decay_steps: float,
    steps: float | None = None,
    warmup_steps: float = 0,
    stable_steps: float | None = None,
    start: float = 0.0,
    end: float = 0.0,
    shape: str = "minus_sqrt",
) -> Schedule:
    """Warmup, stable, decay (https://arxiv.org/abs/2404.06395). `repeat` or `join` several of them for WSD-S.

    Pass the length of all three as `steps`, or that of the stable phase as `stable_steps`.

    >>> wsd(1.0, steps=100, warmup_steps=10, decay_steps=20, shape="linear").values([5, 10, 80, 90, 100])
    [0.5, 1.0, 1.0, 0.5, 0.0]

    Raises:
        ScheduleError: neither or both of `steps` and `stable_steps` are given; `decay_steps` is not above 0;
            `warmup_steps` or `stable_steps` is below 0; or the phases are longer than `steps`.
    """
    check_number("wsd", low=0, warmup_steps=warmup_steps, stable_steps=stable_steps)
    check_number("wsd", above=0, decay_steps=decay_steps, steps=steps)
    if (steps is None) == (stable_steps is None):
        raise ScheduleError(f"wsd: pass either steps or stable_steps, not {steps=} and {stable_steps=}")
    if stable_steps is None:
        stable_steps = steps - warmup_steps - decay_steps  # type: ignore[operator]
        if stable_steps < 0:
            raise ScheduleError(
                f"wsd: decay_steps={decay_steps!r} must fit after the warmup: steps - warmup_steps is "
                f"{decay_steps + stable_steps!r}"
            )
    stable = [constant(peak, steps=stable_steps)] if stable_steps > 0 else []
    falling = join(*stable, ramp(peak, end, steps=decay_steps, shape=shape))
    return warmup(falling, steps=warmup_steps, start=start)


def one_cycle(
    peak: float,
    *,
    up_steps: float,
    down_steps: float,
    start: float | None = None,
    end: float = 0.0,
    shape: str = "cosine",
) -> Schedule:
    """One rise to `peak` and one fall (https://arxiv.org/abs/1708.07120). `start` is peak / 25 by default.

    torch's OneCycleLR(total_steps=T, pct_start=p) is up_steps=p·T - 1, down_steps=T - p·T, end=start / 1e4.

    >>> [round(v, 6) for v in one_cycle(1.0, up_steps=30, down_steps=70).values([0, 30, 65, 100])]
    [0.04, 1.0, 0.5, 0.0]
    """
    check_number("one_cycle", above=0, up_steps=up_steps, down_steps=down_steps)
    first = peak / 25 if start is None else start
    return join(ramp(first, peak, steps=up_steps, shape=shape), ramp(peak, end, steps=down_steps, shape=shape))


def cyclic(low: float, high: float, *, up_steps: float, down_steps: float, times: int | None = None) -> Schedule:
    """Triangles between two values (https://arxiv.org/abs/1506.01186), `times` of them, or forever.

    >>> cyclic(0.0, 1.0, up_steps=2, down_steps=4).values([0, 1, 2, 4, 6, 7])
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.5]
    """
    check_number("cyclic", above=0, up_steps=up_steps, down_steps=down_steps)
    return repeat(join(linear(low, high, steps=up_steps), linear(high, low, steps=down_steps)), times=times)


def piecewise_constant(values: Sequence[float], *, at: Sequence[float]) -> Schedule:
    """`values[0]` until step `at[0]`, then `values[1]` until step `at[1]`, and so on.

    >>> piecewise_constant([1.0, 0.1, 0.01], at=[100, 150]).values([0, 99, 100, 149, 150])
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    if not (isinstance(values, Sequence) and isinstance(at, Sequence)):
        raise ScheduleError(f"piecewise_constant: {values=} and {at=} must be lists or tuples of numbers")
    check_number("piecewise_constant", **{f"values[{index}]": value for index, value in enumerate(values)})
    check_number("piecewise_constant", **{f"at[{index}]": step for index, step in enumerate(at)})
    edges = [0.0, *at]
    if len(values) != len(edges):
        raise ScheduleError(
            f"piecewise_constant: at={list(at)!r} has {len(at)} steps, at which {len(at) + 1} values meet, but there "
            f"are {len(values)} values"
        )
    if any(b <= a for a, b in pairwise(edges)):
        raise ScheduleError(f"piecewise_constant: at={list(at)!r} must ascend from above 0")
    lengths = [b - a for a, b in pairwise(edges)]
    parts = [constant(value, steps=steps) for value, steps in zip(values, lengths, strict=False)]
    return join(*parts, constant(values[-1]))


def step_decay(start: float, *, factor: float, every: float, times: int) -> Schedule:
    """`start`, multiplied by `factor` after every `every` steps, `times` times in all.

    >>> step_decay(1.0, factor=0.5, every=10, times=2).values([0, 9, 10, 20, 1000])
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    check_number("step_decay", low=1, times=times)
    check_number("step_decay", above=0, every=every)
    return piecewise_constant([start * factor**i for i in range(times + 1)], at=[every * (i + 1) for i in range(times)])
