"""Writes of other code to parameters, and what they mean for main values that are copies.

A float32 main is a copy: after `model.load_state_dict`, `torch.nn.utils.vector_to_parameters`, `param.data = ...`, or
any other write to a bfloat16 or float16 parameter, the next update of its old main would restore the old weights. torch
counts writes (`_version`), and an assignment moves the parameter; only after either are parameters and mains compared.
So a write is seen as another version, another address, or another storage at the same address. A write through
`param.data`, such as `param.data.fill_(0)`, is not seen.

What follows is the policy of the caller. Drop-ins follow, as torch.optim would: `follow_write_`, before each update
(`optim.base`). The optimizer of opt-stack, on one rank or several, refuses the step: `has_foreign_write`, asked by
`opt_stack.state.weights`; replicas on other ranks may not have been written. A remainder is not a copy: a foreign write
changes the upper half of the main value unnoticed.

A load of the optimizer's own state compares nothing: a saved main value is written, rounded, to the parameter, and
without one the main value begins as the parameter. Only a load of Megatron-Core's distributed form compares them, and
refuses main weights that are shifted (`opt_stack.state.megatron_state`).

Kernels write memory that autograd does not watch. Counting their writes makes a backward pass through an older graph
raise, as after a step of torch's optimizers. An assignment to `param.data` leaves the version as it was, and may find
memory at the address of the storage that it releases, so the storage is compared as well.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from opt_kernels.backends.elements import flat
from opt_kernels.dtensor import are_dtensors, is_dtensor, local
from opt_kernels.params.main import MAIN, Main
from opt_kernels.quantized.adapters import is_quantized

CHUNK_NUMEL = 1 << 22  # elements that are compared at a time


class Mark(NamedTuple):
    """The version and the memory of a tensor at one time."""

    version: int  # 0 for a tensor made in inference mode: nothing counts its writes
    address: int  # 0 for a wrapper subclass, such as DTensor, whose elements are in other tensors
    storage: StorageWeakRef | None  # does not keep the memory


Marks = tuple[Mark, ...]  # of a parameter, or of the local shard of a DTensor and of itself


class Writes:
    """Counts the writes of the owner to some tensors, and notices those of others."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        # In C where no tensor is special.
        are_counted = len(self._counted) == len(self.tensors)
        are_placed = all(map(_has_memory, self.tensors))
        self._version: Callable[[Tensor], int] = _VERSION if are_counted else _version
        self._address = Tensor.data_ptr if are_placed else _address
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._storages: list[StorageWeakRef | None] = []
        self._numbers: list[int] = []  # of the storages, in torch
        self.set_baseline()

    def count_step(self) -> None:
        """Count one more write of the owner to each. A tensor that others have moved is still to be noticed."""
        torch.autograd.graph.increment_version(self._counted)
        self._versions = list(map(self._version, self.tensors))

    def set_baseline(self) -> None:
        """Compare with the present versions and places from now on: earlier writes count as the owner's."""
        self._versions = list(map(self._version, self.tensors))
        if not self._storages or not self._are_in_place():
            self._addresses = list(map(self._address, self.tensors))
            self._storages = [_storage(tensor) for tensor in self.tensors]
            self._numbers = [storage.cdata for storage in self._storages if storage is not None]

    def has_foreign(self) -> bool:
        """Return whether other code has written to the tensors or moved them."""
        versions = list(map(self._version, self.tensors))
        return versions != self._versions or not self._are_in_place()

    def foreign(self) -> list[Tensor]:
        """Return the tensors that other code has written or moved."""
        pairs = zip(self.tensors, self.marks, strict=True)
        return [tensor for tensor, mark in pairs if not is_unwritten(tensor, mark)]

    @property
    def marks(self) -> list[Mark]:
        """The marks of the tensors at the baseline."""
        return list(map(Mark, self._versions, self._addresses, self._storages))

    def _are_in_place(self) -> bool:
        addresses = list(map(self._address, self.tensors))
        return addresses == self._addresses and not any(map(_IS_RELEASED, self._numbers))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Writes holds addresses of tensors, so it is not copied or pickled; make another")


def are_unwritten(param: Tensor, shard: Tensor, marks: Marks) -> bool:
    """Whether no other code has written a parameter or moved it since its `marks`; False without any.

    A write to a DTensor counts for it alone, and one to its local shard for that alone: it has marks of both.
    """
    tensors = (shard,) if shard is param else (shard, param)
    return bool(marks) and all(map(is_unwritten, tensors, marks))


def is_unwritten(tensor: Tensor, mark: Mark) -> bool:
    """Whether no other code has written to `tensor` or moved it since `mark`."""
    is_in_place = mark.storage is None or not _IS_RELEASED(mark.storage.cdata)
    return is_in_place and (_version(tensor), _address(tensor)) == mark[:2]


_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_IS_RELEASED = cast(Callable[[int], bool], torch.UntypedStorage._expired)


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, or its data
        return 0


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if _has_memory(tensor) else 0


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    return cast(Any, StorageWeakRef)(tensor.untyped_storage()) if _has_memory(tensor) else None


def _has_memory(tensor: Tensor) -> bool:
    return not hasattr(type(tensor), "__tensor_flatten__")


