"""`StepResult`: the outcome of a step, read from the device on first access."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload


class _Values(NamedTuple):
    success: bool
    grad_norm: float
    num_zeros_in_grad: int | None


class StepResult(Sequence[Any]):
    """The triple (success, grad_norm, num_zeros_in_grad), the same on every rank.

    On an accelerator, the first access waits for the statistics of the step, but not for its update, and raises the
    errors that the step would have raised on a CPU. If a result is never accessed, the next step raises its errors.
    Until then, saving the state warns of them, and so does the end of the optimizer or of the interpreter.
    """

    __slots__ = ("_read", "_values")

    def __init__(self, success: bool, grad_norm: float, num_zeros_in_grad: int | None):
        self._values: _Values | None = _Values(success, grad_norm, num_zeros_in_grad)
        self._read: Callable[[], tuple[bool, float, int | None]] | None = None

    @classmethod
    def later(cls, read: Callable[[], tuple[bool, float, int | None]]) -> "StepResult":
        """Create a result whose values are returned by `read`, which is called once."""
        result = cls.__new__(cls)
        result._values, result._read = None, read
        return result

    @property
    def success(self) -> bool:
        """False after an overflow or with a norm above the limit: only the loss scale has changed."""
        return self._known.success

    @property
    def grad_norm(self) -> float:
        """L2 norm of the mean gradient, without loss scale, before clipping; infinite or NaN after an overflow."""
        return self._known.grad_norm

    @property
    def num_zeros_in_grad(self) -> int | None:
        """None unless zeros are counted."""
        return self._known.num_zeros_in_grad

    @property
    def _known(self) -> _Values:
        if self._values is None:
            assert self._read is not None
            self._values, self._read = _Values(*self._read()), None
        return self._values

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._known[index]

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, StepResult | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._known)

    def __repr__(self) -> str:
        return "StepResult" + repr(self._known).removeprefix("_Values")

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, tuple(self._known)
