"""Access to parameters as matrices: reading and writing them, splitting fused rows, and stacking equal shapes."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import check_halves
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.codecs import remainder as remainder
from opt_kernels.works import Batch, MatrixSpec, Task, Work

# Elements of a stack: enough that small matrices share calls. On a CPU a stack must fit in the cache: a matrix of
# 512 x 2048 is faster alone than in a larger stack.
STACK_NUMEL_ON_CPU, STACK_NUMEL_ELSEWHERE = 1 << 20, 1 << 26


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
    shape, spec = tuple(work.grad.shape), work.matrix
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
    return None if work.matrix.by_group and cut == -2 else cut


def sum_of_squares(work: Work, x: Tensor) -> Tensor:
    """‖X‖² of each whole matrix of `x` (*shape): 0-d, or one number per matrix of a stack."""
    return over_peers(work, x.square().sum((-2, -1)))


def over_peers(work: Work, sums: Tensor) -> Tensor:
    """`sums` of the local matrices, added up over the tensor-parallel ranks that share them."""
    group = work.matrix.tensor_parallel
    return sums if matrix_dim(work) is None or group is None else group.all_reduce(sums)


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
    return rows * (ranks if cut == -2 else 1), cols * (ranks if cut == -1 else 1)


def split(stack: Tensor, spec: MatrixSpec) -> list[Tensor]:
    """`stack` (..., groups * sum(rows), cols) as contiguous matrices, one tensor for each r of `spec.split_rows`.

    (batch, groups * r, cols), or (batch * groups, r, cols) if groups are separate matrices.
    """
    stack, rows = stack.reshape(-1, *stack.shape[-2:]), list(spec.split_rows)
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
    return out if isinstance(grad_scale, float) and grad_scale == 1.0 else out.mul_(grad_scale)


def weight_for(x: Tensor, number: float | Tensor) -> float | Tensor:
    """`number` as a weight for `x.lerp_`: a tensor in the dtype of `x`."""
    return number.to(x.dtype) if isinstance(number, Tensor) else number


def compute_dtype(work: Work) -> torch.dtype:
    """float64 if the main is float64, else float32."""
    return torch.float64 if work.main is not None and work.main.dtype is torch.float64 else torch.float32


def read_main(work: Work) -> Tensor:
    """The main in its compute dtype: the tensor itself if it has this dtype, else a copy."""
    if work.main is not None:
        return work.main.to(compute_dtype(work))
    check_halves(work)
    assert work.out is not None
    assert work.remainder is not None
    return remainder.join(work.out, work.remainder)


def write_main_(work: Work, value: Tensor, skip: Tensor | None) -> None:
    """Write `value`, in the compute dtype, to main and out, or split it into out and remainder. Not if `skip`."""
    if work.main is not None:
        targets = [work.main] if work.out is None else [work.main, work.out]
        assign_(targets, [value.to(target.dtype) for target in targets], skip)
        return
    assert work.out is not None
    assert work.remainder is not None
    upper, lower = torch.empty_like(work.out), torch.empty_like(work.remainder)
    remainder.split_(upper, lower, value)
    assign_([work.out, work.remainder], [upper, lower], skip)


def read_state(work: Work, name: str, codec: StateCodec) -> Tensor:
    """The state `name` decoded, a new tensor in the compute dtype."""
    codes = work.state[name]
    values = torch.empty_like(codes, dtype=compute_dtype(work))
    codec.decode_(_run(values, codec), _run(codes, codec), work.state.get(scale_name(name)))
    return values


def write_state_(work: Work, name: str, codec: StateCodec, values: Tensor, skip: Tensor | None) -> None:
    """Write the state `name`, and its block scales if the codec has any. Not if `skip`."""
    codes, scales = work.state[name], work.state.get(scale_name(name))
    if skip is None:
        codec.encode_(_run(codes, codec), scales, _run(values, codec))
        return
    new_codes = torch.empty_like(codes)
    new_scales = None if scales is None else torch.empty_like(scales)
    codec.encode_(_run(new_codes, codec), new_scales, _run(values, codec))
    assign_([codes], [new_codes], skip)
    if scales is not None and new_scales is not None:
        assign_([scales], [new_scales], skip)


def _run(tensor: Tensor, codec: StateCodec) -> Tensor:
    """The tensor as the codec needs it: flat if elements share a scale."""
    return tensor.view(-1) if codec.block else tensor


def assign_(targets: Iterable[Tensor], values: Iterable[Tensor], skip: Tensor | None) -> None:
    """Copy each value to its target, or nothing if `skip` is not zero, which the host does not read."""
    for target, value in zip(targets, values):
        if value is not target:
            target.copy_(value if skip is None else torch.where(skip != 0, target, value))
