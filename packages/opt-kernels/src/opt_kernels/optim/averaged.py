"""Optimizers with averaged weights for evaluation: `eval()` swaps them into the parameters, `train()` swaps back."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat
from opt_kernels.codecs import codecs_of, scale_name
from opt_kernels.dtensor import distributed_like, local, local_like
from opt_kernels.optim.formula_optimizer import FormulaOptimizer
from opt_kernels.optim.groups import ParamGroup, params_with_groups
from opt_kernels.optim.mains import MAIN, saved_main
from opt_kernels.optim.state import STEP

TRAIN_MODE = "train_mode"  # entry of groups and checkpoints: whether the parameters hold the trained weights
TRAINED = "trained_weights"  # in a state_dict of evaluation mode: the parameters do not hold them then


class AveragedOptimizer(FormulaOptimizer):
    """Base of optimizers whose formula has an `evaluation`. Starts in training mode; a step in evaluation mode raises
    RuntimeError."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._trained: dict[Tensor, Tensor] = {}  # in evaluation mode: the trained weights of each parameter
        self._shown: list[int] = []  # versions of these parameters, which change with every write
        super().__init__(*args, **options)
        self.defaults[TRAIN_MODE] = True
        for group in self.param_groups:
            group.setdefault(TRAIN_MODE, True)

    @property
    def is_training(self) -> bool:
        return all(group.get(TRAIN_MODE, False) for group in self.param_groups)

    @torch.no_grad()
    def eval(self) -> None:
        """Write the averaged weights to the parameters, and keep a copy of the trained weights until `train()`."""
        if self.is_training:
            for group, param in params_with_groups(self.param_groups):
                if float(self.state.get(param, {}).get(STEP, 0)):
                    self._trained[param] = local(param).detach().clone()
                    local(param).copy_(self._evaluated(group, param, back=False))
            self._set_mode(training=False)
            self._shown = self._versions()

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Write the trained weights back to the parameters, bit for bit. `train(False)` is `eval()`."""
        if not mode:
            self.eval()
        elif self._trained or not self.is_training:
            if self._shown and self._shown != self._versions():
                warnings.warn(
                    "parameters were written in evaluation mode, as by a load; train() replaces them by the trained "
                    "weights: call train() before the load",
                    stacklevel=3,
                )
            for param, trained in self._trained.items():
                local(param).copy_(trained)
            self._set_mode(training=True)

    @torch.no_grad()
    def _versions(self) -> list[int]:
        return [local(param)._version for param in self._trained]

    def _set_mode(self, *, training: bool) -> None:
        self._trained = {} if training else self._trained
        self._shown = []
        for group in self.param_groups:
            group[TRAIN_MODE] = training

    def _evaluated(self, group: ParamGroup, param: Tensor, *, back: bool) -> Tensor:
        """The averaged weights computed from the trained weights, or with `back` the reverse, in float32."""
        shard, state = local(param).detach(), self.state[param]
        main = saved_main(shard, state)
        values = shard.to(torch.promote_types(shard.dtype, torch.float32)) if main is None else main
        rule = self.rule_of(group, param)
        states = {}
        for name, codec in codecs_of(rule).items():
            states[name] = torch.empty_like(values)
            codes, scales = flat(state[name], shard, name), state.get(scale_name(name))
            codec.decode_(flat(states[name], shard, name), codes, scales)
        return self.formula.evaluated(values, states, self._hyper(group, rule, float(state[STEP])), back=back)

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form. In evaluation mode it includes the trained weights, which a load restores."""
        # A remainder completes the trained parameter, not the averaged one.
        is_shown = self._shown == self._versions()
        averaged = {param: local(param).detach().clone() for param in self._trained}
        with torch.no_grad():
            for param, trained in self._trained.items():
                local(param).copy_(trained)
            packed = super().state_dict()
            for param, values in averaged.items():
                local(param).copy_(values)
            self._shown = self._versions() if is_shown else self._shown
        for index, (_, param) in enumerate(params_with_groups(self.param_groups)):
            if param in self._trained and MAIN not in packed["state"][index]:
                packed["state"][index][TRAINED] = distributed_like(self._trained[param], param)
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load groups and states, and restore the mode. After loading a state_dict of evaluation mode, the parameters
        hold the averaged weights and the optimizer keeps the trained weights."""
        super().load_state_dict(state_dict)
        self._trained, self._shown = {}, []
        if self.is_training:
            return
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        with torch.no_grad():
            for index, (group, param) in zip(indices, params_with_groups(self.param_groups), strict=True):
                saved = state_dict["state"].get(index, {})
                if TRAINED in saved:
                    local(param).copy_(local_like(saved[TRAINED], param))
                elif saved and MAIN not in saved:  # only the averaged weights were saved
                    local(param).copy_(self._evaluated(group, param, back=True))
        self._set_mode(training=True)
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trained": self._trained, "_shown": []}

    def _update_(self) -> None:
        if self._trained or not self.is_training:
            raise RuntimeError(
                f"{type(self).__name__}.step() in evaluation mode (train_mode of a group is not True, or was set by "
                "hand): the parameters hold averaged weights; call optimizer.train() before training continues, and "
                "optimizer.eval() before evaluation"
            )
        super()._update_()
