"""Rules that map tensor names to those of another format, and describe how fused tensors are cut; and usual ones.

A rule is a row of a table. Both sides of it have the same parts in the same order. A tensor with several parts has them
one after another along one axis, or interleaved in groups. For example, this rule maps a query-key-value weight of
Megatron-Core, with 8 groups of 4 queries, one key and one value, to three tensors of a Llama by Hugging Face:

    NameRule(
        ours="decoder.layers.{layer}.self_attention.linear_qkv.weight",
        theirs=tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"),
        shares=(4, 1, 1),
        groups=8,
    )
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opt_checkpoint.convert.reading import read_rows
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.save_load import PathLike

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(:path)?\}")
_NUMBER = "(0|[1-9][0-9]*)"
_TEXT = "(.+)"
Names: TypeAlias = str | tuple[str, ...]  # of one part, or of each part


class NamePattern:
    """A name with placeholders: `{layer}` is a whole number, `{rest:path}` any non-empty text.

    Raises:
        CheckpointingException: braces do not match, or a placeholder occurs twice.
    """

    def __init__(self, text: str) -> None:
        found = _PLACEHOLDER.findall(text)
        self.text = text
        self._names = [name for name, _ in found]
        if len(set(self._names)) != len(found) or set("{}") & set(_PLACEHOLDER.sub("", text)):
            raise CheckpointValueError(
                f"name pattern {text!r}: placeholders are {{name}} for a number and {{name:path}} for text, each once"
            )
        self.numbers = tuple(name for name, is_text in found if not is_text)
        self.texts = {name for name, is_text in found if is_text}
        literals = map(re.escape, _PLACEHOLDER.split(text)[::3])
        groups = [*(_TEXT if is_text else _NUMBER for _, is_text in found), ""]
        self._regex = re.compile("".join(a + b for a, b in zip(literals, groups)), re.DOTALL)

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders if a name matches, else None."""
        matched = self._regex.fullmatch(name)
        return dict(zip(self._names, matched.groups())) if matched else None

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the name that has these values."""
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRule:
    """Maps some of our tensors to tensors of the other side with the same values.

    A number that only one side has in its names is a leading axis of the other side's tensors. For example, with
    `decoder.layers.mlp.linear_fc2.weight` and `model.layers.{layer}.mlp.down_proj.weight`, our tensor has shape
    `(layers, ...)`. Several such axes have the order of the numbers in the names.

    Args:
        ours: name of our tensor; or several names, one for each part. Parts with the same name are in one tensor.
        theirs: the same for the other side. If one side is empty, tensors with the other side's names are left out.
        shares: relative lengths of the parts along `dim`; empty for equal parts.
        groups: number of groups in which the parts are interleaved in one of our tensors that has several parts: each
            group has one piece of every part.
        their_groups: the same for the other side.
        dim: the axis along which parts are concatenated, counted on our side without the axes that are numbers.
        transposed: whether the last two axes are swapped on the other side.
        rows: the other side has only the first `rows` along `dim`; our tensor has padding after them (of a vocabulary).
        tied: another rule reads and writes the tensors named in `theirs`; our tensor must have the same values.

    Raises:
        CheckpointingException: the fields contradict each other.
    """

    ours: Names
    theirs: Names
    shares: tuple[int, ...] = ()
    groups: int = 1
    their_groups: int = 1
    dim: int = 0
    transposed: bool = False
    rows: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if not all(isinstance(given, str | tuple) for given in (self.ours, self.theirs, self.shares)):
            raise CheckpointValueError(f"{self!r}: ours and theirs must be names or tuples of names, shares a tuple")
        lengths = {len(given) for given in (self.ours, self.theirs, self.shares) if isinstance(given, tuple) and given}
        if len(lengths) > 1 or not (self.ours or self.theirs):
            raise CheckpointValueError(f"{self}: ours, theirs and shares must have the same number of parts")
        counts = {"groups": self.groups, "their_groups": self.their_groups, "rows": self.rows or 1}
        counts |= {f"shares[{i}]": share for i, share in enumerate(self.shares)} | {"dim": self.dim}
        for name, count in counts.items():
            least = 0 if name == "dim" else 1
            if type(count) is not int or count < least:
                raise CheckpointValueError(f"{self}: {name}={count!r} must be a whole number of at least {least}")
        if self.parts == 1 and (self.groups, self.their_groups) != (1, 1):
            raise CheckpointValueError(f"{self}: groups need several parts; there is one")
        if self.parts > 1 and self.rows is not None:
            raise CheckpointValueError(f"{self}: rows can be given for a tensor of one part only")
        sides = [[NamePattern(name) for name in names_of(names)] for names in (self.ours, self.theirs) if names]
        if any(len({(frozenset(p.numbers), frozenset(p.texts)) for p in patterns}) > 1 for patterns in sides):
            raise CheckpointValueError(f"{self}: names of one side must have the same placeholders")
        if len({frozenset(patterns[0].texts) for patterns in sides}) > 1:
            raise CheckpointValueError(f"{self}: both sides must have the same text placeholders")

    def __str__(self) -> str:
        return f"the rule for {self.ours or 'nothing'} = {self.theirs or 'nothing'}"

    @property
    def parts(self) -> int:
        """Number of parts."""
        return max(len(given) for given in (self.ours, self.theirs, self.shares, ("",)) if isinstance(given, tuple))


def names_of(names: Names) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    return (names,) if isinstance(names, str) else names


SAME_NAMES = (NameRule(ours="{name:path}", theirs="{name:path}"),)


def read_name_rules(file: PathLike) -> list[NameRule]:
    """Return rules from a JSON list of objects with `NameRule`'s fields.

    Raises:
        CheckpointingException: it is not such a list.
    """
    return read_rows(file, NameRule)


def fingerprint(rules: Sequence[NameRule]) -> str:
    """Return a short text that is equal only for equal rules."""
    return hashlib.sha256(repr(tuple(rules)).encode()).hexdigest()[:16]


# Name maps between models of Megatron-Core and of Hugging Face, for their usual configurations. Our names are those of
# Megatron-Core's `GPTModel.sharded_state_dict()`, which has the same keys for its local and its Transformer Engine
# layers. By default (`stacked`) all layers are stacked in one tensor of shape (layers, ...).


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
    """Return the rules for Llama, Mistral and Qwen: RMSNorm, SwiGLU, grouped queries, no bias elsewhere.

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
    ours = _layer(stacked)
    theirs = "model.layers.{layer}"
    qkv = tuple(f"{theirs}.self_attn.{part}_proj" for part in "qkv")
    parts = [_qkv(ours, qkv, what, heads // groups, groups) for what in ("weight", "bias")[: 1 + qkv_bias]]
    plain = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    if qk_norm:
        plain["self_attention.q_layernorm.weight"] = "self_attn.q_norm.weight"
        plain["self_attention.k_layernorm.weight"] = "self_attn.k_norm.weight"
    embedding = "model.embed_tokens.weight"
    output = embedding if tied else "lm_head.weight"
    gate_and_value = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
    return (
        NameRule(ours="embedding.word_embeddings.weight", theirs=embedding, rows=vocab),
        NameRule(ours="output_layer.weight", theirs=output, rows=vocab, tied=tied),
        NameRule(ours="decoder.final_layernorm.weight", theirs="model.norm.weight"),
        *parts,
        NameRule(ours=f"{ours}.mlp.linear_fc1.weight", theirs=gate_and_value),
        *(NameRule(ours=f"{ours}.{a}", theirs=f"{theirs}.{b}") for a, b in plain.items()),
    )


def megatron_gpt2_names(*, heads: int, vocab: int | None = None, stacked: bool = True) -> tuple[NameRule, ...]:
    """Return the rules for GPT-2: LayerNorm, biases, learned positions, weights as (inputs, outputs), a tied output.

    Args:
        heads: `n_head`.
        vocab: `vocab_size` if Megatron-Core pads it, else None.
        stacked: whether all layers are stacked in one tensor on our side.
    """
    ours = _layer(stacked)
    theirs = "transformer.h.{layer}"
    linear = {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
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
        rules.append(_qkv(ours, (f"{theirs}.attn.c_attn",) * 3, what, 1, heads, turned=turned))
        for a, b in linear.items():
            rules.append(NameRule(ours=f"{ours}.{a}.{what}", theirs=f"{theirs}.{b}.{what}", transposed=turned))
        for a, b in norms.items():
            rules.append(NameRule(ours=f"{ours}.{a}_{what}", theirs=f"{theirs}.{b}.{what}"))
    return tuple(rules)


def _layer(stacked: bool) -> str:
    return "decoder.layers" if stacked else "decoder.layers.{layer}"


def _qkv(ours: str, theirs: tuple[str, ...], what: str, queries: int, groups: int, *, turned: bool = False) -> NameRule:
    """Rule for queries, keys and values. Our tensor has, for each group, its queries, then its key, then its value."""
    return NameRule(
        ours=f"{ours}.self_attention.linear_qkv.{what}",
        theirs=tuple(f"{name}.{what}" for name in theirs),
        shares=(queries, 1, 1),
        groups=groups,
        transposed=turned,
    )
