"""`Guard`: a reason for which every rank refuses a step; `Refusal`: a guard for an error that a rank finds alone.

Two refusals that every step has stand here: gradients that must not be used, and parameters that have moved.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

from torch import Tensor

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.stored import StorageError
from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import Comm
from opt_distributed.pieces.piece import Groups
from opt_distributed.pieces.sources import Source


class Guard(Protocol):
    """Its flags are summed over ranks in the step's one reduction, so that every rank learns of an error in the step.

    It belongs to the `Stepper.guards` of every rank, in one order, before the first step. Flags and errors are local. A
    check that needs a collective of its own runs at the start of the next step (`Stepper.at_start`). An accelerator
    asks for the error after the step, at the latest when the next one begins, so a guard must not keep a model alive.
    """

    @property
    def num_flags(self) -> int:
        """The number of flags, equal on every rank."""
        ...

    def flags(self) -> Sequence[float]:
        """This rank's flags, once a step, after gradients were reduced. If it raises, every rank refuses the step."""
        ...

    def is_wrong(self, sums: Tensor) -> Tensor:
        """(1,) bool on the device: nothing may be written, given the sums of the flags, (num_flags,) float64."""
        ...

    def error(self, sums: Sequence[float]) -> Exception | None:
        """The error to raise on this rank if `is_wrong`, given the same sums.

        None withdraws the refusal, on a CPU: the step is made. On an accelerator its update has been skipped by then.
        """
        ...


class GuardError(ValueError):
    """Ranks have different guards, or a guard does not have the flags that it announces."""


def agreed_guards(guards: Sequence[Guard], everyone: Comm, instances: Comm) -> tuple[Guard, ...]:
    """Return the guards, after a check that all ranks have as many, of the same types and numbers of flags. Collective.

    Raises GuardError, on every rank.
    """
    here = [(type(guard).__name__, guard.num_flags) for guard in guards]
    try:
        of_instances = [here] if instances.size == 1 else instances.gather_objects(here)
        of_ranks = [of_instances] if everyone.size == 1 else everyone.gather_objects(of_instances)
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"comparison of guards: {error}") from error
    if any(there != here for found in of_ranks for there in found):
        different = sorted({str(there) for found in of_ranks for there in found})
        raise GuardError(
            f"ranks have different guards, by type and number of flags: {' and '.join(different)}; append the same "
            "guards on every rank, in one order, before the first step. Nothing was updated"
        )
    return tuple(guards)


@dataclass(slots=True)
class Inputs:
    """The inputs of the present step, for the guards. The stepper writes them before it asks for flags."""

    groups: Groups = ()
    refused: Exception | None = None  # why this rank's gradients must not be used, or a guard that failed


class Refusal(ABC):
    """An error that a rank finds without the others. Its flag: whether this rank has found one."""

    num_flags = 1
    found: Exception | None = None  # in this step

    @abstractmethod
    def find(self) -> Exception | None:
        """Return the error of this rank, if there is one."""

    def flags(self) -> Sequence[float]:
        self.found = self.find()
        return (float(self.found is not None),)

    def is_wrong(self, sums: Tensor) -> Tensor:
        return sums > 0

    def error(self, sums: Sequence[float]) -> Exception | None:
        return self.found or self.of_others(int(sums[0]))

    def of_others(self, num_ranks: int) -> Exception:
        """The error on a rank without one."""
        return UnusableGradientError(
            f"{num_ranks} other rank(s) refused their gradients or parameter groups; the message there names them. "
            "Nothing was updated"
        )


class UsableGrads(Refusal):
    """Gradients of a rank are sparse, lacking or were refused when reduced. The stepper notes it while it reads."""

    def __init__(self, inputs: Inputs):
        self._inputs = inputs

    def find(self) -> Exception | None:
        return self._inputs.refused


class ParamsInPlace(Refusal):
    """A parameter has left the memory that updates write to: compares addresses, or dtypes and devices, of all."""

    def __init__(self, sources: Iterable[Source]):
        self._sources = [ref(source) for source in sources]  # a guard must not keep the model alive

    def find(self) -> StorageError | None:
        for source in self._sources:
            found = source()
            id = None if found is None else found.moved()
            if id is not None:
                return self._error(f"parameter {str(id)!r}")
        return None

    def of_others(self, num_ranks: int) -> Exception:
        return self._error(f"a parameter on {num_ranks} other rank(s)")

    def _error(self, which: str) -> StorageError:
        return StorageError(
            f"{which} has left the memory that the optimizer updates: the model was converted or moved, or param.data "
            "was assigned, after the optimizer was built; convert and move the model first, then build the optimizer. "
            "Nothing was updated"
        )
