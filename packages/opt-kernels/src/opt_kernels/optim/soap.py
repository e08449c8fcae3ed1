"""Drop-in SOAP and SOAPMuon."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from opt_kernels.matrices.newton_schulz.coefficients import Coefficients
from opt_kernels.optim.matrices import MatrixOptimizer, made, options_of
from opt_kernels.rules.base import Rule
from opt_kernels.rules.soap import SOAPRule
from opt_kernels.rules.soap_muon import SOAPMuonRule

_ORTHOGONALIZATION: Mapping[str, Any] = MappingProxyType(
    options_of(
        SOAPMuonRule,
        "scale_mode",
        "extra_scale_factor",
        "coefficient_type",
        "custom_coefficients",
        "num_ns_steps",
        "fp32_matmul_prec",
        "use_syrk",
    )
)


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al., arXiv 2409.11321) for matrices; `scalar_optimizer` selects Adam or Lion for other parameters.

    For a matrix (m, n), its state has up to 2 (m² + n²) numbers more than Adam's; `max_precond_dim` and `one_sided`
    remove sides from this sum. Do not use SOAP for embeddings. If a group splits rows into heads or parts, each part
    has its own factors; loading a state_dict saved with another split raises an error. `order="megatron"` computes a
    step as Megatron-Core does. The options are those of `opt_kernels.rules.soap.SOAPRule`, by name. Raises ValueError
    for an option that is not allowed.
    """

    numbers: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    )
    options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {name: value for name, value in options_of(SOAPRule).items() if name != "backend"}
    )

    @classmethod
    def rule_with(cls, given: Mapping[str, Any]) -> Rule:
        return made(SOAPRule, {name: given[name] for name in (*cls.options, "backend")})


class SOAPMuon(SOAP):
    """SOAP for matrices with a direction orthogonalised by Newton-Schulz. No paper defines SOAPMuon;
    `opt_kernels.rules.soap_muon.SOAPMuonRule` states the equation used here.

    `scale_mode` sets the scale of updates; with the default, "match_rms_adamw", AdamW's lr and weight decay are
    suitable. The other options are those of the rule and of `SOAP`, by name. Raises ValueError for an option that is
    not allowed.
    """

    options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {**SOAP.options, **_ORTHOGONALIZATION, "scale_mode": "match_rms_adamw"}
    )

    @classmethod
    def rule_with(cls, given: Mapping[str, Any]) -> Rule:
        soap = made(SOAPRule, {name: given[name] for name in (*SOAP.options, "backend")})
        steps = tuple(Coefficients(*step) for step in given["custom_coefficients"])
        chosen = {name: given[name] for name in _ORTHOGONALIZATION} | {"custom_coefficients": steps}
        return made(SOAPMuonRule, {"soap": soap, **chosen})
