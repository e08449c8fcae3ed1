"""Name maps: parts and groups against reshapes of torch, every element once, and what is refused."""

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_checkpoint import CheckpointingException, NameRule, megatron_gpt2_names, megatron_llama_names
from opt_checkpoint.convert.name_maps import Described, Piece, to_ours, to_theirs


def described(tensors: Mapping[str, Tensor]) -> dict[str, Described]:
    return {name: Described(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def stored_part(piece: Piece, theirs: Mapping[str, Tensor]) -> Tensor:
    """The part of an external tensor that holds a piece."""
    sizes = piece.box.sizes
    return piece.within.region((0,) * len(sizes), sizes).of_tensor(theirs[piece.theirs])


def own_part(piece: Piece, ours: Tensor) -> Tensor:
    values = ours[tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes))]
    return piece.within.as_stored(values)


def exported(rules: Sequence[NameRule], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Assemble the external tensors box by box; elements that no box covers are NaN."""
    mapped = to_theirs(rules, described(ours))
    theirs = {name: torch.full(t.shape, torch.nan) for name, t in mapped.theirs.items()}
    for key, pieces in mapped.pieces.items():
        for piece in pieces:
            target = stored_part(piece, theirs)
            assert target.isnan().all()  # no element is written twice
            target.copy_(own_part(piece, ours[key]))
    return theirs


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def interleaved(*parts: Tensor, groups: int) -> Tensor:
    return torch.cat([chunk for chunks in zip(*(part.chunk(groups) for part in parts)) for chunk in chunks])


def queries_keys_and_values_are_interleaved_by_group() -> Any:
    q = numbered(24, 5)
    k = numbered(12, 5) + 1000
    v = numbered(12, 5) + 2000
    rule = NameRule(ours="l.{i}.qkv", theirs=("h.{i}.q", "h.{i}.k", "h.{i}.v"), shares=(2, 1, 1), groups=3)
    return [rule], {"l.7.qkv": interleaved(q, k, v, groups=3)}, {"h.7.q": q, "h.7.k": k, "h.7.v": v}


def a_transposed_fused_tensor_has_the_parts_along_its_other_axis() -> Any:
    parts = [numbered(6, 6) + 100 * i for i in range(3)]
    rule = NameRule(ours="qkv", theirs="c_attn", shares=(1, 1, 1), groups=2, transposed=True)
    return [rule], {"qkv": interleaved(*parts, groups=2)}, {"c_attn": torch.cat(parts).T}


def both_sides_may_interleave_in_different_groups() -> Any:
    first = numbered(6, 1)
    second = numbered(12, 1) + 50
    ours, theirs = (interleaved(first, second, groups=groups) for groups in (2, 3))
    return [NameRule(ours="a", theirs="b", shares=(1, 2), groups=2, their_groups=3)], {"a": ours}, {"b": theirs}


def several_of_our_tensors_may_be_one_of_theirs() -> Any:
    q = numbered(8, 2)
    k = numbered(4, 2) + 100
    v = numbered(4, 2) + 200
    rule = NameRule(ours=("{i}.q", "{i}.kv", "{i}.kv"), theirs="{i}.qkv", shares=(2, 1, 1), their_groups=2)
    return [rule], {"0.q": q, "0.kv": torch.cat([k, v])}, {"0.qkv": interleaved(q, k, v, groups=2)}


def numbers_of_one_side_are_axes_of_the_other() -> Any:
    up = numbered(2, 3, 8, 4)
    down = numbered(2, 3, 4, 4)
    rules = [
        NameRule(ours="w1", theirs=("m.{layer}.e.{expert}.gate", "m.{layer}.e.{expert}.up")),
        NameRule(ours="w2", theirs="m.{layer}.e.{expert}.down", transposed=True),
    ]
    theirs = {}
    for i, e in product(range(2), range(3)):
        at = f"m.{i}.e.{e}"
        theirs |= {f"{at}.gate": up[i, e, :4], f"{at}.up": up[i, e, 4:], f"{at}.down": down[i, e].T}
    return rules, {"w1": up, "w2": down}, theirs


def their_experts_may_be_stacked_while_our_layers_are() -> Any:
    rule = NameRule(ours="experts.{e}.fc1", theirs="layers.{l}.gate_up", shares=(1, 1), transposed=True)
    ours = {f"experts.{e}.fc1": numbered(2, 6, 4) + 1000 * e for e in range(3)}
    theirs = {f"layers.{n}.gate_up": torch.stack([own[n].T for own in ours.values()]) for n in range(2)}
    return [rule], ours, theirs


def parts_lie_along_any_axis_and_scalars_and_empty_tensors_have_their_place() -> Any:
    rule = NameRule(ours="w", theirs=("a", "b"), shares=(1, 3), dim=1)
    whole = numbered(3, 8)
    rest = torch.zeros(0, 3)
    ours = {"w": whole, "x.s": torch.tensor(2.5), "x.none": rest}
    theirs = {"a": whole[:, :2], "b": whole[:, 2:], "y.s": torch.tensor(2.5), "y.none": rest}
    return [rule, NameRule(ours="x.{n:path}", theirs="y.{n:path}")], ours, theirs


MAPS = [
    queries_keys_and_values_are_interleaved_by_group,
    a_transposed_fused_tensor_has_the_parts_along_its_other_axis,
    both_sides_may_interleave_in_different_groups,
    several_of_our_tensors_may_be_one_of_theirs,
    numbers_of_one_side_are_axes_of_the_other,
    their_experts_may_be_stacked_while_our_layers_are,
    parts_lie_along_any_axis_and_scalars_and_empty_tensors_have_their_place,
]


@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.__name__)
def test_names_map_both_ways_onto_the_same_boxes(case: Any) -> None:
    rules, ours, theirs = case()
    found = exported(rules, ours)
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], expected) for name, expected in theirs.items())
    back = to_ours(rules, described(theirs))
    there = to_theirs(rules, described(ours))
    assert back.ours == there.ours
    assert back.pieces.keys() == there.pieces.keys()
    assert all(sorted(map(repr, back.pieces[key])) == sorted(map(repr, there.pieces[key])) for key in ours)


def test_padding_is_not_exported() -> None:
    rule = NameRule(ours="embed", theirs="wte", rows=10)
    assert torch.equal(exported([rule], {"embed": numbered(16, 2)})["wte"], numbered(10, 2))
    assert to_ours([rule], {"wte": Described((10, 2), torch.float32)}).ours["embed"].shape == (10, 2)


def test_random_cuts_move_every_element_once() -> None:
    rng = random.Random(0)
    for _ in range(200):
        shares = tuple(rng.randint(1, 4) for _ in range(rng.randint(2, 4)))
        g = rng.randint(1, 4)
        h = rng.randint(1, 4)
        transposed = rng.random() < 0.5
        names = tuple(f"t{rng.randint(0, 2)}" for _ in shares)
        rule = NameRule(ours="a", theirs=names, shares=shares, groups=g, their_groups=h, transposed=transposed)
        ours = {"a": numbered(sum(shares) * g * h * rng.randint(1, 2), 3)}
        theirs = exported([rule], ours)
        assert sorted(torch.cat([t.reshape(-1) for t in theirs.values()]).tolist()) == ours["a"].reshape(-1).tolist()
        back = torch.full_like(ours["a"], torch.nan)
        for piece in to_ours([rule], described(theirs)).pieces["a"]:
            own_part(piece, back).copy_(stored_part(piece, theirs))
        assert torch.equal(back, ours["a"])


F32 = torch.float32
AB = NameRule(ours="a", theirs="b")
QK = NameRule(ours=("q", "k"), theirs="qk")
REFUSED: list[tuple[list[NameRule], dict[str, Any], str]] = [
    ([AB], {"a": (2,), "c": (2,)}, "no rule names c"),
    ([AB, NameRule(ours="{x:path}", theirs="{x:path}")], {"a": (2,)}, "a is named by several rules"),
    ([AB, NameRule(ours="c", theirs="b")], {"a": (2,), "c": (2,)}, "b would be created twice"),
    ([NameRule(ours="a", theirs="{x}1{y}")], {"a": (12, 12)}, "would be created twice"),
    ([NameRule(ours=("{i}.q", "{i}.k"), theirs="{i}.qk")], {"3.q": (2,)}, "3.k is missing; 3.q cannot be converted"),
    ([NameRule(ours="{i}.w", theirs="w")], {"0.w": (2,), "2.w": (2,)}, "1.w is missing"),
    ([NameRule(ours="{i}.w", theirs="w")], {"0.w": (2,), f"{10**15}.w": (2,)}, "1.w is missing"),  # MemoryError
    ([NameRule(ours="a", theirs=("q", "k"), shares=(2, 1), groups=4)], {"a": (9, 2)}, "a of .9, 2. cannot be cut"),
    ([NameRule(ours="a", theirs=("q", "k"))], {"a": (7, 2)}, "cannot be cut along axis 0"),
    ([NameRule(ours=("q", "k"), theirs="qk", shares=(2, 1))], {"q": (4, 1), "k": (4, 1)}, "k has .* does not fit q"),
    ([QK], {"q": (4, 1), "k": (4, 2)}, "k has .* which does not fit q"),
    ([QK], {"q": (4,), "k": ((4,), torch.float64)}, "k has torch.float64"),
    ([NameRule(ours="a", theirs="b", transposed=True)], {"a": (4,)}, "too few axes"),
    ([NameRule(ours="a", theirs="b", rows=9)], {"a": (4,)}, "does not have 9 rows"),
    ([NameRule(ours="a", theirs="b", tied=True)], {"a": (4,)}, "a is tied to b, but no tensor"),
    ([NameRule(ours="c", theirs="b", tied=True), AB], {"a": (5,), "c": (4,)}, "c is .* tied to b"),
]
CONTRADICTIONS: list[dict[str, Any]] = [
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
]


def test_unfit_or_contradictory_rules_are_refused_by_name() -> None:
    for rules, shapes, message in REFUSED:
        tensors = {n: Described(*s) if isinstance(s[0], tuple) else Described(s, F32) for n, s in shapes.items()}
        with pytest.raises(CheckpointingException, match=message):
            to_theirs(rules, tensors)
    for fields in CONTRADICTIONS:
        with pytest.raises(CheckpointingException):
            NameRule(**fields)
    with pytest.raises(CheckpointingException, match="heads=6 must be a multiple of query_groups=4"):
        megatron_llama_names(heads=6, query_groups=4)


def test_names_are_left_out_by_a_rule_with_one_side() -> None:
    rules = [NameRule(ours="w", theirs="w"), NameRule(ours="{x:path}._extra", theirs=""), NameRule(ours="", theirs="f")]
    shapes = {"w": Described((2,), F32), "m._extra": Described((1,), F32)}
    assert to_theirs(rules, shapes).theirs.keys() == {"w"}
    assert to_ours(rules, {"w": Described((2,), F32), "f": Described((3,), F32)}).ours.keys() == {"w"}


def test_the_presets_name_every_tensor_of_their_models() -> None:
    layers = 2
    heads = 4
    hidden = 8
    inner = 12
    vocab = 11
    linear = {
        "self_attention.linear_qkv": (3 * hidden, hidden),
        "self_attention.linear_proj": (hidden, hidden),
        "mlp.linear_fc1": (inner, hidden),
        "mlp.linear_fc2": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    normed = ("self_attention.linear_qkv", "mlp.linear_fc1")
    shapes |= {f"{name}.layer_norm_{part}": (hidden,) for name in normed for part in ("weight", "bias")}
    gpt2 = {f"decoder.layers.{name}": (layers, *shape) for name, shape in shapes.items()}
    gpt2 |= {f"decoder.final_layernorm.{name}": (hidden,) for name in ("weight", "bias")}
    gpt2 |= {f"embedding.{n}_embeddings.weight": (rows, hidden) for n, rows in (("word", 16), ("position", 5))}
    mapped = to_theirs(megatron_gpt2_names(heads=heads, vocab=vocab), {k: Described(s, F32) for k, s in gpt2.items()})
    assert len(mapped.theirs) == 4 + 12 * layers
    assert mapped.theirs["transformer.h.1.attn.c_attn.weight"].shape == (hidden, 3 * hidden)
    assert mapped.theirs["transformer.wte.weight"].shape == (vocab, hidden)
