"""Lion."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, codec_for, init_state, state_specs
from opt_kernels.dispatch import check_backend, tensors_of, version
from opt_kernels.rules.base import Batch, Needs, StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """Lion (Chen et al. 2023): every element moves by the learning rate, up or down; one state.

    The formula stands in `ops/lion/reference.py`. Of `Hyper` it reads lr, weight_decay and betas. Raises ValueError for
    a dtype or backend that does not exist.
    """

    exp_avg_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, int8
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device

    def __post_init__(self) -> None:
        check_backend(self.backend, "lion")
        codec_for("exp_avg", self.exp_avg_dtype, signed=True)

    @property
    def name(self) -> str:
        return "lion"

    @property
    def needs(self) -> Needs:
        return Needs.ELEMENTS

    @property
    def exp_avg_codec(self) -> StateCodec:
        return codec_for("exp_avg", self.exp_avg_dtype, signed=True)

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """How each state is stored."""
        return {"exp_avg": self.exp_avg_codec}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return init_state(self.codecs, main)

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        version("lion", "lion_", backend=self.backend, tensors=tensors_of(batches))(
            batches, exp_avg_codec=self.exp_avg_codec, grad_scale=grad_scale, skip=skip
        )
