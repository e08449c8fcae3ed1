"""Rules by name: ours, the caller's own, and those that installed packages bring."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.base import Rule
from opt_kernels.rules.lion import Lion
from opt_kernels.rules.sgd import SGD

ENTRY_POINTS = "opt_stack.rules"  # an entry point of this group names a `RuleEntry`


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry:
    """How a configuration becomes a rule: its structure once, its hyper-parameters into every group."""

    name: str
    summary: str
    make: Callable[[OptimizerConfig], Rule]
    hyper: Callable[[OptimizerConfig], Mapping[str, Any]]  # group fields beside lr and weight_decay


def _adam(config: OptimizerConfig) -> Rule:
    numbers = config.precision
    return Adam(
        decoupled=config.decoupled_weight_decay, exp_avg_dtype=numbers.exp_avg, exp_avg_sq_dtype=numbers.exp_avg_sq
    )


BUILT_IN = (
    RuleEntry(
        name="adam",
        summary="Adam, with decoupled weight decay (AdamW) unless decoupled_weight_decay=False",
        make=_adam,
        hyper=lambda c: {"betas": (c.adam_beta1, c.adam_beta2), "eps": c.adam_eps},
    ),
    RuleEntry(
        name="sgd",
        summary="SGD with momentum",
        make=lambda c: SGD(),
        hyper=lambda c: {"momentum": c.sgd_momentum},
    ),
    RuleEntry(
        name="lion",
        summary="Lion: the sign of an interpolated momentum",
        make=lambda c: Lion(),
        hyper=lambda c: {"betas": (c.lion_beta1, c.lion_beta2)},
    ),
)


@dataclass(frozen=True, slots=True)
class Registry:
    """A set of rules by name. `with_rule` gives a larger one; nothing is registered behind anyone's back."""

    entries: Mapping[str, RuleEntry] = field(default_factory=lambda: {entry.name: entry for entry in BUILT_IN})

    def with_rule(self, entry: RuleEntry) -> "Registry":
        """This registry and one more rule; a name that is taken is refused."""
        if entry.name in self.entries:
            raise ConfigError(f"optimizer {entry.name!r} is already registered; give the new rule another name")
        return Registry({**self.entries, entry.name: entry})

    def with_installed(self) -> "Registry":
        """This registry and the rules that installed packages bring through entry points."""
        found = self
        for point in entry_points(group=ENTRY_POINTS):
            found = found.with_rule(point.load())
        return found

    def __getitem__(self, name: str) -> RuleEntry:
        if name not in self.entries:
            near = get_close_matches(name, self.entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"optimizer={name!r} is unknown; known are {', '.join(self.entries)}{hint}")
        return self.entries[name]
