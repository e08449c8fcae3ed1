"""A step of the whole stack inside a graph of `torch.compile`: one operation, which runs the uncompiled step.

`opt_kernels.optim.in_graphs` describes what the operation takes from the graph, and what it reads from the optimizer
when it runs. It returns the number of its result, from which the compiled function makes a `StepResult`.

The graph breaks at `step()` instead, with a closure, for wrapped model chunks (their gradients are in buffers, and
parameters may be gathered until the next forward), and for parameters of tensor subclasses (DTensor, fp8).
"""

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from opt_distributed.step.result import StepResult
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


def step_in_graph(optimizer: Stepping, handle: int) -> StepResult:
    """Add the step to the graph that is being traced."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads, numbers = detached(param.grad for param in params), tensors_of_numbers(optimizer.param_groups)
    number = torch.ops.opt_stack.step_(handle, detached(params), grads, numbers)
    return StepResult.later(_Read(handle, number))


def _step_(handle: int, params: Sequence[Tensor], grads: Sequence[Tensor | None], numbers: Sequence[Tensor]) -> Tensor:
    optimizer = optimizer_of(handle)
    update_(optimizer, range(len(params)), params, grads, numbers)
    return torch.tensor(optimizer.last_graph_result)


_LIBRARY = torch.library.Library("opt_stack", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
_LIBRARY.define(  # type: ignore[no-untyped-call, unused-ignore]
    "step_(int handle, Tensor(a!)[] params, Tensor?[] grads, Tensor[] numbers) -> Tensor"
)
_LIBRARY.impl("step_", _step_, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call, unused-ignore]
torch.library.register_fake(
    "opt_stack::step_", lambda *given: torch.empty((), dtype=torch.int64, device="cpu"), lib=_LIBRARY
)
