"""Which parameters are embeddings and output layers, by their modules, shapes or names; which are vectors; and which
are fused projections of queries, keys and values."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["VocabularyRole", "fused_qkv_rows", "is_regrouped", "is_vector", "vocabulary_roles"]

_HEADS = frozenset({"lm_head", "output_layer", "head", "unembed", "unembedding", "embed_out", "classifier", "score"})
_HEADS_IF_LAST = frozenset({"output", "logits", "to_logits"})  # elsewhere "output" is a projection of attention
_EMBEDDINGS = frozenset(
    {"embed", "embedding", "embeddings", "embed_tokens", "tok_embeddings", "word_embeddings", "token_embedding"}
    | {"pos_embed", "position_embedding", "position_embeddings", "wte", "wpe"}
)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
# Methods of Hugging Face models, and whether they return an embedding rather than an output layer.
_GETTERS = {"get_input_embeddings": True, "get_output_embeddings": False}
_FUSED_QKV = "linear_qkv.weight"  # in Megatron-Core's attention
_STACKED_VECTOR = re.compile(
    r"(?:^|[._])bias(?:es)?\d*(?:_[^.]*)?(?:\.\d+)*$"  # experts.down_proj_bias, dt_bias, biases.0
    r"|(?:^|\.)A(?:_[a-z]+)?_logs?$"  # of Mamba and its kin
    r"|(?:norm(?:_?\d+|_[a-z])?|(?:^|\.)ln(?:_\w+)?)\.(?:weight|scale|gamma)$",  # norms of each head
    re.IGNORECASE,
)


class VocabularyRole(NamedTuple):
    """The role of a parameter that is an embedding or an output layer."""

    is_embedding: bool
    guess: str = ""  # reason for an uncertain decision; empty: certain


# What torch.compile, FSDP1 and activation checkpointing add to names.
_OF_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def plain_name(name: str) -> str:
    """Return the name of a parameter without the names of wrappers in it, such as `_orig_mod`.

    >>> plain_name("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return _OF_WRAPPERS.sub("", name)


class _Matrix(NamedTuple):
    """A matrix, the module that holds it, and the last part of its name."""

    param: nn.Parameter
    module: nn.Module
    last_name: str


def is_vector(param: Tensor, name: str) -> bool:
    """Return whether a parameter is a vector, or a stack of vectors in two or more dims.

    1-D parameters and those called `*.bias` are. Others are if their authors marked them `_no_weight_decay`,
    or by name: biases of experts or heads, `A_log`, weights of norms. `_no_weight_decay = False` overrides the name.
    """
    if param.dim() == 1 or name.endswith(".bias"):
        return True
    marked = getattr(param, "_no_weight_decay", None)
    return bool(_STACKED_VECTOR.search(name)) if marked is None else bool(marked)


def is_regrouped(param: Tensor, name: str) -> bool:
    """Return whether earlier releases, which knew only 1-D parameters and `*.bias`, may have grouped a parameter
    differently."""
    is_known = param.dim() == 1 or name.endswith(".bias")
    is_marked = getattr(param, "_no_weight_decay", None) is not None
    return not is_known and (is_marked or bool(_STACKED_VECTOR.search(name)))


def vocabulary_roles(roots: Sequence[nn.Module]) -> dict[int, VocabularyRole]:
    """Return a model's embeddings and output layers, by the `id()` of their parameters, tied parameters included.

    `roots`: the unwrapped model chunks.

    The matrices of `nn.Embedding` and `nn.EmbeddingBag`, parameters tied to them, the weights of the modules that the
    model's `get_input_embeddings()` and `get_output_embeddings()` return, and the last `nn.Linear` if its weight has
    the shape of an embedding, are certain. The only other `nn.Linear` of such a shape, and matrices with a name that is
    common for heads or embeddings, are guesses.
    """
    modules = [module for root in roots for module in root.modules()]
    tables = [param for module in modules if isinstance(module, _TABLES) for param in module.parameters()]
    roles = {id(param): VocabularyRole(is_embedding=True) for param in tables}
    for param, is_embedding in _named_embeddings(modules):
        roles.setdefault(id(param), VocabularyRole(is_embedding))
    matrices = [matrix for root in roots for matrix in _matrices(root)]
    has_output = any(isinstance(matrix.module, nn.Linear) and id(matrix.param) in roles for matrix in matrices)
    unknown = [matrix for matrix in matrices if id(matrix.param) not in roles]
    by_shape = () if has_output else _shaped_like(tables, unknown)
    for matrix, guess in (*by_shape, *_named(unknown)):
        roles.setdefault(id(matrix.param), VocabularyRole(matrix.last_name in _EMBEDDINGS, guess))
    return roles


def _named_embeddings(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Parameter, bool]]:
    """The matrices of the modules that a Hugging Face model names as its input and output embeddings, and whether they
    are those of inputs."""
    for name, is_embedding in _GETTERS.items():
        for module in modules:
            if not callable(getattr(type(module), name, None)):
                continue
            try:
                weight = getattr(getattr(module, name)(), "weight", None)
            except (NotImplementedError, AttributeError):  # a model without such a layer
                continue
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                yield weight, is_embedding


