"""What an optimizer shows of its state: by parameter, with weights for evaluation, and moved to the host."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_distributed.comm import device as devices
from opt_distributed.pieces import OwnedPiece, QuantizedMain, local
from opt_distributed.saving import PieceState, check_state, decoded, kept_states, load_state_, read_state
from opt_distributed.step import Stepper, Unit, read_hyper
from opt_kernels.formulas import Formula
from opt_kernels.hooks import bare
from opt_kernels.rules import ElementwiseRule

Groups = Sequence[Mapping[str, Any]]


class Held(NamedTuple):
    """This rank's piece of a parameter and the unit whose rule updates it."""

    unit: Unit
    piece: OwnedPiece


class LiveState(MutableMapping[Tensor, dict[str, Tensor]]):
    """State by parameter, with the names of `state_dict`; DTensors for DTensor parameters.

    Reading returns a dict of tensors that share the state's memory, except `step` and main values joined from a
    remainder. Assigning a dict sets the parameter's whole state, as loading does. State exists from construction, so
    the mapping is truthy even on a rank without parameters, and entries cannot be deleted.
    """

    def __init__(
        self,
        held: Mapping[Tensor, Held],
        *,
        check: Callable[[], None] = lambda: None,  # raises while nothing may be read or written
        note: Callable[[], None] = lambda: None,  # called after a write
    ):
        self._held, self._check, self._note = held, check, note

    def __getitem__(self, param: Tensor) -> dict[str, Tensor]:
        self._check()
        if param not in self._held:
            return {}  # as with torch's defaultdict; another rank holds the state
        held = self._held[param]
        return ParamState(read_state(held.unit, held.piece), held, note=self._note)

    def __setitem__(self, param: Tensor, saved: Mapping[str, Any]) -> None:
        self._check()
        unit, piece = self._held[param]
        check_state(unit, piece, saved)
        load_state_(unit, piece, saved)
        self._note()

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

    def __init__(
        self, values: Mapping[str, Tensor], held: Held | None = None, *, note: Callable[[], None] = lambda: None
    ):
        super().__init__(values)
        self._held = held  # None if a trainer constructed a copy of this type, with moved tensors
        self._note = note  # called after a write

    def __setitem__(self, name: str, value: Tensor) -> None:
        changed = {**self, name: value}
        if self._held is not None:
            unit, piece = self._held
            check_state(unit, piece, changed)
            load_state_(unit, piece, changed)
            self._note()
        super().__setitem__(name, value)


class Evaluation:
    """Switches parameters between training and evaluation weights; for most rules the two are the same."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        rules = {unit.name: bare(unit.rule) for unit in stepper.units}
        self._formulas = {  # of units whose rules evaluate other weights than they train
            name: rule.formula
            for name, rule in rules.items()
            if isinstance(rule, ElementwiseRule) and rule.formula.evaluation is not None
        }
        self.rules = {unit.rule.name for unit in stepper.units if unit.name in self._formulas}
        self._trained: dict[Tensor, Tensor] | None = None  # copies of the trained weights, in evaluation mode

    def check_training(self, what: str) -> None:
        """Raise RuntimeError in evaluation mode; `what` names the call for the message."""
        if self._trained is not None:
            raise RuntimeError(
                f"{what} in evaluation mode: the parameters hold averaged weights; call optimizer.train() first, and "
                "optimizer.eval() for evaluation"
            )

    @property
    def is_evaluating(self) -> bool:
        """Whether the parameters hold the evaluation weights."""
        return self._trained is not None

    def keeps_weights_of(self, unit: Unit) -> bool:
        """Return whether the rule of `unit` keeps weights of its own in its state."""
        return unit.name in self._formulas

    @contextmanager
    def with_trained_weights(self) -> Iterator[None]:
        """Show the trained weights in this rank's parameters inside the context; no communication."""
        trained = self._trained or {}
        shown = {param: local(param).detach().clone() for param in trained}
        try:
            _write_(trained)
            yield
        finally:
            _write_(shown)

    @torch.no_grad()
    def resume_(self, groups: Groups) -> None:
        """Begin evaluation after a load that set only the main values of each rank's own pieces. Collective."""
        for unit in self.stepper.units:
            for source in unit.completes if unit.name in self._formulas else ():
                source.publish_()
        self.begin_(groups)

    @torch.no_grad()
    def begin_(self, groups: Groups) -> None:
        """Write the evaluation weights to the parameters of all ranks. Collective."""
        if self._trained is not None or not self.rules:
            return
        moved = [param for group in groups if group["optimizer"] in self.rules for param in group["params"]]
        self._trained = {param: local(param).detach().clone() for param in moved}
        for unit in self.stepper.units:
            for piece in unit.pieces if unit.name in self._formulas else ():
                if piece.step:
                    assert not isinstance(piece.main, QuantizedMain)
                    piece.main.target.copy_(_evaluated(self._formulas[unit.name], unit, piece, groups))
            for source in unit.completes:
                source.publish_()

    def end_(self) -> None:
        """Restore the trained weights in the parameters, bit for bit; no communication."""
        _write_(self._trained or {})
        self._trained = None


