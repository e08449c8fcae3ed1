"""The rule that runs a formula: in which dtypes its states are kept, and which of its choices hold."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend, tensors_of, version
from opt_kernels.codecs import StateCodec, codec_for, init_state, state_specs
from opt_kernels.formulas.formula import Formula, number_of
from opt_kernels.formulas.numbers import unknown
from opt_kernels.rules.base import Needs
from opt_kernels.works import Batch, Hyper, StateSpec

StateDtypes = Mapping[str, torch.dtype] | tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseRule:
    """A formula, and how it is kept and run. Of `Hyper` it reads the numbers that the formula declares.

    Raises CodecError, when built, for a dtype in which no state can be kept, NumberError for a state that the formula
    does not have, and BackendError for an unknown backend.
    """

    formula: Formula
    state_dtypes: StateDtypes = ()  # float32 where nothing is said; float32, bfloat16, float16, float8_e4m3fn,
    # and 8-bit codes: int8 for signed states, uint8 for those that are never negative
    maximize: bool = False  # the negative gradient is followed
    stochastic_rounding: bool = False  # a bfloat16 main is rounded up or down stochastically, right on average
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device
    hooks: tuple[Hashable, ...] = ()  # that the formula has been transformed by: see `opt_kernels.hooks`

    def __post_init__(self) -> None:
        check_backend(self.backend, "update")
        object.__setattr__(self, "state_dtypes", tuple(dict(self.state_dtypes).items()))
        names = [state.name for state in self.formula.declared]
        for name, dtype in dict(self.state_dtypes).items():
            if name not in names:
                raise unknown(f"{name}_dtype", dtype, [f"{name}_dtype" for name in names], of=f"rule {self.name!r}")
        _ = self.codecs

    capturable: ClassVar[bool] = True  # the host reads nothing

    @property
    def name(self) -> str:
        return self.formula.name

    @property
    def needs(self) -> Needs:
        return Needs.ELEMENTS

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The numbers that are found in `Hyper.own`."""
        return self.formula.own_numbers

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """How each state is stored."""
        dtypes = dict(self.state_dtypes)
        return {
            state.name: codec_for(state.name, dtypes.get(state.name, torch.float32), signed=state.signed)
            for state in self.formula.states
        }

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    @property
    def choosing_numbers(self) -> tuple[str, ...]:
        """The numbers that switch a part of the formula off where the host gives a zero."""
        return tuple(choice.off_at_zero for choice in self.formula.choices if choice.off_at_zero)

    def check_numbers(self, values: Mapping[str, object]) -> None:
        """Raises NumberError for a number of a group that is not allowed."""
        self.formula.check_numbers(values)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return init_state(self.codecs, main)

    def in_float64(self) -> "ElementwiseRule":
        """The rule of float64 parameters: with float64 states for float32 ones, on operations that compute so."""
        dtypes = {name: codec.dtype for name, codec in self.codecs.items()}
        wide = {name: torch.float64 if dtype is torch.float32 else dtype for name, dtype in dtypes.items()}
        return replace(self, state_dtypes=wide, backend=self.backend or "torch")

    def formula_at(self, hyper: Hyper) -> Formula:
        """The formula that runs at these numbers; states that it does not have keep their bits."""
        constants = dict(self.formula.constants)
        off = [
            choice.name
            for choice in self.formula.choices
            if choice.off_at_zero
            and constants[choice.name]
            and _is_zero(number_of(hyper, choice.off_at_zero, self.formula))
        ]
        return self.formula.with_constants(**dict.fromkeys(off, False))

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        sweep = version("update", "update_", backend=self.backend, tensors=tensors_of(batches))
        codecs, scale = self.codecs, -grad_scale if self.maximize else grad_scale
        by_formula: dict[Formula, list[Batch]] = {}
        for batch in batches:
            by_formula.setdefault(self.formula_at(batch.hyper), []).append(batch)
        for formula, same in by_formula.items():
            kept: Mapping[str, StateCodec] = {state.name: codecs[state.name] for state in formula.states}
            sweep(same, formula, kept, stochastic_rounding=self.stochastic_rounding, grad_scale=scale, skip=skip)


def _is_zero(number: object) -> bool:
    """Of a tensor the host does not know: whoever gives one means a number that chooses nothing."""
    return not isinstance(number, Tensor) and not number


def elementwise(formula: Formula, **options: Any) -> ElementwiseRule:
    """The rule of `formula` with its choices, `<state>_dtype` for any of its states, and the options of every rule:
    `maximize`, `stochastic_rounding`, `backend`.

    Raises NumberError, a ValueError, for an option that does not exist or is not allowed; else as `ElementwiseRule`.
    """
    choices = [choice.name for choice in formula.choices if choice.off_at_zero is None or choice.name in options]
    dtypes = {f"{state.name}_dtype": state.name for state in formula.declared}
    common = ("maximize", "stochastic_rounding", "backend")
    for name, value in options.items():
        if name not in (*choices, *dtypes, *common):
            raise unknown(name, value, [*choices, *dtypes, *common], of=f"rule {formula.name!r}")
    return ElementwiseRule(
        formula=formula.with_constants(**{name: options[name] for name in choices if name in options}),
        state_dtypes={state: options[name] for name, state in dtypes.items() if name in options},
        **{name: options[name] for name in common if name in options},
    )