def _matrices(root: nn.Module) -> Iterator[_Matrix]:
    for path, module in root.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param.dim() == 2:
                last = plain_name(f"{path}.{name}").removesuffix(".weight").rpartition(".")[2]
                yield _Matrix(param, module, last)


def _shaped_like(tables: Sequence[nn.Parameter], matrices: Sequence[_Matrix]) -> Iterator[tuple[_Matrix, str]]:
    """The output layer of these tables, if it can be distinguished from hidden layers."""
    shapes = {tuple(table.shape) for table in tables}
    linears = [matrix for matrix in matrices if isinstance(matrix.module, nn.Linear)]
    candidates = [matrix for matrix in linears if tuple(matrix.param.shape) in shapes]
    if candidates and linears[-1] is candidates[-1]:
        rows, columns = candidates[-1].param.shape
        yield candidates[-1], "" if rows != columns else "it is the last Linear, with the shape of an embedding"
    elif len(candidates) == 1:
        yield candidates[0], "it is the only Linear with the shape of an embedding"


def _named(matrices: Sequence[_Matrix]) -> Iterator[tuple[_Matrix, str]]:
    if matrices and matrices[-1].last_name in _HEADS_IF_LAST:
        yield matrices[-1], f"it is the last matrix, called {matrices[-1].last_name!r}"
    for matrix in matrices:
        names = _HEADS if isinstance(matrix.module, nn.Linear) else _HEADS | _EMBEDDINGS
        if matrix.last_name in names:
            yield matrix, f"it is called {matrix.last_name!r}"


def fused_qkv_rows(roots: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """Return the rows of q, k, v and, if any, an output gate in one query group, by the `id()` of a fused weight.

    As in Megatron-Core, a fused weight is a matrix called `*linear_qkv.weight`. The innermost module around it with a
    transformer `config` says how many heads there are. A weight whose rows, on this rank, are not whole query groups is
    left out: it is one matrix.

    `roots` are the chunks of a model without wrappers.
    """
    found: dict[int, tuple[int, ...]] = {}
    for root in roots:
        for name, param in root.named_parameters():
            if not name.endswith(_FUSED_QKV) or param.dim() != 2:
                continue
            rows = _qkv_rows_around(root, name)
            if rows and param.shape[0] % sum(rows) == 0:
                found[id(param)] = rows
    return found


def _qkv_rows_around(root: nn.Module, name: str) -> tuple[int, ...]:
    """The rows by the transformer configuration of the innermost module around a parameter; () if none has one."""
    while name:
        name = name.rpartition(".")[0]
        config: Any = getattr(root.get_submodule(name), "config", None)
        if all(getattr(config, field, None) for field in ("num_attention_heads", "num_query_groups", "kv_channels")):
            query_rows = config.num_attention_heads // config.num_query_groups * config.kv_channels
            gate = (query_rows,) if getattr(config, "attention_output_gate", False) else ()
            return (query_rows, *gate, config.kv_channels, config.kv_channels)
    return ()
