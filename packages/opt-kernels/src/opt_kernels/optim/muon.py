"""Drop-in Muon."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from opt_kernels.hooks import GivenHooks
from opt_kernels.matrices.newton_schulz.coefficients import Coefficients, CoefficientType
from opt_kernels.matrices.orthogonalization import ScaleMode
from opt_kernels.optim.base import Params
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.optim.matrices import MatrixOptimizer
from opt_kernels.precision import MatmulPrecision
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.muon import Muon as MuonRule
from opt_kernels.works import Hyper

KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


class Muon(MatrixOptimizer):
    """Muon (Keller Jordan, 2024) with torch.optim.Muon's arguments and updates, to rounding.

    With `scalar_optimizer`, "adam" or "lion" moves all parameters that are not matrices, with the groups' lr and weight
    decay, `betas` and `scalar_eps`. Groups choose with `use_matrix_rule` and `split_rows`, see `MatrixOptimizer`.

    The scale of an update (rows, cols) is `adjust_lr_fn`'s: "original", sqrt(max(1, rows / cols)), also for None; or
    "match_rms_adamw", 0.2 sqrt(max(rows, cols)), which takes AdamW's lr and weight decay. `scale_mode` replaces it by
    one of Megatron-Core's, "spectral", "unit_rms_norm" or "shape_scaling"; `extra_scale_factor` multiplies either.
    `coefficient_type` replaces `ns_coefficients` by a named set. Megatron-Core's Muon is `scale_mode="spectral",
    coefficient_type="quintic", nesterov=False, weight_decay=0.01`.

    The remaining options are those of `opt_kernels.rules.muon.Muon`; `mains` and `max_norm`: as in `AdamW`. Raises
    ValueError for an option that is not allowed, MatrixError for a parameter that is not a matrix and has no
    `scalar_optimizer`.
    """

    fixed = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")

    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = KELLER_JORDAN,
        eps: float = 1e-7,  # smallest norm that a momentum is divided by
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        scale_mode: str | None = None,
        extra_scale_factor: float = 1.0,
        coefficient_type: str | None = None,
        custom_coefficients: Sequence[tuple[float, float, float]] = (),  # coefficient_type="custom": one for each step
        scalar_optimizer: str | None = None,
        scalar_options: Mapping[str, Any] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        scalar_eps: float = 1e-8,
        fp32_matmul_prec: str = "medium",
        use_syrk: bool = True,
        momentum_buffer_dtype: torch.dtype = torch.float32,
        mains: str = "param",
        max_norm: float | None = None,
        backend: str | None = None,
        hooks: GivenHooks = (),
    ) -> None:
        mode, factor = _scale(adjust_lr_fn, scale_mode)
        kind, steps = _coefficients(ns_coefficients, coefficient_type, custom_coefficients)
        rule = MuonRule(
            nesterov=nesterov,
            scale_mode=mode,
            extra_scale_factor=factor * extra_scale_factor,
            coefficient_type=kind,
            custom_coefficients=steps,
            num_ns_steps=ns_steps,
            eps=eps,
            fp32_matmul_prec=MatmulPrecision(fp32_matmul_prec),
            use_syrk=use_syrk,
            momentum_buffer_dtype=momentum_buffer_dtype,
            backend=backend,
        )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "scalar_eps": scalar_eps,
        }
        super().__init__(
            params,
            rule,
            defaults,
            scalar_optimizer=scalar_optimizer,
            scalar_options=scalar_options,
            mains=mains,
            max_norm=max_norm,
            backend=backend,
            hooks=hooks,
        )

    def _hyper(self, group: ParamGroup, rule: Rule, step: float) -> Hyper:
        own = super()._hyper(group, rule, step)
        return own if rule.needs is Needs.MATRICES else replace(own, eps=group["scalar_eps"])


def _scale(adjust_lr_fn: str | None, scale_mode: str | None) -> tuple[ScaleMode, float]:
    """The scale of updates, and a factor of it."""
    if scale_mode is not None and adjust_lr_fn is not None:
        raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} with scale_mode={scale_mode!r}: give one of them")
    if scale_mode is not None:
        return ScaleMode(scale_mode), 1.0
    match adjust_lr_fn:
        case None | "original":
            return ScaleMode.SHAPE_SCALING, 1.0
        case "match_rms_adamw":
            return ScaleMode.SPECTRAL, 0.2
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is unknown; give 'original', 'match_rms_adamw' or None")


def _coefficients(
    ns_coefficients: tuple[float, float, float],
    coefficient_type: str | None,
    custom: Sequence[tuple[float, float, float]],
) -> tuple[CoefficientType, tuple[Coefficients, ...]]:
    """The set of coefficients, and its steps where the set is the caller's."""
    if coefficient_type is None and not custom:
        return CoefficientType.CUSTOM, (Coefficients(*ns_coefficients),)
    if tuple(ns_coefficients) != KELLER_JORDAN:
        raise ValueError(
            f"ns_coefficients={ns_coefficients!r} with coefficient_type={coefficient_type!r} or custom_coefficients: "
            "give one of them"
        )
    kind = CoefficientType.CUSTOM if coefficient_type is None else CoefficientType(coefficient_type)
    return kind, tuple(Coefficients(*step) for step in custom)
