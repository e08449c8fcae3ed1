"""The state of an optimizer: shown by parameter, moved to the host, and compared with that of replicas."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from opt_checkpoint.state import checksums
from opt_distributed.buffers import ReplicaError, check_replicas, compare_copies
from opt_distributed.comm import Roles, agree
from opt_distributed.pieces import OwnedPiece
from opt_distributed.saving import PieceState, check_state, load_state_, read_state, reset_state_
from opt_distributed.step import Scaler, Spikes, Stepper, Unit, Written
from opt_paramgroups import ParamId, is_dtensor
from opt_stack.planning.design import Model
from opt_stack.state import AnyState
from opt_stack.state.weights import LoadedWeights


class PieceRef(NamedTuple):
    """This rank's piece of a parameter and the unit whose rule updates it."""

    unit: Unit
    piece: OwnedPiece


@dataclass(eq=False, repr=False)
class LiveState(MutableMapping[Tensor, dict[str, Tensor]]):
    """State by parameter, with the names of `state_dict`; DTensors for DTensor parameters.

    Reading returns a dict of tensors that share the state's memory, except `step` and main values joined from a
    remainder, which are those of the trained weights in evaluation mode, too. Assigning a dict sets the parameter's
    whole state, as loading does; an empty one resets all but the main values. State exists from construction, so the
    mapping is truthy even on a rank without parameters, and entries cannot be deleted.
    """

    _held: Mapping[Tensor, PieceRef]
    _check: Callable[[], None]  # raises while nothing may be read
    _check_write: Callable[[], None]  # or written
    _note: Callable[[], None] = lambda: None  # called after a write
    _trained: Callable[[Tensor], AbstractContextManager[object]] = nullcontext  # a parameter has its trained weights

    def __getitem__(self, param: Tensor) -> dict[str, Tensor]:
        self._check()
        if param not in self._held:
            return {}  # as with torch's defaultdict; another rank holds the state
        with self._trained(param):  # of which main values may be a part
            return ParamState(read_state(*self._held[param]), partial(self._write, param))

    def __setitem__(self, param: Tensor, saved: AnyState) -> None:
        self._check_write()
        unit, piece = self._held[param]
        if saved:
            check_state(unit, piece, saved)
            load_state_(unit, piece, saved)
        else:
            reset_state_(unit, piece)
        self._note()

    def _write(self, param: Tensor, name: str, value: Tensor) -> None:
        """Set one tensor. All others stay as they are now, which may be long after the state was read."""
        self[param] = {**read_state(*self._held[param]), name: value}

    def __delitem__(self, param: Tensor) -> None:
        raise TypeError("the state of a parameter cannot be deleted; assign {} to optimizer.state[param] to reset it")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, param: object) -> bool:
        return param in self._held

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ([(param, OrderedDict(state)) for param, state in self.items()],)

    def __repr__(self) -> str:
        return repr(dict(self))


class ParamState(PieceState):
    """The state of one parameter. Assigning a tensor writes it to the optimizer."""

    def __init__(self, values: Mapping[str, Tensor], write: Callable[[str, Tensor], None] | None = None):
        super().__init__(values)
        self._write = write  # None if a trainer constructed a copy of this type, with moved tensors

    def __setitem__(self, name: str, value: Tensor) -> None:
        if self._write is not None:
            self._write(name, value)
        super().__setitem__(name, value)


