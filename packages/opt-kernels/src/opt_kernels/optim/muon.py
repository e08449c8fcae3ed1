"""Drop-in Muon, and its preset MuonH."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from opt_kernels.hooks import GivenHooks, Hyperball
from opt_kernels.matrices.newton_schulz.coefficients import Coefficients, CoefficientType
from opt_kernels.matrices.orthogonalization import ScaleMode
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.optim.matrices import MatrixOptimizer, made, options_of
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.muon import MuonRule
from opt_kernels.works import Hyper

KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


# Options that Muon and AdaptiveMuon share, at the rule's defaults.
MUON_OPTIONS: Mapping[str, Any] = MappingProxyType(
    options_of(
        MuonRule,
        "extra_scale_factor",
        "custom_coefficients",
        "fp32_matmul_prec",
        "use_syrk",
        "momentum_buffer_dtype",
        "weight_decay_method",
    )
)


class Muon(MatrixOptimizer):
    """Muon (Keller Jordan, 2024) with the arguments of torch.optim.Muon, and its updates up to rounding.

    `scalar_optimizer`, "adam" or "lion", updates all parameters that are not matrices, with the lr and weight decay of
    their groups, `betas` and `scalar_eps`. For the group options `use_matrix_rule`, `split_rows`, `num_heads` and
    `split_sizes` see `MatrixOptimizer`.

    `adjust_lr_fn` sets the scale of an update (rows, cols): "original" and None mean sqrt(max(1, rows / cols));
    "match_rms_adamw" means 0.2 sqrt(max(rows, cols)), for which AdamW's lr and weight decay are suitable. `scale_mode`
    selects another scale instead: "spectral", "unit_rms_norm", "shape_scaling", "match_rms_adamw" or "mup" (see
    `ScaleMode` in `opt_kernels.matrices.orthogonalization`). `extra_scale_factor` multiplies either. `coefficient_type`
    selects a named set of coefficients instead of `ns_coefficients`. `custom_coefficients` are (a, b, c) of each step,
    alone or with "custom". The Muon of Megatron-Core is
    `scale_mode="spectral", coefficient_type="quintic", nesterov=False, weight_decay=0.01`.

    The remaining options are those of `opt_kernels.rules.muon.MuonRule`. Raises ValueError for an option that is not
    allowed, MatrixError for a parameter that is not a matrix and has no `scalar_optimizer`.
    """

    fixed = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    numbers: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": KELLER_JORDAN,
            "eps": 1e-7,  # lower bound of the norm that a momentum is divided by
            "ns_steps": 5,
            "adjust_lr_fn": None,
            "betas": (0.9, 0.999),
            "scalar_eps": 1e-8,
        }
    )
    options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"scale_mode": None, "coefficient_type": None, **MUON_OPTIONS}
    )

    @classmethod
    def rule_with(cls, given: Mapping[str, Any]) -> Rule:
        kind, steps = _coefficients(given["ns_coefficients"], given["coefficient_type"], given["custom_coefficients"])
        chosen = {
            "scale_mode": _scale(given["adjust_lr_fn"], given["scale_mode"]),
            "coefficient_type": kind,
            "custom_coefficients": steps,
            "num_ns_steps": given["ns_steps"],
        }
        return muon_rule({name: given[name] for name in (*MUON_OPTIONS, "nesterov", "eps", "backend")} | chosen)

    def _hyper(self, group: ParamGroup, rule: Rule, step: float | Tensor) -> Hyper:
        own = super()._hyper(group, rule, step)
        return own if rule.needs is Needs.MATRICES else replace(own, eps=group["scalar_eps"])


class MuonH(Muon):
    """Muon with weights on a sphere (Hyperball, arXiv 2606.16899): a step rotates each matrix by about lr and keeps its
    norm.

    `hooks` default to `{"muon": (Hyperball(),)}`. The weight decay of matrices must be 0. Scales have no effect.
    """

    numbers: ClassVar[Mapping[str, Any]] = MappingProxyType({**Muon.numbers, "weight_decay": 0.0})
    default_hooks: ClassVar[GivenHooks] = MappingProxyType({"muon": (Hyperball(),)})


def muon_rule(options: Mapping[str, Any]) -> MuonRule:
    """The rule with these fields. Enum members may be given by their values."""
    steps = tuple(Coefficients(*step) for step in options["custom_coefficients"])
    return made(MuonRule, {**options, "custom_coefficients": steps})


def _scale(adjust_lr_fn: str | None, scale_mode: str | None) -> ScaleMode:
    """The scale of updates."""
    if scale_mode is not None and adjust_lr_fn is not None:
        raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} with scale_mode={scale_mode!r}: set only one of them")
    if scale_mode is not None:
        return ScaleMode(scale_mode)
    match adjust_lr_fn:
        case None | "original":
            return ScaleMode.SHAPE_SCALING
        case "match_rms_adamw":
            return ScaleMode.MATCH_RMS_ADAMW
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is unknown; pass 'original', 'match_rms_adamw' or None")


def _coefficients(
    ns_coefficients: tuple[float, float, float],
    coefficient_type: str | None,
    custom: Sequence[tuple[float, float, float]],
) -> tuple[CoefficientType, tuple[Coefficients, ...]]:
    """The set of coefficients, and the steps of a custom set."""
    if coefficient_type is None and not custom:
        return CoefficientType.CUSTOM, (Coefficients(*ns_coefficients),)
    if tuple(ns_coefficients) != KELLER_JORDAN:
        raise ValueError(
            f"ns_coefficients={ns_coefficients!r} with coefficient_type={coefficient_type!r} or custom_coefficients: "
            "pass one of them"
        )
    kind = CoefficientType.CUSTOM if coefficient_type is None else CoefficientType(coefficient_type)
    return kind, tuple(Coefficients(*step) for step in custom)
