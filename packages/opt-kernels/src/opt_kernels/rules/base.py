"""What a rule is: a pure update of tensors, the state it declares, and what it needs of a parameter.

A rule is structure. What varies from step to step and group to group comes in a `Hyper`, what it works on in `Work`s.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.orthogonalization import TpMode
from opt_kernels.matrices.stacks import scaled_grads, stacks
from opt_kernels.works import Batch, MatrixSpec, StateSpec, Task


class Needs(Enum):
    """What a rule can work on."""

    ELEMENTS = auto()  # any run of a parameter's elements, flat or not
    MATRICES = auto()  # whole matrices only


class Rule(Protocol):
    """An optimizer's update. Implementations are frozen dataclasses, whose fields are structure, not hyper numbers."""

    @property
    def name(self) -> str:
        """The name under which configurations ask for it, and checkpoints record it."""
        ...

    @property
    def needs(self) -> Needs: ...

    @property
    def state_specs(self) -> tuple[StateSpec, ...]: ...

    @property
    def codecs(self) -> Mapping[str, StateCodec]:
        """How states are stored, by name; one that is not here is stored as it is."""
        ...

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """State for one parameter (or run of elements) of `main`'s shape and device, as it is before the first step."""
        ...

    def update_(
        self,
        batches: Sequence[Batch],
        *,
        grad_scale: float | Tensor = 1.0,  # multiplies every gradient: 1 / loss scale, times the clip coefficient
        skip: Tensor | None = None,  # 0-d; where it is not zero, nothing at all is written
    ) -> None:
        """Writes `main`, `out`, `remainder` and `state` of every work; reads `grad`."""
        ...


@runtime_checkable
class MatrixRule(Rule, Protocol):
    """A matrix rule in three phases, of which one looks at whole matrices: parts may be brought together for it alone.

    `update_` is the three in a row. Elsewhere the first and the last run on the parts that a rank stores, and the
    second where the whole is: on works without a main, whose state is what `state_specs` declare as `whole`.
    """

    @property
    def tp_mode(self) -> TpMode | None:
        """How it wants matrices that tensor parallelism cuts; None: whole, whoever brings them together."""
        ...

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Makes of `grad` (*shape), scaled and in the compute dtype, what is to be transformed; element by element."""
        ...

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """The directions (len(tasks), *shape) of matrices of one layout and batch, from what `prepare_` made of them.

        Writes the state of the tasks, where it is declared as `whole`.
        """
        ...

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """Moves `main` along `update` (*shape), which it may write over; element by element."""
        ...


class SplitStateRule(Rule, Protocol):
    """A rule whose state depends on the rows that are matrices of their own: see `StateSpec.by_part`."""

    def init_state(self, main: Tensor, matrix: MatrixSpec = ...) -> dict[str, Tensor]:
        """`Rule.init_state` of a parameter that is split as `matrix` says."""
        ...


def init_state(rule: Rule, main: Tensor, matrix: MatrixSpec) -> dict[str, Tensor]:
    """`rule.init_state`, by part where the rule keeps it so."""
    if keeps_parts(rule):
        return cast(SplitStateRule, rule).init_state(main, matrix)
    return rule.init_state(main)


def keeps_parts(rule: Rule) -> bool:
    """Whether the state of a parameter depends on how its rows are split."""
    return any(spec.by_part for spec in rule.state_specs)


def update_in_phases_(
    rule: MatrixRule, batches: Sequence[Batch], *, grad_scale: float | Tensor, skip: Tensor | None
) -> None:
    """`Rule.update_` of a rule of three phases, where every work is all that the second one has to see."""
    for tasks in stacks(batches):
        inputs = scaled_grads(tasks, grad_scale)
        for grad, task in zip(inputs, tasks):
            rule.prepare_(task, grad, skip)
        for update, task in zip(rule.transform_(tasks, inputs, skip), tasks):
            rule.apply_(task, update, skip)
