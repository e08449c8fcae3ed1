"""`GradHook`: what a wrapped parameter does in backward when its gradient is complete."""

from weakref import ref

from torch import Tensor, nn

from opt_distributed.buffers.binding import SparseGradientError, adopt_main_grad_, take_grad_
from opt_distributed.buffers.grad_sync import GradSync
from opt_paramgroups import ParamId


class GradHook:
    """Adds the gradient of a parameter to its accumulator, and notes that it is there.

    Python's garbage collector does not see through hooks of tensors, so this one must not keep the wrapper alive.
    """

    def __init__(self, grad_sync: GradSync, id: ParamId, accumulator: Tensor):
        self._grad_sync = ref(grad_sync)
        self._id, self._accumulator = id, accumulator

    def __call__(self, param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        grad_sync = self._grad_sync()
        if grad_sync is None:  # the wrapper is gone
            return
        grad_sync.check_accumulating(self._id)
        adopt_main_grad_(param, self._accumulator, str(self._id))
        try:
            take_grad_(param, str(self._id))
        except SparseGradientError as error:
            param.grad = None
            grad_sync.refuse(self._id, error)
        grad_sync.note(self._id)
