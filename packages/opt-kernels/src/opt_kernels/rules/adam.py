"""Adam and AdamW."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, codec_for, init_state, state_specs
from opt_kernels.dispatch import check_backend, tensors_of, version
from opt_kernels.ops.adam.reference import Order
from opt_kernels.rules.base import Batch, Needs, StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam (Kingma & Ba 2015), with decoupled weight decay (AdamW, Loshchilov & Hutter 2019) unless told otherwise.

    The formula stands in `ops/adam/reference.py`. Of `Hyper` it reads lr, weight_decay, step, betas and eps.
    Raises ValueError for a dtype, order or backend that does not exist.
    """

    decoupled: bool = True  # False: weight decay is added to the gradient (L2)
    exp_avg_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, int8
    exp_avg_sq_dtype: torch.dtype = torch.float32  # float32, bfloat16, float16, float8_e4m3fn, uint8
    order: Order = "torch"  # of operations: torch.optim.AdamW's, or "te", Transformer Engine's
    stochastic_rounding: bool = False  # a bfloat16 main is rounded up or down by chance, right on average
    backend: str | None = None  # "reference", "torch", "cpp", "triton"; None: by device

    def __post_init__(self) -> None:
        if self.order not in ("torch", "te"):
            raise ValueError(f"order={self.order!r} is unknown; give 'torch' or 'te'")
        check_backend(self.backend, "adam")
        codec_for("exp_avg", self.exp_avg_dtype, signed=True)
        codec_for("exp_avg_sq", self.exp_avg_sq_dtype, signed=False)

    @property
    def name(self) -> str:
        return "adam"

    @property
    def needs(self) -> Needs:
        return Needs.ELEMENTS

    @property
    def exp_avg_codec(self) -> StateCodec:
        return codec_for("exp_avg", self.exp_avg_dtype, signed=True)

    @property
    def exp_avg_sq_codec(self) -> StateCodec:
        return codec_for("exp_avg_sq", self.exp_avg_sq_dtype, signed=False)

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """How each state is stored."""
        return {"exp_avg": self.exp_avg_codec, "exp_avg_sq": self.exp_avg_sq_codec}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return state_specs(self.codecs)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return init_state(self.codecs, main)

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        version("adam", "adam_", backend=self.backend, tensors=tensors_of(batches))(
            batches,
            decoupled=self.decoupled,
            order=self.order,
            exp_avg_codec=self.exp_avg_codec,
            exp_avg_sq_codec=self.exp_avg_sq_codec,
            stochastic_rounding=self.stochastic_rounding,
            grad_scale=grad_scale,
            skip=skip,
        )
