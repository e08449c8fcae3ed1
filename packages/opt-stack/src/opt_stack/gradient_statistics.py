"""What a caller may ask about the gradients of a step: norms, zeros, the loss scale."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from opt_distributed.comm.collectives import Comm, group_of
from opt_distributed.step.stepper import Stepper, StepResult
from opt_paramgroups import ParamId
from opt_stack.sharded_state import Held


class InBackward(Protocol):
    """What updates parameters in backward, in place of `step` (`release_gradients`)."""

    @property
    def grad_norm(self) -> float:
        """The model's gradient norm in the last iteration."""
        ...

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The norm of each separate norm group in the last iteration."""
        ...

    def finish(self) -> StepResult:
        """Ends the iteration."""
        ...

    def drop(self) -> None:
        """Begins an iteration anew."""
        ...


class GradientStatistics:
    """The questions about gradients that `Optimizer` answers, under Megatron-Core's names."""

    stepper: Stepper
    in_backward: InBackward | None
    param_groups: list[dict[str, Any]]
    _everyone: Comm
    _held: Mapping[ParamId, Held]

    def get_grad_norm(self, norm_type: float = 2.0) -> float:
        """The model's gradient norm before clipping, unscaled: that of the last `prepare_grads` or `step`.

        Any other than the 2-norm (`math.inf`: the largest element) is found from the gradients that are ready: all
        ranks ask together, between `prepare_grads` and `step_with_ready_grads`.

        Raises:
            RuntimeError: another norm, and no gradients are ready.
            ValueError: `norm_type` is not above 0.
        """
        if norm_type != 2.0:
            return self.stepper.norm(norm_type)
        return self.stepper.grad_norm if self.in_backward is None else self.in_backward.grad_norm

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Lets `step_with_ready_grads` clip to `clip_grad` in place of the configuration's; 0: not at all. Returns the
        model's norm before clipping.

        Gradients are not written: the update scales what it reads. Norm groups keep to their own norms, and groups with
        `clip_grad=False` are not clipped.

        Raises:
            RuntimeError: no gradients are ready; call it between `prepare_grads` and `step_with_ready_grads`.
            ValueError: `clip_grad` is below 0.
        """
        self.stepper.clip_to(clip_grad)
        return self.stepper.grad_norm

    def count_zeros(self) -> int:
        """Zero elements of the model's gradients, each counted once; all ranks ask together.

        Raises:
            RuntimeError: no gradients are ready; call it between `prepare_grads` and `step_with_ready_grads`.
        """
        return self.stepper.count_zeros()

    def has_grad_norm_group(self, name: str) -> bool:
        """Whether a parameter on any rank has `grad_norm_group=name`; all ranks ask together.

        Raises:
            ValueError: there is no norm group of that name.
        """
        slots = self.stepper.limits.slots
        if name not in slots:
            raise ValueError(f"grad_norm_group {name!r}: {', '.join(map(repr, slots))} are allowed")
        mine = any(piece.norm_slot == slots.index(name) for _, piece in self._held.values())
        return any(self._everyone.gather_objects(mine))

    def get_grad_stats_parallel_group(self) -> ProcessGroup | None:
        """The group over which norms and zeros are summed; None for a process alone, or where `Roles` are no groups."""
        return group_of(self.stepper.everyone)

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The last step's norm of each separate norm group; "" is the model's own.

        A parameter group with `clip_grad=False` (through `config_overrides`) is left out of it and never clipped: its
        norm stands under its rule's name. For rules whose update does not depend on the gradient's scale, such as Muon.
        """
        return (self.in_backward or self.stepper).grad_norms_by_group

    def get_loss_scale(self) -> Tensor:
        """Shape (1,), fp32: what the loss is multiplied by at present; 1 without loss scaling."""
        factor = self.stepper.scaler.factor
        if isinstance(factor, Tensor):
            return factor.to(torch.float32).view(1)
        return torch.full((1,), factor, dtype=torch.float32, device=self._device())

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, in the loss's own shape and dtype."""
        factor = self.stepper.scaler.factor
        if not isinstance(factor, Tensor):
            return loss * factor
        scaled = loss * factor.to(torch.promote_types(loss.dtype, torch.float32))  # 2**16 is no fp16 number
        return scaled.to(loss.dtype)

    def _device(self) -> torch.device:
        return next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
