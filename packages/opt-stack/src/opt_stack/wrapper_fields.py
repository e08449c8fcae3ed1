"""Fields of wrapped chunks that only the optimizer's configuration, or the whole model, can judge."""

from collections.abc import Iterator, Sequence

from torch import nn

from opt_config import ConfigError, DynamicScale, OptimizerConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.local_sums import matches
from opt_distributed.comm.collectives import Comm


def check_against(config: OptimizerConfig, index: int, chunk: DistributedDataParallel) -> None:
    """Raises ConfigError for a field of a wrapper that contradicts the optimizer's configuration."""
    if chunk.config.check_for_large_grads and isinstance(config.loss_scaling, DynamicScale):
        raise ConfigError(
            f"model chunk {index} was wrapped with check_for_large_grads=True, which compares gradients of different "
            "iterations, but their loss scale is dynamic (fp16=True without loss_scale); give a loss_scale, or wrap "
            "with check_for_large_grads=False and rely on grad_norm_skip_threshold, which sees unscaled norms"
        )
    if chunk.config.align_param_gather and config.overlap_param_gather_with_optimizer_step:
        raise ConfigError(
            "overlap_param_gather_with_optimizer_step=True starts gathers in the step, but model chunk "
            f"{index} was wrapped with align_param_gather=True, which leaves their start to the pipeline's schedule; "
            "choose one"
        )


def check_patterns(chunks: Sequence[nn.Module], everyone: Comm) -> None:
    """Collective: refuses, on every rank, a pattern of `param_name_patterns_for_fp32_local_accumulation` that matches
    no parameter of any chunk on any rank.

    Raises:
        ConfigError: it names the pattern.
    """
    found: list[dict[str, bool]] = everyone.gather_objects(dict(_patterns(chunks)))
    for pattern in dict.fromkeys(pattern for of_rank in found for pattern in of_rank):
        if not any(of_rank.get(pattern) for of_rank in found):
            raise ConfigError(
                f"param_name_patterns_for_fp32_local_accumulation: {pattern!r} matches no parameter of any wrapped "
                'model chunk; give shell patterns of full names, such as "*.router.weight", or "all"'
            )


def _patterns(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, bool]]:
    """The patterns of this rank's chunks, and whether they match; those that do come last."""
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    found = [
        (pattern, any(matches(id.name, (pattern,)) for id in chunk.metas))
        for chunk in wrapped
        for pattern in chunk.config.param_name_patterns_for_fp32_local_accumulation
    ]
    yield from sorted(found, key=lambda one: one[1])
