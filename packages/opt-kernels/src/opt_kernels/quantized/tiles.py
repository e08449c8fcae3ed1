"""Runs of row-major elements of a matrix as rectangles, for recipes with one scale per square of elements."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Rectangle(NamedTuple):
    """A part of a run: a part of one row, or several whole rows."""

    of_run: slice
    row: int
    col: int
    num_rows: int
    width: int


def rectangles(start: int, numel: int, cols: int) -> Iterator[Rectangle]:
    """Split elements [start, start + numel) of a matrix with `cols` columns into at most three rectangles."""
    at, stop = start, start + numel
    while at < stop:
        row, col = divmod(at, cols)
        whole = (stop - at) // cols if col == 0 else 0
        num_rows, width = (whole, cols) if whole else (1, min(cols - col, stop - at))
        yield Rectangle(slice(at - start, at - start + num_rows * width), row, col, num_rows, width)
        at += num_rows * width


def raise_to_largest_(largest: Tensor, values: Tensor, start: int, *, cols: int, square: int) -> None:
    """Raise `largest` (squares,) to the magnitudes in each square of `values` (n,), elements from `start` on."""
    table = largest.view(-1, -(-cols // square))
    for part in rectangles(start, values.numel(), cols):
        first, left = divmod(part.col, square)
        count = -(-(left + part.width) // square)
        rows = values[part.of_run].view(part.num_rows, part.width).abs()
        padded = pad(rows, (left, count * square - left - part.width))
        of_rows = padded.view(part.num_rows, count, square).amax(2)
        index = _squares(part, square, values.device)[:, None].expand_as(of_rows)
        table[:, first : first + count].scatter_reduce_(0, index, of_rows, "amax")


def spread(numbers: Tensor, start: int, numel: int, *, cols: int, square: int) -> Tensor:
    """(numel,) For each element, the entry of `numbers` (squares,) for its square."""
    table = numbers.view(-1, -(-cols // square))
    found = numbers.new_empty(numel)
    for part in rectangles(start, numel, cols):
        first, left = divmod(part.col, square)
        count = -(-(left + part.width) // square)
        top, above = divmod(part.row, square)
        squares = table[top : -(-(part.row + part.num_rows) // square), first : first + count]
        of_rows = squares.repeat_interleave(square, dim=0)[above : above + part.num_rows]
        wide = of_rows.repeat_interleave(square, dim=1)[:, left : left + part.width]
        found[part.of_run].view(part.num_rows, part.width).copy_(wide)
    return found


def _squares(part: Rectangle, square: int, device: torch.device) -> Tensor:
    """(num_rows,) For each row, the row of squares that contains it."""
    return torch.arange(part.row, part.row + part.num_rows, device=device).div_(square, rounding_mode="floor")
