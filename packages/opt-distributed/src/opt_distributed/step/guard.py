"""`Guard`: a reason for which every rank refuses a step; `Refusal`: a guard for an error that a rank finds alone."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol
from weakref import ref

from torch import Tensor

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.stored import StorageError
from opt_distributed.pieces.piece import Groups
from opt_distributed.pieces.sources import Source


class Guard(Protocol):
    """Its flags are summed over ranks in the step's one reduction, so that every rank learns of an error in the step.

    It belongs to the `Stepper.guards` of every rank, in one order, before the first step. Flags are local, and so are
    errors, except that of `WrittenReplicas` on a CPU, which compares copies. On an accelerator, a check that needs a
    collective of its own runs at the start of the next step (`Stepper.at_start`). An accelerator
    asks for the error after the step, at the latest when the next one begins, so a guard must not keep a model alive:
    it holds the parts that it asks by weak references.
    """

    @property
    def num_flags(self) -> int:
        """The number of flags, equal on every rank."""

    def flags(self, groups: Groups) -> Sequence[float]:
        """This rank's flags, once a step, after gradients were reduced, given the groups of the step. If it raises,
        every rank refuses the step."""

    def is_wrong(self, sums: Tensor) -> Tensor:
        """(1,) bool on the device: nothing may be written, given the sums of the flags, (num_flags,) float64."""

    def error(self, sums: Sequence[float]) -> Exception | None:
        """The error to raise on this rank if `is_wrong`, given the same sums.

        None withdraws the refusal, on a CPU: the step is made. On an accelerator its update has been skipped by then.
        """


class Refusal(ABC):
    """An error that a rank finds without the others. Its flag: whether this rank has found one."""

    num_flags = 1
    found: Exception | None = None  # in this step

    @abstractmethod
    def find(self, groups: Groups) -> Exception | None:
        """Return the error of this rank, if there is one, given the groups of the step."""

    def flags(self, groups: Groups) -> Sequence[float]:
        self.found = self.find(groups)
        return (float(self.found is not None),)

    def is_wrong(self, sums: Tensor) -> Tensor:
        return sums > 0

    def error(self, sums: Sequence[float]) -> Exception | None:
        return self.found or self.of_others(int(sums[0]))

    def of_others(self, num_ranks: int) -> Exception:
        """The error on a rank without one."""
        return UnusableGradientError(
            f"{num_ranks} other rank(s) refused their gradients, parameter groups or weights; the message there names "
            "them. Nothing was updated"
        )


class UsableGrads(Refusal):
    """Gradients are sparse or were refused when reduced, a captured step lacks one, or another guard failed."""

    def find(self, groups: Groups) -> Exception | None:
        """Return what `Guards.refuse` has set. It may set more while other guards are asked."""
        return self.found


class ParamsInPlace(Refusal):
    """A parameter has left the memory that updates write to: compares addresses, or dtypes and devices, of all."""

    def __init__(self, sources: Iterable[Source]):
        self._sources = [ref(source) for source in sources]  # a guard must not keep the model alive

    def find(self, groups: Groups) -> StorageError | None:
        sources = (source for found in self._sources if (source := found()) is not None)
        id = next((id for source in sources if (id := source.place.moved()) is not None), None)
        return None if id is None else self._error(f"parameter {str(id)!r}")

    def of_others(self, num_ranks: int) -> Exception:
        return self._error(f"a parameter on {num_ranks} other rank(s)")

    def _error(self, which: str) -> StorageError:
        return StorageError(
            f"{which} has left the memory that the optimizer updates: the model was converted, or is on another device "
            "than when the optimizer was built; move it back first, or convert it before the optimizer is built. "
            "Nothing was updated"
        )