@dataclass(eq=False)
class StateOffload:
    """Moves the state of device units to the host and back, and follows parameters that other code moves. Units that
    live on the host are not moved.

    Copies use pinned memory and run on the side stream; the host does not wait for them. Work that is queued to the
    compute stream later waits for the copies, so freed memory is not overwritten too early.
    """

    stepper: Stepper
    loaded: LoadedWeights
    has_graphs: bool  # whether captured steps hold the addresses of parameters
    _away: list[list[Tensor]] | None = None  # while the state is on the host: the tensors of each allocation

    def check_restored(self, what: str, *, reads: bool = True) -> None:
        """Raise RuntimeError while the state is on the host; `what` names the call for the message. Follow parameters
        that were moved away and back since the last call. If the call `reads` state, wait until host memory has it."""
        if self._away is not None:
            raise RuntimeError(
                f"{what} while the state is on the host, between offload_to_cpu() and restore_from_cpu(); call "
                "optimizer.restore_from_cpu() first"
            )
        self._follow()
        if reads:
            for unit in self.stepper.units:
                unit.settle()

    def _follow(self, *, frees: bool = False) -> None:
        """Let units write parameters where these are now, if they are on their device again; with `frees`, keep no
        memory that they have left. Local. A step with parameters elsewhere is refused by its guard."""
        places = [source.place for source in self.stepper.sources if source.place.moved() is not None]
        if not places or self.has_graphs:
            return
        moved = {id for place in places for id in place.follow_(frees=frees)}
        for piece in (piece for unit in self.stepper.units for piece in unit.pieces):
            if piece.id in moved and is_dtensor(piece.param):
                piece.follow_()
        if moved:
            self.loaded.note_moved(moved)

    @torch.no_grad()
    def offload_(self) -> None:
        """Move the state to the host and free its device memory, and the memory that parameters have left; do nothing
        if it is on the host already.

        If host memory runs out, nothing has moved.
        """
        if self._away is None:
            device = self.stepper.accelerator
            self._follow(frees=device.is_asynchronous)
            units = self.stepper.units if device.is_asynchronous else ()
            pieces = [piece for unit in units if unit.host is None for piece in unit.pieces]
            # The main values of an fp8 parameter are the target themselves; the parameter has other memory.
            mains = [piece.main for piece in pieces]
            targets = [main.target for main in mains if all(tensor is not main.target for tensor in main.kept.values())]
            params = {target.untyped_storage().data_ptr() for target in targets}  # memory of parameters
            memories: dict[int, list[Tensor]] = {}  # of the state and of separate main values
            for piece in pieces:
                for tensor in (*piece.state.values(), *piece.main.kept.values()):
                    storage = tensor.untyped_storage()
                    address = storage.data_ptr()
                    if storage.nbytes() and address not in params and device.holds(tensor):
                        memories.setdefault(address, []).append(tensor)
            allocations = list(memories.values())
            self._move(allocations, lambda num_bytes: device.host_empty(num_bytes, torch.uint8, pinned=True))
            self._away = allocations

    @torch.no_grad()
    def restore_(self) -> None:
        """Move the state back to the device; do nothing if it is on the device already.

        If device memory runs out, the state is still on the host, and the call may be repeated.
        """
        if self._away is not None:
            device = self.stepper.device
            self._move(self._away, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device))
            self._away = None
            self._follow()

    def _move(self, memories: Sequence[list[Tensor]], empty: Callable[[int], Tensor]) -> None:
        """Move allocations to memory that `empty` returns for a number of bytes; all of it is there before a copy."""
        sources = []  # whole allocations, as (n,) uint8
        for tensors in memories:
            narrow = min(tensors, key=lambda tensor: tensor.dtype.itemsize).detach()
            numel = narrow.untyped_storage().nbytes() // narrow.dtype.itemsize
            sources.append(narrow.as_strided((numel,), (1,), 0).view(torch.uint8))
        targets = [empty(len(source)) for source in sources]
        device = self.stepper.accelerator
        current = device.current_stream()
        side = device.side_stream()
        side.wait_event(current.record_event())
        with device.on(side):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            done = side.record_event()
        current.wait_event(done)
        for tensors, memory in zip(memories, targets, strict=True):  # each views the same elements of the new memory
            for tensor in tensors:
                itemsize = tensor.dtype.itemsize
                elements = memory[: len(memory) - len(memory) % itemsize].view(tensor.dtype)
                tensor.data = elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


LOAD_ALIKE = "load the same checkpoint on all ranks after get_optimizer, or before it with broadcast_params=True"


