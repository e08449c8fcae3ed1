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

# Each module defines one formula.
_IN_MODULES = (vars(import_module(f"opt_kernels.formulas.{module}")).values() for module in MODULES)
FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {value.name: value for values in _IN_MODULES for value in values if isinstance(value, Formula)}
)
