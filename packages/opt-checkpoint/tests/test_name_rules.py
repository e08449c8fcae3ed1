"""Name maps: parts and groups against reshapes of torch, every element once, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_checkpoint import CheckpointingException, NameRule, megatron_gpt2_names, megatron_llama_names
from opt_checkpoint.convert.name_maps import Described, Piece, to_ours, to_theirs


def described(tensors: Mapping[str, Tensor]) -> dict[str, Described]:
    return {name: Described(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def exported(rules: Sequence[NameRule], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Assemble the external tensors box by box; elements that no box covers are NaN."""
    mapped = to_theirs(rules, described(ours))
    theirs = {name: torch.full(t.shape, torch.nan) for name, t in mapped.theirs.items()}
    for key, pieces in mapped.pieces.items():
        for piece in pieces:
            values = ours[key][tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes))]
            target = stored_part(piece, theirs)
            assert target.isnan().all()  # no element is written twice
            target.copy_(piece.within.as_stored(values))
    return theirs


def stored_part(piece: Piece, theirs: dict[str, Tensor]) -> Tensor:
    """The part of an external tensor that holds a piece."""
    sizes = piece.box.sizes
    return piece.within.region((0,) * len(sizes), sizes).of_tensor(theirs[piece.theirs])


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def assert_maps(rules: Sequence[NameRule], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """`ours` becomes `theirs`; and the description of theirs gives that of ours, with the same boxes."""
    found = exported(rules, ours)
    assert found.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(found[name], expected), name
    back, there = to_ours(rules, described(theirs)), to_theirs(rules, described(ours))
    assert back.ours == there.ours
    assert {k: sorted(map(repr, p)) for k, p in back.pieces.items()} == {
        k: sorted(map(repr, p)) for k, p in there.pieces.items()
    }


def test_queries_keys_and_values_are_interleaved_by_group() -> None:
    groups, queries, head, hidden = 3, 2, 4, 5
    rule = NameRule(ours="l.{i}.qkv", theirs=("h.{i}.q", "h.{i}.k", "h.{i}.v"), shares=(queries, 1, 1), groups=groups)
    q, k, v = (numbered(groups, n * head, hidden) + 1000 * i for i, n in enumerate((queries, 1, 1)))
    fused = torch.cat([q, k, v], dim=1).reshape(-1, hidden)
    theirs = {"h.7.q": q.reshape(-1, hidden), "h.7.k": k.reshape(-1, hidden), "h.7.v": v.reshape(-1, hidden)}
    assert_maps([rule], {"l.7.qkv": fused}, theirs)


def test_a_transposed_fused_tensor_has_the_parts_along_its_other_axis() -> None:
    heads, head, hidden = 2, 3, 6
    rule = NameRule(ours="qkv", theirs="c_attn", shares=(1, 1, 1), groups=heads, transposed=True)
    q, k, v = (numbered(heads, head, hidden) + 100 * i for i in range(3))
    theirs = torch.cat([part.reshape(-1, hidden) for part in (q, k, v)]).T.contiguous()
    assert_maps([rule], {"qkv": torch.cat([q, k, v], dim=1).reshape(-1, hidden)}, {"c_attn": theirs})


def test_both_sides_may_interleave_in_different_groups() -> None:
    rule = NameRule(ours="a", theirs="b", shares=(1, 2), groups=2, their_groups=3)
    first, second = numbered(6, 1), numbered(12, 1) + 50
    ours = torch.cat([t for pair in zip(first.chunk(2), second.chunk(2)) for t in pair])
    theirs = torch.cat([t for pair in zip(first.chunk(3), second.chunk(3)) for t in pair])
    assert_maps([rule], {"a": ours}, {"b": theirs})


def test_several_of_our_tensors_may_be_one_of_theirs() -> None:
    rule = NameRule(ours=("{i}.q", "{i}.kv", "{i}.kv"), theirs="{i}.qkv", shares=(2, 1, 1), their_groups=2)
    q, k, v = numbered(8, 2), numbered(4, 2) + 100, numbered(4, 2) + 200
    theirs = torch.cat([t for parts in zip(q.chunk(2), k.chunk(2), v.chunk(2)) for t in parts])
    assert_maps([rule], {"0.q": q, "0.kv": torch.cat([k, v])}, {"0.qkv": theirs})


def test_numbers_of_one_side_are_axes_of_the_other() -> None:
    up, down = numbered(2, 3, 8, 4), numbered(2, 3, 4, 4)
    rules = [
        NameRule(ours="w1", theirs=("m.{layer}.e.{expert}.gate", "m.{layer}.e.{expert}.up")),
        NameRule(ours="w2", theirs="m.{layer}.e.{expert}.down", transposed=True),
    ]
    theirs = {}
    for i in range(2):
        for e in range(3):
            theirs |= {f"m.{i}.e.{e}.gate": up[i, e, :4], f"m.{i}.e.{e}.up": up[i, e, 4:]}
            theirs[f"m.{i}.e.{e}.down"] = down[i, e].T
    assert_maps(rules, {"w1": up, "w2": down}, theirs)


def test_their_experts_may_be_stacked_while_our_layers_are() -> None:
    rule = NameRule(ours="experts.{e}.fc1", theirs="layers.{l}.gate_up", shares=(1, 1), transposed=True)
    ours = {f"experts.{e}.fc1": numbered(2, 6, 4) + 1000 * e for e in range(3)}
    theirs = {f"layers.{n}.gate_up": torch.stack([ours[f"experts.{e}.fc1"][n].T for e in range(3)]) for n in range(2)}
    assert_maps([rule], ours, theirs)


def test_parts_lie_along_any_axis_and_scalars_and_empty_tensors_have_their_place() -> None:
    rules = [
        NameRule(ours="w", theirs=("a", "b"), shares=(1, 3), dim=1),
        NameRule(ours="x.{n:path}", theirs="y.{n:path}"),
    ]
    whole = numbered(3, 8)
    ours = {"w": whole, "x.s": torch.tensor(2.5), "x.none": torch.zeros(0, 3)}
    assert_maps(
        rules, ours, {"a": whole[:, :2], "b": whole[:, 2:], "y.s": torch.tensor(2.5), "y.none": torch.zeros(0, 3)}
    )


def test_padding_is_not_exported() -> None:
    rule = NameRule(ours="embed", theirs="wte", rows=10)
    assert torch.equal(exported([rule], {"embed": numbered(16, 2)})["wte"], numbered(10, 2))
    assert to_ours([rule], {"wte": Described((10, 2), torch.float32)}).ours["embed"].shape == (10, 2)


def test_random_cuts_move_every_element_once() -> None:
    rng = random.Random(0)
    for _ in range(200):
        shares = tuple(rng.randint(1, 4) for _ in range(rng.randint(2, 4)))
        g, h, transposed = rng.randint(1, 4), rng.randint(1, 4), rng.random() < 0.5
        names = tuple(f"t{rng.randint(0, 2)}" for _ in shares)
        rule = NameRule(ours="a", theirs=names, shares=shares, groups=g, their_groups=h, transposed=transposed)
        ours = {"a": numbered(sum(shares) * g * h * rng.randint(1, 2), 3)}
        theirs = exported([rule], ours)
        assert sorted(torch.cat([t.reshape(-1) for t in theirs.values()]).tolist()) == ours["a"].reshape(-1).tolist()
        back = torch.full_like(ours["a"], torch.nan)
        for piece in to_ours([rule], described(theirs)).pieces["a"]:
            box = tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes))
            piece.within.as_stored(back[box]).copy_(stored_part(piece, theirs))
        assert torch.equal(back, ours["a"])


