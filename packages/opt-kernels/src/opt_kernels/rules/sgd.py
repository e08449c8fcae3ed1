"""SGD with momentum."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, codec_for, init_state, state_specs
from opt_kernels.dispatch import check_backend, tensors_of, version
from opt_kernels.rules.base import Batch, Needs, StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Gradient descent, with momentum unless told otherwise (Sutskever et al. 2013, in the form of torch.optim.SGD).

    The formula stands in `ops/sgd/reference.py`. Of `Hyper` it reads lr, weight_decay, step and momentum. Raises
    ValueError where nesterov goes with dampening or without a buffer, and for a dtype or backend that does not exist.
    """

    momentum_buffer: bool = True  # False: plain descent, no state, and momentum is not read
    momentum_buffer_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, int8
    nesterov: bool = False
    dampening: float = 0.0
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device

    def __post_init__(self) -> None:
        check_backend(self.backend, "sgd")
        codec_for("momentum_buffer", self.momentum_buffer_dtype, signed=True)
        if self.nesterov and (self.dampening or not self.momentum_buffer):
            raise ValueError(
                f"nesterov=True with dampening={self.dampening}, momentum_buffer={self.momentum_buffer}: "
                "Nesterov momentum needs a buffer and no dampening; give dampening=0.0 and momentum_buffer=True"
            )

    @property
    def name(self) -> str:
        return "sgd"

    @property
    def needs(self) -> Needs:
        return Needs.ELEMENTS

    @property
    def momentum_buffer_codec(self) -> StateCodec | None:
        if not self.momentum_buffer:
            return None
        return codec_for("momentum_buffer", self.momentum_buffer_dtype, signed=True)

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """How each state is stored."""
        codec = self.momentum_buffer_codec
        return {} if codec is None else {"momentum_buffer": codec}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return init_state(self.codecs, main)

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        version("sgd", "sgd_", backend=self.backend, tensors=tensors_of(batches))(
            batches,
            nesterov=self.nesterov,
            dampening=self.dampening,
            momentum_buffer_codec=self.momentum_buffer_codec,
            grad_scale=grad_scale,
            skip=skip,
        )
