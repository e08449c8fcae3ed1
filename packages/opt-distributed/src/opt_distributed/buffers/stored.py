"""The stored form of a parameter: its values, or its codes if it is in fp8."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from opt_config import ConfigError
from opt_kernels.quantized import is_quantized, quantized
from opt_kernels.quantized.recipes import FP8
from opt_paramgroups import ParamId, ParamMeta, describe
from opt_paramgroups.names import parameters_by_id

__all__ = ["FP8", "StorageError", "address", "describe_stored", "is_quantized", "stored_bytes", "stored_dtype"]


class StorageError(ValueError):
    """Parameters cannot be stored in one buffer, or have left the memory that updates write to."""


def stored_dtype(param: Tensor) -> torch.dtype:
    """The stored dtype: float8_e4m3fn for an fp8 parameter, whose `dtype` is another one."""
    return FP8 if is_quantized(param) else param.dtype


def address(param: Tensor) -> int:
    """The address of its values or codes."""
    found = quantized(param)
    return param.data_ptr() if found is None else found.codes.data_ptr()


def stored_bytes(param: Tensor) -> Tensor | None:
    """(n,) uint8: a copy of everything that is stored of an fp8 parameter; None for others."""
    found = quantized(param)
    if found is None:
        return None
    return torch.cat(
        [part.reshape(-1).view(torch.uint8) for part in (found.codes, found.scales, *found.extra().values())]
    )


def describe_stored(model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0) -> dict[ParamId, ParamMeta]:
    """`opt_paramgroups.describe`, with the dtype of the codes for fp8 parameters.

    Raises:
        ConfigError: a DTensor has fp8 parts.
    """
    params = parameters_by_id(model_chunks, model_chunk_offset=model_chunk_offset)
    metas = describe(model_chunks, model_chunk_offset=model_chunk_offset)
    for id, meta in metas.items():
        if meta.is_dtensor and is_quantized(params[id].to_local()):  # type: ignore[attr-defined]
            raise ConfigError(
                f"parameter {str(id)!r} is a DTensor whose parts are in fp8; fully_shard and tensor-parallel plans "
                "work with bf16, fp16 and fp32 parameters: use use_distributed_optimizer=True for fp8 ones"
            )
    return {id: replace(meta, codes=FP8) if is_quantized(params[id]) else meta for id, meta in metas.items()}
