"""The façade: a real `torch.optim.Optimizer` over a plan and its stepper."""

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.groups import Roles
from opt_distributed.step.stepper import Stepper, StepResult
from opt_paramgroups import ParamId
from opt_stack.evaluation import Evaluation
from opt_stack.gradient_statistics import GradientStatistics, InBackward
from opt_stack.live_state import LiveState
from opt_stack.model_state import find_values
from opt_stack.offload import StateOffload
from opt_stack.plan import Plan
from opt_stack.sharded_state import Held
from opt_stack.state_dicts import StateDicts

_HYPER = ("lr", "weight_decay", "betas", "eps", "momentum")


class Optimizer(GradientStatistics, StateDicts):
    """One step over any layout, behind torch's interface.

    `param_groups` hold the *model's* parameters; `get_parameters` gives what the rules write. `state` maps a parameter
    to this rank's state of it, a DTensor where the parameter is one. Built by `get_optimizer`; parameters cannot be
    added later: they are laid out by then.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        stepper: Stepper,
        groups: Sequence[Mapping[str, Any]],
        layout_id: str,
        rank_local: bool = False,  # whether ranks hold state of plain tensors that others do not
        roles: Roles,
        frozen: Sequence[tuple[str, nn.Parameter]] = (),  # of the model: no gradients, no groups
        wrapped: Sequence[DistributedDataParallel] = (),  # chunks whose gradients accumulate in buffers
    ):
        self.plan = plan
        self.stepper = stepper
        self._layout_id = layout_id
        self._rank_local = rank_local
        self.roles = roles  # the groups it was built for
        self._everyone = roles.everyone
        self._frozen = frozen
        self.wrapped = tuple(wrapped)
        self._built = False
        self.in_backward: InBackward | None = None  # updates parameters before `step` (`release_gradients`)
        self._ids: list[ParamId] = [id for group in groups for id in group["param_ids"]]
        # torch refuses an empty list, but a rank without parameters is legal: it still joins every collective.
        super().__init__(
            [dict(group) for group in groups] or [{"params": [], "param_ids": [], "name": "stub"}],
            defaults=_shared_hyper(groups),
        )
        self._built = True
        for chunk in wrapped:
            chunk.add_optimizer(self, self._ids)
        self._params: list[nn.Parameter] = [param for group in self.param_groups for param in group["params"]]
        self._held = {piece.id: Held(unit, piece) for unit in stepper.units for piece in unit.pieces}
        self.evaluation = Evaluation(stepper)
        self.offload = StateOffload(stepper)
        by_param: dict[Tensor, Held] = {held.piece.param: held for held in self._held.values()}
        self._live = LiveState(by_param, check=lambda: self.offload.check_restored("optimizer.state"))

    @property  # type: ignore[override]  # torch's is a defaultdict
    def state(self) -> MutableMapping[Tensor, dict[str, Tensor]]:
        """This rank's state by parameter, as `state_dict` has it: see `LiveState`."""
        return self._live

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        if self._built:
            raise AttributeError("state cannot be replaced; set it with load_state_dict, or assign to state[param]")

    # --- the step ---------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch annotates it in some versions only
    def step(self, closure: Callable[[], float] | None = None) -> StepResult:
        """Runs `closure`, if any, with gradients enabled; then one step. The same result on every rank.

        Warns once of parameters that were unfrozen after the optimizer was built: it does not train them.

        Raises:
            ValueError: `param_groups` hold other parameters than those the optimizer was built with.
        """
        self._check_params()
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._warn_of_unfrozen()
        return self.in_backward.finish() if self.in_backward is not None else self.stepper.step(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins an iteration: `param.grad` is None or zero, and the gradient buffers of wrapped chunks are zero.

        The same as `zero_grad_buffer()` of every wrapped chunk; both in one iteration do no harm. Where several
        optimizers share a chunk, its buffers are zeroed when all of them have been called.
        """
        super().zero_grad(set_to_none=set_to_none)
        if self.in_backward is not None:
            self.in_backward.drop()
        for chunk in self.wrapped:
            chunk.zero_grad_for(self)

    def prepare_grads(self) -> bool:
        """The first half of a step: reduce and look at the gradients. True where they overflowed. Warns and raises
        as `step`."""
        self._check_params()
        self._warn_of_unfrozen()
        if self.in_backward is not None:
            raise RuntimeError("gradients are released in backward, which has updated the parameters; call step()")
        return self.stepper.prepare_grads(self.param_groups)

    def step_with_ready_grads(self) -> bool:
        """The second half: clip, update, publish. False where the norm was refused."""
        self.check_ready("step_with_ready_grads()")
        return self.stepper.step_with_ready_grads(self.param_groups)

    def train(self, mode: bool = True) -> None:
        """Puts the weights that are trained back into the parameters, bit for bit; `train(False)` is `eval()`."""
        if mode:
            self.evaluation.end_()
        else:
            self.eval()

    def eval(self) -> None:
        """Puts the weights to evaluate with into the parameters, for rules that train others (schedule_free).

        All ranks call it together. Parameters have a copy until `train()`, without which nothing is stepped or loaded
        and no `sharded_state_dict` made: such a checkpoint always holds the trained weights. `state_dict()` may be
        saved, and has the copy.
        """
        self.offload.check_restored("eval()")
        self.evaluation.begin_(self.param_groups)

    def _check_params(self) -> None:
        """Refuse exchanged parameters, as Accelerate's FSDP2 leaves them: the new ones would never be updated."""
        self.check_ready("a step")
        present = [param for group in self.param_groups for param in group["params"]]
        if len(present) != len(self._params) or not all(map(is_, present, self._params)):
            raise ValueError(
                "param_groups hold other parameters than those that this optimizer was built with, as after "
                "Accelerate's FSDP2 `prepare(model, optimizer)` or an assignment; they are laid out when it is built. "
                "Shard or exchange the model's parameters first (`fully_shard`), then call get_optimizer"
            )

    def _warn_of_unfrozen(self) -> None:
        unfrozen = [name for name, param in self._frozen if param.requires_grad]
        if unfrozen:
            self._frozen = ()
            warnings.warn(
                f"{unfrozen[0]!r} (and {len(unfrozen) - 1} more) was frozen when the optimizer was built and is not "
                "trained by it; unfreeze it before the model is wrapped and the optimizer built",
                stacklevel=3,
            )

    # --- what it holds ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> OptimizerConfig:
        """What it was built from."""
        return self.plan.config

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether this rank's part of the model has no trainable parameter."""
        return not self._ids

    def get_parameters(self) -> list[Tensor]:
        """What this rank's rules write, in the groups' order: parameters themselves, or the main values beside them."""
        self.offload.check_restored("get_parameters()")
        return [self._held[id].piece.main.value() for id in self._ids if id in self._held]

    def init_state(self) -> None:
        """Nothing: state exists from construction, for every rule, and no parameter moves for it."""

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Takes the model's present values as main values, after they were loaded from elsewhere.

        With `state_dict` (name to tensor, one chunk's names or `{"model0": {...}, ...}`), main values come from there,
        in its precision.

        Raises:
            ValueError: a parameter of the model, on whichever rank it lives, that `state_dict` does not hold, or not in
                its shape and layout; nothing has changed.
        """
        self.check_ready("reload_model_params()")
        pieces = [held.piece for held in self._held.values()]
        if state_dict is None:
            for piece in pieces:
                piece.main.reload_()
            return
        params = {id: p for group in self.param_groups for id, p in zip(group["param_ids"], group["params"])}
        found = find_values(state_dict, params)
        for piece in pieces:
            piece.main.set_(found[piece.id].flatten()[piece.of_param].view(piece.main.shape))
        self.stepper.publish_set_()

    def offload_to_cpu(self) -> None:
        """Moves main values and state to pinned host memory, and gives their device memory back; parameters stay.

        The host does not wait. Until `restore_from_cpu` nothing is stepped, saved or loaded. Tensors of an earlier
        `state_dict` that are DTensors keep their memory alive. `torch.accelerator.empty_cache()` hands the memory to
        other processes. On a CPU nothing moves. A second call does nothing.

        Raises:
            ConfigError: `optimizer_cuda_graph`, whose graph holds the addresses of the state.
        """
        if self.config.optimizer_cuda_graph:
            raise ConfigError(
                "optimizer_cuda_graph=True: a captured step holds the addresses of the state, which would change; set "
                "it to False to call offload_to_cpu()"
            )
        self.offload.offload_()

    def restore_from_cpu(self) -> None:
        """Moves main values and state back beside the parameters; nothing happens where they are there. The host does
        not wait."""
        self.offload.restore_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once built: parameters are laid out over ranks by then."""
        if getattr(self, "_built", False):
            raise ValueError("parameters are laid out when the optimizer is built; build a new one with get_optimizer")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an Optimizer holds process groups and memory shared with its model, so it is not copied or pickled; build "
            "another with get_optimizer and load this one's state_dict"
        )


MegatronOptimizer = Optimizer  # the reference's name


def _shared_hyper(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The hyper-parameters that every group has, as the first has them: torch's OneCycleLR looks for betas there."""
    return {key: groups[0][key] for key in _HYPER if groups and all(key in group for group in groups)}
