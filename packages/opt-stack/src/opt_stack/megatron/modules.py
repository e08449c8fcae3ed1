"""Megatron-Core's module paths below `opt_stack.megatron`, and its names that do not exist here."""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_MODULES = {
    "distrib_optimizer": "DistributedOptimizer",
    "distributed_data_parallel": "DistributedDataParallel",
    "distributed_data_parallel_config": "DistributedDataParallelConfig",
    "emerging_optimizers": "",
    "finalize_model_grads": "finalize_model_grads",
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
"""The modules of Megatron-Core without a file here, and their names, all of which `opt_stack.megatron` has."""

_FSDP = "shard the model with torch's fully_shard, and pass it to get_megatron_optimizer"
_SCALER = "OptimizerConfig builds the loss scaler: loss_scale, initial_loss_scale, loss_scale_window, hysteresis"
_COEFFICIENTS = "OptimizerConfig(muon_coefficient_type=...) lists the allowed values if it is given another one"
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
    "EmergingOptimizerEntry": "register a rule of your own: opt_stack.Registry().with_rule(...)",
    "get_supported_coefficient_types": _COEFFICIENTS,
    "validate_coefficient_type": _COEFFICIENTS,
    "is_managed_by_layer_wise_optimizer": "print(optimizer.plan) says which rule updates what",
    "copy_optimizer_param_metadata": "main values are the optimizer's; optimizer.get_parameters() returns them",
    "ProxyDict": "one optimizer has one state",
    "Range": "layouts are planned by the wrapper",
}


def absent(name: str, module: str) -> Any:
    """Return a class of Megatron-FSDP if Megatron-Core is installed: its training script imports them in any case.

    Raises ImportError, which says what to write, for other names of Megatron-Core; AttributeError for any other.
    """
    if _ABSENT.get(name) == _FSDP and find_spec("megatron"):
        return getattr(import_module("megatron.core.distributed"), name)
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
        if not hasattr(package, name):  # a function may have the name of its module, as finalize_model_grads
            setattr(package, name, module)
