"""Guard: gradients of a rank must not be used, because they are sparse, lacking or were refused when reduced."""

from opt_distributed.buffers.stored import UnusableGradientError
from opt_distributed.step.guards.guard import Inputs, Refusal


class UsableGrads(Refusal):
    """The stepper has found the error while it reduced and read the gradients."""

    def __init__(self, inputs: Inputs):
        self._inputs = inputs

    def find(self) -> UnusableGradientError | None:
        return self._inputs.refused