@torch.no_grad()
def has_foreign_write(main: Main) -> bool:
    """Return whether a parameter is not its main value rounded, so that the next update would restore other values.

    `main` is a copy of its parameter. NaNs are equal to NaNs. The host waits for the comparison.
    """
    return bool(_differ(main.value(), main.present()).any())


@torch.no_grad()
def followed(main: Main) -> Tensor:
    """Return what `follow_write_` would make of `main`, as a new tensor."""
    values = main.value()
    present = main.present()
    return torch.where(_differ(values, present), present.to(values.dtype), values)


@torch.no_grad()
def follow_write_(main: Main) -> None:
    """Let the elements of `main` that are not those of the parameter, rounded, take the parameter's. The host reads
    nothing."""
    present = main.present()
    of_param = torch.split(flat(present, present, "param"), CHUNK_NUMEL)
    of_main = torch.split(flat(main.value(), present, MAIN), CHUNK_NUMEL)
    for new, kept in zip(of_param, of_main, strict=True):
        is_written = _differ(kept, new)
        kept.copy_(torch.where(is_written, new.to(kept.dtype), kept))


def _differ(values: Tensor, present: Tensor) -> Tensor:
    """Bools: the rounded main value is not what the parameter has."""
    rounded = values.to(present.dtype)
    are_nan = rounded.isnan() & present.isnan()
    return ~((rounded == present) | are_nan)


class FollowingMains:
    """The float32 mains of parameters that are updated together. They follow the writes of other code."""

    def __init__(self, params: Sequence[tuple[Tensor, Mapping[str, Tensor]]], followed: Mapping[Tensor, Marks]):
        """`params` with their states. `followed` are the marks of parameters that mains have followed in earlier steps.

        Also counts the updates of parameters without a main: kernels write memory that autograd does not watch, and a
        backward pass through an older graph must raise.
        """
        # Nothing counts writes to tensors that were made in torch.inference_mode().
        self._counted = [param for param, _ in params if not param.is_inference()]
        self._copied = [param for param, state in params if MAIN in state]
        self._states = [state for _, state in params if MAIN in state]
        self._followed_before = followed
        self._writes: Writes | None = None  # None: before the first update

    @property
    def followed(self) -> dict[Tensor, Marks]:
        """The marks of the parameters that mains have followed."""
        marks = [] if self._writes is None else self._writes.marks
        of_wrappers: dict[Tensor, Mark] = dict(zip(filter(is_dtensor, self._copied), marks[len(self._copied) :]))
        found = dict(self._followed_before)
        for param, mark in zip(self._copied, marks):
            found[param] = (mark, of_wrappers[param]) if param in of_wrappers else (mark,)
        return found

    def begin_update_(self) -> None:
        """Let mains take the values of parameters that other code wrote, and count the writes of the update. The host
        reads no tensor."""
        with torch.no_grad():  # else `to_local` returns an alias with a version of its own
            is_sharded = are_dtensors(self._copied)
            shards = list(map(local, self._copied)) if is_sharded else self._copied  # those of DTensors may be replaced
        watched = [*shards, *filter(is_dtensor, self._copied)] if is_sharded else shards
        before = self._writes
        is_same = before is not None and all(map(is_, before.tensors, watched))
        if before is None or not is_same or before.has_foreign():
            followed = self.followed
            for param, state, shard in zip(self._copied, self._states, shards, strict=True):
                if not are_unwritten(param, shard, followed.get(param, ())):
                    follow_write_(Main(shard, state))
            self._writes = Writes(watched)
        torch.autograd.graph.increment_version(self._counted)
        self.end_update_()

    def end_update_(self) -> None:
        """Count what torch's operations have written in the update, so that the next one does not take it for writes
        of other code."""
        if self._writes is not None:
            self._writes.set_baseline()


# --- parameters that share memory: a write to one of them is a write to another ---------------------------------------


class _Range(NamedTuple):
    """The addresses of one tensor's bytes."""

    start: int
    stop: int
    at: int  # among the tensors


def overlapping(tensors: Sequence[Tensor], num_params: int) -> tuple[int, int] | None:
    """Return the indices of two tensors that share memory, in its order; None if there are no such two.

    The first `num_params` are parameters, and one of the two is one: the others, such as frozen parameters, may share
    memory with each other. Tensors in fp8 are not compared.
    """
    by_device: dict[torch.device, list[_Range]] = {}
    for index, tensor in enumerate(tensors):
        if is_lazy(tensor) or is_quantized(tensor):
            continue
        shard = local(tensor.detach())
        if shard.layout is not torch.strided or shard.is_meta or not shard.numel():
            continue
        start = shard.data_ptr()
        if start:
            dims = zip(shard.shape, shard.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in dims)
            stop = start + (last + 1) * shard.element_size()
            by_device.setdefault(shard.device, []).append(_Range(start, stop, index))
    for ranges in by_device.values():
        furthest = furthest_param = _Range(0, 0, -1)
        for span in sorted(ranges):
            is_param = span.at < num_params
            before = furthest if is_param else furthest_param
            if span.start < before.stop:
                return before.at, span.at
            furthest = max(furthest, span, key=attrgetter("stop"))
            if is_param:
                furthest_param = max(furthest_param, span, key=attrgetter("stop"))
    return None
