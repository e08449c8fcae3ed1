"""Megatron-Core's kinds of optimizer, its positional orders, its module paths, and its names that do not exist here."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from inspect import signature
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from opt_config import ConfigError, DistributedDataParallelConfig, FlatShards, OptimizerConfig, Replicated, WholeParams
from opt_distributed import finalize_model_grads as finalize
from opt_distributed.buffers import DistributedDataParallel as Wrapper
from opt_distributed.comm import Given, ProcessGroups, TorchComm, world
from opt_distributed.finalize import ROUTER_BIAS_UPDATE_RATE
from opt_kernels.rules import Needs
from opt_paramgroups import is_dtensor
from opt_stack.factory import build_optimizer, get_optimizer
from opt_stack.megatron.script import ScriptOptimizer
from opt_stack.optimizer import MegatronOptimizer, Optimizer
from opt_stack.rules.registry import Registry

LAYER_WISE = "layer-wise"  # a `full_param_layout`


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


@wraps(get_optimizer, assigned=())
def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Optimizer:
    """`opt_stack.get_optimizer` with Megatron-Core's meaning of two settings.

    `use_distributed_optimizer=True` with a rule of matrices means layer-wise sharding: see `layer_wise`. Weight decay
    and matrix rules follow the shapes of parameters, the name `*.bias` and `is_embedding_or_output_parameter` only:
    neither stacks of vectors nor position embeddings are recognised.
    """
    given = signature(get_optimizer).bind(*args, **kwargs)
    given.apply_defaults()
    arguments = given.arguments
    arguments["config"] = layer_wise(arguments["config"], arguments["rules"])
    del arguments["use_gloo_process_groups"]
    return build_optimizer(**arguments, by_name=False, kind=ScriptOptimizer)


class _Kind(type):
    """The optimizers whose configuration `matches`. `isinstance` finds them; they are not subclasses."""

    matches: Callable[[OptimizerConfig], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, MegatronOptimizer) and cls.matches(instance.config)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{cls.__name__} is not built directly; call opt_stack.megatron.get_megatron_optimizer(config, "
            "model_chunks), which returns one optimizer for all parameters. For groups of your own, pass all of them "
            "to opt_stack.get_optimizer_based_on_param_groups(config, model_chunks, param_groups)"
        )


def _is_mixed(config: OptimizerConfig) -> bool:
    return config.bf16 or config.fp16


class DistributedOptimizer(metaclass=_Kind):
    """Optimizers with flat shards of the state (`use_distributed_optimizer=True`)."""

    matches = staticmethod(lambda config: isinstance(config.sharding, FlatShards))

    @staticmethod
    def compute_full_param_layout(*args: Any, **kwargs: Any) -> None:
        """Return None: the wrapper plans the layout."""


class LayerWiseDistributedOptimizer(metaclass=_Kind):
    """Optimizers that assign whole matrices to ranks (`use_layer_wise_distributed_optimizer=True`)."""

    matches = staticmethod(lambda config: isinstance(config.sharding, WholeParams))

    @staticmethod
    def compute_full_param_layout(*args: Any, **kwargs: Any) -> str:
        """Return what tells `DistributedDataParallel(full_param_layout=...)` to plan whole matrices."""
        return LAYER_WISE


class MixedPrecisionOptimizer(metaclass=_Kind):
    """Optimizers of bf16 or fp16 parameters, and those with flat shards."""

    matches = staticmethod(lambda config: _is_mixed(config) or isinstance(config.sharding, FlatShards))


class Float16OptimizerWithFloat16Params(metaclass=_Kind):
    """Optimizers of bf16 or fp16 parameters that keep the whole state on every rank."""

    matches = staticmethod(lambda config: _is_mixed(config) and isinstance(config.sharding, Replicated))


class FP32Optimizer(metaclass=_Kind):
    """Optimizers of fp32 parameters that keep the whole state on every rank."""

    matches = staticmethod(lambda config: not _is_mixed(config) and isinstance(config.sharding, Replicated))


class ChainedOptimizer(metaclass=_Kind):
    """Never matches: one optimizer updates dense parameters and experts, with one gradient norm and one verdict."""

    matches = staticmethod(lambda config: False)


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
    if rules.rule(config.optimizer, config).needs is not Needs.MATRICES:
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
        f"DistributedDataParallel({found}): write DistributedDataParallel(transformer_config, ddp_config, module) or "
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


# --- `clip_grads`, on `param.grad`: `Optimizer.step` uses none of it, because it clips while it reads gradients -------


@torch.no_grad()
def get_grad_norm_fp32(
    grads_for_norm: Iterable[Tensor] | Tensor,
    norm_type: float = 2,
    grad_stats_parallel_group: ProcessGroup | None = None,
) -> float:
    """Return the norm of gradients over a group; None: over the world. Collective, also for ranks without gradients.

    It is NaN or infinite if an element is. Raises ConfigError for DTensors.
    """
    grads = _plain(grads_for_norm)
    comm = world() if grad_stats_parallel_group is None else TorchComm(grad_stats_parallel_group)
    if math.isinf(norm_type):
        norms = comm.gather_objects([float(grad.abs().amax()) for grad in grads if grad.numel()])
        largest = [norm for of_rank in norms for norm in of_rank]
        return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)
    powers = [float(torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)) ** norm_type for grad in grads]
    total: float = sum(comm.gather_objects(sum(powers))) ** (1.0 / norm_type)
    return total


@torch.no_grad()
def clip_grad_by_total_norm_fp32(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, total_norm: float | Tensor, use_decoupled_grad: bool = False
) -> None:
    """Multiply gradients in place by `max_norm / (total_norm + 1e-6)` if that is below 1; all of them on every rank.

    Raises:
        ConfigError: `use_decoupled_grad` is set, or a gradient is a DTensor.
    """
    factor = max_norm / (float(total_norm) + 1e-6)
    for grad in _grads(parameters, use_decoupled_grad):
        if factor < 1.0:
            grad.mul_(factor)


def count_zeros_fp32(
    parameters: Iterable[Tensor] | Tensor,
    grad_stats_parallel_group: ProcessGroup | None = None,
    use_decoupled_grad: bool = False,
    tp_group: ProcessGroup | None = None,
) -> int:
    """Return the number of zeros in gradients over a group; None: over the world. Collective.

    Parameters marked `shared` are not counted, and those that tensor parallelism replicates only on the first rank of
    `tp_group`. Raises ConfigError as `clip_grad_by_total_norm_fp32`.
    """
    is_first = tp_group is None or tp_group.rank() == 0
    counted = [
        param
        for param in ([parameters] if isinstance(parameters, Tensor) else parameters)
        if not getattr(param, "shared", False) and (is_first or getattr(param, "tensor_model_parallel", False))
    ]
    zeros = sum(grad.numel() - int(grad.count_nonzero()) for grad in _grads(counted, use_decoupled_grad))
    comm = world() if grad_stats_parallel_group is None else TorchComm(grad_stats_parallel_group)
    return sum(comm.gather_objects(zeros))


def _grads(parameters: Iterable[Tensor] | Tensor, use_decoupled_grad: bool) -> Sequence[Tensor]:
    if use_decoupled_grad:
        raise ConfigError("use_decoupled_grad=True: gradients here are in param.grad only; leave it at False")
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    return _plain(param.grad for param in given if param.grad is not None)


def _plain(tensors: Iterable[Tensor] | Tensor) -> list[Tensor]:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if any(is_dtensor(tensor) for tensor in found):
        raise ConfigError(
            "a gradient is a DTensor, whose mesh this function does not sum over; use optimizer.get_grad_norm(), "
            "clip_grad_norm(max_norm) and count_zeros() between prepare_grads() and step_with_ready_grads()"
        )
    return found


# --- modules, and names that do not exist here ------------------------------------------------------------------------


_MODULES = {
    "clip_grads": "clip_grad_by_total_norm_fp32 count_zeros_fp32 get_grad_norm_fp32",
    "distrib_optimizer": "DistributedOptimizer",
    "distributed_data_parallel": "DistributedDataParallel",
    "distributed_data_parallel_config": "DistributedDataParallelConfig",
    "emerging_optimizers": "",
    "grad_scaler": "",
    "layer_wise_optimizer": "LayerWiseDistributedOptimizer tag_params_for_buffer_routing",
    "muon": "get_megatron_muon_optimizer",
    "optimizer": "ChainedOptimizer FP32Optimizer Float16OptimizerWithFloat16Params MegatronOptimizer "
    "MixedPrecisionOptimizer param_group_identifier_keys",
    "optimizer_config": "AdamOptimizerConfig OptimizerConfig ParamKey ParamPredicate ParamWithNamePredicate "
    "SGDOptimizerConfig",
    "optimizer_cuda_graph": "OptimizerCudaGraphWrapper",
    "optimizer_param_scheduler": "OptimizerParamScheduler ParamGroupOverride combine_param_group_overrides "
    "get_canonical_lr_for_logging param_group_override_to_tuple",
    "qk_clip": "clip_qk",
}
"""The modules of Megatron-Core and their names here, all of which `opt_stack.megatron` has."""

_FSDP = "shard the model with torch's fully_shard, and pass it to get_megatron_optimizer"
_SCALER = "OptimizerConfig builds the loss scaler: loss_scale, initial_loss_scale, loss_scale_window, hysteresis"
_ABSENT = {
    "FullyShardedDataParallel": _FSDP,
    "TorchFullyShardedDataParallel": _FSDP,
    "TorchFullyShardedDataParallelConfig": _FSDP,
    "ConstantGradScaler": _SCALER,
    "DynamicGradScaler": _SCALER,
    "MegatronGradScaler": _SCALER,
    "HybridDeviceOptimizer": "set optimizer_cpu_offload=True and optimizer_offload_fraction of OptimizerConfig",
    "TensorParallelMuon": 'set optimizer="muon" and muon_tp_mode of OptimizerConfig',
    "TensorParallelAdaptiveMuon": 'set optimizer="adaptive_muon" and muon_tp_mode of OptimizerConfig',
    "check_config_overrides_consistency": "get_megatron_optimizer checks overrides",
}


def absent(name: str, module: str) -> NoReturn:
    """Raise ImportError, which says what to write, for a name of Megatron-Core; AttributeError for any other."""
    if name in _ABSENT:
        raise ImportError(f"opt_stack.megatron has no {name}; {_ABSENT[name]}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def add_modules_(package: ModuleType) -> None:
    """Make every module of Megatron-Core importable below `package`, with the names of `package`."""
    vars(package)["__getattr__"] = partial(absent, module=package.__name__)
    for name, public in _MODULES.items():
        module = module_from_spec(ModuleSpec(f"{package.__name__}.{name}", None))
        module.__doc__ = f"Names of Megatron-Core's module {name}."
        names = {public_name: getattr(package, public_name) for public_name in public.split()}
        vars(module).update(names, __all__=list(names), __getattr__=partial(absent, module=module.__name__))
        sys.modules[module.__name__] = module
        setattr(package, name, module)
