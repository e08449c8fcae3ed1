"""Checks of a wrapper's fields that need the optimizer's configuration or the whole model."""

from collections.abc import Iterator, Sequence

from torch import nn

from opt_config import ConfigError, DynamicScale, OptimizerConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.local_sums import matches
from opt_distributed.comm.collectives import Comm


def check_against(config: OptimizerConfig, index: int, chunk: DistributedDataParallel) -> None:
    """Raise ConfigError for a field of a wrapper that contradicts the optimizer's configuration."""
    if chunk.config.check_for_large_grads and isinstance(config.loss_scaling, DynamicScale):
        raise ConfigError(
            f"model chunk {index} was wrapped with check_for_large_grads=True, which compares gradients of different "
            "iterations, but the loss scale is dynamic (fp16=True without loss_scale); set loss_scale, or wrap with "
            "check_for_large_grads=False and use grad_norm_skip_threshold, which compares unscaled norms"
        )
    if chunk.config.align_param_gather and config.overlap_param_gather_with_optimizer_step:
        raise ConfigError(
            "overlap_param_gather_with_optimizer_step=True starts gathers in the step, but model chunk "
            f"{index} was wrapped with align_param_gather=True, which starts them from the pipeline's schedule; "
            "set one of the two to False"
        )


def check_patterns(chunks: Sequence[nn.Module], everyone: Comm) -> None:
    """Check that every pattern of `param_name_patterns_for_fp32_local_accumulation` matches a parameter of any chunk on
    any rank. Collective.

    Raises:
        ConfigError: on every rank, naming the pattern that matches nothing.
    """
    found: list[dict[str, bool]] = everyone.gather_objects(dict(_patterns(chunks)))
    for pattern in dict.fromkeys(pattern for of_rank in found for pattern in of_rank):
        if not any(of_rank.get(pattern) for of_rank in found):
            raise ConfigError(
                f"param_name_patterns_for_fp32_local_accumulation: {pattern!r} matches no parameter of any wrapped "
                'model chunk; pass shell patterns of full names, such as "*.router.weight", or "all"'
            )


def _patterns(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, bool]]:
    """Yield the patterns of this rank's chunks with whether they match; matching ones last."""
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    found = [
        (pattern, any(matches(id.name, (pattern,)) for id in chunk.metas))
        for chunk in wrapped
        for pattern in chunk.config.param_name_patterns_for_fp32_local_accumulation
    ]
    yield from sorted(found, key=lambda one: one[1])
