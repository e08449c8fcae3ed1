"""The scalar block: all numbers of a parameter group that a sweep needs, computed on the device by one small kernel.

One row of float32 per group: 8 for Muon; for a formula those of its scalars, see `kernels`. Learning rate, decay,
step, gradient scale and skip flag may be device tensors: no synchronization is needed, and a captured step uses their
current values. Bias corrections and products are computed in float64 and rounded once, as a host would.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends import tables
from opt_kernels.backends.tables import DeviceTables, to_device
from opt_kernels.backends.triton import jit, tl
from opt_kernels.works import Hyper

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
    host: tl.tensor,  # (rows, 5) float64: lr, weight decay, step, gradient scale, momentum
    lr: tl.tensor,  # (rows,), or None: then the host's
    weight_decay: tl.tensor,
    step: tl.tensor,  # not read
    grad_scale: tl.tensor,  # (1,), or None: then the host's
    skip: tl.tensor,  # (1,), or None: then nothing is skipped
) -> None:
    """Write one row of Muon's block; one program per row."""
    row = tl.program_id(0)
    source = host + row * 5
    target = block + row * WIDTH
    lr64 = tl.load(source + 0) if lr is None else tl.load(lr + row).to(tl.float64)
    decay64 = tl.load(source + 1) if weight_decay is None else tl.load(weight_decay + row).to(tl.float64)
    scale64 = tl.load(source + 3) if grad_scale is None else tl.load(grad_scale).to(tl.float64)
    tl.store(target + PROCEED, 1.0 if skip is None else (tl.load(skip) == 0).to(tl.float32))
    tl.store(target + GRAD_SCALE, scale64.to(tl.float32))
    tl.store(target + LR, lr64.to(tl.float32))
    tl.store(target + WEIGHT_DECAY, decay64.to(tl.float32))
    tl.store(target + LR_DECAY, (lr64 * decay64).to(tl.float32))
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
    grad_scale: float | Tensor,
    skip: Tensor | None,  # 0-d
    device: torch.device,
) -> Tensor:
    """Muon's block for `hypers`, (rows, 8) float32 on `device`, computed without synchronizing.

    Raises FrozenHyperError if a CUDA graph is being captured and lr, weight decay or step is a host number.
    """
    rows = [(h.lr, h.weight_decay, h.step, grad_scale, h.momentum) for h in hypers]
    block = torch.empty((len(rows), WIDTH.value), dtype=torch.float32, device=device)
    fill_scalars[(len(rows),)](block, *fill_arguments(rows, skip=skip, device=device))
    return block


Row = tuple[float | Tensor, ...]  # lr, weight decay, step, gradient scale, then other numbers
NUM_CHANGING = 3  # the first numbers of a row, which may be device tensors that differ from row to row
_OF_HOST = frozenset({float, int})


FillArguments = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def fill_arguments(rows: Sequence[Row], *, skip: Tensor | None, device: torch.device) -> FillArguments:
    """The arguments, after the block, of the kernels that compute scalars: the numbers of the host, float64 row by row
    on `device`, then lr, weight decay, step, gradient scale and skip flag where these are device tensors.

    Raises FrozenHyperError as `scalar_block` does.
    """
    skip = None if skip is None else skip.to(device)
    numbers: list[Any] = list(chain.from_iterable(rows))
    if not _OF_HOST.issuperset(map(type, numbers)):
        return (*_mixed(rows, device), skip)
    if tables.is_capturing(device):
        _refuse_host_numbers(lr=None, weight_decay=None, step=None)
    # Not cached: the numbers include the step.
    host = torch.frombuffer(array("d", numbers), dtype=torch.float64)
    return to_device(host, device), None, None, None, None, skip


def _mixed(
    rows: Sequence[Row], device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`fill_arguments` without the skip flag, of rows with device tensors. The host's numbers are 0 in their place."""
    lr, weight_decay, step = (_on_device(column, device) for column in islice(zip(*rows), NUM_CHANGING))
    if tables.is_capturing(device):
        _refuse_host_numbers(lr=lr, weight_decay=weight_decay, step=step)
    given = rows[0][NUM_CHANGING]  # one gradient scale for all rows
    columns = (lr, weight_decay, step, given.to(device) if isinstance(given, Tensor) else None)
    host = tuple(
        (*(0.0 if column is not None else number for number, column in zip(row, columns)), *row[len(columns) :])
        for row in rows
    )
    return (_rows_on(device, host, is_new=step is None), *columns)


def _on_device(values: Sequence[float | int | Tensor], device: torch.device) -> Tensor | None:
    """A column of the block as a device tensor, or None if all of its values are host numbers."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not tensors:
        return None
    if len(tensors) < len(values):
        values = [v if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device) for v in values]
        tensors = [torch.as_tensor(v) for v in values]
    if len(tensors) == 1:
        return tensors[0].reshape(1).to(device)
    # One dtype, so that the stack is one launch: float64 holds every step and rate exactly.
    same = all(t.dtype is tensors[0].dtype for t in tensors)
    return torch.stack([t.reshape(()).to(device, None if same else torch.float64) for t in tensors])


def _rows_on(device: torch.device, rows: tuple[Row, ...], *, is_new: bool) -> Tensor:
    """`rows` on `device`, (rows, numbers) float64. With `is_new` the cache is bypassed."""
    if any(isinstance(number, Tensor) for row in rows for number in row):
        stacked = _on_device([number for row in rows for number in row], device)
        assert stacked is not None
        return stacked.to(torch.float64).view(len(rows), -1)
    numbers = tuple(tuple(map(float, row)) for row in rows)
    if is_new:
        return to_device(torch.tensor(numbers, dtype=torch.float64), device)
    return known_rows(device).get(numbers, lambda: to_device(torch.tensor(numbers, dtype=torch.float64), device))


@cache
def known_rows(device: torch.device) -> DeviceTables[Tensor]:
    """Cache of the host numbers that were copied to `device`. A captured graph reads its own at every replay."""
    return DeviceTables(device)


def _refuse_host_numbers(**columns: Tensor | None) -> None:
    frozen = [name for name, column in columns.items() if column is None]
    if frozen:
        raise FrozenHyperError(
            f"{', '.join(frozen)} of a step that is being captured: host numbers, which every replay would repeat; "
            "allowed are 0-d tensors on the device; fill them before each replay"
        )
