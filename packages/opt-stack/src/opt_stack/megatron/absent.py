"""Public names of Megatron-Core that do not exist here, and what to write instead."""

from typing import NoReturn

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
