"""All elementwise rules by name. To add one, write its module and list it here."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from opt_kernels.formulas.formula import Formula

MODULES = (
    "adam",
    "sgd",
    "lion",
    "adan",
    "ademamix",
    "laprop",
    "mars",
    "nadam",
    "radam",
    "schedule_free",
    "signum",
)


def formula_in(module: str) -> Formula:
    """The one formula that a module of `opt_kernels.formulas` defines."""
    values = vars(import_module(f"opt_kernels.formulas.{module}")).values()
    (formula,) = (value for value in values if isinstance(value, Formula))
    return formula


FORMULAS: Mapping[str, Formula] = MappingProxyType({formula.name: formula for formula in map(formula_in, MODULES)})
