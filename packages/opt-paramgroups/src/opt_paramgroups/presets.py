"""Preset overrides: no weight decay of vectors, decoupled learning rates, matrix rules for matrices, layer decay."""

import re
from collections.abc import Callable, Sequence

from torch import nn
from torch.nn import Parameter

from opt_config import ConfigError, OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate
from opt_paramgroups.names import parameters_by_id
from opt_paramgroups.overrides import DefaultEntries, Override

MUON_FAMILY = ("muon", "adaptive_muon")
"""The rules that honour `use_muon=False` on a parameter and `muon_scalar_optimizer`."""

MATRIX_RULES = (*MUON_FAMILY, "soap", "soap_muon")
"""The rules that update whole matrices only."""

Overrides = dict[ParamKey, Override]


def get_standard_config_overrides(config: OptimizerConfig) -> Overrides:
    """Megatron-Core's default overrides: no weight decay of biases and vectors, and decoupled learning rates.

    `apply_wd_to_qk_layernorm` keeps the decay of query and key layer norms. `decoupled_lr` and `decoupled_min_lr` apply
    to the parameters marked `is_embedding_or_output_parameter`.
    """
    overrides: Overrides = {_undecayed(config): {"wd_mult": 0.0}}
    if config.decoupled_lr is not None:
        decoupled = {"max_lr": config.decoupled_lr, "is_decoupled_lr": True}
        if config.decoupled_min_lr is not None:
            decoupled["min_lr"] = config.decoupled_min_lr
        overrides[ParamKey(attr="is_embedding_or_output_parameter")] = decoupled
    return overrides


def get_matrix_rule_overrides(config: OptimizerConfig, *, scalar_optimizer: str | None = None) -> Overrides:
    """An elementwise rule for the parameters that a matrix rule (Muon, SOAP) leaves: embeddings, outputs, non-matrices.

    An override of the caller that sets `optimizer` for such a parameter takes precedence.

    `scalar_optimizer` names the elementwise rule. None: `config.muon_scalar_optimizer` for Muon's family, else Adam.
    Muon's family also leaves parameters marked `use_muon=False`.
    """
    muon = config.optimizer in MUON_FAMILY
    not_2d = ParamPredicate(name="not 2-D", fn=lambda param: param.dim() != 2)
    not_muon = ParamPredicate(name="use_muon=False", fn=lambda param: not getattr(param, "use_muon", True))
    key = ParamKey(attr="is_embedding_or_output_parameter", predicate=(not_2d, not_muon) if muon else not_2d)
    return {key: DefaultEntries(optimizer=scalar_optimizer or (config.muon_scalar_optimizer if muon else "adam"))}


def get_layer_decay_overrides(
    model_chunks: Sequence[nn.Module],
    decay: float,
    *,
    num_layers: int | None = None,
    depth_of: Callable[[str], int | None] | None = None,
) -> Overrides:
    """Learning rates that shrink towards the input: `lr_mult = decay ** (num_layers + 1 - depth)` (arXiv 2106.08254).

    Args:
        model_chunks: the model.
        decay: in (0, 1].
        num_layers: number of layers of the whole model, equal on every rank. None: as found in the names.
        depth_of: maps the name of a parameter to its depth: 0 for embeddings, i + 1 for layer i, None for parameters
            after the layers. None: `depth_by_name`, which reads the number after `layers.`, `blocks.` or `h.`.

    Raises:
        ConfigError: `decay` is not in (0, 1], or `num_layers` is smaller than the depth of a parameter.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"get_layer_decay_overrides: decay={decay!r}: must be in (0, 1]")
    find = depth_of or depth_by_name
    depths = [depth for id in parameters_by_id(model_chunks) if (depth := find(id.name)) is not None]
    deepest = max(depths, default=0)
    last = deepest if num_layers is None else num_layers
    if deepest > last:
        raise ConfigError(
            f"get_layer_decay_overrides: num_layers={num_layers!r}: must be at least {deepest}, the depth of a "
            "parameter"
        )
    return {
        ParamKey(with_name_predicate=_at_depth(depth, find)): {"lr_mult": decay ** (last + 1 - depth)}
        for depth in range(last + 1)
    }


def depth_by_name(name: str) -> int | None:
    """The depth of a parameter by common names of layers: 0 for names with `embed`, i + 1 for layer i, else None.

    >>> depth_by_name("decoder.layers.11.mlp.weight"), depth_by_name("embed.weight"), depth_by_name("head.weight")
    (12, 0, None)
    """
    layer = re.search(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.", name)
    if layer:
        return int(layer[1]) + 1
    return 0 if "embed" in name else None


def _at_depth(depth: int, depth_of: Callable[[str], int | None]) -> ParamWithNamePredicate:
    return ParamWithNamePredicate(name=f"depth {depth}", fn=lambda param, name: depth_of(name) == depth)


def _undecayed(config: OptimizerConfig) -> ParamKey:
    """The key of parameters without weight decay."""
    if not config.apply_wd_to_qk_layernorm:
        return ParamKey(name="*.bias", predicate=ParamPredicate("1-D", lambda param: param.dim() == 1))

    def undecayed(param: Parameter, name: str) -> bool:
        return (param.dim() == 1 or name.endswith(".bias")) and not re.search(r"[qk]_layernorm\.", name)

    return ParamKey(with_name_predicate=ParamWithNamePredicate("bias or 1-D, no qk layernorm", undecayed))
