"""Statistics of a step's gradients for the caller: norms, zero counts, the loss scale."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from opt_distributed.comm import group_of
from opt_distributed.step import StepResult
from opt_paramgroups import is_dtensor
from opt_stack.diagnosis.recorder import Callback
from opt_stack.diagnosis.tensor_stats import StepStats
from opt_stack.state.state_dicts import StateDicts


class InBackward(Protocol):
    """Updates parameters in backward instead of in `step` (`release_gradients`)."""

    @property
    def grad_norms_by_group(self) -> dict[str, float]: ...  # in the last iteration; empty before the first

    def finish(self) -> StepResult: ...  # ends the iteration

    def drop(self) -> None: ...  # restarts the iteration


@dataclass(slots=True)
class LossScaleUse:
    """Whether the caller has read the loss scale. Lightning copies an optimizer's attributes; copies share this one."""

    was_read: bool = False


@dataclass(slots=True)
class ClippedGrads:
    """Gradients that `clip_grad_norm_` has prepared for the next `step`. Shared by copies, as `LossScaleUse`."""

    are_ready: bool = False
    overflow: bool = False


class GradientStatistics(StateDicts):
    """The gradient statistics of `Optimizer`, under Megatron-Core's names."""

    in_backward: InBackward | None
    _loss_scale: LossScaleUse

    def stats_every(
        self,
        n: int,
        callback: Callback | None = None,
        *,
        directory: str | Path | None = None,
        spectrum: bool = False,
        forward: nn.Module | None = None,
    ) -> None:
        """Record the statistics of the next step and every `n` steps after it; 0 stops. Collective.

        Only recorded steps pay: they read gradients, main weights and updates once more, keep a copy of the main
        weights that this rank counts during the update, and make one more all-reduce. `optimizer.stats()` returns the
        last record. Weights in host memory are measured by their parameters.

        Args:
            n: number of steps.
            callback: called on every rank with the `StepStats` of each record, and of each skipped step; on an
                accelerator in a later step, once the numbers have arrived.
            directory: where the last 100 records are written (`directory/recording`), when state is saved, after an
                error in a step, when the optimizer is deleted, and at exit; usually that of the checkpoints.
                `python -m opt_stack why` reads them.
            spectrum: also compute the largest / smallest singular value of the matrices of Muon and SOAP, by a
                decomposition of each whole matrix.
            forward: a model, to note the first of its modules that overflows in a forward pass, so that `why` names
                the layer; each rank records its own. A hook on every module reads the inputs and the output of each
                call in training once more, in all steps; the host does not wait. The next call of `stats_every` and
                the end of the optimizer remove the hooks. Call it before torch.compile traces the model.

        Raises:
            ValueError: `n` is negative, or ranks differ in `n`, `spectrum`, or whether there is a directory.
            RuntimeError: gradients are released in backward.
        """
        if n and self.in_backward is not None:
            raise RuntimeError("stats_every: gradients are released in backward, before a step could record them")
        self.complete_params()
        self.recorder.start(n, callback, directory, spectrum, forward, next_step=self.stepper.num_begun + 1)

    @torch.no_grad()
    def note_loss(self, loss: Tensor | float) -> None:
        """Note a loss of the next step, before `scale_loss`: of a micro-batch, or of the iteration.

        The loss of a step is the mean of all losses that all ranks noted since the step before: call it on any ranks
        (the last pipeline stage), any number of times. The step sums them in the all-reduce of its norms; the host
        waits for nothing. A mean that is infinite or NaN skips the step, as does a spike (`skip_sigma`). Steps without
        a loss are judged by their gradients only. `StepStats.loss` has the mean. Losses of backward passes whose step
        is never taken, as after an overflow that torch's `GradScaler` found, count in the next one. A load of state
        forgets them, and so does `zero_grad` after `clip_grad_norm_`.

        Args:
            loss: a number, or a tensor of one element, on any device.

        Raises:
            ValueError: `loss` has another number of elements, or is a DTensor.
            RuntimeError: gradients are released in backward.
        """
        if self.in_backward is not None:
            raise RuntimeError("note_loss: gradients are released in backward, before a step could be skipped")
        if is_dtensor(loss):
            raise ValueError("note_loss: the loss is a DTensor; pass loss.full_tensor()")
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    f"note_loss: the loss has shape {tuple(loss.shape)}; pass one element, such as loss.mean()"
                )
            loss = loss.reshape(())
        self.stepper.losses.note(loss)

    def stats(self) -> StepStats:
        """Return the numbers of the last recorded or skipped step: norms of gradient, weight and update of every
        parameter and group of the whole model. The same on every rank; the host waits for them.

        Raises:
            RuntimeError: no step was recorded; see `stats_every`.
        """
        return self.recorder.last()

    def report(self) -> str:
        """Return how many steps were applied, skipped and refused, why, and the numbers of the last record, as text.

        Steps of gradients released in backward are not counted, nor those that `prepare_grads` or `clip_grad_norm_`
        refuses with an error on an accelerator.
        """
        return self.recorder.report()

    def get_grad_norm(self, norm_type: float = 2.0) -> float:
        """Return the model's unscaled gradient norm before clipping, of the last `prepare_grads` or `step`.

        Norms other than the 2-norm (`math.inf`: the largest element) are computed from the prepared gradients: that is
        collective, and allowed only between `prepare_grads` and `step_with_ready_grads`.

        Raises:
            RuntimeError: `norm_type` is not 2, and no gradients are ready.
            ValueError: `norm_type` is not above 0.
        """
        if norm_type != 2.0:
            return self.stepper.prepared(f"for a {norm_type}-norm").norm(norm_type, everyone=self.stepper.everyone)
        return self.stepper.grad_norm if self.in_backward is None else self.grad_norms_by_group.get("", 0.0)

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Set the norm to which `step_with_ready_grads` clips, in place of the configuration's; 0 disables clipping.
        Return the model's norm before clipping.

        Gradients are not written: the update scales them while reading. Separate norm groups are clipped by their own
        norms, and groups with `clip_grad=False` are not clipped.

        Raises:
            RuntimeError: no gradients are ready; call it between `prepare_grads` and `step_with_ready_grads`.
            ValueError: `clip_grad` is below 0.
        """
        self.stepper.clip_to(clip_grad)
        return self.stepper.grad_norm

    def count_zeros(self) -> int:
        """Return the number of zeros in the model's gradients, each element counted once. Collective.

        Raises:
            RuntimeError: no gradients are ready; call it between `prepare_grads` and `step_with_ready_grads`.
        """
        return self.stepper.prepared("to count zeros in").num_zeros(everyone=self.stepper.everyone)

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """Return the gradients of this rank's parts that a norm counts, each element of the model on one rank: means in
        fp32, without the loss scale, before clipping. The tensors are copies.

        `grad_norm_group`: a separate norm group. None: the model's own norm.

        Raises:
            RuntimeError: no gradients are ready; call it between `prepare_grads` and `step_with_ready_grads`.
            ValueError: no norm group has this name.
        """
        slot = self._check_norm_group(grad_norm_group or "")
        return self.stepper.prepared("to read them").counted_grads(slot)

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Return whether a parameter on any rank is in the norm group of this name. Collective.

        Raises:
            ValueError: no norm group has this name.
        """
        slot = self._check_norm_group(grad_norm_group)
        self.complete_params()
        is_local = any(piece.norm_slot == slot for _, piece in self._held.values())
        return any(self._everyone.gather_objects(is_local))

    def _check_norm_group(self, name: str) -> int:
        slots = self.stepper.limits.slots
        if name not in slots:
            raise ValueError(f"grad_norm_group {name!r}: allowed are {', '.join(map(repr, slots))}")
        return slots.index(name)

    def get_grad_stats_parallel_group(self) -> ProcessGroup | None:
        """Return the group over which norms and zeros are summed; None for one process, or without process groups."""
        return group_of(self.stepper.everyone)

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The norms of the last step by norm group; "" is the model's own.

        Parameter groups with `clip_grad=False` (through `config_overrides`) are not clipped and not part of the model's
        norm; their norm is under their rule's name. Meant for rules that ignore the gradient's scale, such as Muon.
        """
        return (self.in_backward or self.stepper).grad_norms_by_group

    def get_loss_scale(self) -> Tensor:
        """Return the current loss scale, fp32 of shape (1,); 1 without loss scaling."""
        self._loss_scale.was_read = True
        factor = self.stepper.scaler.factor
        if isinstance(factor, Tensor):
            return factor.to(torch.float32).view(1)
        return torch.full((1,), factor, dtype=torch.float32, device=self.stepper.device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale, in the shape and dtype of the loss."""
        self._loss_scale.was_read = True
        factor = self.stepper.scaler.factor
        if not isinstance(factor, Tensor):
            return loss * factor
        scaled = loss * factor.to(torch.promote_types(loss.dtype, torch.float32))  # 2**16 does not fit into fp16
        return scaled.to(loss.dtype)
