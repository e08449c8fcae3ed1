"""The state of a parameter: its main, the form in which an optimizer keeps it between steps; and the saved form.

The saved form is decoded, and independent of codecs and mains.

A float32 main is a copy: after `model.load_state_dict`, `torch.nn.utils.vector_to_parameters`, `param.data = ...`, or
any other write to a bfloat16 or float16 parameter, the next update of its old main would restore the old weights. torch
counts writes (`_version`), and an assignment moves the parameter; only after either are parameters and mains compared,
and mains take the new weights. A write through `param.data`, such as `param.data.fill_(0)`, is not seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import is_

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat
from opt_kernels.backends.memory import Mark, Writes, is_unwritten
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.codecs.narrow import join, split_
from opt_kernels.dtensor import are_dtensors, distributed_like, local, local_like
from opt_kernels.rules.base import Rule
from opt_kernels.rules.base import init_state as state_of_rule
from opt_kernels.works import MatrixSpec

# Names in the state.
MAIN = "main"
REMAINDER = "remainder"
CHUNK_NUMEL = 1 << 22  # elements that are compared at a time


class Mains(Enum):
    """The form in which a parameter is kept. float32 and float64 parameters are always their own main."""

    PARAM = "param"  # the parameter itself, in its own dtype
    FLOAT32 = "float32"  # a float32 copy in the state `main`: 4 bytes per element
    REMAINDER = "remainder"  # float32 whose upper half is the bfloat16 parameter; lower half in `remainder`: 2 bytes


def parse_mains(name: str) -> Mains:
    """The member of this value. Raises ValueError for an unknown one."""
    try:
        return Mains(name)
    except ValueError:
        allowed = ", ".join(repr(mains.value) for mains in Mains)
        raise ValueError(f"mains={name!r} is unknown; pass one of {allowed}") from None


def is_narrow(param: Tensor) -> bool:
    """Whether a main can be wider than the parameter."""
    return param.dtype not in (torch.float32, torch.float64)


def init_main(mains: Mains, param: Tensor) -> dict[str, Tensor]:
    """The states that `mains` adds to those of the rule, before the first step.

    Raises ValueError for a remainder of a parameter that is not bfloat16.
    """
    if mains is Mains.PARAM or not is_narrow(param):
        return {}
    if mains is Mains.FLOAT32:
        return {MAIN: param.to(torch.float32, copy=True)}
    if param.dtype is not torch.bfloat16:
        raise ValueError(
            f"mains='remainder' with a {param.dtype} parameter: only bfloat16 is the upper half of a float32; "
            "pass mains='float32'"
        )
    return {REMAINDER: torch.zeros_like(param, dtype=torch.int16, requires_grad=False)}


def saved_main(param: Tensor, state: dict[str, Tensor]) -> Tensor | None:
    """The float32 main of a parameter, joined from its remainder if need be. None if the parameter is its own main."""
    if REMAINDER in state:
        main = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
        flat(main, main, MAIN).copy_(join(flat(param, param, "param"), flat(state[REMAINDER], param, REMAINDER)))
        return main
    return state.get(MAIN)


def load_main_(param: Tensor, state: dict[str, Tensor], saved: Tensor) -> None:
    """Write the float32 main `saved` to `state`, and rounded to the dtype of `param` to `param`."""
    if REMAINDER in state:
        main = torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(saved)
        split_(flat(param, param, "param"), flat(state[REMAINDER], param, REMAINDER), flat(main, main, MAIN))
        return
    if MAIN in state:
        state[MAIN].copy_(saved)
    param.copy_(saved)


class FollowingMains:
    """The float32 mains of parameters that are updated together. They follow the writes of other code."""

    def __init__(self, params: Sequence[tuple[Tensor, Mapping[str, Tensor]]], followed: Mapping[Tensor, Mark]):
        """`params` with their states. `followed` are the marks of parameters that mains have followed in earlier steps.

        Also counts the updates of parameters without a main: kernels write memory that autograd does not watch, and a
        backward pass through an older graph must raise.
        """
        # Nothing counts writes to tensors that were made in torch.inference_mode().
        self._counted = [param for param, _ in params if not param.is_inference()]
        self._copied = [param for param, state in params if MAIN in state]
        self._states = [state for _, state in params if MAIN in state]
        self._followed_before = followed
        self._writes: Writes | None = None  # None: before the first update

    @property
    def followed(self) -> dict[Tensor, Mark]:
        """The marks of the parameters that mains have followed."""
        marks = [] if self._writes is None else self._writes.marks
        return {**self._followed_before, **dict(zip(self._copied, marks))}

    def begin_update_(self) -> None:
        """Let mains take the values of parameters that other code wrote, and count the writes of the update. The host
        reads no tensor."""
        with torch.no_grad():  # else `to_local` returns an alias with a version of its own
            is_sharded = are_dtensors(self._copied)
            shards = list(map(local, self._copied)) if is_sharded else self._copied  # those of DTensors may be replaced
        before = self._writes
        is_same = before is not None and all(map(is_, before.tensors, shards))
        if before is None or not is_same or not before.are_all_own():
            followed = self.followed
            for param, state, shard in zip(self._copied, self._states, shards, strict=True):
                mark = followed.get(param)
                if mark is None or not is_unwritten(shard, mark):
                    follow_(state[MAIN], shard)
            self._writes = Writes(shards)
        torch.autograd.graph.increment_version(self._counted)
        self.end_update_()

    def end_update_(self) -> None:
        """Count what torch's operations have written in the update, so that the next one does not take it for writes
        of other code."""
        if self._writes is not None:
            self._writes.accept()


@torch.no_grad()
def follow_(main: Tensor, param: Tensor) -> None:
    """Copy each element of `param` to `main` unless it is the rounded main. NaNs are equal to NaNs."""
    of_param = flat(param.detach(), param, "param")
    of_main = flat(main, param, MAIN)
    for new, kept in zip(torch.split(of_param, CHUNK_NUMEL), torch.split(of_main, CHUNK_NUMEL), strict=True):
        rounded = kept.to(new.dtype)
        is_kept = (rounded == new) | (rounded.isnan() & new.isnan())
        kept.copy_(torch.where(is_kept, kept, new.to(kept.dtype)))


STEP = "step"
# Saved in addition to the states of a rule: by any optimizer, and in evaluation mode.
_OF_ANY_RULE = frozenset({STEP, MAIN, REMAINDER, "trained_weights"})
# By torch.optim.NAdam, and by SGD groups whose momentum was set to 0 later.
_OF_RULE = {"nadam": frozenset({"mu_product"}), "sgd": frozenset({"momentum_buffer"})}


class StateDictError(ValueError):
    """A state_dict that does not fit the optimizer that loads it."""


def init_state(rule: Rule, mains: Mains, param: Tensor, matrix: MatrixSpec, *, of: str) -> dict[str, Tensor]:
    """The complete state of `param` before the first step; of a DTensor, that of its local shard."""
    shard = local(param).detach()
    with torch.inference_mode(False), torch.no_grad():  # a step outside of inference mode must be able to write it, too
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        return {STEP: step} | state_of_rule(rule, shard, matrix, of=of) | init_main(mains, shard)


def saved_state(codecs: Mapping[str, StateCodec], param: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` in torch's form: decoded, with a remainder joined to a `main`, and as DTensors if `param` is one."""
    shard = local(param).detach()
    # Aliases, so that callers do not depend on the tensors in which the optimizer stores its states.
    saved = {name: tensor.detach() for name, tensor in state.items() if name != REMAINDER}
    saved[STEP] = state[STEP].clone()  # a view of the tensor in which steps are counted
    for name, codec in codecs.items():
        if codec.block:
            values = torch.empty_like(shard, dtype=torch.float32)
            codec.decode_(flat(values, shard, name), flat(state[name], shard, name), saved.pop(scale_name(name)))
            saved[name] = values
    main = saved_main(shard, dict(state))
    if main is not None:
        saved[MAIN] = main
    return {name: tensor if name == STEP else distributed_like(tensor, param) for name, tensor in saved.items()}


