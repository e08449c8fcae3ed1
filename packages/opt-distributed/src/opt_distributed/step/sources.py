"""Where gradients come from and where parameters go: the one seam between the step and how data is laid out."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.comm.groups import Axes
from opt_paramgroups import ParamId


class Source(Protocol):
    """One set of parameters whose gradients are reduced together and whose new values are published together.

    In a step: `reduce_`, `grad`, then `flags` summed over the data-parallel ranks into `settle_`, `used`, `publish_`.
    """

    @property
    def grad_scale(self) -> float:
        """What turns the reduced gradients into the mean: 1 / ranks where they are summed on the way."""
        ...

    def reduce_(self) -> None:
        """Completes the reduction of this step's gradients over the data-parallel ranks."""
        ...

    def flags(self) -> Tensor:
        """(n,) float64: one for each parameter whose gradient this rank has; empty where there can be no doubt."""
        ...

    def settle_(self, flags: Tensor) -> None:
        """Takes the flags summed over ranks."""
        ...

    def used(self, id: ParamId) -> bool:
        """Whether any rank has a gradient for the parameter; what no rank used keeps its value and its state."""
        ...

    def grad(self, id: ParamId, of_param: slice) -> Tensor | None:
        """The reduced gradient of these flat elements, in the parameter's shape where they are all of it; zeros, or
        None, where no rank has one."""
        ...

    def publish_(self) -> None:
        """Makes the updated values visible on every rank that holds the parameter, or starts to."""
        ...


class OwnGrads:
    """Parameters of this process alone: gradients are used where autograd left them, and nothing travels."""

    grad_scale = 1.0

    def __init__(self, params: Mapping[ParamId, nn.Parameter]):
        self.params = params

    def reduce_(self) -> None:
        return None

    def flags(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64)

    def settle_(self, flags: Tensor) -> None:
        return None

    def used(self, id: ParamId) -> bool:
        return self.params[id].grad is not None

    def grad(self, id: ParamId, of_param: slice) -> Tensor | None:
        grad = self.params[id].grad
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(f"gradient of {id.name!r} is {grad.layout}; dense (torch.strided) gradients are allowed")
        return grad

    def publish_(self) -> None:
        return None


class BufferedGrads:
    """Plain modules on several ranks: in the step, gradients are copied into a flat buffer and reduced there.

    Where state is sharded, each rank's shard of the buffer holds what it owns, and new values are gathered at the end of
    the step; where it is replicated, every rank updates everything and nothing is gathered.
    """

    def __init__(self, memory: ParamAndGradBuffer, params: Mapping[ParamId, nn.Parameter], axes: Axes):
        self.memory = memory
        self.params = params
        self.axes = axes
        self.grad_scale = 1.0 / axes.num_replicas
        self._ids = [slot.id for slot in memory.layout.slots()]
        self._present: frozenset[ParamId] = frozenset()

    def reduce_(self) -> None:
        for id in self._ids:
            grad, place = self.params[id].grad, self.memory.grad_view(id)
            if grad is None:
                place.zero_()
            else:
                place.copy_(grad)
        self.memory.reduce_(self.axes)

    def flags(self) -> Tensor:
        return torch.tensor([self.params[id].grad is not None for id in self._ids], dtype=torch.float64)

    def settle_(self, flags: Tensor) -> None:
        self._present = frozenset(id for id, count in zip(self._ids, flags.tolist(), strict=True) if count)

    def used(self, id: ParamId) -> bool:
        return id in self._present

    def grad(self, id: ParamId, of_param: slice) -> Tensor | None:
        return self.memory.grad_piece(id, of_param)

    def publish_(self) -> None:
        self.memory.gather_(self.axes.dp)
