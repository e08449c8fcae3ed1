"""Megatron-Core's functions that build an optimizer, and its wrapper, with its positional orders."""

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any

from torch import Tensor, nn

from opt_config import (
    ConfigError,
    DistributedDataParallelConfig,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
)
from opt_distributed import finalize_model_grads as finalize
from opt_distributed.buffers import DistributedDataParallel as Wrapper
from opt_distributed.comm import Given, ProcessGroups
from opt_distributed.finalize import ROUTER_BIAS_UPDATE_RATE
from opt_paramgroups import get_standard_config_overrides
from opt_stack.factory import build_optimizer, get_optimizer, make_request
from opt_stack.megatron.kinds import LAYER_WISE
from opt_stack.megatron.script import ScriptOptimizer
from opt_stack.optimizer import MegatronOptimizer, Optimizer
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
        is_of_matrices = (rules or Registry().with_installed()).needs_matrices(name, OptimizerConfig(optimizer=name))
    except ConfigError:
        return config
    if not is_of_matrices or not (config.use_distributed_optimizer or name != config.optimizer):
        return config
    return replace(config, optimizer=name, use_distributed_optimizer=False, use_layer_wise_distributed_optimizer=True)


_NOT_A_MATRIX = ParamPredicate(
    name="nonlinear_or_embedding",  # as in Megatron-Core
    fn=lambda param: param.dim() != 2 or getattr(param, "is_embedding_or_output_parameter", False),
)


@wraps(get_optimizer, assigned=())
def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Optimizer:
    """Call `opt_stack.get_optimizer` with Megatron-Core's meaning of some settings.

    `use_distributed_optimizer=True` with a rule of matrices means layer-wise sharding: see `layer_wise`. Weight decay
    and matrix rules follow the shapes of parameters, the name `*.bias` and `is_embedding_or_output_parameter` only:
    neither stacks of vectors nor position embeddings are recognised. `optimizer="lion"` and `"laprop"` update matrices
    only, with Adam's betas, and Adam the rest.
    """
    given = signature(get_optimizer).bind(*args, **kwargs)
    given.apply_defaults()
    arguments = given.arguments
    config = layer_wise(arguments["config"], arguments["rules"])
    overrides = arguments.pop("config_overrides")
    # In Megatron-Core these update matrices only.
    if isinstance(config, OptimizerConfig) and config.optimizer in ("lion", "laprop"):
        of_others = get_standard_config_overrides(config, by_name=False) if overrides is None else overrides
        overrides = {**of_others, ParamKey(predicate=_NOT_A_MATRIX): {"optimizer": "adam"}}
        config = replace(config, lion_beta1=config.adam_beta1, lion_beta2=config.adam_beta2)
    arguments["config"] = config
    del arguments["use_gloo_process_groups"]
    group_map = arguments.pop("dump_param_to_param_group_map")
    request = make_request(**arguments, overrides=overrides, by_name=False)
    return build_optimizer(request, group_map, kind=ScriptOptimizer)


def get_megatron_muon_optimizer(
    config: OptimizerConfig,
    model_chunks: list[nn.Module],
    *args: Any,
    layer_wise_distributed_optimizer: bool = False,
    **kwargs: Any,
) -> MegatronOptimizer:
    """Call `get_megatron_optimizer` for a rule of matrices, such as "muon". Megatron-Core deprecated this name.

    Args:
        config, model_chunks, args, kwargs: as for `get_megatron_optimizer`.
        layer_wise_distributed_optimizer: sets `use_layer_wise_distributed_optimizer` of a copy of `config`.

    Raises:
        ConfigError: `config.optimizer` is not a rule of matrices; and as `get_megatron_optimizer`.
    """
    config = layer_wise(config, kwargs.get("rules"))
    rules = kwargs.get("rules") or Registry().with_installed()
    if not rules.needs_matrices(config.optimizer, config):
        raise ConfigError(
            f"optimizer={config.optimizer!r}: get_megatron_muon_optimizer builds rules of matrices, such as 'muon'; "
            "set optimizer='muon', or call get_megatron_optimizer"
        )
    if layer_wise_distributed_optimizer:
        config = replace(config, use_layer_wise_distributed_optimizer=True)
    return get_megatron_optimizer(config, model_chunks, *args, **kwargs)


