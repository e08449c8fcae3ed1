"""`Guard`: a reason for which every rank refuses a step; `Refusal`: a guard for an error that a rank finds alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from opt_distributed.buffers.stored import UnusableGradientError

Groups = Sequence[Mapping[str, Any]]


class Guard(Protocol):
    """Its flags are summed over ranks in the step's one reduction, so that every rank learns of an error in the step.

    It belongs to the `Stepper.guards` of every rank, in one order. Flags and errors are local. A check that needs a
    collective of its own runs at the start of the next step (`Stepper.at_start`). An accelerator asks for the error
    after the step, at the latest when the next one begins, so a guard must not keep a model alive.
    """

    @property
    def num_flags(self) -> int:
        """The number of flags, equal on every rank."""
        ...

    def flags(self) -> Sequence[float]:
        """This rank's flags, once a step, after gradients were reduced."""
        ...

    def is_wrong(self, sums: Tensor) -> Tensor:
        """(1,) bool on the device: nothing may be written, given the sums of the flags, (num_flags,) float64."""
        ...

    def error(self, sums: Sequence[float]) -> Exception | None:
        """The error to raise on this rank if `is_wrong`, given the same sums.

        None withdraws the refusal, on a CPU: the step is made. On an accelerator its update has been skipped by then.
        """
        ...


@dataclass(slots=True)
class Inputs:
    """The inputs of the present step, for the guards. The stepper writes them before it asks for flags."""

    groups: Groups = ()
    refused: UnusableGradientError | None = None  # why this rank's gradients must not be used


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
