"""Gradient release: update each parameter in backward as soon as its gradient is complete, then free the gradient.

As in torch's optimizer-in-backward tutorial and FlashOptim, only gradients in flight need memory, so bf16 parameters
with 16-bit remainders and 8-bit moments take six bytes per element in all, and five with 8-bit remainders
(`main_params_dtype=torch.int8`). Weights are bit-equal to the ordinary step, except with stochastic rounding. Decisions
that need all gradients (a clip coefficient, a skipped step) are not available, and configurations that ask for them are
refused.
"""

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from opt_config import ConfigError, NoScale, changed_fields
from opt_distributed.buffers import StorageError
from opt_distributed.pieces import ParamGrads, Ready, Update, check_dense, check_unfused
from opt_distributed.step import StepResult
from opt_kernels.backends import grad_stats
from opt_kernels.precision import without_autocast
from opt_kernels.rules import ElementwiseRule, Needs
from opt_stack.optimizer import Optimizer


def release_gradients(optimizer: Optimizer) -> "GradientRelease":
    """Let `optimizer` update in backward from now on. The training loop stays: backward, `step()`, `zero_grad()`.

    `step()` ends the iteration. It returns the gradient norm, and success if all gradients were finite. After the first
    infinite or NaN gradient of an iteration, no more parameters are updated; earlier updates stay. The same holds if
    backward raises half-way. Learning rates are read in backward, so set them before it. `zero_grad()` cannot discard a
    gradient: backward has applied it.

    Raises:
        ConfigError: the configuration, a rule or the layout does not allow it; the message says which. A ValueError.
    """
    if optimizer.in_backward is not None:
        raise ConfigError("release_gradients: this optimizer releases its gradients already; call it once")
    problem = next(_problems(optimizer), None)
    if problem is not None:
        raise ConfigError(f"release_gradients: {problem}")
    return GradientRelease(optimizer)


class GradientRelease:
    """The hooks that update parameters in backward, until `remove`."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self._updated: set[Tensor] = set()  # in this iteration; parameters hash by identity
        self._device = optimizer.stepper.device
        self._last_norms: Tensor | None = None  # (slots,) float64, of the last iteration that `step()` ended
        self._restart()
        self._parts = {
            piece.param: (unit, piece, piece.source.reader([(piece.id, piece.of_param)]))
            for unit in optimizer.stepper.units
            for piece in unit.pieces
        }
        self._stored: dict[Tensor, Any] = {param: (param.dtype, param.device) for param in self._parts}
        kept = ref(self)

        def hook(param: nn.Parameter) -> None:  # runs when the gradient is complete
            if (release := kept()) is not None:
                release.update_(param)

        # Python's garbage collector does not see through hooks of tensors, so they must not keep the optimizer alive.
        register = nn.Parameter.register_post_accumulate_grad_hook
        self._handles: list[RemovableHandle] = [register(param, hook) for param in self._parts]  # type: ignore[no-untyped-call]
        optimizer.in_backward = self

    def remove(self) -> None:
        """Let the optimizer update in `step()` again, from the next iteration on.

        Raises:
            RuntimeError: parameters have been updated since the last `step()`; call that first.
        """
        if self._updated:
            raise RuntimeError("parameters were updated in backward since the last step(); call step() first")
        for handle in self._handles:
            handle.remove()
        self.optimizer.in_backward = None

    def finish(self) -> StepResult:
        """End the iteration: return its result and reset the statistics.

        Raises UnusableGradientError if the gradient of a parameter is in ``main_grad``, so that backward has not
        updated it.
        """
        for param, (_, piece, _) in self._parts.items():
            if param not in self._updated:
                check_unfused(piece.id, param)
        norms = self._squares.sqrt()
        skip = self._skip
        self._last_norms = norms
        if self._updated:
            self.optimizer.loaded_weights.note_step()
        self._restart()
        return StepResult.later(lambda: (not bool(skip), float(norms[0]), None))

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The norms of the last iteration by group, as `Optimizer.grad_norms_by_group`; empty before the first."""
        slots = self.optimizer.stepper.limits.slots
        return {} if self._last_norms is None else dict(zip(slots, self._last_norms.tolist(), strict=True))

    def drop(self) -> None:
        """Restart the iteration, also after a backward pass that may have failed. Warns if it has updated parameters:
        they keep these updates, and a retried backward adds another."""
        if self._updated:
            warnings.warn(
                f"zero_grad() dropped an iteration in which backward had updated {len(self._updated)} of "
                f"{len(self._parts)} parameters already: these updates stay, and a retried backward updates the "
                "same parameters again; load a checkpoint to undo them",
                RuntimeWarning,
                stacklevel=3,  # the caller of `zero_grad`
            )
        self._restart()

    def _restart(self) -> None:
        """Forget the updates and statistics of this iteration."""
        self._updated.clear()
        slots = self.optimizer.stepper.limits.slots
        with torch.inference_mode(False):  # a backward pass must be able to write them
            self._squares = torch.zeros(len(slots), dtype=torch.float64, device=self._device)  # one sum for each norm
            self._skip = torch.zeros((), dtype=torch.bool, device=self._device)

    @torch.no_grad()
    @without_autocast()
    def update_(self, param: nn.Parameter) -> None:
        """Update a parameter by its gradient, and free the gradient.

        Raises:
            RuntimeError: the parameter was updated in this iteration already, was converted or moved, the optimizer is
                in evaluation mode, or its state is on the host.
        """
        unit, piece, read = self._parts[param]
        if (param.dtype, param.device) != self._stored[param]:
            raise StorageError(
                f"parameter {str(piece.id)!r} was converted or moved after the optimizer was built; convert and "
                "move the model first, then build the optimizer"
            )
        (grad,) = read()
        assert grad is not None
        check_dense([piece.id], [grad])
        self.optimizer.check_ready("a backward pass that updates parameters", reads=False)
        if not self._updated and (problem := self.optimizer.loaded_weights.problem()) is not None:
            raise problem
        if param in self._updated:
            raise RuntimeError(
                f"a second gradient of {str(piece.id)!r} arrived before optimizer.step(), but gradients released in "
                "backward cannot accumulate; call step() after every backward pass, or do not release gradients"
            )
        if not self._updated:
            self.optimizer.stepper.check_groups(self.optimizer.param_groups)
        self._updated.add(param)
        found = grad_stats([grad], count_zeros=False)
        self._squares[piece.norm_slot] += found.sum_of_squares.to(self._device)
        self._skip |= (found.nonfinite > 0).to(self._device)
        if self._device.type != "cpu" or not self._skip:
            # Backward may still need the old value, for example through a detached view. The version makes that an
            # error.
            torch.autograd.graph.increment_version(param)
            scales = [1.0] * (1 + piece.norm_slot)
            skip = None if self._device.type == "cpu" else self._skip
            for _ in unit.updating_(Update(Ready([piece], [grad]), self.optimizer.param_groups, scales, skip)):
                pass
        param.grad = None


