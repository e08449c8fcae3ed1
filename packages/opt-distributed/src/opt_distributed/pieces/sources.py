"""`Source`: where a step gets gradients from and publishes parameters to, whatever the layout of the data."""

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

from opt_config import ConfigError
from opt_distributed.buffers.gathered import GatheredParams
from opt_distributed.buffers.main_grad import GradientError, SparseGradientError, UnusableGradientError
from opt_distributed.buffers.reduced import Part, ReducedGrads, sum_over_peers_
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.stored import Moved, ParamTensors, form_of, is_bound
from opt_distributed.comm.collectives import ALONE, Comm
from opt_distributed.comm.groups import tensor_peers_outside
from opt_distributed.comm.roles import Axes, Roles, marks_of, peers_of
from opt_paramgroups import Metas, ParamId, ParamMeta, Params

Run = tuple[ParamId, slice]
"""Flat elements of a (local) parameter, which this rank owns."""

ReadGrads = Callable[[], Sequence[Tensor | None]]
"""Returns the reduced gradients of runs in this step, None for one without. It may return the same list every time."""

_GRAD = attrgetter("grad")


class Publisher(Protocol):
    """A set of parameters whose new values are sent together."""

    def publish_(self) -> None:
        """Make the updated values visible on every rank that holds the parameters, or start to."""


class Place(Publisher, Protocol):
    """The memory of a set of parameters, to which updates write."""

    def moved(self) -> ParamId | None:
        """A parameter on this rank that is no longer in that memory; None if all are."""

    def follow_(self, *, frees: bool = False) -> Collection[ParamId]:
        """Accept parameters that other code has moved away, and back to their device. Return them; local.

        With `frees`, those that are elsewhere are followed, too, as far as that frees the memory that they have left.
        """


class Source(Protocol):
    """One set of parameters whose gradients are reduced together and whose new values are published together.

    In a step: `reduce_`; the readers; `publish_` of its place.
    """

    @property
    def params(self) -> Params:
        """The parameters."""

    @property
    def grad_scale(self) -> float:
        """The factor that turns reduced gradients into means: 1 / replicas if the reduction sums."""

    @property
    def place(self) -> Place:
        """Where the parameters are."""

    def reduce_(self) -> None:
        """Complete the reduction of this step's gradients over the data-parallel ranks."""

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        """Create the reader of the gradients of these runs; called when a unit is built.

        A gradient has the shape of the parameter if the run is all of it, else it is flat.
        """


class OwnMemory(Moved):
    """Parameters in memory of their own, whose new values need not be sent."""

    def follow_(self, *, frees: bool = False) -> Collection[ParamId]:
        """See `Place`."""
        return ()

    def publish_(self) -> None:
        """Do nothing."""


class ParamGrads:
    """Gradients that are used where autograd left them, without a reduction.

    Either no other rank contributes to them, or they are reduced already, for example by torch's own
    `DistributedDataParallel`. Only new values are sent, if ranks own shards of the parameters.

    `grad_scale` is 1 / dense replicas, even for an expert that only one of them holds: it has processed tokens of all
    of them, and the loss is their mean.
    """

    def __init__(
        self,
        params: Params,
        *,
        num_replicas: int,
        memory: ParamAndGradBuffer | None = None,  # of the parameters, if ranks own shards of them
        comm: Comm = ALONE,  # the ranks that the gradients were reduced over, and that own the shards
    ):
        self.params = params
        self.grad_scale = 1.0 / num_replicas
        self.comm = comm
        own: Place = OwnMemory(params, form_of(params))
        self.place = own if memory is None else GatheredParams.alone(memory, comm)

    def reduce_(self) -> None:
        return None

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        params = [self.params[id] for id, _ in runs]
        parts = [at for at, (id, of_param) in enumerate(runs) if of_param != slice(0, self.params[id].numel())]

        def read() -> list[Tensor | None]:
            grads: list[Tensor | None] = list(map(_GRAD, params))
            for at in parts:
                grad = grads[at]
                if grad is not None and not is_sparse(grad):
                    grads[at] = grad.reshape(-1)[runs[at][1]]
            return grads

        return read


