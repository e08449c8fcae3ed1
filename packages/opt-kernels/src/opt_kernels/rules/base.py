"""What a rule is: a pure update of tensors, the state it declares, and what it needs of a parameter.

A rule is structure. What varies from step to step and group to group comes in a `Hyper`, what it works on in `Work`s.
The caller owns all memory: a rule writes `main`, `out`, `remainder` and `state`, never `grad`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from opt_kernels.codecs import StateCodec  # which declares its scales with the types of this module
    from opt_kernels.rules.orthogonalization import TpMode  # likewise


class Needs(Enum):
    """What a rule can work on."""

    ELEMENTS = auto()  # any run of a parameter's elements, flat or not
    MATRICES = auto()  # whole matrices only


class StateKind(Enum):
    """How a state tensor relates to its parameter; a checkpoint cuts it accordingly."""

    LIKE_PARAM = auto()  # one element for each of the parameter's
    SCALAR = auto()  # one number per parameter
    REDUCED = auto()  # the parameter's shape without `dims`
    MATRIX = auto()  # (n, n) where n is the parameter's size along `dims[0]`
    BLOCK_SCALES = auto()  # one number for each run of `block` elements of the parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One state tensor of a rule: its name in the state, its kind, the dtype it is stored in."""

    name: str
    kind: StateKind = StateKind.LIKE_PARAM
    dtype: torch.dtype = torch.float32
    dims: tuple[int, ...] = ()  # REDUCED: the dims removed; MATRIX: the one dim
    block: int = 0  # BLOCK_SCALES: elements per scale
    whole: bool = False  # of a whole matrix, though ranks store parts of it: it is where `MatrixRule.transform_` is


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """One row of the hyper-parameter table: a group's numbers at this step. A rule reads the fields it knows.

    A rule with an attribute `hyper_names` finds the numbers of these names in `own`.
    """

    lr: float | Tensor
    weight_decay: float | Tensor = 0.0
    step: int | Tensor = 1  # counts from 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The tensor-parallel group of a matrix, as callables: a rule never sees a process group."""

    rank: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]  # sum over the group; returns the sum
    all_gather: Callable[[Tensor, int], Tensor]  # concatenate over the group along a dim


class MatrixPart(NamedTuple):
    """Which part of a larger matrix a work is, where that is known and may be any run of its rows and columns."""

    whole: Hashable  # the matrix, in any naming the caller keeps
    whole_shape: tuple[int, ...]
    first_row: int  # of the part, in the matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec:
    """What a matrix rule must know of a matrix beside its shape."""

    split_rows: tuple[int, ...] = ()  # fused QKV: rows of q, k and v in one query group; () for a plain matrix
    partition_dim: int | None = None  # the dim that tensor parallelism cuts; None: the whole matrix is here
    tensor_parallel: TensorParallel | None = None
    part: MatrixPart | None = None  # None: the whole is here, or as equal parts as `tensor_parallel` has ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One parameter, or one run of its elements, to be updated. All tensors but scalars have the same shape.

    `main` is what the rule moves: fp32, or the parameter itself. `out`, when given, receives `main` rounded to its
    dtype. With `remainder` (int16), `main` is None: the fp32 value is (`out` as bf16, `remainder`), joined losslessly.
    """

    grad: Tensor  # any float dtype, read only
    main: Tensor | None  # updated
    state: Mapping[str, Tensor]  # updated
    out: Tensor | None = None  # written
    remainder: Tensor | None = None  # updated
    matrix: MatrixSpec = MatrixSpec()  # matrix rules only
    first: int = (
        0  # number of the run's first element, in any numbering the caller keeps: stochastic rounding's counter
    )


class Works(Sequence[Work]):
    """Works of one kind, held column by column; a `Work` is made when somebody asks for one.

    For callers with hundreds of tensors at every step: making so many objects takes longer than all else that the host
    has to do. A column that none of the works has is None.
    """

    __slots__ = ("firsts", "grads", "mains", "matrices", "outs", "remainders", "states")

    def __init__(
        self,
        grads: Sequence[Tensor],
        *,
        mains: Sequence[Tensor] | None,
        states: Sequence[Mapping[str, Tensor]],
        outs: Sequence[Tensor] | None = None,
        remainders: Sequence[Tensor] | None = None,
        matrices: Sequence[MatrixSpec] | None = None,
        firsts: tuple[int, ...] | None = None,  # None: all begin at 0
    ) -> None:
        self.grads = grads
        self.mains = mains
        self.states = states
        self.outs = outs
        self.remainders = remainders
        self.matrices = matrices
        self.firsts = firsts

    def __len__(self) -> int:
        return len(self.grads)

    def __iter__(self) -> Iterator[Work]:
        return map(self.__getitem__, range(len(self.grads)))

    @overload
    def __getitem__(self, index: int) -> Work: ...

    @overload
    def __getitem__(self, index: slice) -> list[Work]: ...

    def __getitem__(self, index: int | slice) -> Work | list[Work]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Work(
            grad=self.grads[index],
            main=None if self.mains is None else self.mains[index],
            state=self.states[index],
            out=None if self.outs is None else self.outs[index],
            remainder=None if self.remainders is None else self.remainders[index],
            matrix=MatrixSpec() if self.matrices is None else self.matrices[index],
            first=0 if self.firsts is None else self.firsts[index],
        )


class Batch(NamedTuple):
    """Works that share one row of the hyper table."""

    hyper: Hyper
    works: Sequence[Work]


class Task(NamedTuple):
    """A work with the hyper-parameters of its batch."""

    hyper: Hyper
    work: Work


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
    def codecs(self) -> "Mapping[str, StateCodec]":
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
    def tp_mode(self) -> "TpMode | None":
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
