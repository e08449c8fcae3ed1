"""Choices of rules: recorded in parameter groups, and compared with those that a loaded state was saved with.

Structure that no number of a group shows, such as `maximize`, the choices of a formula, or Muon's `scale_mode`. State
may mean something else under another choice of a formula, so it is refused. The options of a matrix rule change how its
state is used, not what it means: a load with other options logs a warning.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from opt_config import ConfigError
from opt_distributed.step.group_entries import CHOICES
from opt_kernels.choice import NamedChoice
from opt_kernels.hooks import bare
from opt_kernels.rules.base import Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_stack.planning.hooks import warn_of_other_hooks

logger = logging.getLogger("opt_stack")

_OF_PRECISION = ("backend", "fp32_matmul_prec", "use_syrk")  # options that change only rounding and speed

Group = Mapping[str, Any]


def choices_of(rule: Rule) -> dict[str, Any]:
    """Return the choices of a rule, without its hooks: those of its formula, or the plain fields of its dataclass."""
    rule = bare(rule)
    if isinstance(rule, ElementwiseRule):
        constants = dict(rule.formula.constants)
        recorded = {choice.name: constants[choice.name] for choice in rule.formula.choices if choice.is_recorded}
        return {**recorded, "maximize": rule.maximize}
    return dict(_options(rule))


def _options(rule: object) -> Iterator[tuple[str, Any]]:
    """Yield the options of a rule and of the rules among its fields, if their values read the same on every rank."""
    for field in fields(rule) if is_dataclass(rule) else ():
        value = getattr(rule, field.name, None)
        if is_dataclass(value):
            yield from _options(value)
        elif field.init and field.compare and field.name not in _OF_PRECISION and _is_plain(value):
            yield field.name, value.value if isinstance(value, NamedChoice) else value


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, bool | int | float | str)


def record_choices_(groups: Iterable[dict[str, Any]], made: Mapping[str, Rule]) -> None:
    """Write the choices of its rule to each group, as text; they replace those of an optimizer it was part of."""
    for group in groups:
        choices = choices_of(made[group["optimizer"]])
        group[CHOICES] = tuple(f"{name}={value!r}" for name, value in sorted(choices.items()))


def check_choices(group: Group, saved: Group, rules: Mapping[str, Rule]) -> None:
    """Raise ConfigError if `saved` was saved under another choice of the formula that updates `group`.

    A group without a record passes: older versions and other optimizers write none. `rules` are those of this rank.
    """
    if isinstance(rules.get(group["optimizer"]), ElementwiseRule):
        for name, before, after in _differences(group, saved):
            raise ConfigError(
                f"group {group['name']!r} was saved with {name}={before}, but optimizer {group['optimizer']!r} has "
                f"{name}={after}, for which state may mean something else; build it with the saved choice, or delete "
                f"{CHOICES!r} from the saved groups to continue from that state"
            )


def warn_of_other_choices(group: Group, saved: Group) -> None:
    """Log a warning for each hook and option of the rule that differs from those `saved` was saved with."""
    warn_of_other_hooks(group["name"], group, saved)
    for name, before, after in _differences(group, saved):
        logger.warning(
            "group %r continues with %s=%s, but was saved with %s=%s", group["name"], name, after, name, before
        )


def _differences(group: Group, saved: Group) -> Iterator[tuple[str, str, str]]:
    """Yield the names of choices that both groups record, with the saved and the present value where they differ.
    Groups of different rules do not differ in this sense."""
    if saved.get("optimizer", group["optimizer"]) != group["optimizer"]:
        return
    before, after = (_recorded(one) for one in (saved, group))
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            yield name, before[name], after[name]


def _recorded(group: Group) -> dict[str, str]:
    parts = (str(text).partition("=") for text in group.get(CHOICES) or ())
    return {name: value for name, _, value in parts}
