"""The scalar block: all numbers of a parameter group that a sweep needs, computed on the device by one small kernel.

One row of float32 per group: 8 for Muon; for a formula those of its scalars, see `update`. The numbers that it is
computed from, and the skip flag, may be device tensors: no synchronization is needed, and a captured step uses their
current values. Bias corrections and products are computed in float64 and rounded once, as a host would.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends import tables
from opt_kernels.backends.tables import DeviceTables, to_device
from opt_kernels.backends.triton import jit, tl
from opt_kernels.works import Hyper, Scalar, Skip

WIDTH: tl.constexpr = tl.constexpr(8)
PROCEED: tl.constexpr = tl.constexpr(0)  # 0 if the step is skipped, else 1
GRAD_SCALE: tl.constexpr = tl.constexpr(1)
LR: tl.constexpr = tl.constexpr(2)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(3)
LR_DECAY: tl.constexpr = tl.constexpr(4)  # lr * weight_decay
MOMENTUM: tl.constexpr = tl.constexpr(5)


class FrozenHyperError(ValueError):
    """A number that changes from step to step would become a constant of a captured graph."""


@jit
def fill_scalars(
    block: tl.tensor,  # (rows, 8) float32, written
    numbers: tl.tensor,  # (rows, 5) float64: lr, weight decay, step (not read), gradient scale, momentum
    skip: tl.tensor,  # (1,), or None: then nothing is skipped
) -> None:
    """Write one row of Muon's block; one program per row."""
    row = tl.program_id(0)
    source = numbers + row * 5
    target = block + row * WIDTH
    lr = tl.load(source + 0)
    decay = tl.load(source + 1)
    tl.store(target + PROCEED, 1.0 if skip is None else (tl.load(skip) == 0).to(tl.float32))
    tl.store(target + GRAD_SCALE, tl.load(source + 3).to(tl.float32))
    tl.store(target + LR, lr.to(tl.float32))
    tl.store(target + WEIGHT_DECAY, decay.to(tl.float32))
    tl.store(target + LR_DECAY, (lr * decay).to(tl.float32))
    tl.store(target + MOMENTUM, tl.load(source + 4).to(tl.float32))


@jit
def power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """base^exponent in float64 by squaring, exact to a few units in the last place; exponent (int64) >= 0."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@jit
def any_power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """base^exponent in float64 to a few units in the last place, for a whole exponent or a base of at least 0."""
    size = tl.abs(exponent)
    count = size.to(tl.int64)
    whole = power(base, count)
    whole = tl.where(exponent < 0, 1.0 / whole, whole)
    return tl.where(count.to(tl.float64) == size, whole, tl.exp(exponent * tl.log(base)))


@jit
def q_pochhammer(a: tl.tensor, q: tl.tensor, count: tl.tensor) -> tl.tensor:
    """`opt_kernels.formulas.functions.q_pochhammer` in float64."""
    log_q = tl.log(q)
    total = a * 0.0
    term = a * 0.0 + 1.0
    for j in range(1, 65):
        term = term * a
        shrinking = 1.0 - tl.exp(j * log_q)
        geometric = (1.0 - tl.exp(j * count * log_q)) / tl.where(shrinking == 0, 1.0, shrinking)
        total += term / j * tl.where(shrinking == 0, count, geometric)
    return tl.exp(-total)


def scalar_block(
    hypers: Sequence[Hyper],
    *,
    grad_scale: Scalar,
    skip: Skip,  # 0-d
    device: torch.device,
) -> Tensor:
    """Muon's block for `hypers`, (rows, 8) float32 on `device`, computed without synchronizing.

    Raises FrozenHyperError if a CUDA graph is being captured and lr, weight decay or step is a host number.
    """
    rows = [(h.lr, h.weight_decay, h.step, grad_scale, h.momentum) for h in hypers]
    block = torch.empty((len(rows), WIDTH.value), dtype=torch.float32, device=device)
    skip = None if skip is None else skip.to(device)
    fill_scalars[(len(rows),)](block, numbers_on(device, rows), skip, enable_fp_fusion=False)
    return block


Row = tuple[Any, ...]  # lr, weight decay, step, gradient scale, then other numbers
CHANGING = ("lr", "weight_decay", "step")  # the first numbers of a row, which would be constants of a captured graph
_OF_HOST = frozenset({float, int})


def numbers_on(device: torch.device, rows: Sequence[Row]) -> Tensor:
    """`rows` on `device`, (rows, numbers) float64, where device tensors take part without being read on the host.

    Raises FrozenHyperError as `scalar_block` does.
    """
    numbers: list[Any] = list(chain.from_iterable(rows))
    if tables.is_capturing(device):
        columns = zip(CHANGING, *rows)
        frozen = [name for name, *of_rows in columns if not all(isinstance(x, Tensor) for x in of_rows)]
        if frozen:
            raise FrozenHyperError(
                f"{', '.join(frozen)} of a step that is being captured: host numbers, which every replay would repeat; "
                "allowed are 0-d tensors on the device; fill them before each replay"
            )
    if _OF_HOST.issuperset(map(type, numbers)):  # not cached: the numbers include the step
        return to_device(torch.frombuffer(array("d", numbers), dtype=torch.float64), device)
    on_host = tuple([0.0 if isinstance(number, Tensor) else float(number) for number in numbers])

    def upload() -> Tensor:
        return to_device(torch.tensor(on_host, dtype=torch.float64, device="cpu"), device)

    # A captured graph reads its own at every replay. They are the same in every step if the steps are tensors.
    is_new = not all(isinstance(row[2], Tensor) for row in rows)
    uploaded = list((upload() if is_new else known_rows(device).get(on_host, upload)).unbind())
    for i, number in enumerate(numbers):
        if isinstance(number, Tensor):
            uploaded[i] = number.reshape(()).to(device, torch.float64)
    return torch.stack(uploaded)


@cache
def known_rows(device: torch.device) -> DeviceTables[Tensor]:
    """Cache of the host numbers that were copied to `device`."""
    return DeviceTables(device)
