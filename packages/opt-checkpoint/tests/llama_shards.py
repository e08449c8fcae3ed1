"""A small Llama in Hugging Face's names and its shards in Megatron-Core's, for tests of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_checkpoint import (
    NameRule,
    Segment,
    ShardedTensor,
    ShardedTensorFactory,
    megatron_llama_names,
)

reference = pytest.importorskip("safetensors.torch")
LAYERS, HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCAB, PADDED = 4, 8, 4, 2, 16, 24, 30, 32
NAMES = megatron_llama_names(heads=HEADS, query_groups=GROUPS, vocab=VOCAB)


def llama() -> dict[str, Tensor]:
    """The tensors of a small Llama under the names of Hugging Face, each with values of its own."""
    generator = torch.Generator().manual_seed(0)
    layer = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (GROUPS * HEAD, HIDDEN),
        "self_attn.v_proj": (GROUPS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {f"model.layers.{i}.{n}.weight": s for i in range(LAYERS) for n, s in layer.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes["model.norm.weight"] = (HIDDEN,)
    return {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}


def megatron(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values as Megatron-Core stacks, fuses and pads them."""

    def stacked(name: str) -> Tensor:
        return torch.stack([theirs[f"model.layers.{i}.{name}.weight"] for i in range(LAYERS)])

    def padded(name: str) -> Tensor:
        return torch.cat([theirs[name], torch.zeros(PADDED - VOCAB, HIDDEN, dtype=torch.bfloat16)])

    parts = [stacked(f"self_attn.{p}_proj").view(LAYERS, GROUPS, -1, HIDDEN) for p in "qkv"]
    block = "decoder.layers"
    return {
        "embedding.word_embeddings.weight": padded("model.embed_tokens.weight"),
        "output_layer.weight": padded("lm_head.weight"),
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        f"{block}.self_attention.linear_qkv.layer_norm_weight": stacked("input_layernorm"),
        f"{block}.self_attention.linear_qkv.weight": torch.cat(parts, dim=2).reshape(LAYERS, -1, HIDDEN),
        f"{block}.self_attention.linear_proj.weight": stacked("self_attn.o_proj"),
        f"{block}.mlp.linear_fc1.layer_norm_weight": stacked("post_attention_layernorm"),
        f"{block}.mlp.linear_fc1.weight": torch.cat([stacked("mlp.gate_proj"), stacked("mlp.up_proj")], dim=1),
        f"{block}.mlp.linear_fc2.weight": stacked("mlp.down_proj"),
    }


CUT = {"word_embeddings": 0, "output_layer": 0, "linear_qkv.weight": 0, "linear_proj": 1, "fc2": 1}


def shards(whole: Mapping[str, Tensor], pp: int, tp: int, rank: int, *, filled: bool) -> dict[str, Any]:
    """What rank `rank` of pp * tp holds: some layers, some rows or columns, and both halves of its part of fc1."""
    stage, number = divmod(rank, tp)
    state: dict[str, Any] = {}
    for key, values in whole.items():
        depth = 1 if ".layers." in key else 0
        layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp) if depth else [None]
        if not depth and stage != (0 if "embedding" in key else pp - 1):
            continue
        for layer in layers:
            own = values if layer is None else values[layer]
            prefix = () if layer is None else (layer,)
            state[f"{key}/{layer}"] = _shard(key, own, tuple(values.shape), prefix, tp, number, filled)
    return state


def _shard(
    key: str, own: Tensor, whole: tuple[int, ...], prefix: tuple[int, ...], tp: int, number: int, filled: bool
) -> ShardedTensor | ShardedTensorFactory:
    if "fc1.weight" in key:
        rows = INNER // tp
        data = torch.cat([half[number * rows : (number + 1) * rows] for half in own.chunk(2)])
        segments = tuple(
            Segment(
                row_start=half * rows,
                row_stop=(half + 1) * rows,
                global_shape=whole,
                global_offset=(*prefix, half * INNER + number * rows, 0),
            )
            for half in (0, 1)
        )
        data = data if filled else torch.full_like(data, 7)
        return ShardedTensorFactory(key, data, segments=segments, local_shape=tuple(data.shape))
    axis = next((a for part, a in CUT.items() if part in key), None)
    offset = [0] * own.dim()
    if axis is not None:
        size = own.shape[axis] // tp
        own, offset[axis] = own.narrow(axis, number * size, size), number * size
    data = own.clone() if filled else torch.full_like(own, 7)
    return ShardedTensor(
        key, data, data.dtype, tuple(data.shape), whole, (*prefix, *offset), None,
        replica_id=0 if axis is not None else number, prepend_axis_num=len(prefix), allow_shape_mismatch=True,
    )  # fmt: skip


TIED = [NameRule(ours="embed", theirs="wte"), NameRule(ours="head", theirs="wte", tied=True)]
