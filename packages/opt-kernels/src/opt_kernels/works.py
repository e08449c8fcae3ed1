"""Inputs of a rule: declared numbers, choices and states, hyper-parameters, and the tensors of parameters.

A `Work` has the tensors of one parameter that a step updates: its gradient, main value and states. The caller owns all
memory. An update of a `Work` writes `main`, `out`, `remainder` and `state`, never `grad`.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum, StrEnum, auto
from numbers import Real
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

__all__ = [
    "HYPER_FIELDS", "NOT_SPLIT", "Batch", "Hyper", "MatrixPart", "MatrixSpec", "NamedChoice", "StateKind", "StateSpec",
    "Task", "TensorParallel", "Work", "Works", "as_float", "is_number", "is_on_device",
]  # fmt: skip

NumberValue = float | tuple[float, ...]
Skip = Tensor | None
"""The flag of a skipped step: 0-d; nothing is written if it is not zero. None: the step is not skipped."""
Scalar = float | Tensor
"""A number of the host, or a 0-d tensor that the host need not read."""
Constant = bool | float | str
Constants = Mapping[str, Constant]
"""Values of choices, by name."""


class NamedChoice(StrEnum):
    """An option of a configuration. `NamedChoice("unknown")` raises ValueError with the allowed values."""

    @classmethod
    def _missing_(cls, value: object) -> "NamedChoice":
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{value!r} is not a {cls.__name__}; pass one of {allowed}")


class NumberError(ValueError):
    """A number or choice of a rule that is unknown or not allowed."""


ROUNDING = 1e-12
"""How far below 0 a learning rate may be: torch's LinearLR(end_factor=0.0) ends within rounding of 0."""


def is_number(value: object) -> bool:
    """Whether an entry of a group is one number: of Python, of NumPy, or a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def is_on_device(value: object) -> bool:
    """Whether an entry of a group has a number that the host could only read by waiting for an accelerator."""
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(x, Tensor) and x.device.type != "cpu" for x in values)


def as_float(value: Any) -> Any:
    """A number of another type, such as `numpy.float32`, as a float, also in a row: rules compute with float64 on the
    host. Other values are returned as they are."""
    if isinstance(value, tuple | list):
        return tuple(map(as_float, value))
    if isinstance(value, float | int | Tensor) or not isinstance(value, Real):
        return value
    return float(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a parameter group. `betas` is a tuple, which scalars read as beta1, beta2, ...

    `lr`, `weight_decay`, `eps` and `momentum` are at least 0, and each of `betas`, `ema_decay` and `ema_nesterov_beta`
    is in [0, 1), unless declared otherwise.
    """

    name: str
    default: NumberValue
    low: float | None = None  # the smallest number allowed
    high: float | None = None  # the largest number allowed; infinity is allowed only if it is this
    below: float | None = None  # upper bound, itself not allowed

    def __post_init__(self) -> None:
        if isinstance(self.default, tuple) and self.name != "betas":
            raise NumberError(
                f"{self.name}={self.default!r}: only `betas` may be a tuple; declare each number separately"
            )
        if self.low is None and self.high is None and self.below is None:
            if self.name in HYPER_FIELDS:
                object.__setattr__(self, "low", 0.0)
            if self.name in ("betas", "ema_decay", "ema_nesterov_beta"):
                object.__setattr__(self, "below", 1.0)
        self.check(self.default)

    def check(self, value: object) -> None:
        """Raise NumberError for a value that is not allowed."""
        is_row = isinstance(value, tuple | list)
        values = value if isinstance(value, tuple | list) else (value,)
        count = len(self.default) if isinstance(self.default, tuple) else 1
        fits = is_row == isinstance(self.default, tuple) and len(values) == count
        if not fits or not all(map(self._allows, values)):
            verb = "are" if is_row else "is"
            finite = "" if all(not is_number(x) or _is_finite(x) for x in values) else "finite "
            raise NumberError(f"{self.name}={value!r} {verb} not allowed; pass {self._allowed(finite)}")

    def _allows(self, value: object) -> bool:
        if not is_number(value):
            return False
        if not _is_finite(value):
            return bool(self.high == math.inf and value == self.high)
        x = float(value)  # type: ignore[arg-type]
        low = -ROUNDING if self.name == "lr" and self.low == 0 else self.low
        if low is not None and not x >= low:
            return False
        if self.high is not None and not x <= self.high:
            return False
        return self.below is None or x < self.below

    def _allowed(self, finite: str) -> str:
        bounds = {"at least": self.low, "at most": self.high, "below": self.below}
        parts = []
        for words, bound in bounds.items():
            if bound is not None and math.isfinite(bound):
                parts.append(f"{words} {bound:g}")
        of = f" of {' and '.join(parts)}" if parts else ""
        if not isinstance(self.default, tuple):
            return f"a {finite}number{of}"
        return f"{len(self.default)} {finite}number{'s' if len(self.default) > 1 else ''}{of}"


