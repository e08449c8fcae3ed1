"""Name maps between models of Megatron-Core and of Hugging Face, for their usual configurations.

Our names are those of Megatron-Core's `GPTModel.sharded_state_dict()`, which has the same keys for its local and its
Transformer Engine layers. By default (`stacked`) all layers are stacked in one tensor of shape (layers, ...).
"""

from __future__ import annotations

from opt_checkpoint.convert.names import NameRule
from opt_checkpoint.errors import CheckpointValueError


def megatron_llama_names(
    *,
    heads: int,
    query_groups: int | None = None,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    vocab: int | None = None,
    stacked: bool = True,
) -> tuple[NameRule, ...]:
    """Llama, Mistral and Qwen: RMSNorm, SwiGLU, grouped queries, no bias elsewhere.

    Args:
        heads: `num_attention_heads`.
        query_groups: `num_key_value_heads` (`num_query_groups` of Megatron-Core); None for one per head.
        tied: whether the output layer is the embedding (`tie_word_embeddings`).
        qkv_bias: whether queries, keys and values have a bias, as in Qwen2.
        qk_norm: whether queries and keys are normalized, as in Qwen3.
        vocab: `vocab_size` if Megatron-Core pads it, else None.
        stacked: whether all layers are stacked in one tensor on our side.

    Raises:
        CheckpointingException: `heads` is not a multiple of `query_groups`.
    """
    groups = heads if query_groups is None else query_groups
    if groups < 1 or heads < 1 or heads % groups:
        raise CheckpointValueError(f"heads={heads} must be a multiple of query_groups={query_groups}")
    ours, theirs = _layer(stacked), "model.layers.{layer}"
    parts = [
        _qkv(ours, tuple(f"{theirs}.self_attn.{p}_proj" for p in "qkv"), what, heads // groups, groups)
        for what in ("weight", *(["bias"] if qkv_bias else []))
    ]
    plain = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    if qk_norm:
        plain["self_attention.q_layernorm.weight"] = "self_attn.q_norm.weight"
        plain["self_attention.k_layernorm.weight"] = "self_attn.k_norm.weight"
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    return (
        NameRule(ours="embedding.word_embeddings.weight", theirs=embedding, rows=vocab),
        NameRule(ours="output_layer.weight", theirs=embedding if tied else output, rows=vocab, tied=tied),
        NameRule(ours="decoder.final_layernorm.weight", theirs="model.norm.weight"),
        *parts,
        NameRule(
            ours=f"{ours}.mlp.linear_fc1.weight",
            theirs=(f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"),
        ),
        *(NameRule(ours=f"{ours}.{a}", theirs=f"{theirs}.{b}") for a, b in plain.items()),
    )


def megatron_gpt2_names(*, heads: int, vocab: int | None = None, stacked: bool = True) -> tuple[NameRule, ...]:
    """GPT-2: LayerNorm, biases, learned positions, weights stored as (inputs, outputs), a tied output layer.

    Args:
        heads: `n_head`.
        vocab: `vocab_size` if Megatron-Core pads it, else None.
        stacked: whether all layers are stacked in one tensor on our side.
    """
    ours, theirs = _layer(stacked), "transformer.h.{layer}"
    linear = {
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    norms = {"self_attention.linear_qkv.layer_norm": "ln_1", "mlp.linear_fc1.layer_norm": "ln_2"}
    wte = "transformer.wte.weight"
    rules = [
        NameRule(ours="embedding.word_embeddings.weight", theirs=wte, rows=vocab),
        NameRule(ours="output_layer.weight", theirs=wte, rows=vocab, tied=True),
        NameRule(ours="embedding.position_embeddings.weight", theirs="transformer.wpe.weight"),
    ]
    for what in ("weight", "bias"):
        turned = what == "weight"
        rules.append(NameRule(ours=f"decoder.final_layernorm.{what}", theirs=f"transformer.ln_f.{what}"))
        rules.append(_qkv(ours, (f"{theirs}.attn.c_attn",) * 3, what, 1, heads, transposed=turned))
        rules += [
            NameRule(ours=f"{ours}.{a}.{what}", theirs=f"{theirs}.{b}.{what}", transposed=turned)
            for a, b in linear.items()
        ]
        rules += [NameRule(ours=f"{ours}.{a}_{what}", theirs=f"{theirs}.{b}.{what}") for a, b in norms.items()]
    return tuple(rules)


def _layer(stacked: bool) -> str:
    return "decoder.layers" if stacked else "decoder.layers.{layer}"


def _qkv(
    ours: str, theirs: tuple[str, ...], what: str, queries: int, groups: int, *, transposed: bool = False
) -> NameRule:
    """Rule for queries, keys and values. Our tensor has, for each group, its queries, then its key, then its value."""
    return NameRule(
        ours=f"{ours}.self_attention.linear_qkv.{what}",
        theirs=tuple(f"{name}.{what}" for name in theirs),
        shares=(queries, 1, 1),
        groups=groups,
        transposed=transposed,
    )
