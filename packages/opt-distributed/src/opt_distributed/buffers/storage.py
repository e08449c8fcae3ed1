"""`ParamAndGradBuffer`: one contiguous tensor of gradients, and one of parameters if they are sharded.

`LocalSums` are fp32 sums of 16-bit gradients over microbatches, before they are reduced over ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from opt_distributed.buffers.param_wires import Fp8ThroughGrads, GatherInPlace, ParamWire, move_fp8_in
from opt_distributed.buffers.stored import (
    Moved,
    ParamTensors,
    StorageError,
    address,
    check_apart,
    form_of,
    stored_dtype,
)
from opt_distributed.buffers.wires import InFlight
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Allocate, Comm, zeros
from opt_distributed.layout import Layout, LayoutError, ParamShape, Slot
from opt_kernels.quantized import FP8, quantized
from opt_paramgroups import ParamId, Params

ALL = "all"  # the pattern that every name matches


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a parameter's name matches one of the shell patterns (`fnmatch`, case-sensitive); "all" is every name."""
    return any(pattern == ALL or fnmatchcase(name, pattern) for pattern in patterns)


class Freeable:
    """A tensor of gradients that accumulate, or of parameters, whose memory can be freed between iterations."""

    def __init__(self, data: Tensor):
        self.data = data
        self.is_released = False
        self._queues = devices.device_of(data.device)

    @torch.no_grad()
    def zero_(self) -> None:
        """Begin an iteration with zeros, padding included. Allocates the memory again if it was freed."""
        if self.is_released:
            self.is_released = False
            self._queues.reclaim_(self.data)
        self.data.zero_()

    def release_(self) -> None:
        """Free the memory until `zero_`. Views of it must not be used until then."""
        if not self.is_released:
            self.is_released = True
            self._queues.release_(self.data)


class LocalSums(Freeable):
    """fp32 sums of those gradients whose parameters' names match: `views`, in their shapes.

    There are none if their gradient buffer, of `grad_dtype`, is fp32 or wider. Before the reduction, each gradient is
    rounded once to the dtype of the buffer. This only improves sums over microbatches: a single backward pass gives the
    same bits as accumulation in the buffer.
    """

    def __init__(
        self, params: Sequence[ParamShape], patterns: Collection[str], *, grad_dtype: torch.dtype, device: torch.device
    ):
        is_narrow = torch.finfo(grad_dtype).bits < 32
        summed = [param for param in params if is_narrow and matches(param.id.name, patterns)]
        super().__init__(torch.zeros(sum(param.numel for param in summed), dtype=torch.float32, device=device))
        parts = torch.split(self.data, [param.numel for param in summed])
        self.views: ParamTensors = {param.id: part.view(param.shape) for param, part in zip(summed, parts, strict=True)}


