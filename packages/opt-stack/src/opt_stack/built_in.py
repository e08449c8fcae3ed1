"""Our rules by the names configurations use: which fields of the configuration make each of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.matrices.newton_schulz.coefficients import CoefficientType
from opt_kernels.matrices.orthogonalization import MatmulPrecision, ScaleMode, TpMode
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.adaptive_muon import AdaptiveMuon, SecondMoment
from opt_kernels.rules.base import Rule
from opt_kernels.rules.lion import Lion
from opt_kernels.rules.muon import Muon
from opt_kernels.rules.sgd import SGD
from opt_kernels.rules.soap import SOAP, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry:
    """How a configuration becomes a rule: its structure once, its hyper-parameters into every group."""

    name: str
    summary: str
    make: Callable[[OptimizerConfig], Rule]
    hyper: Callable[[OptimizerConfig], Mapping[str, Any]]  # group fields beside lr and weight_decay


def _moment(dtype: torch.dtype) -> torch.dtype:
    """The dtype a moment is stored in; the reference writes 8-bit floats as `torch.uint8`."""
    return torch.float8_e4m3fn if dtype == torch.uint8 else dtype


def _adam(config: OptimizerConfig) -> Adam:
    numbers = config.precision
    return Adam(
        decoupled=config.decoupled_weight_decay,
        exp_avg_dtype=_moment(numbers.exp_avg),
        exp_avg_sq_dtype=_moment(numbers.exp_avg_sq),
    )


def _lion(config: OptimizerConfig) -> Lion:
    _check_decoupled(config, "lion")
    return Lion(exp_avg_dtype=_moment(config.precision.exp_avg))


def _soap(config: OptimizerConfig) -> SOAP:
    _check_decoupled(config, "soap")
    return SOAP(
        use_kl_shampoo=config.soap_use_kl_shampoo,
        shampoo_beta=config.soap_shampoo_beta,
        precondition_frequency=config.soap_precondition_frequency,
        order=Order(config.soap_order),
        max_precond_dim=config.soap_max_precond_dim,
        one_sided=config.soap_one_sided,
    )


def _check_decoupled(config: OptimizerConfig, name: str) -> None:
    if not config.decoupled_weight_decay:
        raise ConfigError(
            f"decoupled_weight_decay=False: optimizer={name!r} decays weights beside the update only; leave it at True"
        )


def _muon(config: OptimizerConfig) -> Muon:
    return Muon(
        nesterov=config.muon_nesterov,
        decoupled=config.decoupled_weight_decay,
        scale_mode=ScaleMode(config.muon_scale_mode),
        extra_scale_factor=config.muon_extra_scale_factor,
        coefficient_type=CoefficientType(config.muon_coefficient_type),
        num_ns_steps=config.muon_num_ns_steps,
        fp32_matmul_prec=MatmulPrecision(config.muon_fp32_matmul_prec),
        use_syrk=config.muon_use_syrk,
        tp_mode=TpMode(config.muon_tp_mode),
    )


def _adaptive_muon(config: OptimizerConfig) -> AdaptiveMuon:
    return AdaptiveMuon(muon=_muon(config), second_moment=SecondMoment(config.adaptive_muon_moment2_method))


ADAM = RuleEntry(
    name="adam",
    summary="Adam, with decoupled weight decay (AdamW) unless decoupled_weight_decay=False",
    make=_adam,
    hyper=lambda config: {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps},
)
SGD_ = RuleEntry(
    name="sgd",
    summary="gradient descent with momentum",
    make=lambda config: SGD(momentum_buffer=config.sgd_momentum > 0),
    hyper=lambda config: {"momentum": config.sgd_momentum},
)
LION = RuleEntry(
    name="lion",
    summary="the sign of an interpolated momentum",
    make=_lion,
    hyper=lambda config: {"betas": (config.lion_beta1, config.lion_beta2)},
)
MUON = RuleEntry(
    name="muon",
    summary="momentum, orthogonalised by Newton-Schulz; what is no matrix goes to muon_scalar_optimizer",
    make=_muon,
    hyper=lambda config: {"momentum": config.muon_momentum},
)
ADAPTIVE_MUON = RuleEntry(
    name="adaptive_muon",
    summary="Muon with a second moment of the orthogonalised update (AdaMuon, NorMuon)",
    make=_adaptive_muon,
    hyper=lambda config: {
        "momentum": config.muon_momentum,
        "betas": (0.0, config.adaptive_muon_beta2),
        "eps": config.adaptive_muon_eps,
    },
)
SOAP_ = RuleEntry(
    name="soap",
    summary="Adam in the eigenbasis of Shampoo's preconditioner; what is no matrix goes to adam",
    make=_soap,
    hyper=ADAM.hyper,
)

BUILT_IN = (ADAM, SGD_, LION, MUON, ADAPTIVE_MUON, SOAP_)
