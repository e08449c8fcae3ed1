"""The stack inside trainers that replace the model's parameters: Accelerate, the Hugging Face Trainer.

torchtitan and Megatron-Bridge have modules that import them.
"""

import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel, WorldSizes
from opt_distributed.comm import agreed
from opt_distributed.step import StepResult
from opt_kernels.hooks import GivenHooks
from opt_kernels.params import HOOKS
from opt_paramgroups import ParamGroup
from opt_paramgroups.overrides import ConfigOverrides
from opt_stack.factory import get_optimizer_based_on_param_groups, make_design, make_request, read_groups
from opt_stack.optimizer import Optimizer
from opt_stack.rules.registry import Registry
from opt_stack.state import AnyState
from opt_stack.state.live import LiveState
from opt_stack.state.state_dicts import match, packed_groups, set_group_

__all__ = ["DeferredOptimizer", "StackFactory"]


class DeferredOptimizer(torch.optim.Optimizer):
    """The optimizer of a model whose parameters will be replaced, as by Accelerate's `prepare(model, optimizer)`.

    It has parameter groups from the start, so schedulers can be made of it, and it checks the configuration. The
    optimizer itself is built from these groups by the first call of `build`, `step`, `eval`, `load_state_dict` with
    state, or `state_dict` after parameters were replaced. Building is collective: all ranks make that first call
    together. Reading an attribute never communicates; before then, `built` and the entries of `state` raise.

    Attributes of the original parameters, such as `is_embedding_or_output_parameter`, are copied to the parameters that
    replace them.

    It has only the interface of torch's optimizers; use `built` for the rest (`plan`, `get_grad_norm`, ...).

    Args:
        config, config_overrides, mesh, broadcast_params, rules, hooks, allow_unmatched, extra_group_keys: as for
            `get_optimizer`.
        model: the model that will be passed to `prepare`.

    Raises:
        ConfigError (a ValueError), on every rank: as `get_optimizer`; errors that depend on the final parameters are
            raised when the optimizer is built.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: nn.Module,
        config_overrides: ConfigOverrides | None = None,
        *,
        mesh: DeviceMesh | None = None,
        broadcast_params: bool = False,
        rules: Registry | None = None,
        hooks: GivenHooks = (),
        allow_unmatched: bool = False,
        extra_group_keys: Collection[str] = (),
    ):
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; pass the module itself, as to Accelerate's prepare")
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                "model is wrapped in opt_stack.DistributedDataParallel, which keeps its parameters; use get_optimizer"
            )
        self._built: Optimizer | None = None
        self._state_expected = False  # whether the next `state_dict()` builds the optimizer, so that it includes state
        request = make_request(
            config,
            model,
            mesh=mesh,
            rules=rules,
            hooks=hooks,
            extra_group_keys=extra_group_keys,
            overrides=config_overrides,
            allow_unmatched=allow_unmatched,
        )
        of_model, given = read_groups(request)
        design = agreed(request.roles.everyone, lambda: make_design(request, of_model, given, WorldSizes()))
        # The hooks are recorded again when the optimizer is built.
        groups = [{name: group[name] for name in group if name != HOOKS} for group in design.groups.groups]
        of_all = [key for key in ("lr", "betas", "momentum") if all(key in group for group in groups)]
        super().__init__(groups, defaults={key: groups[0][key] for key in of_all})
        # Weak, so that the memory of parameters that are replaced can be freed.
        self._originals = [ref(param) for param in self._present()]
        self._attributes = [dict(vars(param)) for param in self._present()]
        self._make = partial(
            get_optimizer_based_on_param_groups,
            config,
            [model],
            mesh=mesh,
            broadcast_params=broadcast_params,
            rules=request.registry,
            hooks=hooks,
            extra_group_keys=extra_group_keys,
        )

    def build(self) -> Optimizer:
        """Build the optimizer, if no earlier call has, and return it. Collective; call it after `prepare`.

        Raises:
            ConfigError (a ValueError), on every rank: as `get_optimizer`.
        """
        if self._built is None:
            for param, attributes in zip(self._present(), self._attributes, strict=True):
                for key, value in attributes.items():  # a parameter that replaced another has lost them
                    vars(param).setdefault(key, value)
            built = self._make(self.param_groups)
            # torch's `_optimizer_state_dict_pre_hooks`, ..._post_hooks, and those of load_state_dict.
            for name, hooks in vars(self).items():
                if name.startswith("_optimizer_") and "state_dict" in name:
                    setattr(built, name, hooks)
            self._built = built
        return self._built

    @property
    def built(self) -> Optimizer:
        """The optimizer. Never communicates.

        Raises:
            RuntimeError: it is not built yet.
        """
        if self._built is None:
            _raise_not_built("built")
        return self._built

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups. After the optimizer is built, this is another list."""
        return self._groups if self._built is None else self._built.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        if self._built is None:
            self._groups = groups
        else:
            self._built.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, Any]:
        """This rank's state by parameter: that of `built`; before it is built, a mapping without entries."""
        return _NoState(self) if self._built is None else self._built.state

    @state.setter
    def state(self, value: Mapping[Tensor, Any]) -> None:
        if hasattr(self, "_make"):  # torch's constructor sets an empty one
            self.built.state = value

    def step(self, closure: Callable[[], float] | None = None) -> StepResult:  # type: ignore[override]
        """Take one step of `built`. Collective, as is `build`."""
        return self.build().step(closure)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As that of `Optimizer`. Collective, as is `build`, inside the `step` of torch's `GradScaler`."""
        scaler = sys._getframe(1).f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler):
            self.build().expect_scaler(scaler)
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zero."""
        if self._built is None:
            super().zero_grad(set_to_none=set_to_none)
        else:
            self._built.zero_grad(set_to_none=set_to_none)

    def train(self, mode: bool = True) -> None:
        """Call `Optimizer.train`, for rules that evaluate with other weights. Does nothing before it is built."""
        if not mode:
            self.eval()
        elif self._built is not None:
            self._built.train()

    def eval(self) -> None:
        """Call `Optimizer.eval`, for rules that evaluate with other weights. Collective, as is `build`."""
        self.build().eval()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Raise an error after construction, as `Optimizer` does."""
        if hasattr(self, "_make"):
            raise ValueError("the model's parameters are grouped when the optimizer is made; make a new one")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `built`. Before parameters are replaced, the groups without state.

        Collective, as is `build`, after parameters were replaced, and inside torch.distributed.checkpoint, which loads
        into the state that is returned here.
        """
        if self._is_untouched() and not self._state_expected:
            return {"state": {}, "param_groups": packed_groups(self.param_groups, rank_local=False)}
        return self.build().state_dict()

    def load_state_dict(self, state_dict: AnyState, **options: Any) -> None:
        """Call `Optimizer.load_state_dict`. Loading groups without state does not build the optimizer."""
        if self._is_untouched() and not options and state_dict.get("state") == {}:
            matched = match(state_dict, self.param_groups)
            for group, saved in zip(self.param_groups, matched.groups, strict=True):
                set_group_(group, saved)
            return
        self.build().load_state_dict(state_dict, **options)

    def _is_untouched(self) -> bool:
        """Return whether it is not built, and no parameter was replaced."""
        kept = (original() is param for original, param in zip(self._originals, self._present(), strict=True))
        return self._built is None and all(kept)

    def _present(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DeferredOptimizer belongs to its model, so it is not copied or pickled; make another and load this "
            "one's state_dict"
        )


class _NoState(LiveState):
    """`state` before the optimizer is built: it has no entries, and none can be read or set.

    torch.distributed.checkpoint takes a step with zero gradients if `state` is falsy. It tests this on every rank
    before each `state_dict()`, for saves and loads; that `state_dict()` must then include state.
    """

    def __init__(self, optimizer: DeferredOptimizer):
        refuse = partial(_raise_not_built, "state")
        super().__init__({}, refuse, refuse)
        self._optimizer = optimizer

    def __bool__(self) -> bool:
        self._optimizer._state_expected = True
        return True


def _raise_not_built(attribute: str) -> NoReturn:
    raise RuntimeError(
        f"{attribute}: this DeferredOptimizer is not built yet. Building is collective: on all ranks, call build() "
        "after prepare, take the first step, or load a state"
    )


class StackFactory:
    """Builds the optimizer inside the Trainer, when the final model and device are known.

    The Trainer instantiates anything that is not an optimizer class and calls it with the model. Checked with
    transformers 5.23; versions that accept only classes raise a TypeError here.

        Trainer(..., optimizer_cls_and_kwargs=(StackFactory, {"config": OptimizerConfig(optimizer="muon", lr=3e-4)}))

    The Trainer itself clips gradients to `max_grad_norm`, so set `clip_grad=0.0`, or `max_grad_norm=0.0`. Its
    `weight_decay` and `learning_rate` are ignored in favour of the configuration's. Its schedules multiply the learning
    rates of the groups.
    """

    def __call__(self, model: nn.Module, *, config: OptimizerConfig, **options: Any) -> DeferredOptimizer:
        """Return the optimizer of `model`; `options` are those of `DeferredOptimizer`.

        Raises:
            ConfigError (a ValueError): as `DeferredOptimizer`.
        """
        return DeferredOptimizer(config, model, **options)
