"""torchtitan: a container of one optimizer of this library, with the keys of torchtitan's own checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.hooks import GivenHooks
from opt_kernels.params import HELD, HOOKS, Group
from opt_paramgroups import ParamGroup
from opt_paramgroups.overrides import ConfigOverrides
from opt_stack.factory import get_optimizer
from opt_stack.rules.registry import Registry
from opt_stack.state import AnyState


class StackOptimizers(OptimizersContainer):  # type: ignore[misc]  # torchtitan is untyped where types are checked
    """torchtitan's `OptimizersContainer` over one optimizer of `get_optimizer`. Checked with torchtitan 0.3.0.

    In a function of the config registry:

        config.optimizer = StackOptimizers.Config(stack=OptimizerConfig(optimizer="muon", lr=1e-3, clip_grad=0.0))

    The trainer clips (`training.max_norm`), schedules and saves as usual. State is saved under torchtitan's keys,
    `state.<parameter>.<name>` and `param_groups.<parameter>.<key>`, and loads on any number of ranks.

    Raises:
        ConfigError (a ValueError), on every rank: as `get_optimizer`; and for rank-local state, which a checkpoint by
            parameter name would lose, for pipeline stages, and for fields that neither the trainer nor this class
            uses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """Fields are those of `get_optimizer`. `param_groups` and `implementation` of torchtitan keep their
        defaults."""

        stack: OptimizerConfig
        config_overrides: ConfigOverrides | None = None
        hooks: GivenHooks = ()
        rules: Registry | None = None

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        stack = config.stack
        if config.param_groups or config.optimizer_factory_kwargs_by_name or config.implementation != "fused":
            raise ConfigError(
                "param_groups, implementation and optimizer_factory_kwargs_by_name are for torchtitan's own "
                "optimizers; set StackOptimizers.Config(stack=..., config_overrides=...)"
            )
        if stack.clip_grad != 0.0:
            raise ConfigError(
                f"clip_grad={stack.clip_grad!r}: torchtitan clips to training.max_norm before the step; set "
                "clip_grad=0.0"
            )
        if stack.fp16:
            raise ConfigError("fp16=True needs a scaled loss, which torchtitan does not compute; use bf16 or fp32")
        optimizer = get_optimizer(stack, model_parts, config.config_overrides, rules=config.rules, hooks=config.hooks)
        if optimizer.has_rank_local_state:
            raise ConfigError(
                f"optimizer={stack.optimizer!r}: each rank keeps a different part of the state, but "
                "torchtitan's checkpoints identify state by parameter name, so they would store only one rank's part; "
                "use a rule whose state has the parameters' shapes, such as adam or muon, on DTensor parameters of "
                "fully_shard, without use_distributed_optimizer; or save with opt_checkpoint in your own training loop"
            )
        self.model_parts = model_parts
        self.optimizers = [optimizer]
        # By index in a state dict. All ranks have the same names, or they are pipeline stages.
        names = [canonical_fqn(id.name) for group in optimizer.param_groups for id in group["param_ids"]]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two model parts have a parameter {twice[0]!r}; torchtitan saves state by that name")
        self._names = names
        self._follows_model = True  # until the first step: the trainer loads initial weights after this
        self._post_init([param for group in optimizer.param_groups for param in group["params"]])

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take one step. The first one reads main values from the parameters, unless they were loaded."""
        self._follow_model_()
        self._follows_model = False
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return live tensors and hyper-parameters by torchtitan's keys.

        Raises:
            RuntimeError: the parameters hold weights to evaluate with, or the state is on the host.
        """
        (optimizer,) = self.optimizers
        optimizer.check_ready("state_dict()")
        self._follow_model_()
        saved = optimizer.state_dict()
        flat: dict[str, Any] = {}
        for index, states in saved["state"].items():
            flat |= {f"state.{self._names[index]}.{key}": value for key, value in states.items()}
        for group in saved["param_groups"]:
            for index in group["params"]:
                flat |= {f"param_groups.{self._names[index]}.{key}": value for key, value in _hyper(group)}
        return flat

    def load_state_dict(self, state_dict: AnyState) -> None:
        """Load `state_dict`, which DCP has filled.

        Raises:
            ValueError: a key is missing; parameters that share a group here were saved with different
                hyper-parameters; state of another rule, or of other choices of its formula.
        """
        (optimizer,) = self.optimizers
        present = optimizer.state_dict()
        state = {}
        for index, states in present["state"].items():
            name = self._names[index]
            state[index] = {key: _saved(state_dict, f"state.{name}.{key}") for key in states}
        groups = [self._saved_group(state_dict, group) for group in present["param_groups"]]
        optimizer.load_state_dict({**present, "state": state, "param_groups": groups})
        self._follows_model = False

    def _follow_model_(self) -> None:
        """Read main values from the parameters, until a step or a load has set them."""
        if self._follows_model:
            self.optimizers[0].reload_model_params()

    def _saved_group(self, state_dict: AnyState, group: Group) -> ParamGroup:
        """Return the group with the values with which all of its parameters were saved."""
        names = [self._names[index] for index in group["params"]]
        saved = dict(group)
        for key, _ in _hyper(group) if names else ():
            values = [_saved(state_dict, f"param_groups.{name}.{key}") for name in names]
            for name, value in zip(names, values, strict=True):
                if value != values[0]:
                    raise ValueError(
                        f"{key} was saved as {values[0]!r} for {names[0]!r} and as {value!r} for {name!r}, which share "
                        "a group here; group them as they were saved (config_overrides)"
                    )
            saved[key] = values[0]
        if saved["optimizer"] != group["optimizer"]:
            raise ValueError(
                f"{names[0]!r} was saved by optimizer={saved['optimizer']!r}, and has optimizer="
                f"{group['optimizer']!r} here; start with the saved rule, or leave the optimizer out of the load "
                '(torchtitan: checkpoint.exclude_from_loading=["optimizer"])'
            )
        return saved


def _hyper(group: Group) -> Iterator[tuple[str, Any]]:
    """Yield the hyper-parameters of a group and the choices of its rule, but not a name or hooks, which some lack."""
    return ((key, value) for key, value in group.items() if key not in (*HELD, HOOKS, "name"))


def _saved(state_dict: AnyState, key: str) -> Any:
    if key not in state_dict:
        raise ValueError(f"the loaded state has no {key!r}")
    return state_dict[key]
