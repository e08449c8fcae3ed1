"""Drop-in SOAP and SOAPMuon."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from opt_kernels.matrices.newton_schulz.coefficients import Coefficients
from opt_kernels.optim.matrices import MatrixOptimizer, made, options_of
from opt_kernels.rules.base import Rule
from opt_kernels.rules.soap import SOAP as SOAPRule
from opt_kernels.rules.soap_muon import SOAPMuon as SOAPMuonRule

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
    """SOAP (Vyas et al., arXiv 2409.11321) for matrices, and with `scalar_optimizer` Adam or Lion for the others.

    Its state is 2 (m² + n²) numbers larger than Adam's for a matrix (m, n), without the sides that `max_precond_dim`
    and `one_sided` leave out: keep embeddings out of it. Rows that a group splits into heads or parts have factors of
    their own; a state_dict that was saved with another split is refused. `order="megatron"` takes Megatron-Core's
    steps. The options are those of `opt_kernels.rules.soap.SOAP`, by their names. Raises ValueError for an option
    that is not allowed.
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
    """SOAP whose direction is orthogonalised by Newton-Schulz, for matrices: `opt_kernels.rules.soap_muon.SOAPMuon` has
    the equation, which is our reading of the name.

    The scale is `scale_mode`'s; the default, "match_rms_adamw", takes AdamW's lr and weight decay. The other options
    are those of the rule and of `SOAP`, by their names. Raises ValueError for an option that is not allowed.
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
