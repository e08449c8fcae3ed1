"""The protocol of rules: a pure update of tensors, the states it declares, and what it needs of a parameter.

`WholeMatrices` is the base class of rules that transform gradients of whole matrices. `ElementwiseRule` is a formula
with its choices, the dtypes of its states and a backend.

A rule holds structure only. `Hyper` passes what varies between steps and groups, `Work` the tensors to update.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend, tensors_of, version
from opt_kernels.backends.elements import read_main, skipped
from opt_kernels.codecs import Codecs, StateCodec, codec_for, largest_beta, stalls, state_specs
from opt_kernels.codecs import init_state as init_codec_state
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import Formula, State, number_of
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.sgd import SGD as SGD_FORMULA
from opt_kernels.matrices.access import (
    MatrixError,
    check,
    check_shape,
    cut_of,
    scaled_grads,
    stacks,
    write_main_,
)
from opt_kernels.matrices.coefficients import Coefficients
from opt_kernels.matrices.muon import decay_of
from opt_kernels.matrices.orthogonalization import TpMode
from opt_kernels.works import (
    HYPER_FIELDS,
    Batch,
    Hyper,
    MatrixSpec,
    NamedChoice,
    Number,
    NumberError,
    Scalar,
    Skip,
    States,
    StateSpec,
    Task,
    Work,
    is_on_device,
    unknown,
)

StateDtypes = Mapping[str, torch.dtype] | tuple[tuple[str, torch.dtype], ...]


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


def in_phases_(batches: Sequence[Batch], rule: MatrixRule, *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
    """Update all works by the three phases of `rule`: one matrix at a time in the first and the last, so that it stays
    in the cache, and stacks of one layout in the second."""
    for tasks in stacks(batches):
        if reads_weights(rule):
            for index, (hyper, work) in enumerate(tasks):
                tasks[index] = Task(hyper, replace(work, state={**work.state, WEIGHTS: read_main(work)}))
        inputs = scaled_grads(tasks, grad_scale)
        for grad, task in zip(inputs, tasks):
            rule.prepare_(task, grad, skip)
        for update, task in zip(rule.transform_(tasks, inputs, skip), tasks):
            rule.apply_(task, update, skip)


class WholeMatrices(MatrixRule):
    """A rule that transforms gradients of whole matrices directly. The host reads the step and the skip flag, unless
    it is `capturable`.

    A final class has `name`, `state_specs` and `transform_`, and `init_state` if a state does not begin at zero.
    `numbers` are those of `Hyper` that it reads besides lr and weight_decay, with their defaults.
    """

    __slots__ = ()
    numbers: ClassVar[tuple[Number, ...]] = ()
    capturable: ClassVar[bool] = False
    needs = Needs.MATRICES
    tp_mode = None  # it needs whole matrices

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The numbers that it reads from `Hyper.own`."""
        return tuple(number.name for number in self.numbers if number.name not in HYPER_FIELDS)

    @property
    def codecs(self) -> Codecs:
        """Return no codecs: states are stored unencoded."""
        return {}

    def init_state(self, main: Tensor) -> States:
        """Return zeros in the shapes of `state_specs`. Raises MatrixError for a parameter that is not a matrix."""
        check_shape(main.shape)
        states = {}
        for spec in self.state_specs:
            shape = spec.shape_for(main.shape) or ()
            states[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=main.device)
        return states

    def update_(self, batches: Sequence[Batch], *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
        if not self.capturable:
            if skipped(skip):
                return
            skip = None
        for hyper, works in batches:
            for work in works:
                check(work)
                wide = work.main is not None and work.main.dtype is torch.float64
                check_states(self, work.state, work.grad.shape, work.matrix, wide=wide)
            in_phases_([Batch(hyper, works)], self, grad_scale=grad_scale, skip=skip)

    def apply_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Update in place: p <- p - lr wd p - lr update."""
        hyper, work = task
        if not skipped(skip):
            main = read_main(work)
            write_main_(work, main - hyper.lr * (decay_of(main, hyper.weight_decay) + update), None)

    def prepare_(self, task: Task, grad: Tensor, skip: Skip) -> None:
        """Do nothing: `transform_` takes gradients directly."""

    def check_whole(self, work: Work) -> None:
        """Raise MatrixError for a matrix that is cut over tensor-parallel ranks."""
        cut = cut_of(work)
        size = 1 if cut is None else cut.ranks.size
        if size > 1:
            raise MatrixError(
                f"{self.name} needs whole matrices, but dim {work.matrix.partition_dim} of this one is cut over "
                f"{size} tensor-parallel ranks; gather it before the rule, or use Muon with tp_mode 'distributed'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseRule:
    """A formula with the options of its execution. Reads from `Hyper` the numbers that the formula declares.

    When built, raises CodecError for a dtype without a codec, NumberError for a state that the formula does not have,
    and BackendError for an unknown backend.
    """

    formula: Formula
    state_dtypes: StateDtypes = ()  # default float32; also bfloat16, float16, float8_e4m3fn, float8_e5m2,
    # and 8-bit codes: int8 for signed states, uint8 for states that are never negative
    maximize: bool = False  # maximize the objective
    stochastic_rounding: bool = False  # round bfloat16 mains stochastically, unbiased on average
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device
    hooks: tuple[Hashable, ...] = ()  # hooks that were composed into the formula, see `opt_kernels.hooks`
    codecs: Codecs = field(init=False, repr=False, compare=False)
    """The codecs of the states, by name."""
    capturable = True  # a step reads no device tensor on the host
    needs = Needs.ELEMENTS

    def __post_init__(self) -> None:
        check_backend(self.backend, "update")
        dtypes = dict(self.state_dtypes)
        object.__setattr__(self, "state_dtypes", tuple(dtypes.items()))
        names = [state.name for state in self.formula.declared]
        for name, dtype in dtypes.items():
            if name not in names:
                raise unknown(f"{name}_dtype", dtype, [f"{name}_dtype" for name in names], of=f"rule {self.name!r}")
        codecs = {}
        for state in self.formula.states:
            dtype = dtypes.get(state.name, torch.float32)
            codecs[state.name] = codec_for(state.name, dtype, signed=state.signed)
        object.__setattr__(self, "codecs", codecs)

    @property
    def name(self) -> str:
        return self.formula.name

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The numbers that it reads from `Hyper.own`."""
        return self.formula.own_numbers

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    @property
    def choosing_numbers(self) -> tuple[str, ...]:
        """The numbers that switch off a part of the formula if they are zero on the host."""
        return tuple(choice.off_at_zero for choice in self.formula.choices if choice.off_at_zero)

    def init_state(self, main: Tensor) -> States:
        return init_codec_state(self.codecs, main)

    def in_float64(self) -> "ElementwiseRule":
        """The rule of float64 parameters: float32 states become float64, on a backend that supports float64."""
        dtypes = {name: codec.dtype for name, codec in self.codecs.items()}
        wide = {name: torch.float64 if dtype is torch.float32 else dtype for name, dtype in dtypes.items()}
        return replace(self, state_dtypes=wide, backend=self.backend or "torch")

    def formula_at(self, hyper: Hyper) -> Formula:
        """The formula for these numbers. States that it does not use keep their bits."""
        constants = dict(self.formula.constants)
        off = {}
        for choice in self.formula.choices:
            number = choice.off_at_zero
            if number and constants[choice.name] and _is_zero(number_of(hyper, number, self.formula)):
                off[choice.name] = False
        return self.formula.with_constants(**off)

    def update_(self, batches: Sequence[Batch], *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
        sweep = version("update", "update_", backend=self.backend, tensors=tensors_of(batches))
        scale = -grad_scale if self.maximize else grad_scale
        by_sweep: dict[tuple[Formula, tuple[StateCodec, ...]], list[Batch]] = {}
        for batch in batches:
            formula = self.formula_at(batch.hyper)
            codecs = tuple([self.codec_at(state, batch.hyper) for state in formula.states])
            by_sweep.setdefault((formula, codecs), []).append(batch)
        for (formula, codecs), together in by_sweep.items():
            by_name = {state.name: codec for state, codec in zip(formula.states, codecs)}
            sweep(together, formula, by_name, stochastic_rounding=self.stochastic_rounding, grad_scale=scale, skip=skip)

    def check_betas(self, values: Mapping[str, Any]) -> None:
        """Raise NumberError for a beta among the numbers of a group with which rounding would lengthen updates.

        Numbers on an accelerator are not read.
        """
        for state in self.formula.states:
            codec = self.codecs[state.name]
            limit = largest_beta(codec)
            given, at = _entry_of(state.beta or "")
            beta = values.get(given)
            if isinstance(beta, tuple | list):
                beta = beta[at]
            if limit == 1.0 or state.gives_signs or beta is None or is_on_device(beta) or float(beta) <= limit:
                continue
            raise NumberError(
                f"{given}={values[given]!r} with {state.name} in {codec.dtype}: rounding would make updates more than "
                f"5 % longer from {math.floor(limit * 1e4) / 1e4:g} on; choose a smaller beta there, or a wider "
                f"{state.name}_dtype"
            )

    def codec_at(self, state: State, hyper: Hyper) -> StateCodec:
        """Return the codec of a state: stochastic if, with these numbers, its average would stop short of its input."""
        codec = self.codecs[state.name]
        if state.beta and codec.dtype.itemsize < 4 and stalls(codec, number_of(hyper, state.beta, self.formula)):
            return replace(codec, stochastic=True)
        return codec


def _entry_of(number: str) -> tuple[str, int]:
    """The entry of a group that holds a number of a formula, and its place there."""
    is_beta = number.startswith("beta") and number[4:].isdigit()
    return ("betas", int(number[4:]) - 1) if is_beta else (number, 0)


def _is_zero(number: object) -> bool:
    """Whether a host number is zero. A tensor never counts as zero, because the host does not read it."""
    return not isinstance(number, Tensor) and not number


def elementwise(formula: Formula, **options: Any) -> ElementwiseRule:
    """The rule of `formula`. Options: its choices, `<state>_dtype` for each of its states, and `maximize`,
    `stochastic_rounding` and `backend`.

    Raises NumberError, a ValueError, for an option that is unknown or not allowed, and the errors of `ElementwiseRule`.
    """
    choices = [choice.name for choice in formula.choices if choice.off_at_zero is None or choice.name in options]
    dtypes = {f"{state.name}_dtype": state.name for state in formula.declared}
    common = ("maximize", "stochastic_rounding", "backend")
    allowed = [*choices, *dtypes, *common]
    for name, value in options.items():
        if name not in allowed:
            raise unknown(name, value, allowed, of=f"rule {formula.name!r}")
    chosen = formula.with_constants(**{name: options[name] for name in choices if name in options})
    state_dtypes = {state: options[name] for name, state in dtypes.items() if name in options}
    given = {name: options[name] for name in common if name in options}
    return ElementwiseRule(formula=chosen, state_dtypes=state_dtypes, **given)


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


def Adam(*, decoupled: bool = True, **options: Any) -> ElementwiseRule:
    """Adam (Kingma & Ba 2015), with decoupled weight decay (AdamW, Loshchilov & Hutter 2019) by default.

    Options: `decoupled=False` adds weight decay to the gradient (L2). `order` is the order of operations: "torch" for
    that of torch.optim.AdamW, "te" for that of Transformer Engine. `amsgrad`, `exp_avg_dtype`, `exp_avg_sq_dtype`, and
    the options and errors of `elementwise`. The formula is in `formulas/adam.py`.
    """
    return elementwise(ADAM, decoupled_weight_decay=decoupled, **options)


def Lion(**options: Any) -> ElementwiseRule:
    """Lion (Chen et al. 2023): every element moves by the learning rate, up or down. It has one state.

    Options: `exp_avg_dtype` and those of `elementwise`. The formula is in `formulas/lion.py`.
    """
    return elementwise(LION, **options)


def SGD(
    *, momentum_buffer: bool = True, nesterov: bool = False, dampening: float = 0.0, **options: Any
) -> ElementwiseRule:
    """Gradient descent, with momentum by default (Sutskever et al. 2013, in the form of torch.optim.SGD).

    `momentum_buffer=False` is plain descent without a state. `dampening` is the default of groups. Further options:
    `momentum_buffer_dtype` and those of `elementwise`. The formula is in `formulas/sgd.py`. Raises ValueError for
    nesterov with dampening or without a buffer.
    """
    if nesterov and (dampening or not momentum_buffer):
        raise ValueError(
            f"nesterov=True with dampening={dampening}, momentum_buffer={momentum_buffer}: Nesterov momentum needs a "
            "buffer and no dampening; pass dampening=0.0 and momentum_buffer=True"
        )
    formula = SGD_FORMULA.with_defaults(dampening=dampening)
    return elementwise(formula, nesterov=nesterov, has_momentum=momentum_buffer, **options)
