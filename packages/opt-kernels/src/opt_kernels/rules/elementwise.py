"""Rules that a formula defines: the states' dtypes, and which formula runs at a group's numbers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend, tensors_of, version
from opt_kernels.codecs import StateCodec, codec_for, init_state, state_specs
from opt_kernels.formulas.formula import Formula
from opt_kernels.rules.base import Needs
from opt_kernels.works import Batch, Hyper, StateSpec


class ElementwiseRule(ABC):
    """What the rules of a formula share. A final class is a frozen dataclass that says which formula, and its dtypes.

    Raises CodecError, when built, for a dtype in which no state can be kept, and BackendError for an unknown backend.
    """

    __slots__ = ()

    stochastic_rounding: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        check_backend(self.backend, "update")
        _ = self.codecs

    @property
    @abstractmethod
    def formula(self) -> Formula: ...

    @abstractmethod
    def dtype_of(self, state: str) -> torch.dtype:
        """The dtype that the state of this name is kept in."""
        ...

    def formula_at(self, hyper: Hyper) -> Formula:
        """The formula that runs at these numbers; states that it does not have keep their bits."""
        return self.formula

    @property
    def name(self) -> str:
        return self.formula.name

    @property
    def needs(self) -> Needs:
        return Needs.ELEMENTS

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """How each state is stored."""
        return {
            state.name: codec_for(state.name, self.dtype_of(state.name), signed=state.signed)
            for state in self.formula.states
        }

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return init_state(self.codecs, main)

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        sweep = version("update", "update_", backend=self.backend, tensors=tensors_of(batches))
        codecs = self.codecs
        for formula, same in _by_formula(self, batches).items():
            kept: Mapping[str, StateCodec] = {state.name: codecs[state.name] for state in formula.states}
            sweep(same, formula, kept, stochastic_rounding=self.stochastic_rounding, grad_scale=grad_scale, skip=skip)


def _by_formula(rule: ElementwiseRule, batches: Sequence[Batch]) -> dict[Formula, list[Batch]]:
    found: dict[Formula, list[Batch]] = {}
    for batch in batches:
        found.setdefault(rule.formula_at(batch.hyper), []).append(batch)
    return found
