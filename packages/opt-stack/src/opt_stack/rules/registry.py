"""Rules by name: built in, made from fields of the configuration; from the caller; from installed packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

import torch

from opt_config import ConfigError, OptimizerConfig, did_you_mean
from opt_kernels.formulas import FORMULAS, Formula, NumberError
from opt_kernels.hooks import bare
from opt_kernels.matrices import CoefficientType, Decay, MatmulPrecision, ScaleMode, TpMode
from opt_kernels.rules import (
    AdaptiveMuonRule,
    ElementwiseRule,
    Lines,
    MuonRule,
    Order,
    Rule,
    SecondMoment,
    SOAPMuonRule,
    SOAPRule,
    elementwise,
)
from opt_stack.rules.trials import check_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry:
    """How to create a rule from a configuration, and the hyper-parameters to write to every group."""

    name: str
    summary: str
    make: Callable[[OptimizerConfig], Rule]
    hyper: Callable[[OptimizerConfig], Mapping[str, Any]]  # group fields in addition to lr and weight_decay
    reads_fields: bool = True  # False: no number of the rule comes from a field such as adam_beta1


OfFields = Callable[[OptimizerConfig], Mapping[str, Any]]


def formula_entry(formula: Formula, *, fields: OfFields | None = None) -> RuleEntry:
    """The entry of a formula.

    Initial values of its numbers come from `fields` (values of configuration fields), else from `optimizer_options`,
    else from the formula's defaults. Its choices and the dtypes of its states, `<state>_dtype`, come from
    `optimizer_options`. States named exp_avg... use `exp_avg_dtype` and `exp_avg_sq_dtype` unless given there.
    """

    of_fields: OfFields = fields or (lambda config: {})

    def hyper(config: OptimizerConfig) -> Mapping[str, Any]:
        options = _options(formula, config, of_fields(config))
        numbers = {name: default for name, default in formula.defaults.items() if name not in ("lr", "weight_decay")}
        return {**numbers, **{name: value for name, value in options.items() if name in numbers}, **of_fields(config)}

    def make(config: OptimizerConfig) -> ElementwiseRule:
        if formula.evaluation is not None and config.overlap_param_gather:
            raise ConfigError(
                f"overlap_param_gather=True: optimizer={formula.name!r} evaluates other weights than it trains, and "
                "eval() gathers them at once; leave it at False"
            )
        numbers = hyper(config)
        options = _options(formula, config, of_fields(config))
        of_rule = {name: _dtype(value) for name, value in options.items() if name not in numbers}
        try:
            rule = elementwise(formula, **_structure(formula, config, numbers), **of_rule)
            rule.check_numbers(options)  # fields are checked by the configuration
        except NumberError as error:
            raise ConfigError(f"optimizer={formula.name!r}: {error}") from None
        return rule

    summary = formula.description.splitlines()[0].rstrip(".")
    return RuleEntry(name=formula.name, summary=summary, make=make, hyper=hyper, reads_fields=fields is not None)


_REFUSED = {
    "backend": "the stack chooses the fastest backend",
    "stochastic_rounding": "the stack keeps main values; only the drop-in optimizers of opt-kernels round so",
}


def _options(formula: Formula, config: OptimizerConfig, of_fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """`optimizer_options` if they are for this formula, else empty.

    Raises ConfigError for an option that does not exist, or that is a field of the configuration.
    """
    options = config.optimizer_options or {} if config.optimizer == formula.name else {}
    set_by_field = "a field of the configuration sets it"
    refused = dict.fromkeys(("lr", "weight_decay", "decoupled_weight_decay", *of_fields), set_by_field) | _REFUSED
    for name in (name for name in options if name in refused):
        raise ConfigError(
            f"optimizer_options has {name!r}={options[name]!r}; for optimizer={formula.name!r} {refused[name]}"
        )
    known = [name for name in formula.defaults if name not in ("lr", "weight_decay", *of_fields)]
    known += [choice.name for choice in formula.choices if choice.off_at_zero is None]
    known += ["maximize", *(f"{state.name}_dtype" for state in formula.declared)]
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"optimizer_options has {name!r}={value!r}, which optimizer={formula.name!r} does not read; allowed "
                f"are {', '.join(known)}.{did_you_mean(name, known)}"
            )
    return options


def _structure(formula: Formula, config: OptimizerConfig, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The choices and dtypes set by fields of the configuration."""
    found: dict[str, Any] = {}
    for choice in formula.choices:
        if choice.name == "decoupled_weight_decay":
            found[choice.name] = config.decoupled_weight_decay
        elif choice.off_at_zero is not None:
            found[choice.name] = numbers[choice.off_at_zero] != 0
    if "decoupled_weight_decay" not in found and formula is not FORMULAS["sgd"]:
        _check_decoupled(config, formula.name)
    options = config.optimizer_options or {} if config.optimizer == formula.name else {}
    for state in formula.declared:
        moment = config.precision.exp_avg if state.signed else config.precision.exp_avg_sq
        is_moment = state.name.startswith("exp_avg") if state.signed else "exp_avg_sq" in state.name
        if is_moment and f"{state.name}_dtype" not in options:
            # Megatron-Core writes 8-bit floats as `torch.uint8`.
            found[f"{state.name}_dtype"] = torch.float8_e4m3fn if moment == torch.uint8 else moment
    return found


