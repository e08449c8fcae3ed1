"""Drop-in SOAP and SOAPMuon."""

from collections.abc import Mapping
from typing import Any, ClassVar

from opt_kernels.optim.matrices import MatrixOptimizer, options_of
from opt_kernels.rules.soap import SOAPRule
from opt_kernels.rules.soap_muon import SOAPMuonRule


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al., arXiv 2409.11321) for matrices; `scalar_optimizer` selects Adam or Lion for other parameters.

    For a matrix (m, n), its state has up to 2 (m² + n²) numbers more than Adam's; `max_precond_dim` and `one_sided`
    remove sides from this sum. Do not use SOAP for embeddings. If a group splits rows into heads or parts, each part
    has its own factors; loading a state_dict saved with another split raises an error. `order="megatron"` computes a
    step as Megatron-Core does. The options are those of `opt_kernels.rules.soap.SOAPRule`, by name. Raises ValueError
    for an option that is not allowed.
    """

    numbers: ClassVar[Mapping[str, Any]] = {"lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    options: ClassVar[Mapping[str, Any]] = options_of(SOAPRule)
    rule_class = SOAPRule


class SOAPMuon(MatrixOptimizer):
    """SOAP-Muon for matrices: momentum divided by its second moment in Shampoo's eigenbasis, then orthogonalised.
    `opt_kernels.rules.soap_muon.SOAPMuonRule` has its equations.

    `scale_mode` sets the scale of updates; AdamW's lr and weight decay are suitable for "match_rms_adamw". `betas` are
    those of Adam for other parameters; `eps` is for both. The other options are those of the rule, by name. Raises
    ValueError for an option that is not allowed.
    """

    numbers: ClassVar[Mapping[str, Any]] = {
        "lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.95,
    }  # fmt: skip
    options: ClassVar[Mapping[str, Any]] = options_of(SOAPMuonRule)
    rule_class = SOAPMuonRule
