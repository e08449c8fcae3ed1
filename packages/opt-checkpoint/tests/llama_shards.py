"""A small Llama in Hugging Face's names and its shards in Megatron-Core's, for tests of safetensors."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_checkpoint import NameRule, Segment, ShardedTensor, ShardedTensorFactory, megatron_llama_names

reference = pytest.importorskip("safetensors.torch")
LAYERS = 4
HEADS = 8
GROUPS = 4
HEAD = 2
HIDDEN = 16
INNER = 24
VOCAB = 30
PADDED = 32
NAMES = megatron_llama_names(heads=HEADS, query_groups=GROUPS, vocab=VOCAB)
TIED = [NameRule(ours="embed", theirs="wte"), NameRule(ours="head", theirs="wte", tied=True)]
SHAPES = {
    **{f"self_attn.{p}_proj": (heads * HEAD, HIDDEN) for p, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))},
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def llama() -> dict[str, Tensor]:
    """The tensors of a small Llama under the names of Hugging Face, each with values of its own."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.{i}.{n}.weight": s for i in range(LAYERS) for n, s in SHAPES.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes["model.norm.weight"] = (HIDDEN,)
    return {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}


def megatron(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values as Megatron-Core stacks, fuses and pads them."""

    def stacked(name: str) -> Tensor:
        return torch.stack([theirs[f"model.layers.{i}.{name}.weight"] for i in range(LAYERS)])

    parts = [stacked(f"self_attn.{p}_proj").view(LAYERS, GROUPS, -1, HIDDEN) for p in "qkv"]
    padding = torch.zeros(PADDED - VOCAB, HIDDEN, dtype=torch.bfloat16)
    block = "decoder.layers"
    return {
        "embedding.word_embeddings.weight": torch.cat([theirs["model.embed_tokens.weight"], padding]),
        "output_layer.weight": torch.cat([theirs["lm_head.weight"], padding]),
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
        if ".layers." in key:
            for layer in range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp):
                state[f"{key}/{layer}"] = _shard(key, values[layer], values.shape, (layer,), tp, number, filled)
        elif stage == (0 if "embedding" in key else pp - 1):
            state[key] = _shard(key, values, values.shape, (), tp, number, filled)
    return state


def _shard(key: str, own: Tensor, shape: Any, prefix: tuple[int, ...], tp: int, number: int, filled: bool) -> Any:
    whole = tuple(shape)
    offset = [0] * own.dim()
    if "fc1.weight" in key:
        rows = INNER // tp
        own = torch.cat([half[number * rows : (number + 1) * rows] for half in own.chunk(2)])
        starts = ((half * rows, (*prefix, half * INNER + number * rows, 0)) for half in (0, 1))
        segments = [Segment(row_start=s, row_stop=s + rows, global_shape=whole, global_offset=at) for s, at in starts]
        data = own if filled else torch.full_like(own, 7)
        return ShardedTensorFactory(key, data, segments=tuple(segments), local_shape=tuple(own.shape))
    axis = next((a for part, a in CUT.items() if part in key), None)
    if axis is not None:
        size = own.shape[axis] // tp
        own = own.narrow(axis, number * size, size)
        offset[axis] = number * size
    data = own.clone() if filled else torch.full_like(own, 7)
    return ShardedTensor(
        key,
        data,
        data.dtype,
        tuple(data.shape),
        whole,
        (*prefix, *offset),
        None,
        replica_id=0 if axis is not None else number,
        prepend_axis_num=len(prefix),
        allow_shape_mismatch=True,
    )
