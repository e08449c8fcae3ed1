"""Rules by name: built in; from the caller; from installed packages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from opt_config import MUON_FAMILY, ConfigError, OptimizerConfig, changed_fields, did_you_mean, foreign_value
from opt_kernels.formulas import Formula
from opt_kernels.hooks import bare
from opt_kernels.params import RULE, Groups
from opt_kernels.rules import ElementwiseRule, Needs, Rule
from opt_paramgroups import get_matrix_rule_overrides, get_standard_config_overrides
from opt_paramgroups.overrides import ConfigOverrides, read_overrides
from opt_stack.rules.built_in import BUILT_IN, FIELDS_OF_RULES, HYPER_KEYS, RULE_FIELDS, RuleEntry, formula_entry
from opt_stack.rules.trial import check_rule
from opt_stack.wording import logger

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
        registry = self
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
            registry = registry.with_rule(entry)
        return registry

    def rule(self, name: str, config: OptimizerConfig) -> Rule:
        """Return the rule of `optimizer=name` for `config`.

        Raises:
            ConfigError: no entry has this name, or the rule does not support `config`.
        """
        try:
            return self[name].make(config)
        except ConfigError:
            raise
        except ValueError as error:  # the rule refuses its options
            raise ConfigError(f"optimizer={name!r}: {error}") from None

    def rules(self, names: Iterable[str], config: OptimizerConfig) -> tuple[dict[str, Rule], dict[str, dict[str, Any]]]:
        """Return the rules of these names, and the numbers that each adds to its groups. Rules of other packages are
        tried.

        Raises:
            ConfigError: see `rule` and `check_rule`; an entry gives other numbers than its rule reads; or no rule reads
                `optimizer_options`.
        """
        rules = {name: self.rule(name, config) for name in names}
        for name, rule in rules.items():
            if not type(bare(rule)).__module__.startswith(("opt_kernels.", "opt_stack.")):
                check_rule(name, rule, config)
        averaged = {name: number for name, number in config.averaged.items() if not callable(number)}
        numbers = {name: {**self._numbers(name, rule, config), **averaged} for name, rule in rules.items()}
        reader = config.elementwise_optimizer
        if rules and config.optimizer_options and not isinstance(rules.get(reader), ElementwiseRule):
            problem = "does not read them, since it is not elementwise"
            if reader not in rules:
                problem = f"reads them, and updates no parameter of optimizer={config.optimizer!r}"
            options = dict(config.optimizer_options)
            raise ConfigError(f"optimizer_options={options!r}: {reader} {problem}; leave them out")
        return rules, numbers

    def _numbers(self, name: str, rule: Rule, config: OptimizerConfig) -> Mapping[str, Any]:
        """Return the initial values of the numbers that a rule reads from groups.

        Raises:
            ConfigError: `hyper` returns a name that the rule never reads, or lacks one that the rule declares.
        """
        numbers = self[name].hyper(config)
        own = getattr(rule, "hyper_names", ())
        allowed = (*HYPER_KEYS, *own)
        for key in numbers:
            if key not in allowed:
                raise ConfigError(
                    f"optimizer={name!r}: RuleEntry.hyper returns {key!r}, which its rule never reads; allowed are "
                    f"{', '.join(allowed)}.{did_you_mean(key, allowed)} A rule reads further numbers from Hyper.own if "
                    f"it names them: hyper_names = ({key!r},)"
                )
        if missing := [key for key in own if key not in numbers]:
            raise ConfigError(
                f"optimizer={name!r}: its rule reads {missing[0]!r} (hyper_names), but RuleEntry.hyper returns "
                "no value for it; return the initial value of groups"
            )
        return numbers

    def needs_matrices(self, name: str, config: OptimizerConfig) -> bool:
        """Return whether the rule of `optimizer=name` updates whole matrices. Raises ConfigError as `rule`."""
        return getattr(self.rule(name, config), "needs", None) is Needs.MATRICES

    def fields_read(self, name: str, config: OptimizerConfig) -> frozenset[str]:
        """Return the fields of `FIELDS_OF_RULES` that a rule reads. Any of them, for a rule that this package lacks."""
        entry = self[name]
        routed = ("muon_scalar_optimizer",) if config.optimizer in MUON_FAMILY else ()
        if entry in BUILT_IN:
            return frozenset((*FIELDS_OF_RULES.get(name, ()), *routed))
        return RULE_FIELDS if entry.reads_fields else frozenset(routed)

    def __getitem__(self, name: str) -> RuleEntry:
        if name not in self.entries:
            answer = foreign_value("optimizer", name)
            hint = f"; {answer}" if answer else f".{did_you_mean(name, self.entries)}"
            raise ConfigError(f"optimizer={name!r} is unknown; allowed are {', '.join(self.entries)}{hint}")
        return self.entries[name]


def with_matrix_rule(
    config: OptimizerConfig, overrides: ConfigOverrides | None, rules: Registry, *, by_name: bool
) -> ConfigOverrides:
    """Return `overrides`, or the standard ones for None, and for a matrix rule those that give non-matrix parameters to
    an elementwise rule.

    Entries that the caller gives under the same key are kept. `by_name`: as for `get_standard_config_overrides`. Raises
    ConfigError if the rule is unknown or cannot be made from `config`, and for overrides that are not allowed.
    """
    needs_matrices = rules.needs_matrices(config.optimizer, config)
    given = get_standard_config_overrides(config, by_name=by_name) if overrides is None else overrides
    if not needs_matrices:
        return given
    read = read_overrides(config, given, extra_group_keys=None)
    for key, entries in get_matrix_rule_overrides(config, by_name=by_name).items():
        given_entries = read.get(key, entries)
        read[key] = given_entries if "optimizer" in given_entries else {**entries, **given_entries}
    return read


def warn_of_unread_fields(groups: Groups, registry: Registry, config: OptimizerConfig) -> None:
    """Log one warning with all fields that differ from their defaults, but that only rules of no group read.

    It is a warning, because configurations of Megatron-Core have numbers of several rules. `groups` are those of the
    whole model.
    """
    rules = sorted({group[RULE] for group in groups})
    read = frozenset[str]().union(*(registry.fields_read(name, config) for name in rules))
    unread = [f"{name}={getattr(config, name)!r}" for name in changed_fields(config, RULE_FIELDS - read)]
    if unread:
        logger.warning(
            "%s: without effect, because only other rules read such fields and all parameter groups are updated by %s",
            ", ".join(unread), ", ".join(rules),
        )  # fmt: skip


def list_optimizers() -> list[str]:
    """Return the names that `OptimizerConfig.optimizer` accepts."""
    return list(Registry().with_installed().entries)


def describe_optimizer(name: str, rules: Registry | None = None) -> str:
    """Describe an optimizer in one line: its summary, its state, and whether it needs whole matrices.

    Raises:
        ConfigError: no optimizer has this name.
    """
    entry = (rules or Registry().with_installed())[name]
    rule = entry.make(OptimizerConfig(optimizer=name))
    state = ", ".join(spec.name for spec in rule.state_specs) or "nothing"
    return f"{name}: {entry.summary}. State: {state}. Needs {rule.needs.name.lower()}."
