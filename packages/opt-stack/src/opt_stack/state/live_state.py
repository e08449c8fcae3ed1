"""`Optimizer.state`: a mapping that reads and writes the live state of each parameter."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from opt_distributed.step.state import PieceState, check_state, load_state_, read_state
from opt_stack.state.sharded_state import Held


class LiveState(MutableMapping[Tensor, dict[str, Tensor]]):
    """State by parameter, with the names of `state_dict`; DTensors for DTensor parameters.

    Reading returns a dict of tensors that share the state's memory, except `step` and main values joined from a
    remainder. Assigning a dict sets the parameter's whole state, as loading does. State exists from construction, so
    the mapping is truthy even on a rank without parameters, and entries cannot be deleted.
    """

    def __init__(self, held: Mapping[Tensor, Held], *, check: Callable[[], None] = lambda: None):
        self._held = held
        self._check = check  # raises while nothing may be read or written

    def __getitem__(self, param: Tensor) -> dict[str, Tensor]:
        self._check()
        if param not in self._held:
            return {}  # as with torch's defaultdict; another rank holds the state
        held = self._held[param]
        return ParamState(read_state(held.unit, held.piece), held)

    def __setitem__(self, param: Tensor, saved: Mapping[str, Any]) -> None:
        self._check()
        unit, piece = self._held[param]
        check_state(unit, piece, saved)
        load_state_(unit, piece, saved)

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

    def __init__(self, values: Mapping[str, Tensor], held: Held | None = None):
        super().__init__(values)
        self._held = held  # None if a trainer constructed a copy of this type, with moved tensors

    def __setitem__(self, name: str, value: Tensor) -> None:
        changed = {**self, name: value}
        if self._held is not None:
            unit, piece = self._held
            check_state(unit, piece, changed)
            load_state_(unit, piece, changed)
        super().__setitem__(name, value)
