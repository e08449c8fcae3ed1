"""Rules by name: ours, the caller's own, and those that installed packages bring."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.formulas import Formula
from opt_kernels.rules.base import Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_stack.built_in import BUILT_IN, RuleEntry, formula_entry
from opt_stack.rule_checks import checked_rule

ENTRY_POINTS = "opt_stack.rules"  # an entry point of this group names a `RuleEntry` or a `Formula`


@dataclass(frozen=True, slots=True)
class Registry:
    """A set of rules by name. `with_rule` gives a larger one; nothing is registered behind anyone's back."""

    entries: Mapping[str, RuleEntry] = field(default_factory=lambda: {entry.name: entry for entry in BUILT_IN})

    def with_rule(self, entry: RuleEntry) -> "Registry":
        """This registry and one more rule; a name that is taken is refused."""
        if entry.name in self.entries:
            raise ConfigError(f"optimizer {entry.name!r} is already registered; give the new rule another name")
        return Registry({**self.entries, entry.name: entry})

    def with_formula(self, formula: Formula) -> "Registry":
        """This registry and the rule of a formula, under its name."""
        return self.with_rule(formula_entry(formula))

    def with_installed(self) -> "Registry":
        """This registry and the rules that installed packages bring through entry points.

        Raises:
            ConfigError: an entry point cannot be loaded, is neither of these, or brings a name that is taken.
        """
        found = self
        for point in entry_points(group=ENTRY_POINTS):
            where = f"entry point {point.name} = {point.value!r} of {ENTRY_POINTS}"
            try:
                entry = point.load()
            except Exception as error:  # whatever a package raises at its import
                raise ConfigError(f"{where} cannot be loaded: {error!r}; mend or uninstall the package") from error
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
        """The rule that `optimizer=name` asks for.

        Raises:
            ConfigError: no entry has that name, its rule is not one that `config` can use, or does not read
                `optimizer_options`.
        """
        rule = checked_rule(name, self[name].make(config), config)
        if config.optimizer_options and name == config.optimizer and not isinstance(rule, ElementwiseRule):
            raise ConfigError(
                f"optimizer_options={dict(config.optimizer_options)!r}: optimizer={name!r} does not read them; they "
                "are for rules that are formulas. Leave them out"
            )
        return rule

    def __getitem__(self, name: str) -> RuleEntry:
        if name not in self.entries:
            near = sorted(get_close_matches(name, self.entries, n=2))
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"optimizer={name!r} is unknown; known are {', '.join(self.entries)}{hint}")
        return self.entries[name]
