"""Megatron-Core's positional order of `DistributedDataParallel` and `finalize_model_grads`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from opt_config import ConfigError, DistributedDataParallelConfig
from opt_distributed import finalize_model_grads as finalize
from opt_distributed.buffers import DistributedDataParallel as Wrapper
from opt_distributed.comm import Given, ProcessGroups
from opt_distributed.finalize import ROUTER_BIAS_UPDATE_RATE
from opt_stack.megatron.kinds import layer_wise


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
        full_param_layout: must be None: the layout is planned here.
        chunk: the number of the chunk in a virtual pipeline. None: `module.vp_stage`, or 0.
        options: keyword arguments of `opt_stack.DistributedDataParallel`.

    Raises:
        ConfigError: neither order fits, or `full_param_layout` is given; see also `opt_stack.DistributedDataParallel`.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig | nn.Module | None = None,
        module: nn.Module | None = None,
        disable_bucketing: bool = False,
        pg_collection: Given = None,
        full_param_layout: None = None,
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
        if full_param_layout is not None:
            raise ConfigError("full_param_layout is planned by the wrapper and must be None; leave it out")
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
        self.transformer_config = transformer_config
        if transformer_config is not None:
            self.qk_layernorm = bool(getattr(transformer_config, "qk_layernorm", False))

    @property
    def ddp_config(self) -> DistributedDataParallelConfig:
        """The configuration of the wrapper, under Megatron-Core's name."""
        return self.config


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

    See `opt_stack.finalize_model_grads`, whose keyword-only arguments are `options`. Their defaults are read from the
    transformer configuration with which the first chunk was wrapped.

    With `force_all_reduce`, every rank has whole gradients in `main_grad` afterwards, also with sharded state.

    Raises:
        ValueError: `force_all_reduce` is set, but a chunk with sharded state was wrapped with `overlap_grad_reduce`.
    """
    for chunk in model if force_all_reduce else ():
        chunk.finish_grad_sync(force_all_reduce=True)
    of_model = getattr(model[0], "transformer_config", None) if model else None
    options.setdefault("qk_layernorm", any(chunk.qk_layernorm for chunk in model))
    rate = getattr(of_model, "moe_router_bias_update_rate", ROUTER_BIAS_UPDATE_RATE)
    options.setdefault("router_bias_update_rate", rate)
    finalize(model, num_tokens, pg_collection, **options)
