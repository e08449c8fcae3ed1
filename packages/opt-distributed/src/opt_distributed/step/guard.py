"""`Guard`: a reason for which every rank refuses a step; `Refusal`: a guard for an error that a rank finds alone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.pieces.piece import Groups


class Guard(Protocol):
    """Its flags are summed over ranks in the step's one reduction, so that every rank learns of an error in the step.

    All ranks append it to `Stepper.guards` in the same order, before the first step. Flags are local, and so are
    errors, except that of `WrittenReplicas` on a CPU, which compares copies. On an accelerator, a check that needs a
    collective of its own runs at the start of the next step (the `at_start` of `Stepper`), and the error is asked for
    after the step, at the latest when the next one begins. So a guard must not keep a model alive: it refers weakly to
    the parts that it asks.
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
