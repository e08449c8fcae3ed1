"""Megatron-Core's names for layer-wise sharding: `use_distributed_optimizer` with a matrix rule, and `dist_muon`."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.comm.find import Given
from opt_kernels.hooks import GivenHooks
from opt_kernels.rules.base import Needs
from opt_stack.factory import Overrides, get_optimizer
from opt_stack.optimizer import MegatronOptimizer
from opt_stack.rules.registry import Registry


def layer_wise(config: OptimizerConfig, rules: Registry | None = None) -> OptimizerConfig:
    """Return `config` with layer-wise sharding if it asks for it as Megatron-Core's training script does.

    `use_distributed_optimizer=True` with a rule of matrices, and the name `dist_muon`, deprecated there, both mean
    `use_layer_wise_distributed_optimizer=True`. Any other configuration is returned as it is, invalid ones too:
    `get_optimizer` refuses those on every rank.
    """
    if not isinstance(config, OptimizerConfig):
        return config  # type: ignore[unreachable]  # `get_optimizer` refuses it
    name = config.optimizer.removeprefix("dist_")
    try:
        needs = (rules or Registry().with_installed()).rule(name, OptimizerConfig(optimizer=name)).needs
    except ConfigError:
        return config
    if needs is not Needs.MATRICES or not (config.use_distributed_optimizer or name != config.optimizer):
        return config
    return replace(config, optimizer=name, use_distributed_optimizer=False, use_layer_wise_distributed_optimizer=True)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: Overrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Given = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    broadcast_params: bool = False,
    rules: Registry | None = None,
    hooks: GivenHooks = (),
    allow_unmatched: bool = False,
    extra_group_keys: Collection[str] = (),
) -> MegatronOptimizer:
    """Build the optimizer of a model, as `opt_stack.get_optimizer`, which describes the arguments and errors.

    As in Megatron-Core, `use_distributed_optimizer=True` with a rule of matrices means layer-wise sharding: see
    `layer_wise`.
    """
    return get_optimizer(
        layer_wise(config, rules),
        model_chunks,
        config_overrides,
        use_gloo_process_groups,
        pg_collection,
        dump_param_to_param_group_map,
        mesh=mesh,
        broadcast_params=broadcast_params,
        rules=rules,
        hooks=hooks,
        allow_unmatched=allow_unmatched,
        extra_group_keys=extra_group_keys,
    )