def check_numbers(declared: Sequence[Number], values: Mapping[str, Any]) -> None:
    """Raise NumberError for a number in `values` that is not allowed. Other entries are ignored."""
    for number in declared:
        if number.name in values:
            number.check(values[number.name])


def _is_finite(number: Any) -> bool:
    """Whether a number is finite as a float; an int may be too large."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True)
class Choice:
    """Structure of a formula, equal in all groups and steps: a constant of its source.

    A choice with `off_at_zero` is False while the number of that name is zero. State_dicts record all other choices,
    unless `recorded` is False, for one that changes only how results are rounded.
    """

    name: str
    default: Constant
    allowed: tuple[Constant, ...] = (False, True)
    off_at_zero: str | None = None
    recorded: bool = True

    def __post_init__(self) -> None:
        self.check(self.default)

    @property
    def is_recorded(self) -> bool:
        """Whether state_dicts record its value, so that state of another value is refused."""
        return self.recorded and self.off_at_zero is None

    def check(self, value: object) -> None:
        """Raise NumberError for a value that is not allowed."""
        equal = [x for x in self.allowed if value is x or (not isinstance(x, bool) and value == x)]
        if not equal:
            raise NumberError(f"{self.name}={value!r} is not allowed; pass {' or '.join(map(repr, self.allowed))}")


def unknown(name: str, value: object, allowed: list[str], *, of: str) -> NumberError:
    """The error for an unknown option."""
    near = get_close_matches(name, allowed)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return NumberError(f"{name}={value!r}: {of} has no such option; allowed are {', '.join(allowed)}{hint}")


class StateKind(Enum):
    """How a state tensor relates to its parameter, and so how a checkpoint shards it."""

    LIKE_PARAM = auto()  # one element per element of the parameter
    SCALAR = auto()  # one number per parameter
    REDUCED = auto()  # the parameter's shape without `dims`
    MATRIX = auto()  # (n, n) where n is the parameter's size along `dims[0]`
    BLOCK_SCALES = auto()  # one number per run of `block` elements of the parameter
    SHAPED = auto()  # `shape`, for a matrix rule: sizes "m" and "n" of the matrix, and numbers that the rule chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One state tensor of a rule: its name, its kind and the dtype in which it is stored."""

    name: str
    kind: StateKind = StateKind.LIKE_PARAM
    dtype: torch.dtype = torch.float32
    dims: tuple[int, ...] = ()  # REDUCED: the dims removed; MATRIX: the one dim
    block: int = 0  # BLOCK_SCALES: elements per scale
    shape: tuple[str | int, ...] = ()  # SHAPED: for example ("n", 8) of a matrix (m, n); always `whole`
    optional: bool = False  # only some parameters have it, see `Rule.init_state`
    # Whether it belongs to the whole matrix, even if ranks store parts: kept where `MatrixRule.transform_` runs.
    whole: bool = False
    by_part: bool = False  # with `MatrixSpec.split_rows`, (*batch, numel): that of each part in turn

    def __post_init__(self) -> None:
        if self.kind is not StateKind.SHAPED:
            return
        sizes = [size for size in self.shape if size not in ("m", "n")]
        if not self.shape or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"state {self.name!r} with shape={self.shape!r}: pass a tuple of 'm' (rows of the matrix), 'n' "
                "(columns) and sizes above 0, as in shape=('n', 8)"
            )
        object.__setattr__(self, "whole", True)

    def shape_for(self, param: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the state of a parameter of this shape; None if its rule decides it."""
        batch = tuple(param[:-2])
        sizes = dict(zip("nm", reversed(param)))
        match self.kind:
            case StateKind.LIKE_PARAM:
                return tuple(param)
            case StateKind.REDUCED:
                removed = {dim % len(param) for dim in self.dims}
                return tuple(size for dim, size in enumerate(param) if dim not in removed)
            case StateKind.MATRIX:
                return (*batch, param[self.dims[0]], param[self.dims[0]])
            case StateKind.SHAPED:
                return (*batch, *(size if isinstance(size, int) else sizes[size] for size in self.shape))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """One row of the hyper-parameter table: the numbers of a group in this step. A rule reads the fields it needs.

    The further numbers that a rule declares in `hyper_names` are in `own`. Tensors are 0-d, on the device of the works,
    so that the host need not read them.
    """

    lr: Scalar
    weight_decay: Scalar = 0.0
    step: int | Tensor = 1  # counts from 1
    betas: tuple[Scalar, ...] = (0.9, 0.999)
    eps: Scalar = 1e-8
    momentum: Scalar = 0.9
    ema_decay: Scalar = 0.0  # read by averages of weights, after the rule
    ema_nesterov_beta: Scalar = 0.0
    own: Mapping[str, Any] = field(default_factory=dict)


HYPER_FIELDS = tuple(field.name for field in fields(Hyper) if field.name not in ("step", "own"))
"""Entries of a parameter group that are fields of `Hyper`. Rules read others from `Hyper.own`."""


States = dict[str, Tensor]
"""The states of a parameter, by name."""
AllReduce = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over a group of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The tensor-parallel group of a matrix as callables, so that rules do not depend on process groups."""

    rank: int
    size: int
    all_reduce: AllReduce
    all_gather: Callable[[Tensor, int], Tensor]  # concatenate over the group along a dim


class MatrixPart(NamedTuple):
    """The matrix of which a work is a part, if the part may be any run of rows or columns."""

    whole: Hashable  # identifies the matrix; chosen by the caller
    whole_shape: tuple[int, ...]
    first_row: int  # of the part, in the matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec:
    """How a matrix rule treats a matrix, in addition to its shape."""

    split_rows: tuple[int, ...] = ()  # rows of each matrix in a group (fused QKV: q, k and v); () for a plain matrix
    # True: the rows of each group form a separate matrix (a head); False: those of all groups form one.
    by_group: bool = False
    partition_dim: int | None = None  # the dim that tensor parallelism shards; None: this rank has the whole matrix
    tensor_parallel: TensorParallel | None = None
    part: MatrixPart | None = None  # None: the whole matrix, or one of `tensor_parallel.size` equal parts

    @property
    def split_name(self) -> str:
        """How the rows are split, as checkpoints mark states of parts: `64-16-16`, `16-each`, or empty."""
        return "-".join(map(str, self.split_rows)) + ("-each" if self.split_rows and self.by_group else "")


NOT_SPLIT = MatrixSpec()
"""A whole matrix, on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One parameter, or one run of its elements, to be updated. All tensors except scalars have the same shape.

    The rule updates `main`: an fp32 copy, or the parameter itself. `out`, if given, receives `main` rounded to its
    dtype. With `remainder` (int16), `main` is None: the fp32 value is (`out` as bf16, `remainder`), joined losslessly.
    An int8 `remainder` keeps 24 of its bits.
    """

    grad: Tensor  # any float dtype, read only
    main: Tensor | None  # updated
    state: Mapping[str, Tensor]  # updated
    out: Tensor | None = None  # written
    remainder: Tensor | None = None  # updated
    matrix: MatrixSpec = MatrixSpec()  # matrix rules only
    # Index of the run's first element, in any numbering the caller chooses: the counter of stochastic rounding.
    first: int = 0


@dataclass(slots=True, eq=False)
class Works(Sequence[Work]):
    """Works of one kind, stored as columns. Indexing creates a `Work`.

    For callers with hundreds of tensors per step, because creating that many objects takes longer than the rest of the
    host's work. A column that none of the works has is None.
    """

    grads: Sequence[Tensor]
    _: KW_ONLY
    mains: Sequence[Tensor] | None
    states: Sequence[Mapping[str, Tensor]]
    outs: Sequence[Tensor] | None = None
    remainders: Sequence[Tensor] | None = None
    matrices: Sequence[MatrixSpec] | None = None
    firsts: tuple[int, ...] | None = None  # None: all begin at 0

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[Work]:
        return map(self.__getitem__, range(len(self.states)))

    @overload
    def __getitem__(self, index: int) -> Work: ...

    @overload
    def __getitem__(self, index: slice) -> list[Work]: ...

    def __getitem__(self, index: int | slice) -> Work | list[Work]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        main = None if self.mains is None else self.mains[index]
        out = None if self.outs is None else self.outs[index]
        remainder = None if self.remainders is None else self.remainders[index]
        matrix = NOT_SPLIT if self.matrices is None else self.matrices[index]
        first = 0 if self.firsts is None else self.firsts[index]
        return Work(
            grad=self.grads[index],
            main=main,
            state=self.states[index],
            out=out,
            remainder=remainder,
            matrix=matrix,
            first=first,
        )


class Batch(NamedTuple):
    """Works that share one row of the hyper-parameter table."""

    hyper: Hyper
    works: Sequence[Work]


class Task(NamedTuple):
    """A work with the hyper-parameters of its batch."""

    hyper: Hyper
    work: Work
