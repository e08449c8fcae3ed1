"""Configurations that accept what Megatron-LM's command line always passes, with or without effect."""

import warnings

import opt_config
from opt_distributed.comm import world


class _FromCommandLine:
    """Resets fields that have no effect and that a command line cannot leave out, with one warning on the first rank.

    Elsewhere they are errors.
    """

    def _without_effect(self) -> list[str]:
        """Return the fields of the object that have no effect."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        unset: list[str] = []
        for name in opt_config.changed_fields(self, self._without_effect()):  # type: ignore[arg-type]
            unset.append(f"{name}={getattr(self, name)!r}")
            setattr(self, name, getattr(type(self), name))
        if unset and world().rank == 0:
            # Not of the logger: the script builds equal configurations, and Python shows equal warnings once.
            warnings.warn(f"without effect in this configuration: {', '.join(unset)}", stacklevel=3)
        super().__post_init__()  # type: ignore[misc]


class OptimizerConfig(_FromCommandLine, opt_config.OptimizerConfig):
    """`opt_config.OptimizerConfig`; `optimizer_offload_fraction` without `optimizer_cpu_offload` is only warned of.

    So is `fp8_recipe` where it cannot act; `get_megatron_optimizer` warns of it if no parameter is stored in fp8.
    """

    def _without_effect(self) -> list[str]:
        names = [] if self.optimizer_cpu_offload else ["optimizer_offload_fraction"]
        return [*names, "fp8_recipe"] if self.optimizer_cpu_offload or self.optimizer_cuda_graph else names


class AdamOptimizerConfig(OptimizerConfig, opt_config.AdamOptimizerConfig):
    """An `OptimizerConfig` whose rule is Adam by default."""


class SGDOptimizerConfig(OptimizerConfig, opt_config.SGDOptimizerConfig):
    """An `OptimizerConfig` whose rule is SGD by default."""


class DistributedDataParallelConfig(_FromCommandLine, opt_config.DistributedDataParallelConfig):
    """`opt_config.DistributedDataParallelConfig`; fields that only Megatron-FSDP reads are warned of without it."""

    def _without_effect(self) -> list[str]:
        is_fsdp = self.use_megatron_fsdp or self.use_custom_fsdp
        return [] if is_fsdp else ["data_parallel_sharding_strategy"]
