"""Drop-in Muon, and its preset MuonH."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from opt_kernels.hooks import GivenHooks, Hyperball
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.optim.matrices import MatrixOptimizer, made, options_of
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.muon import MuonRule
from opt_kernels.works import Hyper

KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


# Options that Muon and AdaptiveMuon share, at the rule's defaults.
MUON_OPTIONS: Mapping[str, Any] = options_of(
    MuonRule,
    "extra_scale_factor",
    "custom_coefficients",
    "fp32_matmul_prec",
    "use_syrk",
    "momentum_buffer_dtype",
    "weight_decay_method",
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
    numbers: ClassVar[Mapping[str, Any]] = {
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
    options: ClassVar[Mapping[str, Any]] = {"scale_mode": None, "coefficient_type": None, **MUON_OPTIONS}

    @classmethod
    def rule_with(cls, given: Mapping[str, Any]) -> Rule:
        chosen = {name: given[name] for name in (*MUON_OPTIONS, "nesterov", "eps", "backend")}
        scale = {"scale_mode": _scale(given["adjust_lr_fn"], given["scale_mode"]), "num_ns_steps": given["ns_steps"]}
        return made(MuonRule, {**chosen, **scale, **_coefficients(given)})

    def _hyper(self, group: ParamGroup, rule: Rule, step: float | Tensor) -> Hyper:
        own = super()._hyper(group, rule, step)
        return own if rule.needs is Needs.MATRICES else replace(own, eps=group["scalar_eps"])


class MuonH(Muon):
    """Muon with weights on a sphere (Hyperball, arXiv 2606.16899): a step rotates each matrix by about lr and keeps its
    norm.

    `hooks` default to `{"muon": (Hyperball(),)}`. The weight decay of matrices must be 0. Scales have no effect.
    """

    numbers: ClassVar[Mapping[str, Any]] = {**Muon.numbers, "weight_decay": 0.0}
    default_hooks: ClassVar[GivenHooks] = {"muon": (Hyperball(),)}


def _scale(adjust_lr_fn: str | None, scale_mode: str | None) -> str:
    """The scale of updates."""
    if scale_mode is not None and adjust_lr_fn is not None:
        raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} with scale_mode={scale_mode!r}: set only one of them")
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is unknown; pass 'original', 'match_rms_adamw' or None")
    if scale_mode is None:
        return "match_rms_adamw" if adjust_lr_fn == "match_rms_adamw" else "shape_scaling"
    return scale_mode


def _coefficients(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The set of coefficients, and the steps of a custom set."""
    single, kind, custom = given["ns_coefficients"], given["coefficient_type"], given["custom_coefficients"]
    if kind is None and not custom:
        return {"coefficient_type": "custom", "custom_coefficients": (single,)}
    if tuple(single) != KELLER_JORDAN:
        raise ValueError(
            f"ns_coefficients={single!r} with coefficient_type={kind!r} or custom_coefficients: pass one of them"
        )
    return {"coefficient_type": "custom" if kind is None else kind, "custom_coefficients": custom}
