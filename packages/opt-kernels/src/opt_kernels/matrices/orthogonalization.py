"""The orthogonalisation of Muon: its precision, matrix products, tensor-parallel modes and scale."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import Backend, parse_backend, version
from opt_kernels.matrices.muon import Inputs
from opt_kernels.matrices.newton_schulz import (
    EPS,
    CoefficientType,
    Schedule,
    cut,
    newton_schulz,
    reference_newton_schulz,
    schedule,
)
from opt_kernels.matrices.syrk import dense_product
from opt_kernels.precision import MatmulPrecision, fp32_products
from opt_kernels.works import NamedChoice, TensorParallel

__all__ = ["MatmulPrecision", "Orthogonalization", "ScaleMode", "TpMode", "scale_factor"]


class ScaleMode(NamedChoice):
    """Factor of the orthogonal matrix (rows, cols), so that one learning rate suits every shape."""

    SPECTRAL = "spectral"  # sqrt(max(rows, cols)): elements have a root mean square of 1
    UNIT_RMS_NORM = "unit_rms_norm"  # sqrt(rows / cols): the change of an output per change of an input is 1
    SHAPE_SCALING = "shape_scaling"  # sqrt(max(1, rows / cols)): as by Keller Jordan
    MATCH_RMS_ADAMW = "match_rms_adamw"  # 0.2 sqrt(max(rows, cols)): AdamW's root mean square (Moonlight, 2502.16982)
    MUP = "mup"  # sqrt(rows / cols), by muP's spectral condition (Yang et al., arXiv 2310.17813): as UNIT_RMS_NORM


class TpMode(NamedChoice):
    """How a matrix that tensor parallelism shards is orthogonalised."""

    BLOCKWISE = "blockwise"  # each rank its own block: no communication; the update depends on the number of ranks
    DUPLICATED = "duplicated"  # gathered and done on every rank: bit for bit the update of the whole matrix
    DISTRIBUTED = "distributed"  # on blocks, with Gram matrices summed over ranks: the same update up to rounding


def scale_factor(mode: ScaleMode, *, rows: int, cols: int) -> float:
    """The factor of `mode` for a matrix of this size; under tensor parallelism, the size of the whole matrix."""
    match mode:
        case ScaleMode.SPECTRAL:
            return float(max(rows, cols) ** 0.5)
        case ScaleMode.MATCH_RMS_ADAMW:
            return float(0.2 * max(rows, cols) ** 0.5)
        case ScaleMode.UNIT_RMS_NORM | ScaleMode.MUP:
            return float((rows / cols) ** 0.5)
        case ScaleMode.SHAPE_SCALING:
            return float(max(1.0, rows / cols) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalization:
    """The polar factor of matrices, by Newton-Schulz (see `matrices/newton_schulz`)."""

    schedule: Schedule
    eps: float = EPS  # lower bound of the norm that a matrix is divided by
    precision: MatmulPrecision = MatmulPrecision.MEDIUM
    use_syrk: bool = True
    tp_mode: TpMode = TpMode.BLOCKWISE
    rescale_rows: bool = False  # AOL's, before the first step
    backend: str | None = None

    @classmethod
    def of(cls, rule: Any, **more: Any) -> "Orthogonalization":
        """That of a rule with the options of Newton-Schulz: `coefficient_type` and so on."""
        kind = rule.coefficient_type
        return cls(
            schedule=schedule(kind, num_steps=rule.num_ns_steps, custom=rule.custom_coefficients),
            precision=rule.fp32_matmul_prec,
            use_syrk=rule.use_syrk,
            rescale_rows=kind is CoefficientType.AOL,
            backend=rule.backend,
            **more,
        )

    def __call__(
        self,
        x: Tensor,  # (batch, rows, cols) float32 or float64, read only: this rank's part
        *,
        cut_dim: int | None = None,  # -2 or -1: the dim that tensor parallelism shards
        tensor_parallel: TensorParallel | None = None,
        normalised: bool = False,  # x has the form that `inputs` describes
    ) -> Tensor:
        """The orthogonalised matrices, or this rank's part of them, (batch, rows, cols) of x's dtype."""
        if cut_dim is None or tensor_parallel is None or self.tp_mode is TpMode.BLOCKWISE:
            return self._oriented(x, transpose=x.shape[-2] > x.shape[-1], normalised=normalised)
        if self.tp_mode is TpMode.DISTRIBUTED:
            # Ranks must store columns, so that their Gram matrices add up to that of the whole.
            reduce = tensor_parallel.all_reduce
            return self._oriented(x, transpose=cut_dim == -2, all_reduce=reduce, normalised=normalised)
        whole = tensor_parallel.all_gather(x, x.dim() + cut_dim)
        part = x.shape[cut_dim]
        done = self._oriented(whole, transpose=whole.shape[-2] > whole.shape[-1])
        return done.narrow(cut_dim, tensor_parallel.rank * part, part)

    def inputs(
        self, dtype: torch.dtype, device: torch.device, *, cut_dim: int | None, tensor_parallel: TensorParallel | None
    ) -> Inputs:
        """The form of x that saves another pass for its norm. `dtype` is the compute dtype."""
        if cut_dim is None or tensor_parallel is None or self.tp_mode is TpMode.BLOCKWISE:
            return Inputs(self._dtype(dtype, device), True, eps=self.eps)
        if self.tp_mode is TpMode.DISTRIBUTED:
            return Inputs(self._dtype(dtype, device), True, tensor_parallel.all_reduce, self.eps)
        # Gathered and normalised on every rank: a norm summed over ranks may differ in its last bit.
        return Inputs(dtype, False, eps=self.eps)

    def _oriented(
        self,
        x: Tensor,
        *,
        transpose: bool,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
        normalised: bool = False,
    ) -> Tensor:
        """Orthogonalise with the Gram matrix of the rows, or of the columns with `transpose`."""
        wide = x.mT.contiguous() if transpose else x
        dtype = x.dtype if normalised else self._dtype(x.dtype, x.device)
        common: dict[str, Any] = {"eps": self.eps, "all_reduce": all_reduce, "rescale_rows": self.rescale_rows}
        if parse_backend(self.backend) is Backend.REFERENCE:
            done = reference_newton_schulz(wide, segments=(self.schedule,), **common)
        else:
            rows, cols = wide.shape[-2:]
            segments = cut(self.schedule, rows=rows, cols=cols, dtype=dtype, symmetric=self.use_syrk)
            product = dense_product
            if self.use_syrk:
                product = version("syrk", "symmetric_product", backend=self.backend, tensors=[x])
            # Products of 16 or 64 bits do not depend on the setting.
            with fp32_products(self.precision) if dtype is torch.float32 else nullcontext():
                done = newton_schulz(
                    wide, segments=segments, dtype=dtype, product=product, normalised=normalised, **common
                )
        done = done.to(x.dtype)
        return done.mT if transpose else done

    def _dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        if dtype is torch.float64 or self.precision is not MatmulPrecision.MEDIUM:
            return dtype
        return torch.float16 if device.type == "cuda" else torch.bfloat16
