"""ParamId: the name of a parameter and its model chunk, and the parameters of a model by ParamId."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from opt_config import ConfigError

# Wrappers hold the model as their only child, under one of these names, and own no parameters.
_WRAPPED = frozenset({"module", "_orig_mod"})


class ParamId(NamedTuple):
    """The name of a parameter and its model chunk: chunks of a virtual pipeline repeat local names."""

    chunk: int
    name: str

    def __str__(self) -> str:
        return self.name if self.chunk == 0 else f"chunk {self.chunk}: {self.name}"


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside data-parallel and torch.compile wrappers, so that wrapping does not change names."""
    while True:
        children = list(module.named_children())
        if len(children) != 1 or children[0][0] not in _WRAPPED or any(True for _ in module.parameters(recurse=False)):
            return module
        module = children[0][1]


def parameters_by_id(model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0) -> dict[ParamId, nn.Parameter]:
    """The trainable parameters in order of registration. Tied parameters appear once, under their first name.

    Raises `ConfigError` for a module in place of the list of chunks (the layers of an `nn.Sequential` are not model
    chunks), and for a parameter of a lazy module, whose shape is not known yet.
    """
    if isinstance(model_chunks, nn.Module):
        raise ConfigError(f"model_chunks: {type(model_chunks).__name__} is a module: pass a list, [model]")
    params = {id: param for id, param in _distinct(model_chunks, model_chunk_offset) if param.requires_grad}
    for id, param in params.items():
        if is_lazy(param):
            raise ConfigError(
                f"parameter {str(id)!r} is uninitialized: its lazy module has not seen a batch; run one forward pass "
                "before building the optimizer"
            )
    return params


def frozen_by_id(model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0) -> dict[ParamId, nn.Parameter]:
    """The parameters with `requires_grad=False`, likewise."""
    return {id: param for id, param in _distinct(model_chunks, model_chunk_offset) if not param.requires_grad}


def _distinct(model_chunks: Sequence[nn.Module], offset: int) -> Iterator[tuple[ParamId, nn.Parameter]]:
    seen: set[int] = set()
    for chunk, module in enumerate(model_chunks, start=offset):
        for name, param in unwrapped(module).named_parameters():
            if id(param) not in seen:
                seen.add(id(param))
                yield ParamId(chunk, name), param


def model_chunks_of(place: str) -> list[nn.Module]:
    """The model chunks that `module:factory` returns. Raises `ConfigError` if it does not return modules."""
    module_name, colon, attr = place.partition(":")
    if not colon:
        raise ConfigError(f"{place!r}: must be module:factory, such as my_project.model:build")
    try:
        factory = getattr(import_module(module_name), attr)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place!r}: {error}") from error
    model = factory()
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    if not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise ConfigError(f"{place!r}: must return a module or a list of modules, not {model!r}")
    return chunks
