"""Optimizers whose weights are evaluated at an average: `eval()` shows it in the parameters, `train()` goes back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat
from opt_kernels.codecs import codecs_of, scale_name
from opt_kernels.dtensor import distributed_like, local, local_like
from opt_kernels.formulas.syntax import parameters_of
from opt_kernels.optim.base import params_with_groups
from opt_kernels.optim.formula_optimizer import FormulaOptimizer
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.optim.mains import MAIN, saved_main
from opt_kernels.optim.state import STEP

TRAIN_MODE = "train_mode"  # in groups, and so in checkpoints: whether parameters hold the weights that are trained
TRAINED = "trained_weights"  # in a state_dict of evaluation mode, since the parameters do not hold them


class AveragedOptimizer(FormulaOptimizer):
    """A formula with `evaluation`. It begins in training mode; a step in evaluation mode raises RuntimeError."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._trained: dict[Tensor, Tensor] = {}  # in evaluation mode, what parameters held before
        super().__init__(*args, **options)
        self.defaults[TRAIN_MODE] = True
        for group in self.param_groups:
            group.setdefault(TRAIN_MODE, True)

    @property
    def is_training(self) -> bool:
        return all(group[TRAIN_MODE] for group in self.param_groups)

    @torch.no_grad()
    def eval(self) -> None:
        """Puts the averaged weights into the parameters; keeps a copy of those that are trained until `train()`."""
        if self.is_training:
            for group, param in params_with_groups(self.param_groups):
                if float(self.state.get(param, {}).get(STEP, 0)):
                    self._trained[param] = local(param).detach().clone()
                    local(param).copy_(self._evaluated(group, param, 0))
            self._set_mode(training=False)

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Puts the trained weights back into the parameters, bit for bit; `train(False)` is `eval()`."""
        if not mode:
            self.eval()
        elif not self.is_training:
            for group, param in params_with_groups(self.param_groups):
                if param in self._trained:
                    local(param).copy_(self._trained[param])
                elif float(self.state.get(param, {}).get(STEP, 0)):  # evaluation mode was loaded
                    local(param).copy_(self._evaluated(group, param, 1))
            self._set_mode(training=True)

    def _set_mode(self, *, training: bool) -> None:
        self._trained = {} if training else self._trained
        for group in self.param_groups:
            group[TRAIN_MODE] = training

    def _evaluated(self, group: ParamGroup, param: Tensor, direction: int) -> Tensor:
        """The averaged weights from the trained ones (0), or the reverse (1), in float32."""
        assert self.formula.evaluation is not None
        function = self.formula.evaluation[direction]
        shard, state = local(param).detach(), self.state[param]
        main = saved_main(shard, state)
        if main is not None and direction == 1:
            return main
        values = shard.to(torch.promote_types(shard.dtype, torch.float32)) if main is None else main
        codecs, numbers = codecs_of(self.rule_of(group, param)), dict(group)
        for i, beta in enumerate(group.get("betas", ())):
            numbers[f"beta{i + 1}"] = beta
        states = {}
        for name in parameters_of(function)[0][1:]:
            decoded = torch.empty_like(values)
            codes, scales = flat(state[name], shard, name), state.get(scale_name(name))
            codecs[name].decode_(flat(decoded, shard, name), codes, scales)
            states[name] = decoded
        found: Tensor = function(values, *states.values(), **{n: float(numbers[n]) for n in parameters_of(function)[1]})
        return found

    def state_dict(self) -> dict[str, Any]:
        """torch's form; in evaluation mode with the trained weights, which a load restores."""
        packed = super().state_dict()
        for index, (_, param) in enumerate(params_with_groups(self.param_groups)):
            if param in self._trained and MAIN not in packed["state"][index]:
                packed["state"][index][TRAINED] = distributed_like(self._trained[param], param)
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As every drop-in's. What was saved in evaluation mode is evaluation mode again: the parameters hold the
        averaged weights, and the trained ones are kept beside them."""
        super().load_state_dict(state_dict)
        self._trained = {}
        if self.is_training:
            return
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, (_, param) in zip(indices, params_with_groups(self.param_groups), strict=True):
            saved = state_dict["state"].get(index, {}).get(TRAINED)
            if saved is not None:
                self._trained[param] = local_like(saved, param).to(param.dtype, copy=True)
        self.train()
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trained": self._trained}

    def _update_(self) -> None:
        if not self.is_training:
            raise RuntimeError(
                f"{type(self).__name__}.step() in evaluation mode: the parameters hold averaged weights; call "
                "optimizer.train() before training goes on, and optimizer.eval() before evaluation"
            )
        super()._update_()
