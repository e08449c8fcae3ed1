"""`Registry`: rules by name, built in, from the caller, or from installed packages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.formulas import Formula
from opt_kernels.rules.base import Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_stack.rules.built_in import BUILT_IN, RuleEntry, formula_entry
from opt_stack.rules.checks import checked_rule

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
        rule = checked_rule(name, self[name].make(config), config)
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