def check_dense(ids: Iterable[ParamId], grads: Iterable[Tensor | None]) -> None:
    """Raise SparseGradientError, which names the first of these parameters with a sparse gradient."""
    for id, grad in zip(ids, grads, strict=True):
        if is_sparse(grad):
            raise SparseGradientError(id.name, grad.layout)


def check_unfused(id: ParamId, param: Tensor) -> None:
    """Raise UnusableGradientError if a plain parameter, whose `grad` is None, has a gradient in ``main_grad``.

    Fused kernels write there (Megatron-Core's gradient accumulation fusion, TransformerEngine) once the caller has
    bound a tensor to it.
    """
    if is_bound(param):
        raise UnusableGradientError(
            f"the gradient of {str(id)!r} is in main_grad, and grad is None, but the model is plain, of which a step "
            "reads grad; wrap it in opt_stack.DistributedDataParallel, which binds main_grad, before get_optimizer, or "
            "turn the fusion of gradient accumulation off, or set param.grad to param.main_grad before each step"
        )


def is_sparse(grad: Tensor | None) -> TypeGuard[Tensor]:
    """Whether this is a gradient, and sparse."""
    return grad is not None and grad.layout is not torch.strided


class ReducedMainGrads(ParamGrads):
    """Gradients that a wrapper reduces on every rank, in `param.main_grad`: Megatron-Core's, or ours without shards.

    They are final: means, or sums that were divided by the number of tokens. The step does not scale them. Every rank
    updates all of these parameters, or its whole ones of a `memory`.
    """

    def __init__(
        self,
        params: Params,
        *,
        finishes: Sequence[Callable[[], None]] = (),  # complete the reductions of wrappers; again in vain
        memory: ParamAndGradBuffer | None = None,
        comm: Comm = ALONE,
    ):
        super().__init__(params, num_replicas=1, memory=memory, comm=comm)
        self._finishes = finishes

    def reduce_(self) -> None:
        for finish in self._finishes:
            finish()

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


class BufferedGrads:
    """Gradients of plain modules on several ranks: the step copies them into buckets and reduces these.

    If state is sharded, this rank keeps its shards of the sums, and new values are gathered once all are updated. If it
    is replicated, every rank updates everything, and nothing is gathered. `num_replicas` counts dense replicas, for
    experts too (see `ParamGrads`).

    A parameter may have a gradient on some ranks only: others reduce zeros. The step sums `has_grads` over ranks and
    passes the sums to `resolve_`. Parameters that no rank has used are `unused`: they keep their values and state.
    """

    def __init__(self, memory: ParamAndGradBuffer, axes: Axes, *, num_replicas: int):
        """`memory` has the parameters; its `grad_dtype` is that of the sums."""
        self.reduced = ReducedGrads(memory.layout, memory.params, axes, dtype=memory.grad_dtype, device=memory.device)
        self.memory = memory
        self.axes = axes
        self.place = GatheredParams.alone(memory, axes.dp)
        self.params = memory.params
        self.grad_scale = 1.0 / num_replicas
        self.ids = [slot.id for slot in memory.layout.slots()]
        self.uses_of_peers: ParamTensors = {}  # by marked parameter: peers with a gradient, on the device
        self.unused: Collection[ParamId] = frozenset()  # in this step

    def reduce_(self) -> None:
        """See `Source`.

        Raises:
            SparseGradientError: a gradient is sparse. The reduction is complete, with zeros in its place.
            UnusableGradientError: a gradient is in ``main_grad``. The reduction is complete.
        """
        grads = {id: self.params[id].grad for id in self.ids}
        self.reduced.reduce_({id: None if is_sparse(grad) else grad for id, grad in grads.items()})
        check_dense(grads.keys(), grads.values())
        for id, grad in grads.items():
            if grad is None:
                check_unfused(id, self.params[id])

    def has_grads(self) -> list[bool]:
        """For each of `ids`, whether it has a gradient here or on a peer; the host waits only if not here."""
        uses = self.uses_of_peers
        return [self.params[id].grad is not None or bool(uses.get(id, False)) for id in self.ids]

    def resolve_(self, counts: Tensor) -> None:
        """Receive the number of ranks with a gradient of each of `ids`, (n,) on the device.

        The host reads them only if a parameter has no gradient on this rank.
        """
        read = () if all(self.has_grads()) else zip(self.ids, counts.tolist(), strict=True)
        self.unused = frozenset(id for id, count in read if not count)

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        views = [self.reduced.pieces[id] for id, _ in runs]
        return lambda: views