class DistributedDataParallel(Wrapper):
    """`opt_stack.DistributedDataParallel` that also takes Megatron-Core's positional order.

    Both of these work::

        DistributedDataParallel(transformer_config, ddp_config, module)   # Megatron-Core's order
        DistributedDataParallel(ddp_config, module)                       # the order of opt_stack

    Args:
        config: Megatron-Core's transformer configuration: any object. Its `calculate_per_token_loss` is read here;
            its `qk_layernorm` and `moe_router_bias_update_rate` in `finalize_model_grads`.
        ddp_config: the configuration of the wrapper, which is not modified.
        module: the model chunk.
        disable_bucketing: reduce all gradients of the chunk in one bucket.
        pg_collection: process groups by role; `groups` of `opt_stack.DistributedDataParallel`.
        full_param_layout: None, or what `compute_full_param_layout` of the optimizer's kind returned. Layouts are
            planned here, with whole matrices for `LayerWiseDistributedOptimizer`.
        chunk: the number of the chunk in a virtual pipeline. None: `module.vp_stage`, or 0.
        options: keyword arguments of `opt_stack.DistributedDataParallel`.

    Raises:
        ConfigError: neither order fits, or `full_param_layout` is another one; see also
            `opt_stack.DistributedDataParallel`.
    """

    by_name = False

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig | nn.Module | None = None,
        module: nn.Module | None = None,
        disable_bucketing: bool = False,
        pg_collection: Given = None,
        full_param_layout: str | None = None,
        *,
        chunk: int | None = None,
        **options: Any,
    ):
        transformer_config = None
        if isinstance(config, DistributedDataParallelConfig):
            if ddp_config is not None and module is not None:
                raise _wrong_order(config, ddp_config, module)
            ddp_config, module = config, ddp_config if module is None else module  # type: ignore[assignment]
        else:
            transformer_config = config
        if not isinstance(ddp_config, DistributedDataParallelConfig) or not isinstance(module, nn.Module):
            raise _wrong_order(config, ddp_config, module)
        if full_param_layout not in (None, LAYER_WISE):
            raise ConfigError(
                "full_param_layout is planned by the wrapper; leave it out, or pass the result of "
                "opt_stack.megatron.LayerWiseDistributedOptimizer.compute_full_param_layout"
            )
        if full_param_layout == LAYER_WISE:
            of_matrices = OptimizerConfig(optimizer="muon", use_layer_wise_distributed_optimizer=True)
            options.setdefault("optimizer_config", of_matrices)
        if disable_bucketing:
            ddp_config = replace(ddp_config, bucket_size=None, num_buckets=1)
        if pg_collection is not None:
            options.setdefault("groups", pg_collection)
        per_token = bool(getattr(transformer_config, "calculate_per_token_loss", False))
        options.setdefault("calculate_per_token_loss", per_token)
        if "optimizer_config" in options:
            options["optimizer_config"] = layer_wise(options["optimizer_config"])
        number = getattr(module, "vp_stage", None) or 0 if chunk is None else chunk
        super().__init__(ddp_config, module, chunk=number, **options)
        if transformer_config is not None:
            self.qk_layernorm = bool(getattr(transformer_config, "qk_layernorm", False))
            self.config = transformer_config  # Megatron-Core's schedules read it, and call functions that it holds
        elif hasattr(module, "config"):
            self.config = module.config
        # As in Megatron-Core, a list in place of the method of this name.
        self.buffers = [one for one in self.synced_buffers if not one.plan.is_expert]  # type: ignore[assignment]
        self.expert_parallel_buffers = [one for one in self.synced_buffers if one.plan.is_expert]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's sharded state."""
        return self.module.sharded_state_dict(*args, **kwargs)  # type: ignore[operator]

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state as the training script saves it in its format `torch`."""
        return self.module.state_dict_for_save_checkpoint(*args, **kwargs)  # type: ignore[operator]

    def set_is_first_microbatch(self) -> None:
        """Tell the module's layers that the next microbatch is the first of an iteration."""
        self.module.set_is_first_microbatch()  # type: ignore[operator]

    def reset_param_sync_dispatch_state(self) -> None:
        """Do nothing: gathers are counted by the step."""

    def free_overlap_buffers(self) -> None:
        """Do nothing: gathers have no buffers of their own."""


def _wrong_order(*given: object) -> ConfigError:
    found = ", ".join(type(one).__name__ for one in given)
    return ConfigError(
        f"DistributedDataParallel({found}): write DistributedDataParallel(config, ddp_config, module) or "
        "DistributedDataParallel(ddp_config, module), with ddp_config of opt_stack.DistributedDataParallelConfig"
    )


def finalize_model_grads(
    model: Sequence[Wrapper],
    num_tokens: Tensor | int | None = None,
    pg_collection: ProcessGroups | None = None,
    force_all_reduce: bool = False,
    **options: Any,
) -> None:
    """Complete the gradients of wrapped chunks, with Megatron-Core's positional parameters. Collective.

    See `opt_stack.finalize_model_grads`, whose keyword-only arguments are `options`. The default of
    `router_bias_update_rate` is read from the transformer configuration with which the first chunk was wrapped.

    With `force_all_reduce`, every rank has whole gradients in `main_grad` afterwards, also with sharded state.

    Raises:
        ValueError: `force_all_reduce` is set, but a chunk with sharded state was wrapped with `overlap_grad_reduce`.
    """
    for chunk in model if force_all_reduce else ():
        chunk.finish_grad_sync(force_all_reduce=True)
    of_model = getattr(model[0], "config", None) if model else None
    rate = getattr(of_model, "moe_router_bias_update_rate", ROUTER_BIAS_UPDATE_RATE)
    options.setdefault("router_bias_update_rate", rate)
    finalize(model, num_tokens, pg_collection, **options)
