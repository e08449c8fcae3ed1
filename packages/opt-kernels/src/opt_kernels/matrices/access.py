"""Access to parameters as matrices: reading and writing them, stacking equal shapes, and splitting fused rows.

Elementwise states have the parameter's shape. Other states of a split parameter, such as the factors of SOAP, are
concatenated to one tensor (*batch, numel): those of the first part, then those of the second, and so on; for heads, one
head after the other.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from opt_kernels.backends import elements
from opt_kernels.backends.elements import compute_dtype, flat
from opt_kernels.codecs import StateCodec, scale_name, without_outliers
from opt_kernels.works import Batch, MatrixSpec, Scalar, Skip, Task, TensorParallel, Work

# Elements of a stack: enough that small matrices share calls. On a CPU a stack must fit in the cache: a matrix of
# 512 x 2048 is faster alone than in a larger stack.
STACK_NUMEL_ON_CPU = 1 << 20
STACK_NUMEL_ELSEWHERE = 1 << 26


class MatrixError(ValueError):
    """A work that a matrix rule cannot update."""


def stacks(batches: Sequence[Batch]) -> Iterator[list[Task]]:
    """All non-empty works, in runs of one layout: equal shapes, dtypes of the computation, devices and specs, whose
    tensor-parallel groups are compared by identity. Layouts keep their order of appearance, so it is equal on every
    rank.

    Raises MatrixError for a work that is not a matrix or a stack of matrices, or whose spec does not fit it.
    """
    by_layout: dict[Hashable, list[Task]] = {}
    for hyper, works in batches:
        for work in works:
            layout = (work.grad.shape, compute_dtype(work), work.grad.device, work.matrix)
            tasks = by_layout.get(layout)
            if tasks is None:
                check(work)
                tasks = by_layout[layout] = []
            tasks.append(Task(hyper, work))
    for tasks in by_layout.values():
        grad = tasks[0].work.grad
        if not grad.numel():
            continue
        limit = STACK_NUMEL_ON_CPU if grad.device.type == "cpu" else STACK_NUMEL_ELSEWHERE
        count = max(1, limit // grad.numel())
        for start in range(0, len(tasks), count):
            yield tasks[start : start + count]


def check(work: Work) -> None:
    """Raise MatrixError if the shape and the spec do not match."""
    shape = tuple(work.grad.shape)
    spec = work.matrix
    check_shape(shape)
    sizes = spec.split_rows
    if sizes and (min(sizes) < 1 or shape[-2] % sum(sizes)):
        raise MatrixError(
            f"split_rows={sizes} does not divide the {shape[-2]} rows of a parameter of shape {shape}; pass "
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


class Cut(NamedTuple):
    """How ranks share a whole matrix: each has a part of its rows (dim -2) or columns (-1)."""

    dim: int
    ranks: TensorParallel


def cut_of(work: Work) -> Cut | None:
    """How tensor-parallel ranks share each matrix of the work; None if it is whole on its rank."""
    spec = work.matrix
    if spec.partition_dim is None or spec.tensor_parallel is None:
        return None
    dim = spec.partition_dim - work.grad.dim()
    return None if dim < -2 else Cut(dim, spec.tensor_parallel)  # -3: the ranks of a stack have whole matrices


def cut_of_parts(work: Work) -> Cut | None:
    """How ranks share the split parts of the work: None if tensor parallelism assigns whole heads to ranks."""
    cut = cut_of(work)
    return None if cut is None or (work.matrix.by_group and cut.dim == -2) else cut


def sum_of_squares(work: Work, x: Tensor) -> Tensor:
    """‖X‖² of each whole matrix of `x` (*shape): 0-d, or one number per matrix of a stack."""
    return over_peers(work, x.square().sum((-2, -1)))


def over_peers(work: Work, sums: Tensor) -> Tensor:
    """`sums` of the local matrices, added up over the tensor-parallel ranks that share them."""
    cut = cut_of(work)
    return sums if cut is None else cut.ranks.all_reduce(sums)


def squares_in_float64(x: Tensor) -> Tensor:
    """‖X‖² of each matrix of `x` (*shape) in float64, so that the sums of parts add up to that of the whole."""
    return x.square().sum((-2, -1), dtype=torch.float64)


def whole_size(work: Work) -> tuple[int, int]:
    """Rows and columns of the whole matrix of which the work is a part."""
    spec = work.matrix
    if spec.part is not None:
        return spec.part.whole_shape[-2], spec.part.whole_shape[-1]
    size = list(work.grad.shape[-2:])
    cut = cut_of(work)
    if cut is not None:
        size[cut.dim] *= cut.ranks.size
    return size[0], size[1]


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
    *batch, _, cols = shape
    grouped = []
    for part, rows in zip(parts, spec.split_rows):
        grouped.append(part.reshape(prod(batch), -1, rows, cols))
    return torch.cat(grouped, dim=2).reshape(shape)


def scaled_grads(tasks: Sequence[Task], grad_scale: Scalar) -> Tensor:
    """The gradients of works of one shape times `grad_scale`, a new (len(tasks), *shape) in the compute dtype."""
    first = tasks[0].work
    shape = (len(tasks), *first.grad.shape)
    out = torch.empty(shape, dtype=compute_dtype(first), device=first.grad.device)
    for row, (_, work) in zip(out, tasks):
        row.copy_(work.grad)
    # Scaled after widening: a narrow gradient times a small clip coefficient would lose bits.
    if isinstance(grad_scale, float) and grad_scale == 1.0:
        return out
    return out.mul_(grad_scale)


def weight_for(x: Tensor, number: Scalar) -> Scalar:
    """`number` as a weight for `x.lerp_`: a tensor in the dtype of `x`."""
    if isinstance(number, Tensor):
        return number.to(x.dtype)
    return number


def write_main_(work: Work, value: Tensor, skip: Skip) -> None:
    """Write `value`, in the compute dtype, to main and out, or split it into out and remainder. Not if `skip`."""
    if skip is None:
        elements.write_main_(work, value)
        return
    targets = elements.tensors_of_main(work)
    new: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in targets.items()}
    elements.write_main_(replace(work, **new), value)
    assign_(targets.values(), new.values(), skip)


def read_state(work: Work, name: str, codec: StateCodec) -> Tensor:
    """The state `name` decoded, a new tensor in the compute dtype."""
    codes = work.state[name]
    scales = work.state.get(scale_name(name))
    values = torch.empty_like(codes, dtype=compute_dtype(work))
    codec.decode_(_run(values, codes, codec), _run(codes, codes, codec), scales)
    return values


def write_state_(work: Work, name: str, codec: StateCodec, values: Tensor, skip: Skip) -> None:
    """Write the state `name`, and its block scales if the codec has any; zeros for outliers. Not if `skip`."""
    [values] = without_outliers([codec], [values])
    like = work.state[name]
    targets = [like]
    if codec.block:
        targets.append(work.state[scale_name(name)])
    new = targets
    if skip is not None:
        new = [torch.empty_like(target) for target in targets]
    codes = _run(new[0], like, codec)
    scales = new[1] if codec.block else None
    codec.encode_(codes, scales, _run(values, like, codec))
    assign_(targets, new, skip)


def _run(tensor: Tensor, codes: Tensor, codec: StateCodec) -> Tensor:
    """The tensor as the codec needs it: flat, in the memory order of `codes`, if elements share a scale."""
    if not codec.block:
        return tensor
    if tensor.stride() != codes.stride():
        tensor = torch.empty_like(codes, dtype=tensor.dtype).copy_(tensor)
    return flat(tensor, codes, "a state")


def assign_(targets: Iterable[Tensor], values: Iterable[Tensor], skip: Skip) -> None:
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
    num_groups = rows // sum(spec.split_rows)
    num_matrices = num_groups if spec.by_group else 1
    parts = []
    first = 0
    for num_rows in spec.split_rows:
        shape = (num_rows * num_groups // num_matrices, cols)
        parts.append(Part(first, num_rows, num_matrices, shape))
        first += num_rows
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
    ends: dict[str, int] = {}  # of the states of the parts so far, among those of the parameter
    places = []
    for part, of_part in zip(parts, shapes):
        place = {}
        for name, shape in of_part.items():
            begin = ends.get(name, 0)
            ends[name] = begin + part.num_matrices * prod(shape)
            place[name] = slice(begin, ends[name])
        places.append(place)
    for _, work in tasks:
        _check(work, ends)
    states = []
    for part, of_part, place in zip(parts, shapes, places):
        views = [_views(work, elements, part, place) for _, work in tasks]
        states.append(PartStates({**dict.fromkeys(elements, part.shape), **of_part}, views, dtype))
    return states


def joined(states: Sequence[Mapping[str, Tensor]], num_batch_dims: int) -> dict[str, Tensor]:
    """Concatenate the states of parts, each (*batch, num_matrices, *shape), to (*batch, numel)."""
    names = dict.fromkeys(name for state in states for name in state)
    found = {}
    for name in names:
        parts = [state[name].flatten(num_batch_dims) for state in states if name in state]
        found[name] = torch.cat(parts, -1)
    return found


def _views(work: Work, elements: Sequence[str], part: Part, places: Mapping[str, slice]) -> dict[str, Tensor]:
    """Views of the work's states that belong to a part: its rows, and its places among the other states."""
    views = {}
    *batch, num_rows, _ = work.grad.shape
    rows = slice(part.first_row, part.first_row + part.num_rows)
    rows_of_group = sum(work.matrix.split_rows) or num_rows
    for name in elements:
        groups = torch.unflatten(work.state[name], -2, (-1, rows_of_group))
        views[name] = groups[..., rows, :]
    for name, place in places.items():
        whole = work.state[name].view(*batch, -1)
        views[name] = whole[..., place]
    return views


def _check(work: Work, numels: Mapping[str, int]) -> None:
    """Raise MatrixError for states of another size. Those of a matrix that is not split have the shape of its own."""
    for name, numel in numels.items():
        wanted = (*work.grad.shape[:-2], numel)
        state = work.state.get(name)
        if state is None or state.flatten(work.grad.dim() - 2).shape != wanted:
            found = "is missing" if state is None else f"has shape {tuple(state.shape)}"
            raise MatrixError(
                f"state {name!r} {found}, but for rows split as {work.matrix.split_name!r} its shape is {wanted}; "
                "create it for the same split: rule.init_state(main, matrix)"
            )
