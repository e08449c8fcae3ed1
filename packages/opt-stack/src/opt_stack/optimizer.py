"""`Optimizer`: a `torch.optim.Optimizer` over a plan and its stepper."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from opt_config import ConfigError, NoScale, OptimizerConfig
from opt_distributed.buffers import AwaitedGroup, stored_params
from opt_distributed.comm import agreed
from opt_distributed.pieces import FullySharded
from opt_distributed.saving import reset_state_
from opt_distributed.step import Stepper, StepResult
from opt_paramgroups import ParamGroup
from opt_stack.building.parts import Parts
from opt_stack.diagnosis.recorder import Recorder
from opt_stack.gradient_statistics import ClippedGrads, GradientStatistics, InBackward, LossScaleUse
from opt_stack.planning.design import Design
from opt_stack.rules.entries import ParamGroups
from opt_stack.state import AnyState
from opt_stack.state.live import LiveState, PieceRef, SharedCopies, StateOffload
from opt_stack.state.state_dicts import find_values
from opt_stack.state.weights import refuse_on_all
from opt_stack.torch_scaler import check_scaler
from opt_stack.unreduced_grads import UnreducedGrads
from opt_stack.wording import and_more

_HYPER = ("lr", "weight_decay", "betas", "eps", "momentum")


class Optimizer(GradientStatistics):
    """An optimizer for any layout, with the interface of `torch.optim.Optimizer`. Built by `get_optimizer`.

    `param_groups` hold the *model's* parameters; `get_parameters` returns the tensors that the rules write. `state`
    maps a parameter to this rank's part of its state, as a DTensor if the parameter is one. Parameters cannot be added
    later, because their layout over ranks is fixed.
    """

    def __init__(
        self,
        design: Design,
        parts: Parts,
        stepper: Stepper,
        *,
        groups: ParamGroups,
        layout_id: str,
        rank_local: bool,  # whether any rank holds a part of the state that other ranks do not
        copies: SharedCopies,
        recorder: Recorder,
    ):
        chunks = design.request.chunks
        self.plan = design.plan
        self.stepper = stepper
        self._layout_id = layout_id
        self._rank_local = rank_local
        self.roles = design.roles  # the process groups it was built for
        self._everyone = self.roles.everyone
        self._copies = copies
        # Parameters without gradients, in no group.
        self._frozen = [named for chunk in chunks for named in chunk.named_parameters() if not named[1].requires_grad]
        self.wrapped = tuple(design.model.wrapped.values())  # chunks whose gradients accumulate in buffers
        self.fully_sharded = FullySharded(chunks)
        self._built = False
        self._loss_scale = LossScaleUse()
        self.in_backward: InBackward | None = None  # updates parameters before `step` (`release_gradients`)
        self._ids = [id for group in groups for id in group["param_ids"]]
        overlapping = [chunk.param_sync for chunk in self.wrapped if chunk.ddp_config.overlap_param_gather]
        super().__init__(
            [AwaitedGroup(group, overlapping) if overlapping else dict(group) for group in groups],
            # torch's OneCycleLR reads the hyper-parameters that every group has.
            defaults={key: groups[0][key] for key in _HYPER if all(key in group for group in groups)},
        )
        self._built = True
        for chunk in self.wrapped:
            chunk.add_optimizer(self, self._ids)
        self._held = parts.held
        self.recorder = recorder
        self._unreduced_grads: UnreducedGrads | None = None  # of plain chunks on several ranks
        if self._everyone.size > 1:
            self._unreduced_grads = UnreducedGrads(stepper)
        self._clipped = ClippedGrads()
        self.evaluation = parts.evaluation
        self.loaded_weights = parts.loaded
        self.offload = StateOffload(stepper, parts.loaded, has_graphs=self.config.optimizer_cuda_graph)
        by_param: dict[Tensor, PieceRef] = {held.piece.param: held for held in self._held.values()}
        reads = partial(self.offload.check_restored, "optimizer.state")
        writes = partial(self.check_ready, "an assignment to optimizer.state")
        self._live = LiveState(by_param, reads, writes, self.loaded_weights.note_state_load, self._with_trained)

    @property  # type: ignore[override]  # torch's is a defaultdict
    def state(self) -> MutableMapping[Tensor, dict[str, Tensor]]:
        """This rank's state by parameter, with the names of `state_dict`; see `LiveState`."""
        return self._live

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        if self._built:
            raise AttributeError(
                "optimizer.state cannot be replaced; call load_state_dict, or assign to optimizer.state[param]"
            )

    @contextmanager
    def _with_trained(self, param: Tensor) -> Iterator[None]:
        """Show the trained weights in a parameter inside the context; no communication."""
        if not self.evaluation.is_evaluating:
            yield
            return
        with self.loaded_weights.writing_without_step(), self.evaluation.with_trained_weights([param]):
            yield

    # --- the step ---------------------------------------------------------------------------------------------------

    @_disable_dynamo  # `torch.compiler.disable` would load dynamo, which takes a second, when this is imported
    def step(  # type: ignore[override]  # torch's returns the loss of the closure
        self, closure: Callable[[], float] | None = None
    ) -> StepResult:
        """Run `closure` with gradients enabled, if it is given, then take one step. Every rank gets the same result.

        Under torch.compile the graph breaks here. Warns once if parameters were unfrozen after the optimizer was built:
        they are not trained.

        Raises:
            ValueError: the loss scale is set, and `closure` has not read it; `param_groups` of this rank hold an entry
                that no step can use; or on every rank, if ranks have other numbers in their groups (HyperError), or a
                parameter has left its memory (StorageError).
            RuntimeError: gradients of this rank are sparse or cannot be reduced; or on every rank, if on one
                `param_groups` hold other parameters than those the optimizer was built with (there a ValueError, too),
                weights were loaded into the model that the update would lose, or parameters of a wrapped model were
                frozen since it was built.
            ReplicaError: on every rank, if replicas differ after a load or another write.

        Where one rank refuses a step, all do, most often the others by an UnusableGradientError, a RuntimeError. On an
        accelerator with several ranks the step is skipped on the device, and the first access to its result, or the
        next step, raises the error. `opt_distributed.step.stepper` says what each rank does.
        """
        self.check_ready("a step", reads=False)
        if closure is not None:
            if self._clipped.are_ready:
                raise RuntimeError(
                    "clip_grad_norm_() has prepared gradients, but step(closure) computes others; call it in the "
                    "closure, after backward"
                )
            self._loss_scale.was_read = False
            with torch.enable_grad():
                closure()
            self._check_scaled()
        self._warn_of_unfrozen()
        if self.in_backward is not None:
            self.stepper.check_params(self.param_groups)
            return self.in_backward.finish()
        if self._clipped.are_ready:
            self._clipped.are_ready = False
            if not self._clipped.overflow:
                self.step_with_ready_grads()
            return self.stepper.result()
        with self.recorder.on_error(self.stepper.num_begun + 1):
            result = self.stepper.step(self._groups_of_step())
        self.evaluation.note_rates(self.param_groups)
        self.loaded_weights.note_step()
        return result

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Let the next `step` clip gradients to `max_norm`, in place of `OptimizerConfig.clip_grad`. Return their norm.

        In place of `torch.nn.utils.clip_grad_norm_`, which does not see the gradients of other ranks. Collective. Call
        it after the last backward pass of an iteration: it reduces the gradients, and the step uses these. They are not
        written: the update scales them while reading.

        A further call changes the norm of the step only, unless gradients were written since.

        Raises:
            ValueError: `max_norm` is below 0, which means no clipping.
        """
        if not (self._clipped.are_ready and self.stepper.has_ready_grads()):
            self._clipped.are_ready = False
            self._clipped.overflow = self.prepare_grads()
            self._clipped.are_ready = True
        return self.stepper.grad_norm if self._clipped.overflow else self.clip_grad_norm(max_norm)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: torch's `GradScaler` unscales the gradients, and may skip `step`.

        The scaler's own `step` reads this on every rank, also where it then skips ours. Raises ConfigError there if
        only some ranks could skip.
        """
        self.expect_scaler(sys._getframe(1).f_locals.get("self"))
        return False

    def expect_scaler(self, scaler: object) -> None:
        """Take gradients that torch's `scaler` has unscaled. Raises ConfigError if only some ranks could skip, or the
        step would divide by a loss scale, too."""
        check_scaler(scaler, self.config, self.stepper, self._everyone.size)
        if self._unreduced_grads is not None:
            self._unreduced_grads.num_expected = 1

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step` as torch does, with its hooks; ranks that wait for this one learn of an error of a hook or of the
        closure, too."""
        hooked = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        @_disable_dynamo
        def step(self: "Optimizer", *args: Any, **options: Any) -> Any:
            with self.stepper.telling(self.stepper.num_begun + (not self._clipped.are_ready)):
                return hooked(self, *args, **options)

        return step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: set `param.grad` to None or zero, and the gradient buffers of wrapped chunks to zero.

        Does what `zero_grad_buffer()` of every wrapped chunk does; calling both is harmless. If several optimizers
        share a chunk, its buffers are zeroed once `zero_grad` of all of them has been called.
        """
        groups = self.param_groups
        self.param_groups = [{"params": stored_params(group)} for group in groups]  # gradients wait for no gather
        try:
            super().zero_grad(set_to_none=set_to_none)
        finally:
            self.param_groups = groups
        if self.in_backward is not None:
            self.in_backward.drop()
        self.drop_ready_grads()
        if self._unreduced_grads is not None:
            self._unreduced_grads.forget()
        for chunk in self.wrapped:
            chunk.zero_grad_for(self)

    def drop_ready_grads(self) -> None:
        """Forget gradients that were prepared for a step, because they are cleared. Wrapped chunks call it, too."""
        self._clipped.are_ready = False
        self.stepper.drop_ready_grads()
        self.stepper.losses.forget(noted=False)

    def prepare_grads(self) -> bool:
        """Take the first half of a step: reduce the gradients and compute their norm. Return whether they overflowed.

        Warns and raises like `step`.
        """
        with self.stepper.telling(self.stepper.num_begun + 1):
            self.check_ready("a step", reads=False)
            self._warn_of_unfrozen()
            if self.in_backward is not None:
                raise RuntimeError("gradients are released in backward, which has updated the parameters; call step()")
            with self.recorder.on_error(self.stepper.num_begun + 1):
                return self.stepper.prepare_grads(self._groups_of_step())

    def step_with_ready_grads(self) -> bool:
        """Take the second half of a step: clip, update, all-gather. Return False if the norm was above
        `grad_norm_skip_threshold`, or the norm or the loss was a spike, and so nothing was updated.

        Raises ValueError, on every rank, if numbers of `param_groups` or of `clip_grad_norm` differ between ranks.
        """
        with self.stepper.telling(self.stepper.num_begun):
            self.check_ready("step_with_ready_grads()", reads=False)
            self._clipped.are_ready = False
            with self.recorder.on_error(self.stepper.num_begun):
                made = self.stepper.step_with_ready_grads(self.param_groups)
        self.evaluation.note_rates(self.param_groups)
        self.loaded_weights.note_step()
        return made

    def train(self, mode: bool = True) -> None:
        """Restore the trained weights in the parameters, bit for bit, after `eval()`; `train(False)` is `eval()`."""
        if not mode:
            self.eval()
        elif self.evaluation.is_evaluating:
            self.complete_params()
            with self.loaded_weights.writing_without_step():
                self.evaluation.end_()

    def eval(self) -> None:
        """Replace the parameters by the weights to evaluate: averages (`ema_decay`), EMA-Nesterov's without look-ahead,
        or those of rules that evaluate other weights than they train (schedule_free). Collective.

        The trained weights are kept as a copy until `train()`. Until then, steps, loads and `sharded_state_dict` are
        refused, because a sharded checkpoint always holds the trained weights. `state_dict()` is allowed: it includes
        the copy.

        Raises UnusableGradientError, on every rank, after a load or another write of weights that it would not show.
        """
        self.offload.check_restored("eval()")
        self.complete_params()
        if self.evaluation.has_other_weights and not self.evaluation.is_evaluating:
            refuse_on_all(self._everyone, self.loaded_weights.problem())
        with self.loaded_weights.writing_without_step():
            self.evaluation.begin_(self.param_groups, self.complete_params)

    def _groups_of_step(self) -> list[ParamGroup]:
        """Return the groups for the next step, after what must come before its first exchange."""
        if self._unreduced_grads is not None:
            self._unreduced_grads.check()
        # Before any other exchange: a rank whose forward reads parameters has started them, and waits for the others.
        for chunk in self.wrapped:
            chunk.param_sync.start_all()
        self.fully_sharded.reshard_()  # after a forward without backward, whose weights the update makes old
        self._copies.check_first_step()
        return self.param_groups

    def _check_scaled(self) -> None:
        """Raise if gradients would be divided by a loss scale by which the closure has not multiplied the loss."""
        if not self._loss_scale.was_read and not isinstance(self.config.loss_scaling, NoScale):
            raise ValueError(
                f"fp16={self.config.fp16}, loss_scale={self.config.loss_scale}: the step divides gradients by the loss "
                "scale, but the closure has not called optimizer.scale_loss(loss); call it before backward (in "
                "Lightning: return self.optimizers().scale_loss(loss) from training_step), or train in bf16 or fp32"
            )

    def _warn_of_unfrozen(self) -> None:
        unfrozen = [name for name, param in self._frozen if param.requires_grad]
        if unfrozen:
            self._frozen = []
            warnings.warn(
                f"{and_more(unfrozen)} was frozen when the optimizer was built, so it "
                "is not trained; unfreeze parameters before wrapping the model and building the optimizer",
                stacklevel=4,
            )

    # --- what it holds ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> OptimizerConfig:
        """The configuration that the optimizer was built from."""
        return self.plan.config

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether this rank's part of the model has no trainable parameter."""
        return not self._ids

    def get_parameters(self) -> list[Tensor]:
        """Return the tensors that this rank's rules write, in the order of the groups: parameters, or main values.

        Raises:
            RuntimeError: in evaluation mode, or while the state is on the host.
        """
        self.check_ready("get_parameters()")
        return [self._held[id].piece.main.value() for id in self._ids if id in self._held]

    def init_state(self) -> None:
        """Do nothing: the state of every rule exists from construction. Part of Megatron-Core's interface."""

    def prepare_model_params_for_param_sync(self) -> None:
        """Do nothing: a step writes the parameters before it returns. Part of Megatron-Core's interface."""

    def reload_model_params(self, state_dict: AnyState | None = None) -> None:
        """Copy the model's current values to the main values, after a weight load that bypassed the optimizer.

        Averages of weights, and rules that keep weights of their own (schedule_free), start anew from the loaded
        weights.

        With `state_dict` (name to tensor, one chunk's names or `{"model0": {...}, ...}`), main values are read from it,
        in its precision, and the parameters are set from them. This is collective if ranks hold different parts of the
        state, or with fp8 parameters.

        Raises:
            ValueError: `state_dict` lacks a parameter of the model, or has it in another shape or layout. Every rank
                checks all parameters of its model; nothing has changed.
        """
        self.check_ready("reload_model_params()")
        self.complete_params()
        pieces = [held.piece for held in self._held.values()]
        if state_dict is None:
            for piece in pieces:
                piece.main.reload_()
        else:
            params = {id: p for group in self.param_groups for id, p in zip(group["param_ids"], group["params"])}
            found = agreed(self._load_peers, lambda: find_values(state_dict, params))
            for piece in pieces:
                piece.main.set_(found[piece.id].flatten()[piece.of_param].view(piece.main.shape))
        for unit, piece in self._held.values():
            unit.restart_averages_(piece)
            if unit.name in self.evaluation.formulas:
                reset_state_(unit, piece)
        self.loaded_weights.note_state_load()
        if state_dict is not None:
            self.stepper.publish_main_values_()

    def reset_state(self) -> None:
        """Set the rules' state and their counts of updates to those before the first step, as for a new phase of
        training. Weights, main values, numbers of `param_groups` and the loss scale stay.

        Call it on all ranks. Rules that keep weights of their own in their state (schedule_free) start from the present
        ones.

        Raises:
            RuntimeError: in evaluation mode, or while the state is on the host.
        """
        self.check_ready("reset_state()")
        self.complete_params()
        for unit, piece in self._held.values():
            reset_state_(unit, piece)
        self.loaded_weights.note_state_load()

    def offload_to_cpu(self) -> None:
        """Move main values and state to pinned host memory and free their device memory; parameters stay. If they were
        moved away before, as by `model.to("cpu")`, this also frees the memory that they have left.

        The host does not wait for the copies. Until `restore_from_cpu`, steps, saves and loads are refused. DTensors of
        an earlier `state_dict` keep their device memory alive. Call `torch.accelerator.empty_cache()` to return the
        memory to other processes. On a CPU nothing moves. A second call does nothing.

        Raises:
            ConfigError: `optimizer_cuda_graph` is set; the captured graph holds the addresses of the state.
        """
        if self.config.optimizer_cuda_graph:
            raise ConfigError(
                "optimizer_cuda_graph=True: a captured step holds the addresses of the state, which offload_to_cpu() "
                "would change; set it to False to call offload_to_cpu()"
            )
        self.offload.offload_()

    def restore_from_cpu(self) -> None:
        """Move main values and state back to the device of the parameters; do nothing if they are there already.

        The host does not wait for the copies.
        """
        self.offload.restore_()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Raise ValueError: the layout of parameters over ranks is fixed when the optimizer is built."""
        if self._built:
            raise ValueError(
                "the layout of parameters is fixed when the optimizer is built; build a new one with get_optimizer"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an Optimizer holds process groups and memory shared with its model, so it is not copied or pickled; build "
            "another with get_optimizer and load this one's state_dict"
        )


MegatronOptimizer = Optimizer  # Megatron-Core's name
