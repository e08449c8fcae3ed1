"""The protocol of rules: a pure update of tensors, the states it declares, and what it needs of a parameter.

`WholeMatrices` is the base class of rules that transform gradients of whole matrices.

A rule holds structure only. `Hyper` passes what varies between steps and groups, `Work` the tensors to update.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from opt_kernels.backends.elements import skipped
from opt_kernels.codecs import StateCodec
from opt_kernels.formulas.formula import OF_HYPER
from opt_kernels.formulas.numbers import Number
from opt_kernels.matrices.muon import decay_of
from opt_kernels.matrices.orthogonalization import TpMode
from opt_kernels.matrices.stacks import check, check_shape, read_main, scaled_grads, stacks, write_main_
from opt_kernels.works import Batch, MatrixSpec, StateSpec, Task


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
    def codecs(self) -> Mapping[str, StateCodec]:
        """The codecs of the states, by name. A state without a codec is stored unchanged."""
        ...

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """The state before the first step, for one parameter (or run of elements) of the shape and device of `main`.

        With states that depend on how rows are split (`StateSpec.by_part`), it takes a `MatrixSpec`, too.
        """
        ...

    def update_(
        self,
        batches: Sequence[Batch],
        *,
        grad_scale: float | Tensor = 1.0,  # factor of every gradient: 1 / loss scale, times the clip coefficient
        skip: Tensor | None = None,  # 0-d; if it is not zero, nothing is written
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

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Turn `grad` (*shape), scaled and in the compute dtype, into the input of `transform_`, in place."""
        ...

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """The directions (len(tasks), *shape) of matrices of one layout and batch, from the results of `prepare_`.

        Writes the states of the tasks that are declared as `whole`.
        """
        ...

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """Update `main` along `update` (*shape), elementwise. May overwrite `update`."""
        ...


GRAD_SQUARES = "grad_squares"
"""The entry of a whole work's state that holds ‖g‖² for a rule with `sums_gradients`. It is not kept."""


def sums_gradients(rule: Rule) -> bool:
    """Whether `transform_` of a matrix rule reads `GRAD_SQUARES`: ‖g‖² of every whole matrix, in float64, summed over
    parts by the caller. The rule then has an attribute of this name."""
    return bool(getattr(rule, "sums_gradients", False))


class RuleStateError(ValueError):
    """A state of a parameter that differs from what its rule declares."""


def init_state(rule: Rule, main: Tensor, matrix: MatrixSpec, *, of: str = "") -> dict[str, Tensor]:
    """`rule.init_state`, by part if the state of the rule depends on the split. Raises the error of `check_states`."""
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
        state, wanted = states.get(spec.name), None if spec.by_part and matrix.split_rows else spec.shape_for(shape)
        if state is None and spec.optional:
            continue
        is_right = state is not None and (state.dtype is spec.dtype or (wide and state.dtype is torch.float64))
        if state is None or not is_right or (wanted is not None and tuple(state.shape) != wanted):
            found = "is missing" if state is None else f"has shape {tuple(state.shape)} and {state.dtype}"
            raise RuleStateError(
                f"state {spec.name!r} of {of or f'a parameter of shape {tuple(shape)}'} {found}, but rule "
                f"{rule.name!r} declares {spec.dtype}{'' if wanted is None else f' of shape {wanted}'} ({spec.kind}); "
                "return it from `init_state`, or declare it in `state_specs`"
            )


def keeps_parts(rule: Rule) -> bool:
    """Whether the state of a parameter depends on how its rows are split."""
    return any(spec.by_part for spec in rule.state_specs)


class WholeMatrices(MatrixRule):
    """A rule that transforms gradients of whole matrices directly. The host reads the step and the skip flag.

    A final class has `name`, `state_specs` and `transform_`, and `init_state` if a state does not begin at zero.
    `numbers` are those of `Hyper` that it reads besides lr and weight_decay, with their defaults.
    """

    __slots__ = ()
    numbers: ClassVar[tuple[Number, ...]] = ()

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The numbers that it reads from `Hyper.own`."""
        return tuple(number.name for number in self.numbers if number.name not in OF_HYPER)

    needs = Needs.MATRICES
    tp_mode = None  # it needs whole matrices

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """Empty: states are stored without encoding."""
        return {}

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """Zeros, in the shapes that `state_specs` declare. Raises MatrixError for a parameter that is not a matrix."""
        check_shape(main.shape)
        return {
            spec.name: torch.zeros(spec.shape_for(main.shape) or (), dtype=spec.dtype, device=main.device)
            for spec in self.state_specs
        }

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        if skipped(skip):
            return
        for batch in batches:
            for work in batch.works:
                check(work)
                wide = work.main is not None and work.main.dtype is torch.float64
                check_states(self, work.state, work.grad.shape, work.matrix, wide=wide)
            for tasks in stacks([batch]):
                inputs = scaled_grads(tasks, grad_scale)
                for grad, task in zip(inputs, tasks):
                    self.prepare_(task, grad, None)
                for update, task in zip(self.transform_(tasks, inputs, None), tasks):
                    self.apply_(task, update, None)

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """p <- p - lr wd p - lr update."""
        hyper, work = task
        if not skipped(skip):
            main = read_main(work)
            write_main_(work, main - hyper.lr * (decay_of(main, hyper.weight_decay) + update), None)

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Do nothing: `transform_` takes gradients directly."""
