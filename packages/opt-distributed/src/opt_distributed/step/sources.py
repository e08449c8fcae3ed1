"""Where gradients come from and where parameters go: the one seam between the step and how data is laid out."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from opt_distributed.buffers.reduced import ReducedGrads
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.comm.groups import Axes
from opt_distributed.step.dtensor import local_grad
from opt_paramgroups import ParamId

ReadGrad = Callable[[], Tensor | None]
"""Gives one piece's reduced gradient of this step, in the piece's shape; None where there is none."""

_NONE: frozenset[ParamId] = frozenset()


class Source(Protocol):
    """One set of parameters whose gradients are reduced together and whose new values are published together.

    In a step: `reduce_`, the readers, then `flags` summed over the data-parallel ranks into `settle_`, `unused`,
    `publish_`.
    """

    @property
    def grad_scale(self) -> float:
        """What turns the reduced gradients into the mean: 1 / replicas where they are summed on the way."""
        ...

    def reduce_(self) -> None:
        """Completes the reduction of this step's gradients over the data-parallel ranks."""
        ...

    @property
    def doubtful(self) -> Sequence[ParamId]:
        """Parameters that this rank may have no gradient of while others do, (n,); none where that cannot be."""
        ...

    def flags(self) -> Tensor:
        """(n,) float64: one where this rank has the gradient of a doubtful parameter, zero elsewhere."""
        ...

    def settle_(self, flags: Sequence[float]) -> None:
        """Takes the flags summed over ranks."""
        ...

    def unused(self) -> Collection[ParamId]:
        """Parameters whose readers give zeros because no rank has a gradient: they keep value and state."""
        ...

    def reader(self, id: ParamId, of_param: slice) -> ReadGrad:
        """Made once for each piece: reads the gradient of these flat elements, which this rank owns; in the
        parameter's shape where they are all of it."""
        ...

    def publish_(self) -> None:
        """Makes the updated values visible on every rank that holds the parameter, or starts to."""
        ...


class OwnGrads:
    """Parameters that no other rank reduces: gradients are used where autograd left them, and nothing travels.

    `grad_scale` is one over the dense replicas, also for an expert that only one of them holds: tokens of all of them
    have come to it, and the loss is their mean.
    """

    doubtful: Sequence[ParamId] = ()

    def __init__(self, params: Mapping[ParamId, nn.Parameter], *, num_replicas: int):
        self.params = params
        self.grad_scale = 1.0 / num_replicas

    def reduce_(self) -> None:
        return None

    def flags(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64)

    def settle_(self, flags: Sequence[float]) -> None:
        return None

    def unused(self) -> Collection[ParamId]:
        return _NONE  # their readers give None

    def reader(self, id: ParamId, of_param: slice) -> ReadGrad:
        param = self.params[id]

        def read() -> Tensor | None:
            grad = param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise ValueError(f"gradient of {id.name!r} is {grad.layout}; dense (torch.strided) ones are allowed")
            return grad

        return read

    def publish_(self) -> None:
        return None


class LaidOutGrads:
    """DTensor parameters, as `fully_shard` makes them: gradients arrive reduced, in the parameters' own shards."""

    grad_scale = 1.0
    doubtful: Sequence[ParamId] = ()

    def __init__(self, params: Mapping[ParamId, nn.Parameter]):
        self.params = params

    def reduce_(self) -> None:
        return None

    def flags(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64)

    def settle_(self, flags: Sequence[float]) -> None:
        return None

    def unused(self) -> Collection[ParamId]:
        return _NONE

    def reader(self, id: ParamId, of_param: slice) -> ReadGrad:
        param = self.params[id]
        return lambda: None if param.grad is None else local_grad(param)

    def publish_(self) -> None:
        return None


class BufferedGrads:
    """Plain modules on several ranks: in the step, gradients are copied into buckets and reduced there.

    Where state is sharded, this rank keeps its shards of the sums, and new values are gathered as soon as they are all
    there; where it is replicated, every rank updates everything and nothing is gathered. `num_replicas` are the dense
    ones, for experts too (see `OwnGrads`).
    """

    def __init__(self, reduced: ReducedGrads, memory: ParamAndGradBuffer, axes: Axes, *, num_replicas: int):
        self.reduced, self.memory, self.axes = reduced, memory, axes
        self.params = memory.params
        self.grad_scale = 1.0 / num_replicas
        self.doubtful: Sequence[ParamId] = [slot.id for slot in memory.layout.slots()]
        self._unused = _NONE

    def reduce_(self) -> None:
        self.reduced.reduce_({id: self.params[id].grad for id in self.doubtful})

    def flags(self) -> Tensor:
        return torch.tensor([self.params[id].grad is not None for id in self.doubtful], dtype=torch.float64)

    def settle_(self, flags: Sequence[float]) -> None:
        self._unused = frozenset(id for id, count in zip(self.doubtful, flags, strict=True) if not count)

    def unused(self) -> Collection[ParamId]:
        return self._unused

    def reader(self, id: ParamId, of_param: slice) -> ReadGrad:
        view = self.reduced.piece(id, of_param)
        return lambda: view

    def publish_(self) -> None:
        self.memory.gather_(self.axes.dp)
