"""The protocol of rules: a pure update of tensors, the states it declares, and what it needs of a parameter.

A rule holds structure only. `Hyper` passes what varies between steps and groups, `Work` the tensors to update.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum, auto
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from opt_kernels.codecs import Codecs
from opt_kernels.matrices.coefficients import Coefficients
from opt_kernels.matrices.orthogonalization import TpMode
from opt_kernels.works import Batch, MatrixSpec, NamedChoice, Scalar, Skip, States, StateSpec, Task


class Needs(Enum):
    """Which elements of a parameter a rule needs at once."""

    ELEMENTS = auto()  # any run of a parameter's elements, flat or not
    MATRICES = auto()  # whole matrices only


class Rule(Protocol):
    """An optimizer's update. Implementations are frozen dataclasses without hyper-parameters."""

    @property
    def name(self) -> str:
        """The name of the rule in configurations and checkpoints."""
        ...

    @property
    def needs(self) -> Needs: ...

    @property
    def state_specs(self) -> tuple[StateSpec, ...]: ...

    @property
    def codecs(self) -> Codecs:
        """The codecs of the states, by name. A state without a codec is stored unchanged."""
        ...

    def init_state(self, main: Tensor) -> States:
        """Return the state before the first step of a parameter or run of elements, in the shape and device of `main`.

        With states that depend on how rows are split (`StateSpec.by_part`), it takes a `MatrixSpec`, too.
        """
        ...

    def update_(
        self,
        batches: Sequence[Batch],
        *,
        grad_scale: Scalar = 1.0,  # factor of every gradient: 1 / loss scale, times the clip coefficient
        skip: Skip = None,  # 0-d; if it is not zero, nothing is written
    ) -> None:
        """Write `main`, `out`, `remainder` and `state` of every work. `grad` is only read."""
        ...


@runtime_checkable
class MatrixRule(Rule, Protocol):
    """A matrix rule in three phases, of which only the second needs whole matrices.

    `update_` runs all three. Sharded, the first and the last run on the parts that a rank stores, and the second on the
    rank that gathers the whole matrix: on works without a main, with the states that `state_specs` declare as `whole`.
    """

    @property
    def tp_mode(self) -> TpMode | None:
        """How it handles matrices that tensor parallelism shards. None: it needs them whole, gathered by the caller."""
        ...

    def prepare_(self, task: Task, grad: Tensor, skip: Skip) -> None:
        """Turn `grad` (*shape), scaled and in the compute dtype, into the input of `transform_`, in place."""
        ...

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Skip) -> Tensor:
        """Compute directions (len(tasks), *shape) of matrices of one layout and batch, from the results of `prepare_`.

        Writes the states of the tasks that are declared as `whole`.
        """
        ...

    def apply_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Update `main` along `update` (*shape), elementwise. May overwrite `update`."""
        ...


GRAD_SQUARES = "grad_squares"
"""The entry of a whole work's state that holds ‖g‖² for a rule with `sums_gradients`. It is not kept."""

WEIGHTS = "weights"
"""The entry of a whole work's state that holds the whole weights for a rule with `reads_weights`. It is not kept."""


def reads_weights(rule: Rule) -> bool:
    """Whether `transform_` of a matrix rule reads `WEIGHTS`: whole matrices in the compute dtype, which the caller
    gathers in addition to gradients. The rule then has an attribute of this name."""
    return bool(getattr(rule, "reads_weights", False))


def sums_gradients(rule: Rule) -> bool:
    """Whether `transform_` of a matrix rule reads `GRAD_SQUARES`: ‖g‖² of every whole matrix, in float64, summed over
    parts by the caller. The rule then has an attribute of this name."""
    return bool(getattr(rule, "sums_gradients", False))


def update_dtype(rule: Rule, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the narrowest dtype that holds, without rounding, what `transform_` of a matrix rule returns in `dtype`.

    A rule whose last products are in 16 bits has a method of this name. A class that overrides `transform_` without it
    returns `dtype`: its directions may not fit what the base class declares.
    """
    declaring = next((cls for cls in type(rule).__mro__ if {"transform_", "update_dtype"} & vars(cls).keys()), None)
    if declaring is None or "update_dtype" not in vars(declaring):
        return dtype
    narrow: torch.dtype = cast(Any, rule).update_dtype(dtype, device)
    return narrow


def sums_over_blocks(rule: Rule) -> bool:
    """Whether a matrix rule in mode "blockwise" sums over tensor-parallel ranks, which then need equal blocks. The rule
    then has an attribute of this name."""
    return bool(getattr(rule, "sums_over_blocks", False))


class RuleStateError(ValueError):
    """A state of a parameter that differs from what its rule declares."""


def init_state(rule: Rule, main: Tensor, matrix: MatrixSpec, *, of: str = "") -> States:
    """`rule.init_state`, by part if the state of the rule depends on the split. Raises the error of `check_states`."""
    with torch.inference_mode(False), torch.no_grad():  # a step outside of inference mode must be able to write it, too
        states = cast(Any, rule).init_state(main, matrix) if keeps_parts(rule) else rule.init_state(main)
    check_states(rule, states, main.shape, matrix, of=of)
    return states


def check_states(
    rule: Rule,
    states: Mapping[str, Tensor],
    shape: Sequence[int],
    matrix: MatrixSpec,
    *,
    of: str = "",
    wide: bool = False,
) -> None:
    """Raise RuleStateError if a state is missing, or has another shape or dtype than `rule` declares.

    `shape` is that of the parameter, and `of` names it. States may be float64 instead of float32 if `wide`.
    """
    for spec in rule.state_specs:
        state = states.get(spec.name)
        declared_shape = None if spec.by_part and matrix.split_rows else spec.shape_for(shape)
        if state is None and spec.optional:
            continue
        has_dtype = state is not None and (state.dtype is spec.dtype or (wide and state.dtype is torch.float64))
        if state is None or not has_dtype or (declared_shape is not None and tuple(state.shape) != declared_shape):
            found = "is missing" if state is None else f"has shape {tuple(state.shape)} and {state.dtype}"
            param = of or f"a parameter of shape {tuple(shape)}"
            declared = str(spec.dtype) if declared_shape is None else f"{spec.dtype} of shape {declared_shape}"
            raise RuleStateError(
                f"state {spec.name!r} of {param} {found}, but rule {rule.name!r} declares {declared} ({spec.kind}); "
                "return it from `init_state`, or declare it in `state_specs`"
            )


def keeps_parts(rule: Rule) -> bool:
    """Whether the state of a parameter depends on how its rows are split."""
    return any(spec.by_part for spec in rule.state_specs)


R = TypeVar("R", bound=Rule)


def build_rule(kind: Callable[..., R], options: Mapping[str, Any]) -> R:
    """Return the rule of the dataclass `kind` with these fields. Members of enums may be given by their values."""
    chosen = dict(options)
    for option in fields(cast(Any, kind)):
        if option.name in chosen and isinstance(option.type, type) and issubclass(option.type, NamedChoice):
            chosen[option.name] = option.type(chosen[option.name])
    if "custom_coefficients" in chosen:
        chosen["custom_coefficients"] = tuple(Coefficients(*step) for step in chosen["custom_coefficients"])
    return kind(**chosen)
