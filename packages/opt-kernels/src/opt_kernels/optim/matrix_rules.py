"""Drop-in optimizers of matrix rules: Muon, MuonH, Scion, Muown; AdaptiveMuon, NorMuon, NAMO; SOAP and SOAPMuon."""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from opt_kernels.hooks import GivenHooks, Hyperball
from opt_kernels.optim.groups import Options, ParamGroup
from opt_kernels.optim.matrices import MatrixOptimizer, options_of
from opt_kernels.rules.adaptive_muon import AdaptiveMuonRule, Lines, SecondMoment
from opt_kernels.rules.base import Needs, Rule, build_rule
from opt_kernels.rules.muon import MuonRule
from opt_kernels.rules.muown import MuownRule
from opt_kernels.rules.soap import SOAPRule
from opt_kernels.rules.soap_muon import SOAPMuonRule
from opt_kernels.works import Hyper

KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


# Options that Muon and AdaptiveMuon share, at the rule's defaults.
MUON_OPTIONS: Options = options_of(
    MuonRule,
    "extra_scale_factor",
    "custom_coefficients",
    "fp32_matmul_prec",
    "use_syrk",
    "momentum_buffer_dtype",
    "weight_decay_method",
    "pre_norm",
    "post_norm",
    "nuclear_scale",
)
_NUMBERS: Options = {
    "lr": 3e-4,
    "momentum": 0.95,
    "weight_decay": 0.01,
    "nesterov": False,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
}
_MUON = {"scale_mode": "spectral", "num_ns_steps": 5, "coefficient_type": "quintic", **MUON_OPTIONS}


class Muon(MatrixOptimizer):
    """Muon (Keller Jordan, 2024) with the arguments of torch.optim.Muon, and its updates up to rounding.

    `scalar_optimizer`, "adam" or "lion", updates all parameters that are not matrices, with the lr and weight decay of
    their groups, `betas` and `scalar_eps`. For the group options `use_matrix_rule`, `split_rows`, `num_heads` and
    `split_sizes` see `MatrixOptimizer`.

    `adjust_lr_fn` sets the scale of an update (rows, cols): "original" and None mean sqrt(max(1, rows / cols));
    "match_rms_adamw" means 0.2 sqrt(max(rows, cols)), for which AdamW's lr and weight decay are suitable. `scale_mode`
    selects another scale instead: "spectral", "unit_rms_norm", "shape_scaling", "match_rms_adamw" or "mup" (see
    `opt_kernels.matrices.ScaleMode`). `extra_scale_factor` multiplies either. `coefficient_type` selects a named set of
    coefficients instead of `ns_coefficients`. `custom_coefficients` are (a, b, c) of each step, alone or with "custom".
    The Muon of Megatron-Core is
    `scale_mode="spectral", coefficient_type="quintic", nesterov=False, weight_decay=0.01`.

    The remaining options are those of `opt_kernels.rules.muon.MuonRule`. Raises ValueError for an option that is not
    allowed, MatrixError for a parameter that is not a matrix and has no `scalar_optimizer`.
    """

    fixed = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    numbers: ClassVar[Options] = {
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
    options: ClassVar[Options] = {"scale_mode": None, "coefficient_type": None, **MUON_OPTIONS}

    @classmethod
    def rule_with(cls, given: Options) -> Rule:
        options = {name: given[name] for name in (*MUON_OPTIONS, "nesterov", "eps", "backend")}
        options["num_ns_steps"] = given["ns_steps"]
        scale = given["scale_mode"]
        adjust = given["adjust_lr_fn"]
        if scale is not None and adjust is not None:
            raise ValueError(f"adjust_lr_fn={adjust!r} with scale_mode={scale!r}: set only one of them")
        if adjust not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjust!r} is unknown; pass 'original', 'match_rms_adamw' or None")
        if scale is None:
            scale = "match_rms_adamw" if adjust == "match_rms_adamw" else "shape_scaling"
        options["scale_mode"] = scale
        single = given["ns_coefficients"]
        kind = given["coefficient_type"]
        options["coefficient_type"] = "custom" if kind is None else kind
        if kind is None and not given["custom_coefficients"]:
            options["custom_coefficients"] = (single,)
        elif tuple(single) != KELLER_JORDAN:
            raise ValueError(
                f"ns_coefficients={single!r} with coefficient_type={kind!r} or custom_coefficients: pass one of them"
            )
        return build_rule(MuonRule, options)

    def _hyper(self, group: ParamGroup, rule: Rule, step: int | Tensor) -> Hyper:
        own = super()._hyper(group, rule, step)
        return own if rule.needs is Needs.MATRICES else replace(own, eps=group["scalar_eps"])


class MuonH(Muon):
    """Muon with weights on a sphere (Hyperball, arXiv 2606.16899): a step rotates each matrix by about lr and keeps its
    norm.

    `hooks` default to `{"muon": (Hyperball(),)}`. The weight decay of matrices must be 0. Scales have no effect;
    `nuclear_scale` is refused.
    """

    numbers: ClassVar[Options] = {**Muon.numbers, "weight_decay": 0.0}
    default_hooks: ClassVar[GivenHooks] = {"muon": (Hyperball(),)}


