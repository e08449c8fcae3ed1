"""Megatron-Core's module paths below `opt_stack.megatron`, and its names that do not exist here."""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import NoReturn

_MODULES = {
    "distrib_optimizer": "DistributedOptimizer",
    "distributed_data_parallel": "DistributedDataParallel",
    "distributed_data_parallel_config": "DistributedDataParallelConfig",
    "emerging_optimizers": "",
    "grad_scaler": "",
    "layer_wise_optimizer": "LayerWiseDistributedOptimizer",
    "muon": "get_megatron_muon_optimizer",
    "optimizer": "ChainedOptimizer FP32Optimizer Float16OptimizerWithFloat16Params MegatronOptimizer "
    "MixedPrecisionOptimizer",
    "optimizer_config": "AdamOptimizerConfig OptimizerConfig ParamKey ParamPredicate ParamWithNamePredicate "
    "SGDOptimizerConfig",
    "optimizer_cuda_graph": "",
    "optimizer_param_scheduler": "OptimizerParamScheduler ParamGroupOverride combine_param_group_overrides "
    "get_canonical_lr_for_logging param_group_override_to_tuple",
    "qk_clip": "",
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
    "OptimizerCudaGraphWrapper": "set optimizer_cuda_graph=True of OptimizerConfig",
    "TensorParallelMuon": 'set optimizer="muon" and muon_tp_mode of OptimizerConfig',
    "TensorParallelAdaptiveMuon": 'set optimizer="adaptive_muon" and muon_tp_mode of OptimizerConfig',
    "clip_qk": "pass hooks=[opt_stack.QKClip(...)] to get_megatron_optimizer",
    "check_config_overrides_consistency": "get_megatron_optimizer checks overrides",
    "param_group_identifier_keys": "load_state_dict matches groups by the names of their parameters",
}


def absent(name: str, module: str) -> NoReturn:
    """Raise ImportError, which says what to write, for a name of Megatron-Core; AttributeError for any other."""
    if name in _ABSENT:
        raise ImportError(f"opt_stack.megatron has no {name}; {_ABSENT[name]}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def add_modules_(package: ModuleType) -> None:
    """Make every module of Megatron-Core importable below `package`, with the names of `package`."""
    for name, public in _MODULES.items():
        module = module_from_spec(ModuleSpec(f"{package.__name__}.{name}", None))
        module.__doc__ = f"Names of Megatron-Core's module {name}."
        names = {public_name: getattr(package, public_name) for public_name in public.split()}
        vars(module).update(names, __all__=list(names), __getattr__=partial(absent, module=module.__name__))
        sys.modules[module.__name__] = module
        setattr(package, name, module)
