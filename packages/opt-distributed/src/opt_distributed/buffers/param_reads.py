"""Reads of parameters wait for pending gathers, whatever code reads them.

Modules, state dicts, copies, moving averages and saves all read a parameter through the `_parameters` of the module
that holds it. While gathers overlap with the forward, `AwaitedParams` replaces these dicts, so that readers need not be
known in advance. Two kinds of readers bypass it: code that torch.compile has compiled, and modules that keep parameters
in other attributes (`nn.LSTM._flat_weights`). For these, blocks wait before they run.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from opt_distributed.buffers.param_sync import ParamSync

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


class AwaitedParams(dict[str, Any]):
    """A module's `_parameters`, whose reads wait until the values have arrived. Copies and pickles are plain dicts."""

    def __init__(self, params: Mapping[str, Any], sync: ParamSync):
        super().__init__(params)
        self._sync = sync

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if not torch.compiler.is_compiling() and self._sync.is_pending:
            self._sync.wait_for((param,))
        return param

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

    def _wait(self) -> None:
        if not torch.compiler.is_compiling() and self._sync.is_pending:
            self._sync.wait_for(super().values())


class UseHooks:
    """Makes every read of a model's parameters wait for them, until `remove`.

    Compiled regions cannot wait, so modules wait before they run: a block for its own parameters, which keeps the
    overlap if blocks are compiled, and a module above the blocks, if it is compiled itself, for everything below it.
    Blocks are the elements of the outermost `ModuleList`, `ModuleDict` and `Sequential`, other modules that contain
    none of these, and modules that were compiled before.
    """

    def __init__(self, model: nn.Module, sync: ParamSync):
        self._gated = [module for module in model.modules() if vars(module).get("_parameters")]
        for module in self._gated:
            module._parameters = AwaitedParams(module._parameters, sync)
        self._handles: list[RemovableHandle] = []
        for module, is_block in _with_blocks(model):
            below = _params_below(module)
            first = below if is_block else list(_held_elsewhere(module))
            self._handles.append(module.register_forward_pre_hook(_Wait(sync, first, below)))

    def remove(self) -> None:
        """Restores the modules."""
        for handle in self._handles:
            handle.remove()
        for module in self._gated:
            if isinstance(module._parameters, AwaitedParams):
                module._parameters = dict.copy(module._parameters)  # does not wait for gathers


class _Wait:
    """A forward pre-hook. Its copies and pickles do nothing, because a copied model has its own memory."""

    def __init__(self, sync: ParamSync, first: Collection[nn.Parameter], below: Collection[nn.Parameter]):
        self._sync = sync
        self._first, self._below = first, below

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._sync.is_pending:
            self._wait(is_compiled=torch.compiler.is_compiling())

    def __reduce__(self) -> Any:
        return _no_hook, ()

    @_disable_dynamo  # `torch.compiler.disable` would load dynamo when this is imported
    def _wait(self, *, is_compiled: bool) -> None:
        self._sync.wait_for(self._below if is_compiled else self._first)


def _no_hook() -> Any:
    return _ignore


def _ignore(module: nn.Module, args: Any) -> None:
    return None


def _with_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Modules that wait before they run, and whether they are blocks."""
    if _is_compiled(model) or not any(isinstance(below, _CONTAINERS) for below in model.modules()):
        yield model, True
        return
    yield model, False
    for child in model.children():
        if isinstance(model, _CONTAINERS) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child, True
        else:
            yield from _with_blocks(child)


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule)


def _params_below(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of a module and its submodules, and those in other attributes of these."""
    own = list(module.parameters())
    return list(dict.fromkeys([*own, *(param for one in module.modules() for param in _held_elsewhere(one))]))


def _held_elsewhere(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters in attributes of a module other than its registered parameters and modules."""
    for name, value in vars(module).items():
        if name not in _REGISTRIES:
            yield from _params_in(value)


def _params_in(value: Any, *, depth: int = 3) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, list | tuple | set | Mapping) and depth:
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _params_in(one, depth=depth - 1)