F32 = torch.float32
REFUSED: dict[str, tuple[list[NameRule], dict[str, Any], str]] = {
    "no rule": ([NameRule(ours="a", theirs="b")], {"a": (2,), "c": (2,)}, "no rule names c"),
    "two rules": (
        [NameRule(ours="a", theirs="b"), NameRule(ours="{x:path}", theirs="{x:path}")],
        {"a": (2,)},
        "a is named by several rules",
    ),
    "one target": ([NameRule(ours=n, theirs="b") for n in "ac"], {"a": (2,), "c": (2,)}, "b would be created twice"),
    "ambiguous numbers": (
        [NameRule(ours="a", theirs="{x}1{y}")], {"a": (12, 12)}, "would be created twice"
    ),
    "a part is missing": (
        [NameRule(ours=("{i}.q", "{i}.k"), theirs="{i}.qk")], {"3.q": (2,)}, "3.k is missing; 3.q cannot be converted"
    ),
    "a layer is missing": (
        [NameRule(ours="{i}.w", theirs="w")], {"0.w": (2,), "2.w": (2,)}, "1.w is missing"
    ),
    "groups do not divide": (
        [NameRule(ours="a", theirs=("q", "k"), shares=(2, 1), groups=4)], {"a": (9, 2)}, "a of .9, 2. cannot be cut"
    ),
    "shares do not divide": ([NameRule(ours="a", theirs=("q", "k"))], {"a": (7, 2)}, "cannot be cut along axis 0"),
    "parts contradict": (
        [NameRule(ours=("q", "k"), theirs="qk", shares=(2, 1))], {"q": (4, 1), "k": (4, 1)}, "k has .* does not fit q"
    ),
    "other axes differ": (
        [NameRule(ours=("q", "k"), theirs="qk")], {"q": (4, 1), "k": (4, 2)}, "k has .* which does not fit q"
    ),
    "dtypes differ": (
        [NameRule(ours=("q", "k"), theirs="qk")], {"q": (4,), "k": ((4,), torch.float64)}, "k has torch.float64"
    ),
    "too few axes": ([NameRule(ours="a", theirs="b", transposed=True)], {"a": (4,)}, "too few axes"),
    "too few rows": ([NameRule(ours="a", theirs="b", rows=9)], {"a": (4,)}, "does not have 9 rows"),
    "tied to nothing": ([NameRule(ours="a", theirs="b", tied=True)], {"a": (4,)}, "a is tied to b, but no tensor"),
    "tied to another shape": (
        [NameRule(ours="a", theirs="b", tied=True), NameRule(ours="c", theirs="b")],
        {"a": (4,), "c": (5,)},
        "a is .* tied to b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    rules, shapes, message = REFUSED[case]
    tensors = {n: Described(*s) if s and isinstance(s[0], tuple) else Described(s, F32) for n, s in shapes.items()}
    with pytest.raises(CheckpointingException, match=message):
        to_theirs(rules, tensors)


@pytest.mark.parametrize(
    "fields",
    [
        {"ours": "a{i", "theirs": "b"},
        {"ours": "a{i}{i}", "theirs": "b{i}"},
        {"ours": "", "theirs": ""},
        {"ours": ("a", "b"), "theirs": ("c", "d", "e")},
        {"ours": "a", "theirs": ("b", "c"), "shares": (1,)},
        {"ours": "a", "theirs": ("b", "c"), "shares": (1, 0)},
        {"ours": "a", "theirs": ("b", "c"), "groups": 0},
        {"ours": "a", "theirs": ("b", "c"), "groups": True},
        {"ours": "a", "theirs": "b", "groups": 2},
        {"ours": "a", "theirs": "b", "dim": -1},
        {"ours": "a", "theirs": ("b", "c"), "rows": 4},
        {"ours": "{x:path}", "theirs": "b"},
        {"ours": ("{i}.a", "b"), "theirs": "{i}.c"},
        {"ours": "a", "theirs": ["b", "c"]},
    ],
    ids=str,
)
def test_a_rule_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointingException):
        NameRule(**fields)


def test_names_are_left_out_by_a_rule_with_one_side() -> None:
    rules = [NameRule(ours="w", theirs="w"), NameRule(ours="{x:path}._extra", theirs=""), NameRule(ours="", theirs="f")]
    shapes = {"w": Described((2,), F32), "m._extra": Described((1,), F32)}
    assert to_theirs(rules, shapes).theirs.keys() == {"w"}
    assert to_ours(rules, {"w": Described((2,), F32), "f": Described((3,), F32)}).ours.keys() == {"w"}


def test_llama_heads_must_be_a_multiple_of_query_groups() -> None:
    with pytest.raises(CheckpointingException, match="heads=6 must be a multiple of query_groups=4"):
        megatron_llama_names(heads=6, query_groups=4)


def test_the_presets_name_every_tensor_of_their_models() -> None:
    layers, heads, hidden, inner, vocab = 2, 4, 8, 12, 11
    gpt2 = {
        "embedding.word_embeddings.weight": (16, hidden),
        "embedding.position_embeddings.weight": (5, hidden),
        **{f"decoder.final_layernorm.{w}": (hidden,) for w in ("weight", "bias")},
        **{f"decoder.layers.{n}_{w}": (layers, hidden) for w in ("weight", "bias") for n in
           ("self_attention.linear_qkv.layer_norm", "mlp.linear_fc1.layer_norm")},
        "decoder.layers.self_attention.linear_qkv.weight": (layers, 3 * hidden, hidden),
        "decoder.layers.self_attention.linear_qkv.bias": (layers, 3 * hidden),
        "decoder.layers.self_attention.linear_proj.weight": (layers, hidden, hidden),
        "decoder.layers.self_attention.linear_proj.bias": (layers, hidden),
        "decoder.layers.mlp.linear_fc1.weight": (layers, inner, hidden),
        "decoder.layers.mlp.linear_fc1.bias": (layers, inner),
        "decoder.layers.mlp.linear_fc2.weight": (layers, hidden, inner),
        "decoder.layers.mlp.linear_fc2.bias": (layers, hidden),
    }  # fmt: skip
    mapped = to_theirs(megatron_gpt2_names(heads=heads, vocab=vocab), {k: Described(s, F32) for k, s in gpt2.items()})
    assert len(mapped.theirs) == 4 + 12 * layers
    assert mapped.theirs["transformer.h.1.attn.c_attn.weight"].shape == (hidden, 3 * hidden)
    assert mapped.theirs["transformer.wte.weight"].shape == (vocab, hidden)
