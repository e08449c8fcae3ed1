"""`ElementwiseRule`: a formula with its choices, the dtypes of its states and a backend. Adam, Lion and SGD by name."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend, tensors_of, version
from opt_kernels.codecs import Codecs, StateCodec, codec_for, largest_beta, stalls, state_specs
from opt_kernels.codecs import init_state as init_codec_state
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import Formula, State, number_of
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.sgd import SGD as SGD_FORMULA
from opt_kernels.rules.base import Needs
from opt_kernels.works import Batch, Hyper, NumberError, Scalar, Skip, States, StateSpec, is_on_device, unknown

StateDtypes = Mapping[str, torch.dtype] | tuple[tuple[str, torch.dtype], ...]


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
