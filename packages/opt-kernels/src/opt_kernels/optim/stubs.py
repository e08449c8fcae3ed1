"""The signatures of the drop-in optimizers over formulas, for type checkers: `python -m opt_kernels.optim.stubs`
writes `catalogue.pyi`."""

from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch

from opt_kernels.optim import catalogue
from opt_kernels.optim.formula_optimizer import FormulaOptimizer

STUB = Path(__file__).with_name("catalogue.pyi")
_TYPES = {
    "params": "Params", "lr": "float | Tensor", "max_norm": "float | None", "backend": "str | None",
    "foreach": "bool | None", "fused": "bool | None", "hooks": "GivenHooks",
}  # fmt: skip


def stub() -> str:
    """The text of `catalogue.pyi`."""
    classes: dict[str, type[FormulaOptimizer]] = {name: getattr(catalogue, name) for name in catalogue.__all__}
    return "\n".join([*_header(classes), *(line for name, cls in classes.items() for line in _class(name, cls)), ""])


def _header(classes: dict[str, type[FormulaOptimizer]]) -> Iterator[str]:
    yield "# Written by `python -m opt_kernels.optim.stubs`; a test keeps it current."
    yield "import torch"
    yield "from torch import Tensor"
    yield ""
    yield "from opt_kernels.hooks import GivenHooks"
    bases = {f"from {base.__module__} import {base.__name__}" for base in (cls.__mro__[1] for cls in classes.values())}
    yield from sorted({*bases, "from opt_kernels.optim.base import Params"})
    yield ""
    yield f"__all__ = [{', '.join(repr(name) for name in classes)}]"


def _class(name: str, cls: type[FormulaOptimizer]) -> Iterator[str]:
    yield ""
    yield f"class {name}({cls.__mro__[1].__name__}):"
    yield "    def __init__("
    yield "        self,"
    by_name = False
    for parameter in signature(cls).parameters.values():
        if parameter.kind is Parameter.KEYWORD_ONLY and not by_name:
            by_name = True
            yield "        *,"
        yield f"        {_parameter(parameter)},"
    yield "    ) -> None: ..."


def _parameter(parameter: Parameter) -> str:
    default = parameter.default
    kind = _TYPES.get(parameter.name) or _type_of(default)
    return f"{parameter.name}: {kind}" + ("" if default is Parameter.empty else f" = {default!r}")


def _type_of(default: Any) -> str:
    if isinstance(default, tuple):
        return f"tuple[{', '.join(['float'] * len(default))}]"
    if isinstance(default, torch.dtype):
        return "torch.dtype"
    return "float" if isinstance(default, int) and not isinstance(default, bool) else type(default).__name__


if __name__ == "__main__":
    STUB.write_text(stub())
