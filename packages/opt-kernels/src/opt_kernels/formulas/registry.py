"""All elementwise rules by name. To add one, write its module and list it here."""

from collections.abc import Mapping
from types import MappingProxyType

from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.adan import ADAN
from opt_kernels.formulas.ademamix import ADEMAMIX
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.laprop import LAPROP
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.mars import MARS
from opt_kernels.formulas.nadam import NADAM
from opt_kernels.formulas.radam import RADAM
from opt_kernels.formulas.schedule_free import SCHEDULE_FREE
from opt_kernels.formulas.sgd import SGD
from opt_kernels.formulas.signum import SIGNUM

FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        formula.name: formula
        for formula in (
            ADAM, SGD, LION, ADAN, ADEMAMIX, LAPROP, MARS, NADAM, RADAM, SCHEDULE_FREE, SIGNUM,
        )
    }
)  # fmt: skip
