"""A model as values: names of parameters, layouts of DTensors, and which modules are embeddings or output layers."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn
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


TENSOR_PARALLEL_AXES = ("tp",)
"""The names of mesh axes that mean tensor parallelism."""


class MeshPlacement(NamedTuple):
    """How a tensor is placed along one axis of the device mesh."""

    axis: str  # the mesh's name for it, or its number
    size: int
    shard_dim: int | None  # the dim it shards; None: replicated
    cuts_last: bool = False  # applied after the inner axes: FSDP2 shards the tensor-parallel shard of a dim


class DTensorLayout(NamedTuple):
    """The placement of a DTensor parameter on its mesh."""

    local_shape: tuple[int, ...]
    placements: tuple[MeshPlacement, ...]  # one for each axis of the mesh, outermost first


def dtensor_layout(tensor: Tensor) -> DTensorLayout | None:
    """The layout of a DTensor; None for any other tensor.

    Raises `ConfigError` for partial placements: a pending sum cannot be updated.
    """
    # DTensors exist only if their module was imported. Importing it here would cost every user most of a second and
    # fail on builds of torch without distributed.
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    dtensor: Any = tensor
    names = dtensor.device_mesh.mesh_dim_names or tuple(str(axis) for axis in range(dtensor.device_mesh.ndim))
    placements = tuple(
        MeshPlacement(axis, dtensor.device_mesh.size(index), _shard_dim(placement), hasattr(placement, "split_factor"))
        for index, (axis, placement) in enumerate(zip(names, dtensor.placements, strict=True))
    )
    return DTensorLayout(tuple(dtensor.to_local().shape), placements)


def _shard_dim(placement: Any) -> int | None:
    if placement.is_partial():
        raise ConfigError(
            f"a parameter has the placement {placement}; allowed are Shard and Replicate; redistribute it first"
        )
    return None if placement.is_replicate() else int(placement.dim)  # is_shard() is False for strided shards since 2.13


_HEADS = frozenset({"lm_head", "output_layer", "head", "unembed", "unembedding", "embed_out", "classifier", "score"})
_HEADS_IF_LAST = frozenset({"output", "logits", "to_logits"})  # elsewhere "output" is a projection of attention
_EMBEDDINGS = frozenset(
    {"embed", "embedding", "embeddings", "embed_tokens", "tok_embeddings", "word_embeddings", "token_embedding"}
    | {"pos_embed", "position_embedding", "position_embeddings", "wte", "wpe"}
)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_GETTERS = ("get_input_embeddings", "get_output_embeddings")  # of Hugging Face models


class VocabularyRole(NamedTuple):
    """The role of a parameter that is an embedding or an output layer."""

    is_embedding: bool
    guess: str = ""  # reason for an uncertain decision; empty: certain


class _Held(NamedTuple):
    """A matrix, the module that holds it, and the last part of its name."""

    param: nn.Parameter
    module: nn.Module
    last_name: str


def vocabulary_roles(model_chunks: Sequence[nn.Module]) -> dict[int, VocabularyRole]:
    """The embeddings and output layers of a model, by the `id()` of their parameters. Tied parameters are included.

    Certain are the matrices of `nn.Embedding` and `nn.EmbeddingBag`, parameters tied to them, the weights of the
    modules that the model's `get_input_embeddings()` and `get_output_embeddings()` return, and the last `nn.Linear` if
    its weight has the shape of an embedding. Guessed are the only other `nn.Linear` of such a shape, and matrices with
    a name that is common for heads or embeddings.
    """
    roots = [unwrapped(chunk) for chunk in model_chunks]
    tables = [
        p for root in roots for module in root.modules() if isinstance(module, _TABLES) for p in module.parameters()
    ]
    roles = {id(param): VocabularyRole(is_embedding=True) for param in tables}
    for param in _of_getters(roots):
        roles.setdefault(id(param), VocabularyRole(is_embedding=False))
    matrices = [held for root in roots for held in _matrices(root)]
    has_output = any(isinstance(held.module, nn.Linear) and id(held.param) in roles for held in matrices)
    unknown = [held for held in matrices if id(held.param) not in roles]
    by_shape = () if has_output else _shaped_like(tables, unknown)
    for held, guess in (*by_shape, *_named(unknown)):
        roles.setdefault(id(held.param), VocabularyRole(held.last_name in _EMBEDDINGS, guess))
    return roles


def _of_getters(roots: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """The matrices of the modules that a Hugging Face model names as its embeddings."""
    for module in (module for root in roots for module in root.modules()):
        for name in _GETTERS:
            if not callable(getattr(type(module), name, None)):
                continue
            try:
                weight = getattr(getattr(module, name)(), "weight", None)
            except (NotImplementedError, AttributeError):  # a model without such a layer
                continue
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                yield weight


def _matrices(root: nn.Module) -> Iterator[_Held]:
    for path, module in root.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param.dim() == 2:
                yield _Held(param, module, path.rpartition(".")[2] if name == "weight" else name)


def _shaped_like(tables: Sequence[nn.Parameter], matrices: Sequence[_Held]) -> Iterator[tuple[_Held, str]]:
    """The output layer of these tables, if it can be distinguished from hidden layers."""
    shapes = {tuple(table.shape) for table in tables}
    linears = [held for held in matrices if isinstance(held.module, nn.Linear)]
    candidates = [held for held in linears if tuple(held.param.shape) in shapes]
    if linears and candidates and linears[-1] is candidates[-1]:
        rows, columns = candidates[-1].param.shape
        yield candidates[-1], "" if rows != columns else "it is the last Linear, with the shape of an embedding"
    elif len(candidates) == 1:
        yield candidates[0], "it is the only Linear with the shape of an embedding"


def _named(matrices: Sequence[_Held]) -> Iterator[tuple[_Held, str]]:
    if matrices and matrices[-1].last_name in _HEADS_IF_LAST:
        yield matrices[-1], f"it is the last matrix, called {matrices[-1].last_name!r}"
    for held in matrices:
        names = _HEADS if isinstance(held.module, nn.Linear) else _HEADS | _EMBEDDINGS
        if held.last_name in names:
            yield held, f"it is called {held.last_name!r}"
