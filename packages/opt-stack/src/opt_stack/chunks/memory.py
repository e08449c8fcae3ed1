"""Checks of the memory that a model's parameters are in."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from opt_config import ConfigError, OptimizerConfig, Replicated
from opt_distributed.buffers.apart import check_apart, not_trained


def check_materialised(chunks: Sequence[nn.Module]) -> None:
    """Raise ConfigError for a parameter on the meta device."""
    named = ((name, param) for chunk in chunks for name, param in nn.Module.named_parameters(chunk))
    found = next((name for name, param in named if param.is_meta), None)
    if found is not None:
        raise ConfigError(
            f"{found!r} is on the meta device, where it has no values; call model.to_empty(device=...) and initialise "
            "the parameters first, then get_optimizer"
        )


def check_memory(config: OptimizerConfig, chunks: Sequence[nn.Module], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise StorageError if a parameter of `groups` shares memory with another one.

    If ranks own shards, parameters move into buffers, so that they must not share memory with any tensor of the model.
    """
    params = {id: param for group in groups for id, param in zip(group["param_ids"], group["params"], strict=True)}
    moves = not isinstance(config.sharding, Replicated)
    check_apart(params, (named for chunk in chunks for named in not_trained(chunk) if moves))
