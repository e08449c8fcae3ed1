"""Rules by name: built in, made from fields of the configuration; from the caller; from installed packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

import torch

from opt_config import ConfigError, OptimizerConfig, did_you_mean, foreign_value
from opt_kernels.codecs import join, split_
from opt_kernels.formulas import FORMULAS, Formula, NumberError
from opt_kernels.hooks import bare
from opt_kernels.matrices import CoefficientType, Decay, MatmulPrecision, PostNorm, PreNorm, ScaleMode, TpMode
from opt_kernels.rules import (
    AdaptiveMuonRule,
    ElementwiseRule,
    Lines,
    MuonRule,
    MuownRule,
    Needs,
    Order,
    Rule,
    SecondMoment,
    SOAPMuonRule,
    SOAPRule,
    elementwise,
)
from opt_kernels.works import Batch, Hyper, StateKind, StateSpec, Work
from opt_paramgroups.overrides import MUON_FAMILY, elementwise_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry:
    """How to create a rule from a configuration, and the hyper-parameters to write to every group."""

    name: str
    summary: str
    make: Callable[[OptimizerConfig], Rule]
    hyper: Callable[[OptimizerConfig], Mapping[str, Any]]  # group fields in addition to lr and weight_decay
    reads_fields: bool = True  # False: no number of the rule comes from a field such as adam_beta1


ReadFields = Callable[[OptimizerConfig], Mapping[str, Any]]
_REFUSED = {
    "backend": "the stack chooses the fastest backend",
    "stochastic_rounding": "the stack keeps main values; only the drop-in optimizers of opt-kernels round so",
}


def _no_fields(config: OptimizerConfig) -> Mapping[str, Any]:
    return {}


def formula_entry(formula: Formula, *, fields: ReadFields = _no_fields, reads_fields: bool = False) -> RuleEntry:
    """Return the entry of a formula.

    Initial values of its numbers come from `fields` (values of configuration fields), else from `optimizer_options`,
    else from the formula's defaults. Its choices and the dtypes of its states, `<state>_dtype`, come from
    `optimizer_options`. States named exp_avg... use `exp_avg_dtype` and `exp_avg_sq_dtype` unless given there.
    """
    numbers = {name: default for name, default in formula.defaults.items() if name not in ("lr", "weight_decay")}

    def hyper(config: OptimizerConfig) -> Mapping[str, Any]:
        of_fields = fields(config)
        options = _options(formula, config, of_fields)
        given = {name: value for name, value in options.items() if name in numbers}
        return {**numbers, **given, **of_fields}

    def make(config: OptimizerConfig) -> ElementwiseRule:
        if formula.evaluation is not None and config.overlap_param_gather:
            raise ConfigError(
                f"overlap_param_gather=True: optimizer={formula.name!r} evaluates other weights than it trains, and "
                "eval() gathers them at once; leave it at False"
            )
        initial = hyper(config)
        options = _options(formula, config, fields(config))
        chosen: dict[str, Any] = {}
        for choice in formula.choices:
            if choice.name == "decoupled_weight_decay":
                chosen[choice.name] = config.decoupled_weight_decay
            elif choice.off_at_zero is not None:
                chosen[choice.name] = initial[choice.off_at_zero] != 0
        if "decoupled_weight_decay" not in chosen and formula is not FORMULAS["sgd"]:
            _check_decoupled(config, formula.name)
        for state in formula.declared:
            moment = config.precision.exp_avg if state.signed else config.precision.exp_avg_sq
            if state.name.startswith("exp_avg") if state.signed else "exp_avg_sq" in state.name:
                # Megatron-Core writes 8-bit floats as `torch.uint8`.
                chosen[f"{state.name}_dtype"] = torch.float8_e4m3fn if moment == torch.uint8 else moment
        for name, value in options.items():
            if name not in numbers:  # files name dtypes
                named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
                chosen[name] = named if isinstance(named, torch.dtype) else value
        try:
            rule = elementwise(formula, **chosen)
            rule.check_numbers(options)  # fields are checked by the configuration
        except NumberError as error:
            raise ConfigError(f"optimizer={formula.name!r}: {error}") from None
        return rule

    summary = formula.description.splitlines()[0].rstrip(".")
    return RuleEntry(name=formula.name, summary=summary, make=make, hyper=hyper, reads_fields=reads_fields)


def _options(formula: Formula, config: OptimizerConfig, of_fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `optimizer_options` if they are for this formula, else nothing.

    Raises ConfigError for an option that does not exist, or that is a field of the configuration.
    """
    if not config.optimizer_options or elementwise_optimizer(config) != formula.name:
        return {}
    options = config.optimizer_options
    set_by_field = "a field of the configuration sets it"
    refused = dict.fromkeys(("lr", "weight_decay", "decoupled_weight_decay", *of_fields), set_by_field) | _REFUSED
    known = [name for name in formula.defaults if name not in ("lr", "weight_decay", *of_fields)]
    known += [choice.name for choice in formula.choices if choice.off_at_zero is None]
    known += ["maximize", *(f"{state.name}_dtype" for state in formula.declared)]
    for name in sorted(options, key=lambda name: name not in refused):
        given = f"optimizer_options has {name!r}={options[name]!r}"
        if name in refused:
            raise ConfigError(f"{given}; for optimizer={formula.name!r} {refused[name]}")
        if name not in known:
            raise ConfigError(
                f"{given}, which optimizer={formula.name!r} does not read; allowed are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    return options


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
        value = getattr(config, name)
        if value != only:
            raise ConfigError(
                f"{name}={value!r}: optimizer='soap_muon' updates its bases after every step; leave it at {only!r}"
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
    method = config.muon_weight_decay_method
    is_decoupled = config.decoupled_weight_decay
    if not is_decoupled and method != "decoupled":
        raise ConfigError(
            f"decoupled_weight_decay=False with muon_weight_decay_method={method!r}: leave one of them at its default"
        )
    decay = Decay(method) if is_decoupled else Decay.L2
    pre_norm = PreNorm(config.muon_pre_norm)
    post_norm = PostNorm(config.muon_post_norm)
    if config.muon_nuclear_scale and (pre_norm is not PreNorm.NONE or post_norm is not PostNorm.NONE):
        raise ConfigError(
            f"muon_nuclear_scale=True with muon_pre_norm={pre_norm.value!r}, muon_post_norm={post_norm.value!r}: the "
            "nuclear norm is that of an update which nothing else normalises; leave the norms at 'none'"
        )
    return MuonRule(
        nesterov=config.muon_nesterov,
        weight_decay_method=decay,
        tp_mode=TpMode(config.muon_tp_mode),
        pre_norm=pre_norm,
        post_norm=post_norm,
        nuclear_scale=config.muon_nuclear_scale,
        **_orthogonalization(config),
    )


def _muown(config: OptimizerConfig) -> MuownRule:
    _check_decoupled(config, "muown")
    return MuownRule(**_orthogonalization(config))


def _adaptive_muon(config: OptimizerConfig) -> AdaptiveMuonRule:
    muon = _muon(config)
    method = config.adaptive_muon_moment2_method
    if config.muon_nuclear_scale:
        raise ConfigError(
            "muon_nuclear_scale=True: optimizer='adaptive_muon' divides by the scale of updates; leave it at False"
        )
    lines = config.adaptive_muon_lines
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


def _adam_fields(config: OptimizerConfig) -> Mapping[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def _lion_fields(config: OptimizerConfig) -> Mapping[str, Any]:
    return {"betas": (config.lion_beta1, config.lion_beta2)}


def _sgd_fields(config: OptimizerConfig) -> Mapping[str, Any]:
    return {"momentum": config.sgd_momentum}


_FIELDS: Mapping[str, ReadFields] = {"adam": _adam_fields, "sgd": _sgd_fields, "lion": _lion_fields}
_FORMULA_ENTRIES = {
    name: formula_entry(formula, fields=_FIELDS.get(name, _no_fields), reads_fields=name in _FIELDS)
    for name, formula in FORMULAS.items()
}
ADAM = _FORMULA_ENTRIES["adam"]
_MUON_ENTRY = RuleEntry(
    name="muon",
    summary="momentum, orthogonalised by Newton-Schulz; muon_scalar_optimizer updates other parameters",
    make=_muon,
    hyper=lambda config: {"momentum": config.muon_momentum},
)
_ADAPTIVE_MUON_ENTRY = RuleEntry(
    name="adaptive_muon",
    summary="Muon with a second moment of the orthogonalised update (AdaMuon, NorMuon) or of the gradient (NAMO)",
    make=_adaptive_muon,
    hyper=lambda config: {
        "momentum": config.muon_momentum,
        "betas": (0.0, config.adaptive_muon_beta2),
        "eps": config.adaptive_muon_eps,
    },
)
_MUOWN_ENTRY = RuleEntry(
    name="muown",
    summary="Muon of the directions of rows, Adam of their lengths; Adam updates other parameters",
    make=_muown,
    hyper=lambda config: {**ADAM.hyper(config), "momentum": config.muon_momentum},
)
_SOAP_ENTRY = RuleEntry(
    name="soap",
    summary="Adam in the eigenbasis of Shampoo's preconditioner; Adam updates other parameters",
    make=_soap,
    hyper=ADAM.hyper,
)
_SOAP_MUON_ENTRY = RuleEntry(
    name="soap_muon",
    summary="momentum, preconditioned in Shampoo's eigenbasis and orthogonalised; non-matrix parameters use adam",
    make=_soap_muon,
    hyper=lambda config: {"eps": config.adam_eps, "momentum": config.muon_momentum},
)
BUILT_IN = (
    *_FORMULA_ENTRIES.values(),
    *(_MUON_ENTRY, _ADAPTIVE_MUON_ENTRY, _MUOWN_ENTRY, _SOAP_ENTRY, _SOAP_MUON_ENTRY),
)
_ORTHOGONALISED = (
    *("muon_momentum", "muon_scale_mode", "muon_extra_scale_factor", "muon_coefficient_type", "muon_num_ns_steps"),
    *("muon_fp32_matmul_prec", "muon_use_syrk"),
)
_MUON = (
    *_ORTHOGONALISED,
    *("muon_nesterov", "muon_tp_mode", "muon_weight_decay_method", "muon_split_qkv"),
    *("muon_pre_norm", "muon_post_norm", "muon_nuclear_scale"),
)
_SECOND_MOMENT = ("adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps", "adaptive_muon_lines")
_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_PRECONDITIONED = (
    *("soap_shampoo_beta", "soap_precondition_frequency", "soap_order", "soap_max_precond_dim", "soap_one_sided"),
    "soap_split_qkv",
)
FIELDS_OF_RULES: Mapping[str, tuple[str, ...]] = {
    "adam": _ADAM,
    "sgd": ("sgd_momentum",),
    "lion": ("lion_beta1", "lion_beta2"),
    "muon": _MUON,
    "adaptive_muon": (*_MUON, *_SECOND_MOMENT),
    "muown": (*_ADAM, *_ORTHOGONALISED, "muon_split_qkv"),
    "soap": (*_ADAM, *_PRECONDITIONED, "soap_use_kl_shampoo"),
    "soap_muon": ("adam_eps", *_ORTHOGONALISED, *_PRECONDITIONED),
}
"""The fields of `OptimizerConfig` that only rules read, by built-in rule. Other built-in rules read none. In addition,
Muon's family reads `muon_scalar_optimizer` if the configuration names it."""
RULE_FIELDS = frozenset(("muon_scalar_optimizer",)).union(*FIELDS_OF_RULES.values())
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
            _check_rule(name, rule, config)
        if config.optimizer_options and name == elementwise_optimizer(config) and not isinstance(rule, ElementwiseRule):
            raise ConfigError(
                f"optimizer_options={dict(config.optimizer_options)!r}: optimizer={name!r} does not read them; "
                "only elementwise rules do. Leave them out"
            )
        return rule

    def fields_read(self, name: str, config: OptimizerConfig) -> frozenset[str]:
        """Return the fields of `FIELDS_OF_RULES` that a rule reads. Any of them, for a rule that this package lacks."""
        entry = self[name]
        routed = ("muon_scalar_optimizer",) if config.optimizer in MUON_FAMILY else ()
        if any(entry is built_in for built_in in BUILT_IN):
            return frozenset((*FIELDS_OF_RULES.get(name, ()), *routed))
        return RULE_FIELDS if entry.reads_fields else frozenset(routed)

    def __getitem__(self, name: str) -> RuleEntry:
        if name not in self.entries:
            near = sorted(get_close_matches(name, self.entries, n=2))
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            if answer := foreign_value("optimizer", name):
                hint = f"; {answer}"
            raise ConfigError(f"optimizer={name!r} is unknown; allowed are {', '.join(self.entries)}{hint}")
        return self.entries[name]


# --- rules of other packages, which are tried before they are used ----------------------------------------------------

_MEMBERS = ("name", "needs", "state_specs", "codecs", "init_state", "update_")
_SHAPES = {Needs.ELEMENTS: (64,), Needs.MATRICES: (4, 6)}


def _check_rule(name: str, rule: Any, config: OptimizerConfig) -> None:
    """Check that `rule`, the rule of `optimizer=name`, declares its states, and that `config` can use it.

    The shapes and dtypes of states are compared with those declared when they are made: see `RuleStateError`.

    Raises:
        ConfigError: the rule lacks a member of `Rule`; its specs leave a shape undefined, or lack a state of its own,
            which checkpoints would lose; or the configuration asks for remainders and the rule cannot update bf16
            parameters with them.
    """
    rule_of = f"optimizer={name!r}: its rule {type(bare(rule)).__name__}"
    missing = [member for member in _MEMBERS if not hasattr(rule, member)]
    if missing or not isinstance(rule.needs, Needs):
        problem = f"lacks {', '.join(missing)}" if missing else f"has needs={rule.needs!r}, which is not a Needs"
        raise ConfigError(f"{rule_of} {problem}; a rule is an opt_kernels.rules.base.Rule, with {', '.join(_MEMBERS)}")
    main = torch.zeros(_SHAPES[rule.needs], dtype=torch.float32, device="cpu")
    for spec in bare(rule).state_specs:
        if problem := _problem_of_spec(spec, main.dim()):
            raise ConfigError(f"{rule_of} declares the state {spec.name!r} with kind={spec.kind}, {problem}")
    try:
        states = bare(rule).init_state(main)
    except Exception:  # the caller's code may raise anything, and may support some shapes only
        states = {}
    if undeclared := sorted(states.keys() - {spec.name for spec in bare(rule).state_specs}):
        raise ConfigError(
            f"{rule_of} keeps {', '.join(undeclared)}, which its state_specs do not declare, so that checkpoints would "
            f"not have it; add StateSpec(name={undeclared[0]!r})"
        )
    if config.precision.remainder:
        _check_remainder(name, rule, torch.int16, "store_param_remainders=True")
    elif config.precision.mains is torch.int8:
        _check_remainder(name, rule, torch.int8, "main_params_dtype=torch.int8")


def _problem_of_spec(spec: StateSpec, num_dims: int) -> str:
    """Return why no parameter of so many dims can have the state; empty if it can."""
    are_dims = isinstance(spec.dims, tuple) and all(type(dim) is int for dim in spec.dims)
    match spec.kind:
        case StateKind.MATRIX if not (are_dims and len(spec.dims) == 1):
            return f"dims={spec.dims!r}; allowed is a tuple of one int, as in dims=(0,)"
        case StateKind.REDUCED if not (are_dims and spec.dims):
            return f"dims={spec.dims!r}; allowed is a tuple of the dims that it lacks, as in dims=(-1,)"
        case StateKind.BLOCK_SCALES if type(spec.block) is not int or spec.block < 1:
            return f"block={spec.block!r}; allowed is the number of elements per scale, at least 1"
        case StateKind.MATRIX | StateKind.REDUCED if not all(-num_dims <= dim < num_dims for dim in spec.dims):
            return f"dims={spec.dims!r}; allowed are dims from {-num_dims} to {num_dims - 1}"
    return ""


def _check_remainder(name: str, rule: Rule, dtype: torch.dtype, field: str) -> None:
    """Raise ConfigError unless one step with a remainder of `dtype` is the step with fp32 main values."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    problem = ""
    values = torch.rand(2, *_SHAPES[rule.needs], dtype=torch.float32, device="cpu", generator=generator) + 0.5
    start, grad = values.unbind()
    try:
        out = torch.empty_like(start, dtype=torch.bfloat16)
        remainder = torch.empty_like(start, dtype=dtype)
        split_(out, remainder, start)
        main = join(out, remainder)
        split = Work(grad=grad.clone(), main=None, state=rule.init_state(main), out=out, remainder=remainder)
        for work in (split, Work(grad=grad.clone(), main=main, state=rule.init_state(main))):
            with torch.no_grad():
                rule.update_([Batch(Hyper(lr=0.01, step=1), [work])])
        joined = join(out, remainder)
        if not torch.allclose(main, joined, rtol=1e-6 if dtype is torch.int16 else 2.0**-15, atol=1e-7):
            problem = f"updates a parameter differently, by up to {float((main - joined).abs().max()):.1e}"
    except ConfigError:
        raise
    except Exception as error:  # the caller's code may raise anything
        problem = f"raised {type(error).__name__}: {error}"
    if problem:
        raise ConfigError(
            f"{field}: optimizer={name!r} with a remainder {problem}; if a work has no main, a rule must join `out` "
            "and `remainder`, and write both (opt_kernels.codecs); or keep fp32 mains: "
            "store_param_remainders=False and main_params_dtype=torch.float32"
        )
