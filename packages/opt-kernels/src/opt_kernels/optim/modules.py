"""Recognises the parameters of a module that a matrix rule should not update: embeddings, outputs, non-matrices."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from opt_kernels.optim.groups import ParamGroup

_SUSPECTS = frozenset(
    {"lm_head", "output_layer", "head", "unembed", "embed_out", "embed", "embedding", "embeddings", "embed_tokens"}
    | {"tok_embeddings", "word_embeddings", "position_embeddings", "pos_embed", "wte", "wpe"}
)


def groups_of(module: nn.Module) -> list[ParamGroup]:
    """All parameters of `module` in at most two groups: hidden matrices, and the rest with `use_matrix_rule=False`.

    Embeddings are the parameters of `nn.Embedding` and `nn.EmbeddingBag`. An output layer is tied to an embedding, or
    is the last `nn.Linear` if its weight has the shape of an embedding. The attribute
    `is_embedding_or_output_parameter` of a parameter overrides this.
    """
    recognised = _embeddings_and_outputs(module)
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for param in module.parameters():
        marked = getattr(param, "is_embedding_or_output_parameter", None)
        is_excluded = id(param) in recognised if marked is None else bool(marked)
        groups[param.dim() == 2 and not is_excluded].append(param)
    rest: ParamGroup = {"params": groups[False], "use_matrix_rule": False}
    return [group for group in ({"params": groups[True]}, rest) if group["params"]]


def _embeddings_and_outputs(module: nn.Module) -> set[int]:
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    found = {id(param) for table in tables for param in table.parameters()}
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if linears and linears[-1].weight.shape in {table.weight.shape for table in tables}:
        found.add(id(linears[-1].weight))
    return found


def warn_of_suspects(groups: Iterable[Mapping[str, Any]]) -> None:
    """Warn of matrices named like embeddings or output layers, in groups without `use_matrix_rule`."""
    suspects = [
        name
        for group in groups
        if group["use_matrix_rule"] is None
        for name, param in zip(group.get("param_names", ()), group["params"], strict=False)
        if param.dim() == 2 and name.removesuffix(".weight").rpartition(".")[2] in _SUSPECTS
    ]
    if suspects:
        warnings.warn(
            f"{', '.join(map(repr, suspects))}: updated as hidden matrices, but named like embeddings or output "
            "layers; pass the model itself in place of its parameters, or set use_matrix_rule in their group: False, "
            "or True to confirm",
            stacklevel=4,
        )
