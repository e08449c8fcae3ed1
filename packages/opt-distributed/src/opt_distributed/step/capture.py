"""A step as a graph: the device's work between the reduction of gradients and the publication of parameters.

    reduce ─▶ [ statistics and their all-reduce ─▶ verdict, scaler ─▶ clip coefficient ─▶ updates, counts ] ─▶ publish
               captured once, then one call for each step

Before each replay, the host writes the numbers of the parameter groups and the flags of the guards to memory that the
graph reads, and copies gradients that autograd allocates anew to fixed memory. `opt_kernels.hyper_table` describes what
a capture freezes and what stays live. If something frozen has changed, one step runs without the graph, and the next
one captures again. Reductions and gathers stay outside, because they overlap with backward and forward passes.
"""

import logging
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.comm import device as devices
from opt_distributed.pieces.dtensor import DTensorGrads
from opt_distributed.pieces.piece import Groups, Ready
from opt_distributed.pieces.sources import BufferedGrads, ParamGrads, Source
from opt_distributed.step.outcome import Scaler
from opt_distributed.step.unit import Unit
from opt_distributed.step.verdict import Limits, Verdict
from opt_kernels.backends import HyperTable
from opt_kernels.hooks import bare

MANY_MISSES = 10  # successive steps without a graph, after which a warning says so
_LOG = logging.getLogger(__name__)


Work = Callable[[list[Ready], Tensor, Groups], Verdict]
"""Statistics, verdict, loss scale and updates of a step, given gradients, flags and groups."""


class CapturedStep:
    """The captured part of a `Stepper`'s step: captured once two successive steps have the same key, then replayed."""

    def __init__(self, units: Sequence[Unit], sources: Sequence[Source], *, scaler: Scaler, device: devices.Device):
        """Raises GraphError if the device does not support graphs."""
        self.units = units
        self._device = device
        self.scaler = scaler
        self._buffered = [source for source in sources if isinstance(source, BufferedGrads)]
        self._graph = device.graph()
        self._captured: tuple[Hashable, Verdict] | None = None  # the capture's key, and what replays write
        self._last_key: Hashable = None
        self._num_misses = 0  # successive steps with a new key
        rules = [bare(unit.rule) for unit in units]
        self._table = HyperTable(rules, device=device.torch_device, upload=device.upload)
        self._copies: list[dict[int, Tensor]] = [{} for _ in units]
        self._memory: list[Tensor] = []  # which updates write
        for unit in units:
            for piece in unit.pieces:
                self._memory += [piece.main.target, *piece.state.values(), *piece.main.kept.values()]

    def missing_grad_error(self, ready: Sequence[Ready]) -> UnusableGradientError | None:
        """Return the error for a parameter that has no gradient on this rank; None if all have one."""
        missing = []
        for source in self._buffered:
            missing += [id for id in source.ids if source.params[id].grad is None]
        for unit, unit_grads in zip(self.units, ready, strict=True):
            if unit_grads.pieces is not unit.pieces:
                present = {piece.id for piece in unit_grads.pieces}
                missing += [piece.id for piece in unit.pieces if piece.id not in present]
        if not missing:
            return None
        return UnusableGradientError(
            f"{str(missing[0])!r} has no gradient: a step as a graph (optimizer_cuda_graph=True) updates the same "
            "parameters every time; freeze those that are not used, or turn graphs off"
        )

    def step(self, work: Work, ready: Sequence[Ready], flags: Tensor, groups: Groups, limits: Limits) -> Verdict:
        """Do `work`, or replay it. If gradients are missing, `flags` must say that this rank refuses the step.

        The tensors of the result are valid until the next call.
        """
        is_complete = self.missing_grad_error(ready) is None
        ready = [_in_fixed_memory(unit_grads, copies) for unit_grads, copies in zip(ready, self._copies, strict=True)]
        self._table.refresh_(groups)
        self.scaler.stay_on(self._device)
        if not is_complete:
            return work(ready, flags, self._table.groups)
        # Everything that a capture freezes. Counts are compared by identity: loading state replaces them.
        counts = []
        tensors = [*self._memory, flags]
        for unit, unit_grads in zip(self.units, ready, strict=True):
            counts += [run.count for run in unit.runs(unit_grads)]
            tensors += unit_grads.grads
        for count in counts:
            count.stay_on(self._device.torch_device)
        addresses = tuple(map(Tensor.data_ptr, tensors))
        key = tuple(counts), addresses, self._table.frozen, limits
        if self._captured is None or self._captured[0] != key:
            is_known = self._last_key == key
            self._last_key = key
            if not is_known:  # the first run compiles kernels and builds tables, which a capture must not do
                self._captured = None
                self._num_misses += 1
                if self._num_misses == MANY_MISSES:
                    _LOG.warning(
                        "the last %d steps ran without their graph: before each of them, memory of gradients, "
                        "parameters or states has moved, or an entry of param_groups that is not a number has changed",
                        MANY_MISSES,
                    )
                return work(ready, flags, self._table.groups)
            self._num_misses = 0
            with self._graph.capture():
                self._captured = (key, work(ready, flags, self._table.groups))
        self._graph.replay()
        return self._captured[1]


def _in_fixed_memory(ready: Ready, copies: dict[int, Tensor]) -> Ready:
    """Return `ready` with the gradients that autograd allocates anew in each backward pass copied to fixed memory.

    `copies` has that memory, by position among the pieces; it is allocated here. Other gradients are in buffers.
    """
    moving = [at for at, piece in enumerate(ready.pieces) if isinstance(piece.source, ParamGrads | DTensorGrads)]
    if not moving:
        return ready
    grads = list(ready.grads)
    for at in moving:
        copy = copies.get(at)
        grad = grads[at]
        if copy is None or copy.dtype is not grad.dtype or copy.shape != grad.shape:
            copies[at] = torch.empty_like(grad)
    torch._foreach_copy_([copies[at] for at in moving], [grads[at] for at in moving])
    for at in moving:
        grads[at] = copies[at]
    return ready._replace(grads=grads)
