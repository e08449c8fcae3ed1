"""The signatures of the drop-in optimizers, for type checkers: `python -m opt_kernels.optim.stubs` writes
`catalogue.pyi` and `matrix_catalogue.pyi`."""

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from opt_kernels.optim import catalogue, matrix_catalogue
from opt_kernels.optim.base import RuleOptimizer

_TYPES = {
    "params": "Params", "lr": "float | Tensor", "max_norm": "float | None", "backend": "str | None",
    "foreach": "bool | None", "fused": "bool | None", "hooks": "GivenHooks",
}  # fmt: skip
_TYPES_OF_MATRICES = _TYPES | {
    "params": "Params | nn.Module", "adjust_lr_fn": "str | None", "scale_mode": "str | None",
    "coefficient_type": "str | None", "custom_coefficients": "Sequence[tuple[float, float, float]]",
    "scalar_optimizer": "str | None", "scalar_options": "Mapping[str, Any] | None", "max_precond_dim": "int | None",
    "ns_steps": "int", "num_ns_steps": "int", "precondition_frequency": "int", "power_iterations": "int",
}  # fmt: skip


class Stub(NamedTuple):
    """The signatures of one module's classes."""

    module: ModuleType
    header: tuple[str, ...]
    types: Mapping[str, str]

    @property
    def file(self) -> Path:
        return Path(str(self.module.__file__)).with_suffix(".pyi")

    @property
    def classes(self) -> dict[str, type[RuleOptimizer]]:
        return {name: getattr(self.module, name) for name in self.module.__all__}

    def text(self) -> str:
        classes = self.classes
        lines = ["# Written by `python -m opt_kernels.optim.stubs`; a test keeps it current.", *self.header]
        lines += sorted({"from opt_kernels.optim.base import Params", *map(_import, classes.values())})
        lines += ["", f"__all__ = [{', '.join(map(repr, sorted(classes)))}]"]
        return "\n".join([*lines, *(line for item in classes.items() for line in self._class(*item)), ""])

    def _class(self, name: str, cls: type[RuleOptimizer]) -> Iterator[str]:
        yield ""
        yield f"class {name}({_base(cls).__name__ if _is_made(cls) else '_' + name}):"
        yield "    def __init__("
        yield "        self,"
        by_name = False
        for parameter in signature(cls).parameters.values():
            if parameter.kind is Parameter.KEYWORD_ONLY and not by_name:
                by_name = True
                yield "        *,"
            yield f"        {_parameter(parameter, self.types)},"
        yield "    ) -> None: ..."


_ALWAYS = ("import torch", "from torch import Tensor")
STUBS = (
    Stub(catalogue, (*_ALWAYS, "", "from opt_kernels.hooks import GivenHooks"), _TYPES),
    Stub(
        matrix_catalogue,
        (
            "from collections.abc import Mapping, Sequence",
            "from typing import Any",
            "",
            "import torch",
            "from torch import Tensor, nn",
            "",
            "from opt_kernels.hooks import GivenHooks",
        ),
        _TYPES_OF_MATRICES,
    ),
)


def _is_made(cls: type[RuleOptimizer]) -> bool:
    """Whether `drop_in` made the class, which no source defines."""
    return cls.__module__ == catalogue.__name__


def _base(cls: type[RuleOptimizer]) -> type:
    return cls.__mro__[1]


def _import(cls: type[RuleOptimizer]) -> str:
    if _is_made(cls):
        return f"from {_base(cls).__module__} import {_base(cls).__name__}"
    return f"from {cls.__module__} import {cls.__name__} as _{cls.__name__}"


def _parameter(parameter: Parameter, types: Mapping[str, str]) -> str:
    default = parameter.default
    kind = types.get(parameter.name) or _type_of(default)
    return f"{parameter.name}: {kind}" + ("" if default is Parameter.empty else f" = {_literal(default)}")


def _literal(default: Any) -> str:
    """As source; `...` for what is no constant."""
    return repr(default) if isinstance(default, bool | int | float | str | tuple | torch.dtype | None) else "..."


def _type_of(default: Any) -> str:
    if isinstance(default, tuple):
        return f"tuple[{', '.join(['float'] * len(default))}]"
    if isinstance(default, torch.dtype):
        return "torch.dtype"
    return "float" if isinstance(default, int) and not isinstance(default, bool) else type(default).__name__


if __name__ == "__main__":
    for stub in STUBS:
        stub.file.write_text(stub.text())