FoundGrads: TypeAlias = list[tuple[Tensor | None, int]]
"""The gradient of each parameter, where autograd left it, and how often it was written."""


def found_grads(sources: Iterable[Source]) -> FoundGrads:
    """The present gradients, to tell later whether one was written or replaced."""
    found: FoundGrads = []
    for source in sources:
        for param in source.params.values():
            grad = getattr(param, "main_grad", None) if param.grad is None else param.grad
            part = getattr(grad, "_local_tensor", grad)
            # A write to a DTensor counts for it alone, and one to its local part for that alone.
            counted = [grad] if part is grad else [grad, part]
            versions = [tensor._version for tensor in counted if tensor is not None and not tensor.is_inference()]
            found.append((part, sum(versions)))
    return found


class PeerSums:
    """Completes the gradients of plain modules, as `finalize_model_grads` completes those of wrapped ones.

    Sums the reduced gradients of marked parameters over tensor-parallel ranks and stages, in every step.
    It writes the buffers of the reduction, not `param.grad`, so that a step may be repeated.
    """

    def __init__(self, sources: Iterable[Source], metas: Metas, roles: Roles, *, qk_layernorm: bool):
        self._peers = peers_of(roles)
        self._qk_layernorm = qk_layernorm
        self._marked: dict[BufferedGrads, list[ParamMeta]] = {}
        ids = marked_ids(metas, roles, qk_layernorm=qk_layernorm)
        for source in sources:
            if isinstance(source, BufferedGrads) and not ids.isdisjoint(source.params):
                self._marked[source] = [metas[id] for id in source.ids if id in ids]

    def add_(self) -> None:
        """Sum the reduced gradients, and which ranks have one: a peer may have used a parameter that this rank did not.

        Collective. Raises CollectiveError if a sum failed, or exceeded the timeout of its group.
        """
        if not self._marked:
            return
        parts = []
        uses = []
        for source, marked in self._marked.items():
            pieces = source.reduced.pieces
            for meta in marked:
                if meta.id in pieces:
                    parts.append(Part(meta, pieces[meta.id]))
                param = source.params[meta.id]
                has_grad = float(param.grad is not None)
                uses.append(Part(meta, torch.full((1,), has_grad, dtype=torch.float32, device=param.device)))
        sum_over_peers_(parts, self._peers, qk_layernorm=self._qk_layernorm)
        sum_over_peers_(uses, self._peers, qk_layernorm=self._qk_layernorm)
        for source in self._marked:
            source.uses_of_peers = {meta.id: count for meta, count in uses if meta.id in source.params}


def marked_ids(metas: Metas, roles: Roles, *, qk_layernorm: bool) -> frozenset[ParamId]:
    """Parameters whose gradients are complete only after a sum or mean over peers."""
    num_chunks = len({id.chunk for id in metas})
    return frozenset(
        id for id, meta in metas.items() if marks_of(meta, roles, qk_layernorm=qk_layernorm, num_chunks=num_chunks)
    )


def check_marks(params: Params, metas: Metas, roles: Roles, *, qk_layernorm: bool) -> None:
    """Check that the step can complete the gradients of plain parameters.

    Raises:
        ConfigError: the peers of a marked parameter are unknown, or it is a DTensor whose mesh does not contain them.
    """
    for id in params:
        for mark in marks_of(metas[id], roles, qk_layernorm=qk_layernorm):
            axes = roles.expert if metas[id].is_expert else roles.dense
            if metas[id].is_dtensor and (
                mark.role not in ("tp", "expt_tp") or tensor_peers_outside(params[id], axes.tp)
            ):
                raise ConfigError(
                    f"{str(id)!r} is a DTensor marked {mark.attr}: its gradient would not be summed over the group "
                    f"{mark.role}, which is not part of its mesh; use a mesh with these ranks, or a plain parameter"
                )
            if mark.comm is None:
                raise ConfigError(
                    f"{str(id)!r} is marked {mark.attr}, but the group {mark.role} is not given, so that copies of it "
                    f"would diverge; pass pg_collection=opt_stack.ProcessGroups({mark.role}=..., ...), with None if "
                    "this rank holds the only copy"
                )