def _dtype(value: object) -> object:
    """The dtype for an option that names a torch dtype, as in files; any other option unchanged."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    return found if isinstance(found, torch.dtype) else value


def _soap(config: OptimizerConfig) -> SOAPRule:
    _check_decoupled(config, "soap")
    return SOAPRule(
        use_kl_shampoo=config.soap_use_kl_shampoo,
        shampoo_beta=config.soap_shampoo_beta,
        precondition_frequency=config.soap_precondition_frequency,
        order=Order(config.soap_order),
        max_precond_dim=config.soap_max_precond_dim,
        one_sided=config.soap_one_sided,
    )


def _soap_muon(config: OptimizerConfig) -> SOAPMuonRule:
    _check_decoupled(config, "soap_muon")
    for name, only in (("soap_order", "paper"), ("soap_precondition_frequency", 1)):
        if getattr(config, name) != only:
            raise ConfigError(
                f"{name}={getattr(config, name)!r}: optimizer='soap_muon' updates its bases after every step; leave it "
                f"at {only!r}"
            )
    return SOAPMuonRule(
        shampoo_beta=config.soap_shampoo_beta,
        max_precond_dim=config.soap_max_precond_dim,
        one_sided=config.soap_one_sided,
        **_orthogonalization(config),
    )


def _orthogonalization(config: OptimizerConfig) -> dict[str, Any]:
    return {
        "scale_mode": ScaleMode(config.muon_scale_mode),
        "extra_scale_factor": config.muon_extra_scale_factor,
        "coefficient_type": CoefficientType(config.muon_coefficient_type),
        "num_ns_steps": config.muon_num_ns_steps,
        "fp32_matmul_prec": MatmulPrecision(config.muon_fp32_matmul_prec),
        "use_syrk": config.muon_use_syrk,
    }


def _check_decoupled(config: OptimizerConfig, name: str) -> None:
    if not config.decoupled_weight_decay:
        raise ConfigError(
            f"decoupled_weight_decay=False: optimizer={name!r} supports only decoupled decay; leave it at True"
        )


def _muon(config: OptimizerConfig) -> MuonRule:
    method, is_decoupled = config.muon_weight_decay_method, config.decoupled_weight_decay
    if not is_decoupled and method != "decoupled":
        raise ConfigError(
            f"decoupled_weight_decay=False with muon_weight_decay_method={method!r}: leave one of them at its default"
        )
    return MuonRule(
        nesterov=config.muon_nesterov,
        weight_decay_method=Decay(method) if is_decoupled else Decay.L2,
        **_orthogonalization(config),
        tp_mode=TpMode(config.muon_tp_mode),
    )


def _adaptive_muon(config: OptimizerConfig) -> AdaptiveMuonRule:
    muon, method, lines = _muon(config), config.adaptive_muon_moment2_method, config.adaptive_muon_lines
    if method != "normuon" and lines != "rows":
        raise ConfigError(
            f"adaptive_muon_lines={lines!r} with adaptive_muon_moment2_method={method!r}: only 'normuon' has lines; "
            "leave it at 'rows'"
        )
    if method == "namo" and not config.decoupled_weight_decay:
        raise ConfigError(
            "decoupled_weight_decay=False with adaptive_muon_moment2_method='namo': its scale is of the gradient "
            "alone; leave it at True"
        )
    return AdaptiveMuonRule(muon=muon, second_moment=SecondMoment(method), lines=Lines(lines))


# Values of a formula's numbers from fields of the configuration.
_FIELDS: Mapping[str, OfFields] = {
    "adam": lambda config: {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps},
    "sgd": lambda config: {"momentum": config.sgd_momentum},
    "lion": lambda config: {"betas": (config.lion_beta1, config.lion_beta2)},
}
_OF_FORMULAS = {name: formula_entry(formula, fields=_FIELDS.get(name)) for name, formula in FORMULAS.items()}
MUON = RuleEntry(
    name="muon",
    summary="momentum, orthogonalised by Newton-Schulz; muon_scalar_optimizer updates other parameters",
    make=_muon,
    hyper=lambda config: {"momentum": config.muon_momentum},
)
ADAPTIVE_MUON = RuleEntry(
    name="adaptive_muon",
    summary="Muon with a second moment of the orthogonalised update (AdaMuon, NorMuon) or of the gradient (NAMO)",
    make=_adaptive_muon,
    hyper=lambda config: {
        "momentum": config.muon_momentum,
        "betas": (0.0, config.adaptive_muon_beta2),
        "eps": config.adaptive_muon_eps,
    },
)
ADAM = _OF_FORMULAS["adam"]
SOAP_ = RuleEntry(
    name="soap",
    summary="Adam in the eigenbasis of Shampoo's preconditioner; Adam updates other parameters",
    make=_soap,
    hyper=ADAM.hyper,
)
SOAP_MUON = RuleEntry(
    name="soap_muon",
    summary="momentum, preconditioned in Shampoo's eigenbasis and orthogonalised; non-matrix parameters use adam",
    make=_soap_muon,
    hyper=lambda config: {"eps": config.adam_eps, "momentum": config.muon_momentum},
)

BUILT_IN = (*_OF_FORMULAS.values(), MUON, ADAPTIVE_MUON, SOAP_, SOAP_MUON)


ENTRY_POINTS = "opt_stack.rules"  # an entry point of this group names a `RuleEntry` or a `Formula`


@dataclass(frozen=True, slots=True)
class Registry:
    """An immutable set of rules by name. `with_rule` returns a larger one; there is no global registry."""

    entries: Mapping[str, RuleEntry] = field(default_factory=lambda: {entry.name: entry for entry in BUILT_IN})

    def with_rule(self, entry: RuleEntry) -> "Registry":
        """Return this registry with one more rule. Raise ConfigError if its name is taken."""
        if entry.name in self.entries:
            raise ConfigError(f"optimizer {entry.name!r} is already registered; give the new rule another name")
        return Registry({**self.entries, entry.name: entry})

    def with_formula(self, formula: Formula) -> "Registry":
        """Return this registry with the rule of a formula, under the formula's name."""
        return self.with_rule(formula_entry(formula))

    def with_installed(self) -> "Registry":
        """Return this registry with the rules of installed packages, from entry points of group `opt_stack.rules`.

        Raises:
            ConfigError: an entry point cannot be loaded, is neither a RuleEntry nor a Formula, or has a name that is
                taken.
        """
        found = self
        for point in entry_points(group=ENTRY_POINTS):
            where = f"entry point {point.name} = {point.value!r} of {ENTRY_POINTS}"
            try:
                entry = point.load()
            except Exception as error:  # whatever a package raises at its import
                raise ConfigError(f"{where} cannot be loaded: {error!r}; fix or uninstall the package") from error
            if isinstance(entry, Formula):
                entry = formula_entry(entry)
            if not isinstance(entry, RuleEntry):
                raise ConfigError(
                    f"{where} names a {type(entry).__name__}; it must be an opt_kernels.formulas.Formula or an "
                    "opt_stack.RuleEntry"
                )
            found = found.with_rule(entry)
        return found

    def rule(self, name: str, config: OptimizerConfig) -> Rule:
        """Return the rule of `optimizer=name` for `config`.

        Raises:
            ConfigError: no entry has this name, the rule does not support `config`, or it does not read
                `optimizer_options`.
        """
        rule = self[name].make(config)
        if not type(bare(rule)).__module__.startswith(("opt_kernels.", "opt_stack.")):
            check_rule(name, rule, config)
        if config.optimizer_options and name == config.optimizer and not isinstance(rule, ElementwiseRule):
            raise ConfigError(
                f"optimizer_options={dict(config.optimizer_options)!r}: optimizer={name!r} does not read them; "
                "only elementwise rules do. Leave them out"
            )
        return rule

    def __getitem__(self, name: str) -> RuleEntry:
        if name not in self.entries:
            near = sorted(get_close_matches(name, self.entries, n=2))
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"optimizer={name!r} is unknown; allowed are {', '.join(self.entries)}{hint}")
        return self.entries[name]
