"""Parts of matrices: rows that a `MatrixSpec` treats as separate matrices, and the states of each part.

Elementwise states have the parameter's shape. Other states of a split parameter, such as the factors of SOAP, are
concatenated to one tensor (*batch, numel): those of the first part, then those of the second, and so on; for heads, one
head after the other.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from opt_kernels.matrices.stacks import MatrixError
from opt_kernels.works import MatrixSpec, Task, Work

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # of the states of one matrix, by name


class Part(NamedTuple):
    """Rows of one parameter that form matrices of one shape."""

    first_row: int  # in a group of rows; all groups have the same
    num_rows: int  # of a group
    num_matrices: int
    shape: tuple[int, int]  # of each


def parts_of(spec: MatrixSpec, shape: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a matrix (..., rows, cols), in the order of `spec.split_rows`; the whole matrix if it is not
    split."""
    rows, cols = shape[-2:]
    if not spec.split_rows:
        return (Part(0, rows, 1, (rows, cols)),)
    groups = rows // sum(spec.split_rows)
    firsts = [sum(spec.split_rows[:index]) for index in range(len(spec.split_rows))]
    return tuple(
        Part(first, r, groups, (r, cols)) if spec.by_group else Part(first, r, 1, (groups * r, cols))
        for first, r in zip(firsts, spec.split_rows)
    )


class PartStates:
    """The states of one part of works of one layout: stacked copies (number of matrices, *shape of a matrix's state),
    loaded by name and stored back."""

    def __init__(self, shapes: Shapes, states: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._states = states  # for each work, views of the part's states
        self._dtype = dtype

    def load(self, name: str) -> Tensor:
        """(number of matrices, *shape), in the order of the works."""
        stacked = torch.stack([state[name].to(self._dtype) for state in self._states])
        return stacked.reshape(-1, *self._shapes[name])

    def store_(self, name: str, values: Tensor) -> None:
        """Write the states in the form that `load` returns."""
        for value, state in zip(values.chunk(len(self._states)), self._states):
            state[name].copy_(value.reshape(state[name].shape))


def states_by_part(
    tasks: Sequence[Task],
    *,
    elements: Sequence[str],  # states in the parameter's shape
    shapes: Sequence[Shapes],  # of the other states of one matrix, for each part
    dtype: torch.dtype,
) -> list[PartStates]:
    """The states of works of one layout, part by part.

    Raises MatrixError for states that were made for another split.
    """
    parts = parts_of(tasks[0].work.matrix, tasks[0].work.grad.shape)
    for task in tasks:
        _check(task.work, parts, shapes)
    return [
        PartStates(
            {**dict.fromkeys(elements, part.shape), **shapes[n]},
            [_views(work, elements, parts, shapes, n) for _, work in tasks],
            dtype,
        )
        for n, part in enumerate(parts)
    ]


def joined(states: Sequence[Mapping[str, Tensor]], num_batch_dims: int) -> dict[str, Tensor]:
    """Concatenate the states of parts, each (*batch, num_matrices, *shape), to (*batch, numel)."""
    names = dict.fromkeys(name for state in states for name in state)
    return {name: torch.cat([s[name].flatten(num_batch_dims) for s in states if name in s], -1) for name in names}


def _views(
    work: Work, elements: Sequence[str], parts: Sequence[Part], shapes: Sequence[Shapes], number: int
) -> dict[str, Tensor]:
    """Views of the work's states that belong to part `number`."""
    views, part = {}, parts[number]
    for name in elements:
        of_groups = torch.unflatten(work.state[name], -2, (-1, sum(part.num_rows for part in parts)))
        views[name] = of_groups.narrow(-2, part.first_row, part.num_rows)
    for name in shapes[number]:
        start, stop, total = (_numel(name, parts[:count], shapes) for count in (number, number + 1, len(parts)))
        views[name] = work.state[name].view(*work.grad.shape[:-2], total).narrow(-1, start, stop - start)
    return views


def _numel(name: str, parts: Sequence[Part], shapes: Sequence[Shapes]) -> int:
    """Total size of the state `name` for these parts."""
    return sum(part.num_matrices * prod(of_part[name]) for part, of_part in zip(parts, shapes) if name in of_part)


def _check(work: Work, parts: Sequence[Part], shapes: Sequence[Shapes]) -> None:
    """Raise MatrixError for states of another size. Those of a matrix that is not split have the shape of its own."""
    for name in dict.fromkeys(name for of_part in shapes for name in of_part):
        wanted = (*work.grad.shape[:-2], _numel(name, parts, shapes))
        state = work.state.get(name)
        if state is None or state.flatten(work.grad.dim() - 2).shape != wanted:
            found = "is missing" if state is None else f"has shape {tuple(state.shape)}"
            raise MatrixError(
                f"state {name!r} {found}, but for rows split as {work.matrix.split_name!r} its shape is {wanted}; "
                "create it for the same split: rule.init_state(main, matrix)"
            )
