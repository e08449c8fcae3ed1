"""Access to parameters as matrices: reading and writing them, stacking equal shapes, and splitting fused rows.

Elementwise states have the parameter's shape. Other states of a split parameter, such as the factors of SOAP, are
concatenated to one tensor (*batch, numel): those of the first part, then those of the second, and so on; for heads, one
head after the other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from opt_kernels.backends.elements import compute_dtype, flat
from opt_kernels.codecs import StateCodec, narrow, scale_name, without_outliers
from opt_kernels.works import Batch, MatrixSpec, Task, Work

# Elements of a stack: enough that small matrices share calls. On a CPU a stack must fit in the cache: a matrix of
# 512 x 2048 is faster alone than in a larger stack.
STACK_NUMEL_ON_CPU = 1 << 20
STACK_NUMEL_ELSEWHERE = 1 << 26


class MatrixError(ValueError):
    """A work that a matrix rule cannot update."""


class Layout(NamedTuple):
    """Properties that must be equal for works to be stacked. Tensor-parallel groups are compared by identity."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the computation
    device: torch.device
    spec: MatrixSpec


def stacks(batches: Sequence[Batch]) -> Iterator[list[Task]]:
    """All non-empty works, in runs of one layout. Layouts keep their order of appearance, so it is equal on every rank.

    Raises MatrixError for a work that is not a matrix or a stack of matrices, or whose spec does not fit it.
    """
    by_layout: dict[Layout, list[Task]] = {}
    for hyper, works in batches:
        for work in works:
            layout = Layout(work.grad.shape, compute_dtype(work), work.grad.device, work.matrix)
            same = by_layout.get(layout)
            if same is None:
                check(work)
                same = by_layout[layout] = []
            same.append(Task(hyper, work))
    for layout, tasks in by_layout.items():
        numel = tasks[0].work.grad.numel()
        if not numel:
            continue
        limit = STACK_NUMEL_ON_CPU if layout.device.type == "cpu" else STACK_NUMEL_ELSEWHERE
        count = max(1, limit // numel)
        for start in range(0, len(tasks), count):
            yield tasks[start : start + count]


def check(work: Work) -> None:
    """Raise MatrixError if the shape and the spec do not match."""
    shape = tuple(work.grad.shape)
    spec = work.matrix
    check_shape(shape)
    if spec.split_rows and (min(spec.split_rows) < 1 or shape[-2] % sum(spec.split_rows)):
        raise MatrixError(
            f"split_rows={spec.split_rows} does not divide the {shape[-2]} rows of a parameter of shape {shape}; pass "
            "positive rows of q, k and v in one query group, or of a head, whose sum divides this rank's rows"
        )
    if spec.partition_dim is not None and not 0 <= spec.partition_dim < len(shape):
        raise MatrixError(
            f"partition_dim={spec.partition_dim} is out of range for a parameter of shape {shape}; pass 0 to "
            f"{len(shape) - 1}, or None if this rank has the whole matrix"
        )


def check_shape(shape: Sequence[int]) -> None:
    """Raise MatrixError for a shape that is neither a matrix nor a stack of matrices."""
    if len(shape) not in (2, 3):
        raise MatrixError(
            f"a parameter of shape {tuple(shape)} is not a matrix; matrix rules update (rows, cols), or (batch, "
            "rows, cols) as a stack of matrices; view a convolution's weight as (out, in * kernel), or give it an "
            "elementwise rule"
        )


def matrix_dim(work: Work) -> int | None:
    """The dim that tensor parallelism shards, -2 (rows) or -1 (cols); None if each matrix is whole on its rank."""
    spec = work.matrix
    if spec.partition_dim is None or spec.tensor_parallel is None:
        return None
    dim = spec.partition_dim - work.grad.dim()
    return dim if dim >= -2 else None  # the batch dim of a stack: ranks have whole matrices


def cut_of_parts(work: Work) -> int | None:
    """`matrix_dim` of the split parts of the work: None if tensor parallelism assigns whole heads to ranks."""
    cut = matrix_dim(work)
    if work.matrix.by_group and cut == -2:
        return None
    return cut


def sum_of_squares(work: Work, x: Tensor) -> Tensor:
    """‖X‖² of each whole matrix of `x` (*shape): 0-d, or one number per matrix of a stack."""
    return over_peers(work, x.square().sum((-2, -1)))


def over_peers(work: Work, sums: Tensor) -> Tensor:
    """`sums` of the local matrices, added up over the tensor-parallel ranks that share them."""
    group = work.matrix.tensor_parallel
    if group is None or matrix_dim(work) is None:
        return sums
    return group.all_reduce(sums)


def squares_in_float64(x: Tensor) -> Tensor:
    """‖X‖² of each matrix of `x` (*shape) in float64, so that the sums of parts add up to that of the whole."""
    return x.square().sum((-2, -1), dtype=torch.float64)


def whole_size(work: Work) -> tuple[int, int]:
    """Rows and columns of the whole matrix of which the work is a part."""
    spec = work.matrix
    if spec.part is not None:
        return spec.part.whole_shape[-2], spec.part.whole_shape[-1]
    rows, cols = work.grad.shape[-2:]
    ranks = 1 if spec.tensor_parallel is None else spec.tensor_parallel.size
    cut = matrix_dim(work)
    if cut == -2:
        return rows * ranks, cols
    if cut == -1:
        return rows, cols * ranks
    return rows, cols


def split(stack: Tensor, spec: MatrixSpec) -> list[Tensor]:
    """`stack` (..., groups * sum(rows), cols) as contiguous matrices, one tensor for each r of `spec.split_rows`.

    (batch, groups * r, cols), or (batch * groups, r, cols) if groups are separate matrices.
    """
    stack = stack.reshape(-1, *stack.shape[-2:])
    rows = list(spec.split_rows)
    if not rows:
        return [stack]
    grouped = stack.view(stack.shape[0], -1, sum(rows), stack.shape[-1])
    merged = (0, 1) if spec.by_group else (1, 2)
    # Contiguous, aligned copies: without them products may sum in another order, depending on the address of a part.
    parts = (part.clone(memory_format=torch.contiguous_format) for part in torch.split(grouped, rows, dim=2))
    return [part.flatten(*merged) for part in parts]


def join(parts: Sequence[Tensor], spec: MatrixSpec, shape: Sequence[int]) -> Tensor:
    """The inverse of `split`, in the `shape` (..., rows, cols) that was split."""
    if not spec.split_rows:
        return parts[0].reshape(shape)
    batch = prod(shape[:-2])
    grouped = [part.reshape(batch, -1, r, shape[-1]) for part, r in zip(parts, spec.split_rows)]
    return torch.cat(grouped, dim=2).reshape(shape)


def scaled_grads(tasks: Sequence[Task], grad_scale: float | Tensor) -> Tensor:
    """The gradients of works of one shape times `grad_scale`, a new (len(tasks), *shape) in the compute dtype."""
    first = tasks[0].work
    out = torch.empty(len(tasks), *first.grad.shape, dtype=compute_dtype(first), device=first.grad.device)
    for row, (_, work) in zip(out, tasks):
        row.copy_(work.grad)
    # Scaled after widening: a narrow gradient times a small clip coefficient would lose bits.
    if isinstance(grad_scale, float) and grad_scale == 1.0:
        return out
    return out.mul_(grad_scale)


def weight_for(x: Tensor, number: float | Tensor) -> float | Tensor:
    """`number` as a weight for `x.lerp_`: a tensor in the dtype of `x`."""
    if isinstance(number, Tensor):
        return number.to(x.dtype)
    return number


def write_main_(work: Work, value: Tensor, skip: Tensor | None) -> None:
    """Write `value`, in the compute dtype, to main and out, or split it into out and remainder. Not if `skip`."""
    if work.main is not None:
        targets = [work.main]
        if work.out is not None:
            targets.append(work.out)
        assign_(targets, [value.to(target.dtype) for target in targets], skip)
        return
    assert work.out is not None
    assert work.remainder is not None
    upper = torch.empty_like(work.out)
    lower = torch.empty_like(work.remainder)
    narrow.split_(upper, lower, value)
    assign_([work.out, work.remainder], [upper, lower], skip)


def read_state(work: Work, name: str, codec: StateCodec) -> Tensor:
    """The state `name` decoded, a new tensor in the compute dtype."""
    codes = work.state[name]
    values = torch.empty_like(codes, dtype=compute_dtype(work))
    codec.decode_(_run(values, codes, codec), _run(codes, codes, codec), work.state.get(scale_name(name)))
    return values


def write_state_(work: Work, name: str, codec: StateCodec, values: Tensor, skip: Tensor | None) -> None:
    """Write the state `name`, and its block scales if the codec has any; zeros for outliers. Not if `skip`."""
    [values] = without_outliers([codec], [values])
    codes = work.state[name]
    scales = work.state.get(scale_name(name))
    if skip is None:
        codec.encode_(_run(codes, codes, codec), scales, _run(values, codes, codec))
        return
    new_codes = torch.empty_like(codes)
    new_scales = None if scales is None else torch.empty_like(scales)
    codec.encode_(_run(new_codes, codes, codec), new_scales, _run(values, codes, codec))
    assign_([codes], [new_codes], skip)
    if scales is not None and new_scales is not None:
        assign_([scales], [new_scales], skip)


def _run(tensor: Tensor, codes: Tensor, codec: StateCodec) -> Tensor:
    """The tensor as the codec needs it: flat, in the memory order of `codes`, if elements share a scale."""
    if not codec.block:
        return tensor
    if tensor.stride() != codes.stride():
        tensor = torch.empty_like(codes, dtype=tensor.dtype).copy_(tensor)
    return flat(tensor, codes, "a state")


def assign_(targets: Iterable[Tensor], values: Iterable[Tensor], skip: Tensor | None) -> None:
    """Copy each value to its target, or nothing if `skip` is not zero, which the host does not read."""
    for target, value in zip(targets, values):
        if value is target:
            continue
        if skip is not None:
            value = torch.where(skip != 0, target, value)
        target.copy_(value)


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
    parts = []
    for first, rows in zip(firsts, spec.split_rows):
        num = groups if spec.by_group else 1
        parts.append(Part(first, rows, num, (rows * groups // num, cols)))
    return tuple(parts)


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
    states = []
    for number, part in enumerate(parts):
        of_matrix = {**dict.fromkeys(elements, part.shape), **shapes[number]}
        views = [_views(work, elements, parts, shapes, number) for _, work in tasks]
        states.append(PartStates(of_matrix, views, dtype))
    return states


def joined(states: Sequence[Mapping[str, Tensor]], num_batch_dims: int) -> dict[str, Tensor]:
    """Concatenate the states of parts, each (*batch, num_matrices, *shape), to (*batch, numel)."""
    names = dict.fromkeys(name for state in states for name in state)
    found = {}
    for name in names:
        parts = [state[name].flatten(num_batch_dims) for state in states if name in state]
        found[name] = torch.cat(parts, -1)
    return found


def _views(
    work: Work, elements: Sequence[str], parts: Sequence[Part], shapes: Sequence[Shapes], number: int
) -> dict[str, Tensor]:
    """Views of the work's states that belong to part `number`."""
    views = {}
    part = parts[number]
    for name in elements:
        of_groups = torch.unflatten(work.state[name], -2, (-1, sum(part.num_rows for part in parts)))
        views[name] = of_groups.narrow(-2, part.first_row, part.num_rows)
    for name in shapes[number]:
        start = _numel(name, parts[:number], shapes)
        stop = _numel(name, parts[: number + 1], shapes)
        whole = work.state[name].view(*work.grad.shape[:-2], -1)
        views[name] = whole.narrow(-1, start, stop - start)
    return views


def _numel(name: str, parts: Sequence[Part], shapes: Sequence[Shapes]) -> int:
    """Total size of the state `name` for these parts."""
    total = 0
    for part, of_part in zip(parts, shapes):
        if name in of_part:
            total += part.num_matrices * prod(of_part[name])
    return total


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