@torch.no_grad()
def _write_(weights: Mapping[Tensor, Tensor]) -> None:
    """Copy values to the local part of each parameter."""
    for param, values in weights.items():
        local(param).copy_(values)


def _evaluated(formula: Formula, unit: Unit, piece: OwnedPiece, groups: Groups) -> Tensor:
    def evaluate(groups: Groups, value: Tensor) -> Tensor:
        hyper = read_hyper(groups[piece.group], step=piece.step, own=formula.own_numbers)
        states = {spec.name: decoded(unit, piece, spec).float() for spec in kept_states(unit, piece)}
        return formula.evaluated(value.float(), states, hyper)

    value = piece.main.value()
    if unit.host is None:
        return evaluate(groups, value)
    here = unit.host.device.to_host(value)
    with unit.host.device.on_host():
        return evaluate(unit.host.numbers_of(groups), here)


class StateOffload:
    """Moves the state of device units to the host and back. Units that live on the host are not moved.

    Copies use pinned memory and run on the side stream; the host does not wait for them. Work that is queued to the
    compute stream later waits for the copies, so freed memory is not overwritten too early.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._units = [unit for unit in stepper.units if unit.host is None]
        self._place = stepper.device
        self._device = devices.device_of(stepper.device)
        self._away: list[list[Tensor]] | None = None  # while the state is on the host: the tensors of each allocation

    def check_restored(self, what: str) -> None:
        """Raise RuntimeError while the state is on the host; `what` names the call for the message."""
        if self._away is not None:
            raise RuntimeError(
                f"{what} while the state is on the host, between offload_to_cpu() and restore_from_cpu(); call "
                "optimizer.restore_from_cpu() first"
            )

    @torch.no_grad()
    def offload_(self) -> None:
        """Move the state to the host and free its device memory; do nothing if it is on the host already.

        If host memory runs out, nothing has moved.
        """
        if self._away is None:
            memories: dict[int, list[Tensor]] = {}
            for tensor in self._tensors() if self._device.is_asynchronous else ():
                memories.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
            sources = [_whole(tensors) for tensors in memories.values()]
            targets = [self._device.host_empty(len(source), torch.uint8, pinned=True) for source in sources]
            self._move(list(memories.values()), sources, targets)
            self._away = list(memories.values())

    @torch.no_grad()
    def restore_(self) -> None:
        """Move the state back to the device; do nothing if it is on the device already.

        If device memory runs out, the state is still on the host, and the call may be repeated.
        """
        if self._away is not None:
            sources = [_whole(tensors) for tensors in self._away]
            targets = [torch.empty(len(source), dtype=torch.uint8, device=self._place) for source in sources]
            self._move(self._away, sources, targets)
            self._away = None

    def _move(self, memories: Sequence[list[Tensor]], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        current, side = self._device.current_stream(), self._device.side_stream()
        side.wait_event(current.record_event())
        with self._device.on(side):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            done = side.record_event()
        current.wait_event(done)
        for tensors, target in zip(memories, targets, strict=True):
            self.show_in_(tensors, target)

    @staticmethod
    def show_in_(tensors: Sequence[Tensor], memory: Tensor) -> None:
        """Make `tensors` view the same elements of `memory`, (n,) uint8, as of the allocation in which they are.

        That is freed with the last tensor that views it.
        """
        for tensor in tensors:
            itemsize = tensor.dtype.itemsize
            elements = memory[: len(memory) - len(memory) % itemsize].view(tensor.dtype)
            tensor.data = elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the state on the device and separate main values, except tensors that share a parameter's memory."""
        pieces = [piece for unit in self._units for piece in unit.pieces]
        kept = [piece.main.kept() for piece in pieces]
        # The main values of an fp8 parameter are the target themselves; the parameter has other memory.
        targets = [
            piece.main.target
            for piece, beside in zip(pieces, kept, strict=True)
            if all(tensor is not piece.main.target for tensor in beside)
        ]
        params = {target.untyped_storage().data_ptr() for target in targets}
        for piece, beside in zip(pieces, kept, strict=True):
            for tensor in (*piece.state.values(), *beside):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in params and self._device.holds(tensor):
                    yield tensor


def _whole(tensors: Sequence[Tensor]) -> Tensor:
    """Return the whole allocation in which `tensors` are, as (n,) uint8."""
    narrow = min(tensors, key=lambda tensor: tensor.dtype.itemsize).detach()
    numel = narrow.untyped_storage().nbytes() // narrow.dtype.itemsize
    return narrow.as_strided((numel,), (1,), 0).view(torch.uint8)
