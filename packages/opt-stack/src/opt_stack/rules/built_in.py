"""What an entry of the registry is; the entries of built-in rules, made from fields of the configuration."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opt_config import ConfigError, OptimizerConfig, changed_fields, did_you_mean
from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.hooks import check_numbers
from opt_kernels.matrices import Decay
from opt_kernels.rules import (
    AdaptiveMuonRule,
    ElementwiseRule,
    MuonRule,
    MuownRule,
    Rule,
    SOAPMuonRule,
    SOAPRule,
    build_rule,
    elementwise,
)
from opt_paramgroups.overrides import entries_of_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry:
    """How to create a rule from a configuration, and the hyper-parameters to write to every group.

    Raises ConfigError for a name with "/", which separates the parts of a unit's name.
    """

    name: str
    summary: str
    make: Callable[[OptimizerConfig], Rule]
    hyper: Callable[[OptimizerConfig], Mapping[str, Any]]  # group fields in addition to lr and weight_decay
    reads_fields: bool = True  # False: no number of the rule comes from a field such as adam_beta1

    def __post_init__(self) -> None:
        if "/" in self.name:
            raise ConfigError(f"RuleEntry: name={self.name!r} must not contain '/'; use another separator, such as '.'")


HYPER_KEYS = ("betas", "eps", "momentum")
"""The hyper-parameters that any rule may read from a group, besides lr and weight_decay."""
_DEFAULTS = OptimizerConfig()
# Fields of the configuration, by the options that they set.
_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_NEWTON_SCHULZ = (
    "muon_scale_mode",
    "muon_extra_scale_factor",
    "muon_coefficient_type",
    "muon_num_ns_steps",
    "muon_fp32_matmul_prec",
    "muon_use_syrk",
)
_MUON = (
    *_NEWTON_SCHULZ,
    "muon_nesterov",
    "muon_tp_mode",
    "muon_weight_decay_method",
    "muon_pre_norm",
    "muon_post_norm",
    "muon_nuclear_scale",
)
_OF_MUON = (*_MUON, "muon_momentum", "muon_split_qkv")
_SECOND_MOMENT = ("adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps", "adaptive_muon_lines")
_FACTORS = ("soap_shampoo_beta", "soap_max_precond_dim", "soap_one_sided")
_PRECONDITIONED = (*_FACTORS, "soap_precondition_frequency", "soap_order")
_SOAP = (*_PRECONDITIONED, "soap_use_kl_shampoo")
_REFUSED = {
    "backend": "the stack chooses the fastest backend",
    "stochastic_rounding": "the stack keeps main values; only the drop-in optimizers of opt-kernels round so",
}


def formula_entry(formula: Formula) -> RuleEntry:
    """Return the entry of a formula.

    Initial values of its numbers come from fields of the configuration, else from `optimizer_options`, else from the
    formula's defaults. Its choices and the dtypes of its states, `<state>_dtype`, come from `optimizer_options`. States
    named exp_avg... use `exp_avg_dtype` and `exp_avg_sq_dtype` unless given there.
    """
    numbers = {name: default for name, default in formula.defaults.items() if name not in ("lr", "weight_decay")}

    def hyper(config: OptimizerConfig) -> Mapping[str, Any]:
        of_fields = entries_of_rule(config, formula.name)
        given = {name: value for name, value in _optimizer_options(formula, config).items() if name in numbers}
        return {**numbers, **given, **of_fields}

    def make(config: OptimizerConfig) -> ElementwiseRule:
        if formula.evaluation is not None and config.overlap_param_gather:
            raise ConfigError(
                f"overlap_param_gather=True: optimizer={formula.name!r} evaluates other weights than it trains, and "
                "eval() gathers them at once; leave it at False"
            )
        initial = hyper(config)
        options = _optimizer_options(formula, config)
        chosen: dict[str, Any] = {}
        for choice in formula.choices:
            if choice.name == "decoupled_weight_decay":
                chosen[choice.name] = config.decoupled_weight_decay
            elif choice.off_at_zero is not None:
                chosen[choice.name] = initial[choice.off_at_zero] != 0
        if "decoupled_weight_decay" not in chosen and formula is not FORMULAS["sgd"]:
            _check_decoupled(config, formula.name)
        chosen |= _dtypes_of_moments(formula, config)
        for name, value in options.items():
            if name not in numbers:
                # A configuration from a file has dtypes by name.
                named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
                chosen[name] = named if isinstance(named, torch.dtype) else value
        rule = elementwise(formula, **chosen)
        check_numbers(rule, options)  # fields are checked by the configuration
        return rule

    summary = formula.description.splitlines()[0].rstrip(".")
    return RuleEntry(
        name=formula.name,
        summary=summary,
        make=make,
        hyper=hyper,
        reads_fields=bool(entries_of_rule(_DEFAULTS, formula.name)),
    )


def _dtypes_of_moments(formula: Formula, config: OptimizerConfig) -> dict[str, torch.dtype]:
    """Return the dtypes of the states that are moments, by option."""
    dtypes = {}
    for state in formula.declared:
        if state.signed:
            moment = config.precision.exp_avg
            is_moment = state.name.startswith("exp_avg")
        else:
            moment = config.precision.exp_avg_sq
            is_moment = "exp_avg_sq" in state.name
        if is_moment:
            # Megatron-Core writes 8-bit floats as `torch.uint8`.
            dtypes[f"{state.name}_dtype"] = torch.float8_e4m3fn if moment == torch.uint8 else moment
    return dtypes


def _optimizer_options(formula: Formula, config: OptimizerConfig) -> Mapping[str, Any]:
    """Return `optimizer_options` if they are for this formula, else nothing.

    Raises ConfigError for an option that does not exist, or that is a field of the configuration.
    """
    if not config.optimizer_options or config.elementwise_optimizer != formula.name:
        return {}
    options = config.optimizer_options
    of_fields = entries_of_rule(config, formula.name)
    set_by_field = "a field of the configuration sets it"
    refused = dict.fromkeys(("lr", "weight_decay", "decoupled_weight_decay", *of_fields), set_by_field) | _REFUSED
    known = [name for name in formula.defaults if name not in ("lr", "weight_decay", *of_fields)]
    known += [choice.name for choice in formula.choices if choice.off_at_zero is None]
    known += ["maximize", *(f"{state.name}_dtype" for state in formula.declared)]
    for name in sorted(options, key=lambda name: name not in refused):
        given = f"optimizer_options has {name!r}={options[name]!r}"
        if name in refused:
            raise ConfigError(f"{given}; for optimizer={formula.name!r} {refused[name]}")
        if name == "maximize" and options[name] and config.optimizer != formula.name:
            raise ConfigError(f"{given}: only parameters of {formula.name!r} would, not those of {config.optimizer!r}")
        if name not in known:
            raise ConfigError(
                f"{given}, which optimizer={formula.name!r} does not read; allowed are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    return options


def _options_from_fields(config: OptimizerConfig, fields: Iterable[str]) -> dict[str, Any]:
    """Return the options that these fields of the configuration set, under their names without the prefix."""
    return {name.partition("_")[2]: getattr(config, name) for name in fields}


def _soap(config: OptimizerConfig) -> SOAPRule:
    _check_decoupled(config, "soap")
    return build_rule(SOAPRule, _options_from_fields(config, _SOAP))


def _soap_muon(config: OptimizerConfig) -> SOAPMuonRule:
    _check_decoupled(config, "soap_muon")
    for name in changed_fields(config, ("soap_order", "soap_precondition_frequency")):
        raise ConfigError(
            f"{name}={getattr(config, name)!r}: optimizer='soap_muon' updates its bases after every step; leave it at "
            "its default"
        )
    return build_rule(SOAPMuonRule, _options_from_fields(config, (*_FACTORS, *_NEWTON_SCHULZ)))


def _check_decoupled(config: OptimizerConfig, name: str) -> None:
    if not config.decoupled_weight_decay:
        raise ConfigError(
            f"decoupled_weight_decay=False: optimizer={name!r} supports only decoupled decay; leave it at True"
        )


def _muon(config: OptimizerConfig) -> MuonRule:
    options = _options_from_fields(config, _MUON)
    if not config.decoupled_weight_decay:
        method = config.muon_weight_decay_method
        if method != "decoupled":
            raise ConfigError(
                f"decoupled_weight_decay=False with muon_weight_decay_method={method!r}: leave one of them at its "
                "default"
            )
        options["weight_decay_method"] = Decay.L2
    return build_rule(MuonRule, options)


def _muown(config: OptimizerConfig) -> MuownRule:
    _check_decoupled(config, "muown")
    return build_rule(MuownRule, _options_from_fields(config, _NEWTON_SCHULZ))


def _adaptive_muon(config: OptimizerConfig) -> AdaptiveMuonRule:
    return build_rule(
        AdaptiveMuonRule,
        {
            "muon": _muon(config),
            "second_moment": config.adaptive_muon_moment2_method,
            "lines": config.adaptive_muon_lines,
        },
    )


def _built_in() -> Iterator[RuleEntry]:
    yield from map(formula_entry, FORMULAS.values())
    yield RuleEntry(
        name="muon",
        summary="momentum, orthogonalised by Newton-Schulz; muon_scalar_optimizer updates other parameters",
        make=_muon,
        hyper=lambda config: {"momentum": config.muon_momentum},
    )
    yield RuleEntry(
        name="adaptive_muon",
        summary="Muon with a second moment of the orthogonalised update (AdaMuon, NorMuon) or of the gradient (NAMO)",
        make=_adaptive_muon,
        hyper=lambda config: {
            "momentum": config.muon_momentum,
            "betas": (0.0, config.adaptive_muon_beta2),
            "eps": config.adaptive_muon_eps,
        },
    )
    yield RuleEntry(
        name="muown",
        summary="Muon of the directions of rows, Adam of their lengths; Adam updates other parameters",
        make=_muown,
        hyper=lambda config: {**entries_of_rule(config, "adam"), "momentum": config.muon_momentum},
    )
    yield RuleEntry(
        name="soap",
        summary="Adam in the eigenbasis of Shampoo's preconditioner; Adam updates other parameters",
        make=_soap,
        hyper=lambda config: entries_of_rule(config, "adam"),
    )
    yield RuleEntry(
        name="soap_muon",
        summary="momentum, preconditioned in Shampoo's eigenbasis and orthogonalised; non-matrix parameters use adam",
        make=_soap_muon,
        hyper=lambda config: {"eps": config.adam_eps, "momentum": config.muon_momentum},
    )


BUILT_IN = tuple(_built_in())
FIELDS_OF_RULES: Mapping[str, tuple[str, ...]] = {
    "adam": _ADAM,
    "sgd": ("sgd_momentum",),
    "lion": ("lion_beta1", "lion_beta2"),
    "muon": _OF_MUON,
    "adaptive_muon": (*_OF_MUON, *_SECOND_MOMENT),
    "muown": (*_ADAM, *_NEWTON_SCHULZ, "muon_momentum", "muon_split_qkv"),
    "soap": (*_ADAM, *_SOAP, "soap_split_qkv"),
    "soap_muon": ("adam_eps", *_NEWTON_SCHULZ, "muon_momentum", *_PRECONDITIONED, "soap_split_qkv"),
}
"""The fields of `OptimizerConfig` that only rules read, by built-in rule. Other built-in rules read none. In addition,
Muon's family reads `muon_scalar_optimizer` if the configuration names it."""
RULE_FIELDS = frozenset(("muon_scalar_optimizer",)).union(*FIELDS_OF_RULES.values())