@dataclass(frozen=True, slots=True)
class Saved:
    """The saved state of one parameter, to be loaded by an optimizer with `rule` and `mains`."""

    rule: Rule
    mains: Mains
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
        unknown = sorted(name for name in self.values.keys() - known if isinstance(self.values[name], Tensor))
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
    def load_(self) -> dict[str, Tensor]:
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
                codec.encode_(flat(state[name], shard, name), state[scale_name(name)], flat(values, shard, name))
            else:
                state[name].copy_(tensor)
        if MAIN in self.values:
            load_main_(shard, state, self._fitting(MAIN, shard))
        return state

    def _kept(self, like: Tensor) -> dict[str, Tensor]:
        """The states that must have been saved: all of the rule except block scales, which follow from the values."""
        scales = {scale_name(name) for name, codec in self.rule.codecs.items() if codec.block}
        kept = state_of_rule(self.rule, like, self.matrix)
        return {name: tensor for name, tensor in kept.items() if name not in scales}

    def _fitting(self, name: str, wanted: Tensor) -> Tensor:
        """This rank's part of the saved state `name`, which must have the shape of `wanted`."""
        value = self.values.get(name)
        if not isinstance(value, Tensor):
            raise StateDictError(
                f"state {name!r} of {self.of} is missing: the state_dict has {sorted(self.values)}; load one that was "
                "saved by the same rule"
            )
        is_like_param = wanted.shape == local(self.param).shape
        try:
            part = local_like(value, self.param if is_like_param else wanted)
        except ValueError as error:
            raise StateDictError(
                f"state {name!r} of {self.of} {error}; load a state_dict of the same parameters, in the same order"
            ) from error
        return part


def _step(saved: Mapping[str, Tensor | float]) -> float:
    if STEP not in saved and "momentum_buffer" in saved:
        # torch.optim.SGD does not count steps. Only whether the first step is over matters here.
        return 1.0
    if STEP not in saved:
        raise StateDictError(f"state 'step' is missing: the state_dict has {sorted(saved)}; load one with step counts")
    return float(saved[STEP])
