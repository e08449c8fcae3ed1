"""`Source`: where a step gets gradients from and publishes parameters to, whatever the layout of the data."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, nn

from opt_distributed.buffers.reduced import ReducedGrads
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.stored import Converted, GradientError, SparseGradientError, stored_dtype
from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes
from opt_distributed.pieces.dtensor import local, local_address, local_grad
from opt_paramgroups import ParamId

Run = tuple[ParamId, slice]
"""Flat elements of a (local) parameter, which this rank owns."""

ReadGrads = Callable[[], Sequence[Tensor | None]]
"""Returns the reduced gradients of runs in this step, None for one without. It may return the same list every time."""

ALONE = Alone()
_NONE: frozenset[ParamId] = frozenset()
_GRAD = attrgetter("grad")


class Publisher(Protocol):
    """A set of parameters whose new values are sent together."""

    def publish_(self) -> None:
        """Make the updated values visible on every rank that holds the parameters, or start to."""
        ...


class Source(Publisher, Protocol):
    """One set of parameters whose gradients are reduced together and whose new values are published together.

    In a step: `reduce_`; the readers; `resolve_` with the `flags` summed over data-parallel ranks; `unused`;
    `publish_`.
    """

    @property
    def params(self) -> Mapping[ParamId, nn.Parameter]:
        """The parameters."""
        ...

    @property
    def grad_scale(self) -> float:
        """The factor that turns reduced gradients into means: 1 / replicas if the reduction sums."""
        ...

    def reduce_(self) -> None:
        """Complete the reduction of this step's gradients over the data-parallel ranks."""
        ...

    @property
    def unresolved(self) -> Sequence[ParamId]:
        """Parameters (n,) that may have a gradient on some ranks only; empty if that cannot happen."""
        ...

    def flags(self) -> Tensor:
        """(n,) float64, on the host: 1 for each unresolved parameter that has a gradient on this rank, else 0."""
        ...

    def resolve_(self, flags: Tensor) -> None:
        """Receive the flags summed over ranks, (n,) on the device.

        The host reads them only if an unresolved parameter has no gradient on this rank.
        """
        ...

    def unused(self) -> Collection[ParamId]:
        """Parameters whose readers return zeros because no rank has a gradient. They keep their values and state."""
        ...

    def moved(self) -> ParamId | None:
        """A parameter on this rank that is no longer in the memory that updates write to; None if all are."""
        ...

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        """Create the reader of the gradients of these runs; called when a unit is built.

        A gradient has the shape of the parameter if the run is all of it, else it is flat.
        """
        ...


class Settled:
    """A source of gradients that are final where they are, and whose new values need not be sent."""

    unresolved: Sequence[ParamId] = ()

    def reduce_(self) -> None:
        return None

    def flags(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64)

    def resolve_(self, flags: Tensor) -> None:
        return None

    def unused(self) -> Collection[ParamId]:
        return _NONE  # readers return None for these

    def publish_(self) -> None:
        return None


class OwnGrads(Settled):
    """Gradients that are used where autograd left them, without a reduction.

    Either no other rank contributes to them, or they are reduced already, for example by torch's own
    `DistributedDataParallel`. Only new values are sent, if ranks own shards of the parameters.

    `grad_scale` is 1 / dense replicas, even for an expert that only one of them holds: it has processed tokens of all
    of them, and the loss is their mean.
    """

    def __init__(
        self,
        params: Mapping[ParamId, nn.Parameter],
        *,
        num_replicas: int,
        memory: ParamAndGradBuffer | None = None,  # of the parameters, if ranks own shards of them
        comm: Comm = ALONE,  # the ranks that own the shards
    ):
        self.params, self.memory, self.comm = params, memory, comm
        self.grad_scale = 1.0 / num_replicas
        first = next(iter(params.values()))
        self._converted = Converted(params, dtype=stored_dtype(first), device=first.device)

    def moved(self) -> ParamId | None:
        if self.memory is not None:
            return self.memory.moved()
        return self._converted.first()

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        params = [self.params[id] for id, _ in runs]
        parts = [
            (place, of_param)
            for place, (param, (_, of_param)) in enumerate(zip(params, runs, strict=True))
            if of_param != slice(0, param.numel())
        ]

        if not parts:
            return ReadWhole(params)

        def read() -> list[Tensor | None]:
            grads: list[Tensor | None] = list(map(_GRAD, params))
            for place, of_param in parts:
                grad = grads[place]
                if grad is not None and not is_sparse(grad):
                    grads[place] = grad.reshape(-1)[of_param]
            return grads

        return read

    def publish_(self) -> None:
        if self.memory is not None:
            self.memory.gather_(self.comm)