@dataclass(eq=False, kw_only=True)
class SharedCopies:
    """The copies of weights, state, loss scale and norms of the last steps that several ranks hold."""

    model: Model
    roles: Roles
    held: Mapping[ParamId, PieceRef]
    scaler: Scaler
    spikes: Spikes | None
    loaded: LoadedWeights
    _is_first_step: bool = True

    def written(self) -> Written:
        """Return what other code wrote on this rank since its last step."""
        return self.loaded.written()

    def compare(self, written: Written) -> None:
        """Compare what any rank passes as written; all of them, if that includes state. Collective.

        Raises:
            ReplicaError: on every rank, if copies differ.
        """
        per_rank = self.roles.everyone.gather_objects(written)
        if any(of_rank.has_state for of_rank in per_rank):
            self._compare_all()
        else:
            self._compare_weights(frozenset[ParamId]().union(*(of_rank.ids for of_rank in per_rank)))

    def check_first_step(self) -> None:
        """Raise ReplicaError, on every rank, if a load before the first step made copies differ. Collective."""
        is_first_step = self._is_first_step
        self._is_first_step = False
        if is_first_step and self.roles.everyone.size > 1:
            is_whole = self.loaded.replaced() is None  # else every rank refuses the step for that
            per_rank = self.roles.everyone.gather_objects((is_whole, self.loaded.has_loaded()))
            if all(whole for whole, _ in per_rank) and any(has_loaded for _, has_loaded in per_rank):
                self._compare_all()
                self.loaded.accept_equal()

    def _compare_weights(self, only: Collection[ParamId] | None = None) -> None:
        """Compare all weights, or those of `only` some parameters, the same on all ranks. Collective."""
        for chunk in self.model.wrapped.values():
            chunk.finish_param_sync()
        try:
            check_replicas(self.model.params, self.model.metas, self.roles, only=only)
        except ValueError as error:  # on a rank whose replicas are equal, the error is another rank's
            raise ReplicaError(f"weights were loaded after the optimizer was built: {error}") from error

    def _compare_all(self) -> None:
        """Compare weights, state, loss scale and norms of the last steps. Collective."""
        self._compare_weights()
        for unit, _ in self.held.values():
            unit.settle()
        found = compare_copies(_sums_of_states(self.held), self.model.params, self.model.metas, self.roles)
        everyone = self.roles.everyone
        try:
            agree(everyone, None if found is None else ValueError(f"optimizer state: {found}; {LOAD_ALIKE}"))
        except ValueError as error:
            raise ReplicaError(str(error)) from error
        scales = everyone.gather_objects(self.scaler.state_dict())
        if any(scale != scales[0] for scale in scales):
            raise ReplicaError(f"ranks have different loss scales: {scales}; {LOAD_ALIKE}")
        windows = everyone.gather_objects(None if self.spikes is None else self.spikes.state_dict())
        if any(window != windows[0] for window in windows):
            raise ReplicaError(f"ranks have different norms or losses of the last steps (skip_sigma); {LOAD_ALIKE}")


def _sums_of_states(held: Mapping[ParamId, PieceRef]) -> dict[ParamId, int]:
    """Return a checksum of the state of each parameter that data-parallel replicas hold wholly and in the same form."""
    tensors: dict[tuple[ParamId, str], Tensor] = {}
    of_param: dict[ParamId, list[object]] = {}
    for id, (unit, piece) in held.items():
        if piece.replica is None and piece.is_whole:
            of_param[id] = [piece.step]
            whole = {spec.name for spec in unit.rule.state_specs if spec.whole}  # on the rank that computes the matrix
            tensors |= {(id, name): tensor for name, tensor in piece.state.items() if name not in whole}
            tensors |= {(id, f"main {number}"): tensor for number, tensor in enumerate(piece.main.kept.values())}
    for (id, name), number in checksums(tensors).items():
        of_param[id].append((name, number))
    return {id: crc32(repr(found).encode()) for id, found in of_param.items()}
