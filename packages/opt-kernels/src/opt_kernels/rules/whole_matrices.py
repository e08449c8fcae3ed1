"""The phases of a rule that transforms gradients of whole matrices."""

from collections.abc import Sequence

from torch import Tensor

from opt_kernels.backends.elements import skipped
from opt_kernels.codecs import StateCodec
from opt_kernels.rules.base import MatrixRule, Needs, update_in_phases_
from opt_kernels.works import Batch, Task


class WholeMatrices(MatrixRule):
    """A rule that transforms gradients of whole matrices directly. The host reads the step and the skip flag.

    A final class has `name`, `state_specs`, `init_state`, `transform_` and `apply_`.
    """

    __slots__ = ()

    @property
    def needs(self) -> Needs:
        return Needs.MATRICES

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """Empty: states are stored without encoding."""
        return {}

    @property
    def tp_mode(self) -> None:
        """None: the rule needs whole matrices."""
        return None

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        if skipped(skip):
            return
        for batch in batches:
            update_in_phases_(self, [batch], grad_scale=grad_scale, skip=None)

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Do nothing: `transform_` takes gradients directly."""