class ReadWhole:
    """Returns the gradients that autograd left at these parameters."""

    def __init__(self, params: Sequence[Tensor]):
        self.params = list(params)

    def __call__(self) -> list[Tensor | None]:
        return list(map(_GRAD, self.params))


def check_dense(ids: Iterable[ParamId], grads: Iterable[Tensor | None]) -> None:
    """Raise SparseGradientError, which names the first of these parameters with a sparse gradient."""
    for id, grad in zip(ids, grads, strict=True):
        if is_sparse(grad):
            assert grad is not None
            raise SparseGradientError(id.name, grad.layout)


def is_sparse(grad: Tensor | None) -> bool:
    """Whether this is a gradient, and sparse."""
    return grad is not None and grad.layout is not torch.strided


class LaidOutGrads(Settled):
    """Gradients of DTensor parameters: sharded like the parameters, and reduced along the axes of their meshes.

    If a parameter has replicas outside of its mesh, as with a tensor-parallel plan on one axis of a larger mesh, its
    gradient is averaged over them in the step. `replicas` maps parameters to these groups. A parameter that is not in
    it, or that it maps to (), has no such replicas.
    """

    grad_scale = 1.0

    def __init__(
        self,
        params: Mapping[ParamId, nn.Parameter],
        replicas: Mapping[ParamId, tuple[Comm, ...]] | None = None,
        *,
        dtype: torch.dtype = torch.float32,  # of the sums
    ):
        self.params = params
        self._addresses = [local_address(param) for param in params.values()]
        by_groups: dict[tuple[Comm, ...], list[ParamId]] = {}
        for id, comms in (replicas or {}).items():
            if comms:
                by_groups.setdefault(comms, []).append(id)
        self._averages = [
            AveragedReplicas({id: params[id] for id in ids}, comms, dtype=dtype) for comms, ids in by_groups.items()
        ]
        self._average_of = {id: average for average in self._averages for id in average.params}

    def reduce_(self) -> None:
        for average in self._averages:
            average.reduce_()

    def moved(self) -> ParamId | None:
        addresses = zip(self.params.items(), self._addresses, strict=True)
        return next((id for (id, param), address in addresses if local_address(param) != address), None)

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        reads = [self._reader_of(id) for id, _ in runs]
        return lambda: [read() for read in reads]

    def _reader_of(self, id: ParamId) -> Callable[[], Tensor | None]:
        if id in self._average_of:
            return self._average_of[id].reader(id)
        param = self.params[id]
        return lambda: None if param.grad is None else local_grad(param)


class ReducedMainGrads(Settled):
    """Gradients that Megatron-Core's `DistributedDataParallel` has reduced on every rank, in `param.main_grad`.

    They are final: means, or sums that were divided by the number of tokens. The step neither reduces nor scales them,
    and every rank updates all of these parameters.
    """

    grad_scale = 1.0

    def __init__(self, params: Mapping[ParamId, nn.Parameter]):
        self.params = params
        first = next(iter(params.values()))
        self._converted = Converted(params, dtype=stored_dtype(first), device=first.device)

    def moved(self) -> ParamId | None:
        return self._converted.first()

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        return lambda: [self._grad(id, of_param) for id, of_param in runs]

    def _grad(self, id: ParamId, of_param: slice) -> Tensor:
        param = self.params[id]
        grad: Tensor | None = getattr(param, "main_grad", None)
        if grad is None or grad.shape != param.shape:
            raise GradientError(
                f"main_grad of {id} is {None if grad is None else tuple(grad.shape)}; the wrapper of this "
                f"parameter must hold its gradient of shape {tuple(param.shape)}"
            )
        return grad if of_param == slice(0, param.numel()) else grad.reshape(-1)[of_param]


