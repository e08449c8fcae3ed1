"""The state of a parameter in a drop-in optimizer, and its saved form: decoded, and independent of codecs and mains."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.backends.elements import block_scales, flat
from opt_kernels.codecs import Codecs, scale_name
from opt_kernels.dtensor import distributed_like, local, local_like
from opt_kernels.params import MAIN, REMAINDER, Main, MainFormat, init_kept, values_of
from opt_kernels.rules.base import Rule
from opt_kernels.rules.base import init_state as state_of_rule
from opt_kernels.works import MatrixSpec, States

_MAIN_FORMATS = {format.value: format for format in (MainFormat.PARAM, MainFormat.FP32_COPY, MainFormat.REMAINDER)}


def parse_mains(name: str) -> MainFormat:
    """The format of this name. Raises ValueError for an unknown one."""
    if name not in _MAIN_FORMATS:
        allowed = ", ".join(map(repr, _MAIN_FORMATS))
        raise ValueError(f"mains={name!r} is unknown; pass one of {allowed}")
    return _MAIN_FORMATS[name]


def is_narrow(param: Tensor) -> bool:
    """Whether a main can be wider than the parameter."""
    return param.dtype not in (torch.float32, torch.float64)


def init_main(mains: MainFormat, param: Tensor) -> dict[str, Tensor]:
    """The states that `mains` adds to those of the rule. Raises the error of `init_kept`."""
    return init_kept(mains if is_narrow(param) else MainFormat.PARAM, param)


STEP = "step"
# Saved in addition to the states of a rule: by any optimizer, and in evaluation mode.
_OF_ANY_RULE = frozenset({STEP, MAIN, REMAINDER, "trained_weights"})
# By torch.optim.NAdam, and by SGD groups whose momentum was set to 0 later.
_OF_RULE = {"nadam": frozenset({"mu_product"}), "sgd": frozenset({"momentum_buffer"})}


class StateDictError(ValueError):
    """A state_dict that does not fit the optimizer that loads it."""


def init_state(rule: Rule, mains: MainFormat, param: Tensor, matrix: MatrixSpec, *, of: str) -> States:
    """The complete state of `param` before the first step; of a DTensor, that of its local shard."""
    shard = local(param).detach()
    with torch.inference_mode(False), torch.no_grad():  # a step outside of inference mode must be able to write it, too
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        return {STEP: step} | state_of_rule(rule, shard, matrix, of=of) | init_main(mains, shard)


def saved_state(codecs: Codecs, param: Tensor, state: Mapping[str, Tensor]) -> States:
    """`state` in torch's form: decoded, with a remainder joined to a `main`, and as DTensors if `param` is one."""
    shard = local(param).detach()
    # Aliases, so that callers do not depend on the tensors in which the optimizer stores its states.
    saved = {name: tensor.detach() for name, tensor in state.items() if name != REMAINDER}
    saved[STEP] = state[STEP].clone()  # a view of the tensor in which steps are counted
    for name, codec in codecs.items():
        if codec.block:
            saved[name] = values_of(codec, state[name], saved.pop(scale_name(name)))
    if REMAINDER in state:
        saved[MAIN] = Main(shard, state).value()
    return {name: tensor if name == STEP else distributed_like(tensor, param) for name, tensor in saved.items()}


@dataclass(frozen=True, slots=True)
class Saved:
    """The saved state of one parameter, to be loaded by an optimizer with `rule` and `mains`."""

    rule: Rule
    mains: MainFormat
    param: Tensor
    matrix: MatrixSpec
    values: Mapping[str, Tensor | float]
    of: str  # the parameter in messages

    def check(self) -> None:
        """Raise StateDictError if a state is missing, unknown or misshapen; ValueError if the main is impossible."""
        like = local(self.param).detach().to("meta")
        init_main(self.mains, like)
        _step(self.values)
        kept = self._kept(like)
        for name, wanted in kept.items():
            self._fitting(name, wanted)
        known = _OF_ANY_RULE | _OF_RULE.get(self.rule.name, frozenset()) | kept.keys()
        tensors = [name for name, value in self.values.items() if isinstance(value, Tensor)]
        unknown = sorted({*tensors} - known)
        if unknown:
            raise StateDictError(
                f"states {unknown} are unknown to rule {self.rule.name!r}; load one that was saved by the same rule"
            )
        if MAIN in self.values:
            self._fitting(MAIN, like)
        elif REMAINDER in self.values:
            raise StateDictError(
                f"state {MAIN!r} is missing: flatten_optimizer_state_dict=True loses it with mains='remainder'; save "
                "and load without it"
            )

    @torch.no_grad()
    def load_(self) -> States:
        """The state in the form that this optimizer stores. Every state keeps its dtype, unlike in torch.

        A saved `main` is written, rounded, to `param`; without one the main starts from `param`. Raises the same errors
        as `check`.
        """
        shard = local(self.param).detach()
        state = init_state(self.rule, self.mains, self.param, self.matrix, of=self.of)
        state[STEP].fill_(_step(self.values))
        for name in self._kept(shard.to("meta")):
            tensor = self._fitting(name, state[name])
            codec = self.rule.codecs.get(name)
            if codec is not None and codec.block:
                values = torch.empty_like(shard, dtype=torch.float32).copy_(tensor)
                scales = state[scale_name(name)]
                codec.encode_(flat(state[name], shard, name), scales, flat(values, shard, name))
            else:
                state[name].copy_(tensor)
        if MAIN in self.values:
            Main(shard, state).set_(self._fitting(MAIN, shard))
        return state

    def _kept(self, like: Tensor) -> States:
        """The states that must have been saved: all of the rule except block scales, which follow from the values."""
        kept = state_of_rule(self.rule, like, self.matrix)
        for name in block_scales(self.rule.codecs):
            del kept[name]
        return kept

    def _fitting(self, name: str, wanted: Tensor) -> Tensor:
        """This rank's part of the saved state `name`, which must have the shape of `wanted`."""
        value = self.values.get(name)
        if not isinstance(value, Tensor):
            raise StateDictError(
                f"state {name!r} of {self.of} is missing: the state_dict has {sorted(self.values)}; load one that was "
                "saved by the same rule"
            )
        like = self.param if wanted.shape == local(self.param).shape else wanted
        try:
            return local_like(value, like)
        except ValueError as error:
            raise StateDictError(
                f"state {name!r} of {self.of} {error}; load a state_dict of the same parameters, in the same order"
            ) from error


def _step(saved: Mapping[str, Tensor | float]) -> float:
    if STEP in saved:
        return float(saved[STEP])
    if "momentum_buffer" in saved:
        # torch.optim.SGD does not count steps. Only whether the first step is over matters here.
        return 1.0
    raise StateDictError(f"state 'step' is missing: the state_dict has {sorted(saved)}; load one with step counts")