_ALL_GRADS = "needs the norm of all gradients before the first update"
_AT_END = "averages all weights at the end of a step"
_REFUSED = {
    "grad_norm_skip_threshold": _ALL_GRADS,
    "skip_sigma": _ALL_GRADS,
    "log_num_zeros_in_grad": "needs gradients that are already freed",
    "optimizer_cuda_graph": "captures a whole step",
    "optimizer_cpu_offload": "copies gradients to the host in parts of a step",
    "fp8_recipe": "quantises parameters in step()",
    "ema_decay": _AT_END,
    "ema_nesterov_beta": _AT_END,
}
"""Fields of the configuration that gradient release does not allow, and why."""


def _problems(optimizer: Optimizer) -> Iterator[str]:
    """Yield the reasons why gradients of this optimizer cannot be released."""
    config = optimizer.config
    if config.clip_grad > 0 and "" in optimizer.plan.norms:
        yield f"clip_grad={config.clip_grad} {_ALL_GRADS}; set clip_grad=0.0"
    for name in changed_fields(config, _REFUSED):
        yield f"{name}={getattr(config, name)!r} {_REFUSED[name]}; leave it at its default"
    if not isinstance(config.loss_scaling, NoScale):
        yield "a loss scale skips whole steps that overflow; use bf16 or fp32, without loss_scale"
    if optimizer.recorder.every:
        yield "statistics are recorded in a step, from gradients that are already freed; call stats_every(0)"
    roles = optimizer.roles
    if roles.everyone.size > 1 or roles.dense.num_replicas > 1:
        yield (
            f"gradients of {roles.everyone.size} ranks are reduced after backward; gradient release supports one "
            "process only; shard over ranks without it"
        )
    for unit in optimizer.stepper.units:
        if any(not isinstance(piece.source, ParamGrads) for piece in unit.pieces):
            yield (
                "gradients of DistributedDataParallel chunks and of DTensors are complete only after backward; pass a "
                "plain module"
            )
        if not isinstance(unit.rule, ElementwiseRule):
            kind = "batches matrices" if unit.rule.needs is Needs.MATRICES else "may update parameters together"
            yield f"rule {unit.rule.name!r} {kind}; allowed are elementwise rules without hooks that need norms"
