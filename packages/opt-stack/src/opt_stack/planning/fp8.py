"""Checks for parameters in fp8: configuration, rules and tensors must agree."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Comm, agree
from opt_kernels.hooks import bare
from opt_kernels.quantized import quantized
from opt_kernels.rules.base import Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_paramgroups import ParamId, ParamMeta, parameters_by_id


def check_fp8(
    config: OptimizerConfig,
    metas: Mapping[ParamId, ParamMeta],
    rule_of: Mapping[ParamId, str],
    rules: Mapping[str, Rule],
) -> None:
    """Raise ConfigError for parameters in fp8 without `fp8_recipe`, or with a rule that has evaluation weights."""
    stored = [id for id in rule_of if metas[id].codes is not None]
    if stored and config.fp8_recipe is None:
        raise ConfigError(
            f"parameter {str(stored[0])!r} (and {len(stored) - 1} more) is stored in fp8, but fp8_recipe=None; set it "
            "to the recipe of the parameters: delayed, tensorwise, blockwise or mxfp8"
        )
    for id in stored:
        rule = bare(rules[rule_of[id]])
        if isinstance(rule, ElementwiseRule) and rule.formula.evaluation is not None:
            raise ConfigError(
                f"optimizer={rule.name!r} evaluates other weights than it trains, but parameter {str(id)!r} is stored "
                "in fp8, which cannot restore the trained weights bit for bit; use another rule for it"
            )


def check_recipes(config: OptimizerConfig, chunks: Sequence[nn.Module], everyone: Comm) -> None:
    """Check that parameters are stored in fp8 as the configurations say. Collective.

    Raises:
        ConfigError: on every rank, if a parameter has another recipe than `fp8_recipe`, or no parameter on any rank is
            stored in fp8 although the configuration asks for it.
    """
    stored = ((id, quantized(param)) for id, param in parameters_by_id(chunks).items())
    found = {id: param.recipe.name for id, param in stored if param is not None}
    other = next((id for id, recipe in found.items() if recipe != config.fp8_recipe), None)
    error = None
    if other is not None:
        error = ConfigError(
            f"fp8_recipe={config.fp8_recipe!r}, but parameter {str(other)!r} is stored with recipe {found[other]!r}; "
            "set fp8_recipe to that of the parameters"
        )
    agree(everyone, error)
    asks = _asking(config, chunks)
    if asks and not any(everyone.gather_objects(bool(found))):
        raise ConfigError(
            f"{asks}, but no parameter is stored in fp8 on any rank; quantise the model before it is wrapped "
            "(opt_kernels.quantized.quantize_linears_, or TransformerEngine's quantized_model_init), or leave the "
            "option out; fully_shard and other DTensors store parameters dequantised"
        )


def check_reused(chunks: Sequence[nn.Module], trained: Collection[ParamId]) -> None:
    """Raise ConfigError if a buffer that is reused to gather parameters holds gradients of another optimizer."""
    for index, chunk in enumerate(chunks):
        for buffer in chunk.synced_buffers if isinstance(chunk, DistributedDataParallel) else ():
            others = [id for id in buffer.params if id not in trained]
            if buffer.through_grads is not None and others and len(others) < len(buffer.params):
                raise ConfigError(
                    f"model chunk {index} was wrapped with reuse_grad_buf_for_mxfp8_param_ag=True, which overwrites "
                    f"gradients when an optimizer has used them, but {str(others[0])!r} is not trained by this one; "
                    "train all mxfp8 parameters with one optimizer, or set it to False"
                )


def _asking(config: OptimizerConfig, chunks: Sequence[nn.Module]) -> str:
    """Return the option that asks for parameters in fp8; empty if none does. Equal on all ranks."""
    if config.fp8_recipe is not None:
        return f"fp8_recipe={config.fp8_recipe!r}"
    gathers = any(isinstance(chunk, DistributedDataParallel) and chunk.config.fp8_param_gather for chunk in chunks)
    return "fp8_param_gather=True" if gathers else ""
