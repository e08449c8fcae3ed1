"""Gradients that other code writes after backward, before the step reduces them over ranks."""

import warnings
from weakref import ref

import torch
from torch import nn

from opt_distributed.pieces import BufferedGrads
from opt_distributed.step import Stepper
from opt_paramgroups import ParamId
from opt_stack.wording import and_more, caller_level

NUM_ITERATIONS = 3
"""Iterations that are watched: a loop that clips does so from the start."""


class UnreducedGrads:
    """Warns once of gradients that were written in place between backward and the step that reduces them.

    `torch.nn.utils.clip_grad_norm_` would clip them by the norm of one rank. The first gradient of a backward pass lets
    the end of the pass note the versions of all gradients: other hooks may write them before. All hooks are removed
    after the warning, or after `NUM_ITERATIONS`.
    """

    def __init__(self, stepper: Stepper):
        self._max_norm = stepper.limits.max_norm  # for the message
        self._params = {
            id: param
            for source in stepper.sources
            if isinstance(source, BufferedGrads) and source.axes.num_replicas > 1  # torch counts no writes of DTensors
            for id, param in source.params.items()
        }
        self.num_expected = 0  # writes of each gradient since backward that are right
        self._versions: dict[ParamId, tuple[int, int]] = {}  # identity and version of each gradient after backward
        self._is_queued = False
        self._num_iterations = 0
        kept = ref(self)

        def hook(param: nn.Parameter) -> None:  # Python's garbage collector does not see through it
            if (grads := kept()) is not None:
                grads._note_later()

        params = self._params.values()
        self._hooks = [param.register_post_accumulate_grad_hook(hook) for param in params]  # type: ignore[no-untyped-call]

    def _note_later(self) -> None:
        """Note the versions when the present backward pass ends. If it fails, none are known."""
        if not self._is_queued:
            self.forget()
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._is_queued = False
        grads = ((at, param.grad) for at, param in self._params.items())
        self._versions = {at: (id(grad), grad._version) for at, grad in grads if grad is not None}

    def forget(self) -> None:
        """Compare nothing with the last backward pass."""
        self._versions = {}
        self._is_queued = False
        self.num_expected = 0

    def check(self) -> None:
        """Warn, at the start of a step, if gradients were written since the last backward pass."""
        written = []
        for at, (identity, version) in self._versions.items():
            grad = self._params[at].grad
            # The tensor that backward left, written more often than expected.
            if grad is not None and id(grad) == identity and grad._version - version > self.num_expected:
                written.append(at)
        self._num_iterations += bool(self._versions)
        self.forget()
        if written or self._num_iterations == NUM_ITERATIONS:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        if written:
            warnings.warn(
                f"the gradient of {and_more(written)} was written between backward and "
                "step(), but until step() averages it over ranks it is that of this rank: "
                "torch.nn.utils.clip_grad_norm_ clips it by the norm of one rank. To clip by the norm over all ranks, "
                "call optimizer.clip_grad_norm_(max_norm) instead, or leave clipping to step() and "
                f"OptimizerConfig(clip_grad={self._max_norm}). It is right to multiply gradients by the same number on "
                "all ranks",
                stacklevel=caller_level(),
            )