class Scion(Muon):
    """Scion for hidden matrices (arXiv 2502.07529): W <- (1 - lr) W - lr rho sqrt(m / n) Newton-Schulz(M), a step of
    Frank-Wolfe towards the ball of radius rho, `extra_scale_factor`, of the spectral norm per width.

    It is Muon with a weight decay of 1, the scale "unit_rms_norm" and no Nesterov momentum. Groups of parameters that
    are not matrices have a weight decay of 1 too, unless they set their own.
    """

    numbers: ClassVar[Options] = {**Muon.numbers, "weight_decay": 1.0, "nesterov": False}
    options: ClassVar[Options] = {
        **Muon.options,
        "scale_mode": "unit_rms_norm",
        "coefficient_type": "quintic",
    }


class AdaptiveMuon(MatrixOptimizer):
    """Muon with a second moment: per element of the orthogonalised update ("adamuon", Megatron-Core's variant, whose
    step is about 100 times as long as Muon's at the same lr; "adamuon_paper", arXiv 2507.11005, for which
    `scale_mode="match_rms_adamw"` is the paper's scale), per row or column of it
    ("normuon"), or of the gradient's norm ("namo").

    `betas[1]` and `eps` belong to the second moment; groups that `scalar_optimizer` updates have their own. The `lines`
    of NorMuon are "rows", "cols" or "longer" (rows unless cols > rows). The other options are those of `Muon`. Raises
    ValueError for an option that is not allowed.
    """

    fixed = ("nesterov",)
    numbers = _NUMBERS
    options: ClassVar[Options] = {"moment2_method": "adamuon", "lines": "rows", **_MUON}
    method: ClassVar[str | None] = None  # None: an argument

    @classmethod
    def rule_with(cls, given: Options) -> Rule:
        return AdaptiveMuonRule(
            muon=build_rule(MuonRule, {name: given[name] for name in (*_MUON, "nesterov", "backend")}),
            second_moment=SecondMoment(cls.method or given["moment2_method"]),
            lines=Lines(given.get("lines", Lines.ROWS)),
        )


class NorMuon(AdaptiveMuon):
    """NorMuon (arXiv 2510.05491): `AdaptiveMuon` with "normuon" and the paper's scale, 0.2 sqrt(max(rows, cols)).

    AdamW's lr and weight decay are suitable.
    """

    numbers: ClassVar[Options] = {**_NUMBERS, "weight_decay": 0.1}
    options: ClassVar[Options] = {"lines": "rows", **_MUON, "scale_mode": "match_rms_adamw"}
    method = "normuon"


class NAMO(AdaptiveMuon):
    """NAMO (arXiv 2602.17080): Muon with one adaptive scale per matrix; `AdaptiveMuon` with "namo"."""

    options = _MUON
    method = "namo"


class Muown(MatrixOptimizer):
    """Muown (arXiv 2605.10797): Muon of the directions of rows, Adam of their lengths, on which weight decay acts.
    `opt_kernels.rules.muown.MuownRule` has its equations.

    `betas` and `eps` are those of Adam, for lengths and for parameters that are not matrices. With
    `extra_scale_factor=0.2`, AdamW's lr is suitable. The other options are those of the rule, by name. Raises
    ValueError for an option that is not allowed.
    """

    numbers: ClassVar[Options] = {
        "lr": 3e-4, "momentum": 0.95, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8,
    }  # fmt: skip
    options = options_of(MuownRule)
    rule_class = MuownRule


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al., arXiv 2409.11321) for matrices; `scalar_optimizer` selects Adam or Lion for other parameters.

    For a matrix (m, n), its state has up to 2 (m² + n²) numbers more than Adam's; `max_precond_dim` and `one_sided`
    remove sides from this sum. Do not use SOAP for embeddings. If a group splits rows into heads or parts, each part
    has its own factors; loading a state_dict saved with another split raises an error. `order="megatron"` computes a
    step as Megatron-Core does. The options are those of `opt_kernels.rules.soap.SOAPRule`, by name. Raises ValueError
    for an option that is not allowed.
    """

    numbers: ClassVar[Options] = {"lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    options = options_of(SOAPRule)
    rule_class = SOAPRule


class SOAPMuon(MatrixOptimizer):
    """SOAP-Muon for matrices: momentum divided by its second moment in Shampoo's eigenbasis, then orthogonalised.
    `opt_kernels.rules.soap_muon.SOAPMuonRule` has its equations.

    `scale_mode` sets the scale of updates; AdamW's lr and weight decay are suitable for "match_rms_adamw". `betas` are
    those of Adam for other parameters; `eps` is for both. The other options are those of the rule, by name. Raises
    ValueError for an option that is not allowed.
    """

    numbers: ClassVar[Options] = {
        "lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.95,
    }  # fmt: skip
    options = options_of(SOAPMuonRule)
    rule_class = SOAPMuonRule