class AveragedReplicas:
    """Means of the local gradients of DTensor parameters over replicas outside of their meshes.

    All gradients are reduced as one tensor, with a flag for each parameter that says whether this rank has a gradient:
    a parameter that no replica used has none. The host reads the flags only if this rank lacks a gradient.
    """

    def __init__(self, params: Mapping[ParamId, nn.Parameter], comms: Sequence[Comm], *, dtype: torch.dtype):
        self.params, self.comms = params, comms
        shapes = [local(param).shape for param in params.values()]
        numels = [math.prod(shape) for shape in shapes]
        device = local(next(iter(params.values()))).device
        self._queues = devices.device_of(device)
        self._all = torch.zeros(sum(numels) + len(params), dtype=dtype, device=device)
        *parts, self._flags = torch.split(self._all, [*numels, len(params)])
        self._places = {id: part.view(shape) for id, part, shape in zip(params, parts, shapes, strict=True)}
        self._used: Collection[ParamId] = ()

    @torch.no_grad()
    def reduce_(self) -> None:
        """Average this step's gradients.

        Raises:
            CollectiveError: a collective failed, or exceeded the timeout of its group.
        """
        self._all.zero_()
        for id, param in self.params.items():
            if param.grad is not None:
                self._places[id].copy_(local_grad(param))
        has_gradient = [param.grad is not None for param in self.params.values()]
        self._flags.copy_(self._queues.upload(torch.tensor(has_gradient, dtype=self._flags.dtype)))
        for comm in self.comms:
            try:
                comm.all_reduce_(self._all)
            except Exception as error:  # whatever a backend raises when a peer is gone
                raise CollectiveError(f"sum of DTensor gradients over replicas: {error}") from error
        counts = has_gradient if all(has_gradient) else self._flags.tolist()
        self._used = {id for id, count in zip(self.params, counts, strict=True) if count}
        self._all.div_(math.prod(comm.size for comm in self.comms))

    def reader(self, id: ParamId) -> Callable[[], Tensor | None]:
        """Create the reader of the mean, in the local part's shape; it returns None if no replica has a gradient."""
        return lambda: self._places[id] if id in self._used else None


class BufferedGrads:
    """Gradients of plain modules on several ranks: the step copies them into buckets and reduces these.

    If state is sharded, this rank keeps its shards of the sums, and new values are gathered once all are updated. If it
    is replicated, every rank updates everything, and nothing is gathered. `num_replicas` counts dense replicas, for
    experts too (see `OwnGrads`).
    """

    def __init__(self, reduced: ReducedGrads, memory: ParamAndGradBuffer, axes: Axes, *, num_replicas: int):
        self.reduced, self.memory, self.axes = reduced, memory, axes
        self.params = memory.params
        self.grad_scale = 1.0 / num_replicas
        self.unresolved: Sequence[ParamId] = [slot.id for slot in memory.layout.slots()]
        self.uses_of_peers: Mapping[ParamId, Tensor] = {}  # by marked parameter: peers with a gradient, on the device
        self._unused = _NONE

    def reduce_(self) -> None:
        """See `Source`.

        Raises:
            SparseGradientError: a gradient is sparse. The reduction is complete, with zeros in its place.
        """
        grads = {id: self.params[id].grad for id in self.unresolved}
        self.reduced.reduce_({id: None if is_sparse(grad) else grad for id, grad in grads.items()})
        check_dense(grads.keys(), grads.values())

    def flags(self) -> Tensor:
        return torch.tensor(self._has_gradient(), dtype=torch.float64)

    def resolve_(self, flags: Tensor) -> None:
        self._unused = _NONE
        if not all(self._has_gradient()):
            self._unused = frozenset(id for id, count in zip(self.unresolved, flags.tolist(), strict=True) if not count)

    def owned(self, id: ParamId) -> list[slice]:
        """The flat elements of a parameter whose sums this rank has: none, or one run."""
        layout = self.memory.layout
        rank = self.axes.dp.rank if layout.num_shards > 1 else 0
        return [owned.piece.of_param for owned in layout.owned(rank) if owned.piece.id == id]

    def lacking(self) -> ParamId | None:
        """A parameter that has no gradient on this rank; None if all have one."""
        return next((id for id in self.unresolved if self.params[id].grad is None), None)

    def _has_gradient(self) -> list[bool]:
        """Whether each unresolved parameter has a gradient here or on a peer; the host waits only if not here."""
        uses = self.uses_of_peers
        return [self.params[id].grad is not None or (id in uses and bool(uses[id])) for id in self.unresolved]

    def unused(self) -> Collection[ParamId]:
        return self._unused

    def moved(self) -> ParamId | None:
        return self.memory.moved()

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        views = [self.reduced.piece(id, of_param) for id, of_param in runs]
        return lambda: views

    def publish_(self) -> None:
        self.memory.gather_(self.axes.dp)