class ParamAndGradBuffer:
    """Gradients of many parameters in one tensor, and the parameters in another. Everything else is a view of these.

    `grad_data` (layout.numel,) of `grad_dtype` starts as zeros; (0,) if gradients are kept elsewhere. `param_data`
    (layout.numel,) of `param_dtype`, or None, holds the values of the parameters: `param.data` becomes a view of it, so
    that an in-place all-gather of a bucket publishes its parameters. Padding is always zero. For fp8 parameters it
    holds the codes, as uint8; see `Fp8Memory`.

    Raises:
        LayoutError: parameters and layout differ in ids or sizes.
        StorageError: a parameter has another dtype or device, is frozen, or shares memory with another one.
    """

    def __init__(
        self,
        layout: Layout,
        params: Params,
        *,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        sharded: bool,  # whether the parameters move into the buffer
        holds_grads: bool = True,
        allocate: Allocate = zeros,
        reuses_grads: bool = False,  # whether fp8 parameters keep their memory, and are gathered through the gradients
    ):
        self.layout = layout
        self.params = dict(params)
        self.param_dtype = param_dtype
        self.grad_dtype = grad_dtype
        self.device = device
        self.queues = devices.device_of(device)
        self._allocate = allocate  # a pool must live as long as its memory
        self._slot_of = {slot.id: slot for slot in layout.slots()}
        self._shapes = {id: param.shape for id, param in params.items()}
        _check(self._slot_of, self.params, dtype=param_dtype, device=device)
        self.grads = Freeable(allocate(layout.numel if holds_grads else 0, dtype=grad_dtype, device=device))
        self.grad_data = self.grads.data
        self.reduces_everywhere = False  # whether this iteration's reduction gives every rank the whole gradients
        # Of each bucket before its reduction: the sum of squares of this rank's gradients. None: not computed.
        self.local_squares: dict[int, Tensor] | None = None
        self.param_data: Tensor | None = None
        self.wire: ParamWire | None = None  # of the parameters, if ranks own shards of them
        self._freeable: Freeable | None = None  # `param_data` while parameters are elsewhere, unless they are in fp8
        place = form_of(self.params)
        if sharded and param_dtype is FP8:
            fp8 = {id: found for id, param in params.items() if (found := quantized(param)) is not None}
            if reuses_grads:
                self.wire = Fp8ThroughGrads(layout=layout, params=fp8, grad_data=self.grad_data)
            else:
                self.wire = move_fp8_in(layout, fp8, device=device, allocate=allocate)
                self.param_data = self.wire.codes
                place = address
        elif sharded:
            self.param_data = allocate(layout.numel, dtype=param_dtype, device=device)
            self.wire = GatherInPlace(layout, self.param_data)
            self._freeable = Freeable(self.param_data)
            self._take_in(self.param_data)
            place = Tensor.data_ptr
        self._moved = Moved(self.params, place)

    def grad_view(self, id: ParamId) -> Tensor:
        """Return the gradient of a parameter, in its shape, as a view."""
        slot = self._slot_of[id]
        return self.grad_data[slot.start : slot.stop].view(self.params[id].shape)

    def grad_bucket(self, index: int) -> Tensor:
        """Return the gradients of a bucket (bucket.numel,), padding included, as a view."""
        bucket = self.layout.buckets[index]
        return self.grad_data[bucket.start : bucket.stop]

    def grad_piece(self, id: ParamId, of_param: slice) -> Tensor:
        """Return a view of the gradient of flat elements of a parameter, in its shape if they are all of it."""
        grad = self.grad_view(id)
        return grad if of_param == slice(0, grad.numel()) else grad.view(-1)[of_param]

    def result(self, index: int, rank: int) -> Tensor:
        """Return a view of a bucket's reduced gradients on rank `rank`: its shard, or all if there is one shard."""
        shard = self.layout.buckets[index].shard(rank, self.layout.num_shards)
        return self.grad_data[shard]

    def start_gather(self, index: int, comm: Comm) -> InFlight:
        """Start to write the shards of all ranks to a bucket of `param_data`.

        Raises:
            LayoutError: the layout was planned for another number of ranks.
        """
        if self.layout.num_shards not in (1, comm.size):
            raise LayoutError(
                f"the layout was planned for {self.layout.num_shards} shards, but the group has {comm.size} ranks; "
                "plan it for the group that shares the buffer"
            )
        assert self.wire is not None
        stages = self.wire.stages(index, comm)
        is_staged = self.wire.is_staged or bool(self.layout.buckets[index].cuts)
        return InFlight(stages, f"parameter bucket {index}", device=self.queues, is_staged=is_staged)

    def moved(self) -> ParamId | None:
        """Return the first parameter that was converted or has left the buffer, so that updates miss it; or None.

        Fast enough for every step: one comparison of integers, or of dtype and device, for each parameter.
        """
        if self._freeable is not None and self._freeable.is_released:  # they may come back to the same addresses
            return next(iter(self.params))
        return self._moved.moved()

    def check_arrived(self, index: int) -> None:
        """Raise StorageError if a parameter of a bucket has left the memory that was gathered."""
        if self._freeable is None:
            return
        memory = self._freeable.data
        start = memory.data_ptr()
        for slot in self.layout.buckets[index].slots:
            address = start + slot.start * memory.element_size()
            if slot.numel and self.params[slot.id].data_ptr() != address:
                raise StorageError(
                    f"{slot.id} was moved while its new values were gathered, so that it has old ones; call "
                    "finish_param_sync() of its DistributedDataParallel before you move parameters"
                )

    def check_converted(self) -> None:
        """Raise StorageError if a parameter was converted to another dtype, so that updates cannot reach it."""
        for id, param in self.params.items():
            if stored_dtype(param) != self.param_dtype:
                raise StorageError(
                    f"{id} has left its buffer ({self.param_dtype} on {self.device}) and is now {param.dtype} "
                    f"on {param.device}; convert the model before wrapping it"
                )

    @torch.no_grad()
    def take_back_(self, *, frees: bool = False) -> Collection[ParamId]:
        """Let parameters that other code has moved away, and back to the device, be views of the buffer again. Return
        them. They keep their values. None if one is in fp8, or has another dtype, shape or device.

        With `frees`, the memory that all parameters have left is freed until they come back, unless it is registered.
        """
        if self._freeable is None or self.moved() is None:
            return ()
        memory = self._freeable.data
        params = self.params.items()
        if frees and self._allocate is zeros:
            address = memory.untyped_storage().data_ptr()
            if all(param.untyped_storage().data_ptr() != address for _, param in params):
                self._freeable.release_()
                return ()
        if any((p.dtype, p.device, p.shape) != (self.param_dtype, self.device, self._shapes[id]) for id, p in params):
            return ()
        if self._freeable.is_released:
            self._freeable.zero_()
        found = self._take_in(memory)
        self._moved = Moved(self.params, Tensor.data_ptr)
        return found

    @torch.no_grad()
    def _take_in(self, memory: Tensor) -> list[ParamId]:
        """Move the values of parameters that are elsewhere. Return these."""
        found = []
        for id, param in self.params.items():
            slot = self._slot_of[id]
            view = memory[slot.start : slot.stop].view(self._shapes[id])
            if param.data_ptr() != view.data_ptr():
                view.copy_(param)
                param.data = view
                found.append(id)
        return found


def _check(slots: Mapping[ParamId, Slot], params: Params, *, dtype: torch.dtype, device: torch.device) -> None:
    planned = {id: slot.numel for id, slot in slots.items()}
    given = {id: p.numel() for id, p in params.items()}
    if planned != given:
        differing = sorted(str(id) for id in planned.keys() | given.keys() if planned.get(id) != given.get(id))
        raise LayoutError(
            f"layout and parameters differ in: {', '.join(differing)}; make the layout from exactly these parameters"
        )
    for id, param in params.items():
        if stored_dtype(param) != dtype:
            raise StorageError(
                f"{id} is {stored_dtype(param)} in a buffer of {dtype}; parameters of one dtype share a buffer"
            )
        if param.device != device:
            raise StorageError(f"{id} is on {param.device}, the buffer on {device}; move the model before wrapping it")
        if not param.requires_grad:
            raise StorageError(f"{id} does not require a gradient; leave frozen parameters out of the layout")
    check_apart(params)
