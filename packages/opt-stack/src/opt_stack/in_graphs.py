"""A step of the whole stack inside a graph of `torch.compile`: one operation, which runs the uncompiled step.

`opt_kernels.optim.in_graphs` describes what the operation takes from the graph, and what it reads from the optimizer
when it runs. It returns the number of its result, from which the compiled function makes a `StepResult`.

Of wrapped model chunks the operation also takes and writes `main_grad`, which the step reduces in place.

The graph breaks at `step()` instead, with a closure, for parameters of tensor subclasses (DTensor, fp8), for
Megatron-Core's wrapper, and for chunks wrapped with `overlap_grad_reduce` or `overlap_param_gather`: a graph may copy
what it passes to an operation, and gradients are still being reduced before the step, or parameters gathered after it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor, nn

from opt_distributed.buffers.binding import is_bound, main_grad
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.step.result import StepResult
from opt_kernels.backends.kept.snapshot import are_plain
from opt_kernels.optim.in_graphs import Stepping, detached, optimizer_of, tensors_of_numbers, update_

KEPT_RESULTS = 100


class GraphResults:
    """The results of the last steps in graphs, until they are read."""

    def __init__(self) -> None:
        self._results: dict[int, StepResult] = {}  # by number, the oldest first
        self._numbers = count()

    def keep(self, result: StepResult) -> int:
        """Keep the result of a step, and drop the oldest. Return its number."""
        number = next(self._numbers)
        self._results[number] = result
        self._results.pop(number - KEPT_RESULTS, None)
        return number

    def of(self, number: int) -> StepResult:
        """Return the result of this number.

        Raises:
            RuntimeError: it is not kept any more.
        """
        if number not in self._results:
            raise RuntimeError(
                f"the result of compiled step {number} was not read for {KEPT_RESULTS} steps and is not kept any more; "
                "read results earlier"
            )
        return self._results[number]


class _Read:
    """Reads the result of a step in a graph. Created in the compiled function."""

    def __init__(self, handle: int, number: Tensor):
        self._handle, self._number = handle, number

    def __call__(self) -> tuple[bool, float, int | None]:
        results: GraphResults = optimizer_of(self._handle).graph_results
        success, grad_norm, num_zeros = results.of(int(self._number))
        return success, grad_norm, num_zeros


def fits_graphs(params: Sequence[nn.Parameter], wrapped: Sequence[DistributedDataParallel]) -> bool:
    """Whether a step of these parameters, and of these wrapped chunks, is one operation of a graph."""
    overlaps = any(chunk.config.overlap_grad_reduce or chunk.config.overlap_param_gather for chunk in wrapped)
    ours = {param for chunk in wrapped for param in chunk.parameters()}
    in_other_wrappers = any(is_bound(param) for param in params if param not in ours)
    return not overlaps and not in_other_wrappers and are_plain(params)


def step_in_graph(optimizer: Stepping, handle: int) -> StepResult:
    """Add the step to the graph that is being traced."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads, numbers = detached(param.grad for param in params), tensors_of_numbers(optimizer.param_groups)
    bound = detached(main_grad(param) for param in params if is_bound(param))
    number = torch.ops.opt_stack.step_(handle, detached(params), grads, bound, numbers)
    return StepResult.later(_Read(handle, number))


def _step_(
    handle: int,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    main_grads: Sequence[Tensor],  # of the parameters that have one
    numbers: Sequence[Tensor],
) -> Tensor:
    optimizer = optimizer_of(handle)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    with _main_grads([main_grad(param) for param in held if is_bound(param)], main_grads):
        update_(optimizer, range(len(params)), params, grads, numbers)
    return torch.tensor(optimizer.last_graph_result)


@contextmanager
def _main_grads(held: Sequence[Tensor], given: Sequence[Tensor]) -> Iterator[None]:
    """Set the gradients in buffers to those in the graph, which get the results of the reduction."""
    copies = [(bound, copy) for bound, copy in zip(held, given, strict=True) if bound.data_ptr() != copy.data_ptr()]
    for bound, copy in copies:
        bound.copy_(copy)
    yield
    for bound, copy in copies:
        copy.copy_(bound)


_LIBRARY = torch.library.Library("opt_stack", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
_LIBRARY.define(  # type: ignore[no-untyped-call, unused-ignore]
    "step_(int handle, Tensor(a!)[] params, Tensor?[] grads, Tensor(b!)[] main_grads, Tensor[] numbers) -> Tensor"
)
_LIBRARY.impl("step_", _step_, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call, unused-ignore]
torch.library.register_fake(
    "opt_stack::step_", lambda *given: torch.empty((), dtype=torch.int64, device="cpu"), lib=_LIBRARY
)
