"""Embeddings and output layers are recognised by their modules, so that a matrix rule does not update them."""

import pytest
import torch
from models import mark
from torch import nn

from opt_config import OptimizerConfig, ParamKey
from opt_paramgroups import describe, get_matrix_rule_overrides, get_param_groups

VOCAB = 11
DIM = 4


class Layer(nn.Module):
    """Hidden matrices; the first has the shape of an embedding of `hidden` entries."""

    def __init__(self, hidden=16):
        super().__init__()
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)


class GPT(nn.Module):
    """A typical model without any attributes."""

    def __init__(self, *, hidden=16, tied=False, head="readout"):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(16, DIM)
        self.layers = nn.ModuleList([Layer(hidden)])
        self.norm = nn.LayerNorm(DIM)
        self.register_module(head, nn.Linear(DIM, VOCAB, bias=False))
        if tied:
            getattr(self, head).weight = self.tokens.weight


def stage(**modules):
    return nn.ModuleDict(modules)


def wrapped(model):
    """In a module as data-parallel wrappers and torch.compile are."""
    return stage(module=stage(_orig_mod=model))


def recognised(*chunks, **options):
    """The embeddings and outputs by name, and whether each is a guess."""
    metas = describe(chunks, **options).values()
    return {str(meta.id): bool(meta.guess) for meta in metas if meta.is_embedding_or_output}


def moved_by_muon(*chunks):
    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    groups = get_param_groups(chunks, config, get_matrix_rule_overrides(config))
    return {str(id) for group in groups if group["optimizer"] == "muon" for id in group["param_ids"]}


HIDDEN = {"layers.0.up.weight", "layers.0.down.weight"}


@pytest.mark.parametrize("wrap", [lambda model: model, wrapped])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_muon_updates_hidden_matrices_of_unmarked_models_only(wrap, device):
    # Embeddings and heads of every stock torch model were orthogonalised, without a word.
    with torch.device(device):
        model = wrap(GPT())
    assert moved_by_muon(model) == HIDDEN
    assert recognised(model) == {"tokens.weight": False, "positions.weight": False, "readout.weight": False}


def test_a_head_tied_to_another_chunks_embedding_is_recognised():
    first = nn.Embedding(VOCAB, DIM)
    last = nn.ModuleDict({"up": Layer().up, "readout": nn.Linear(DIM, VOCAB)})
    last["readout"].weight = first.weight
    assert moved_by_muon(first, last) == {"chunk 1: up.weight"}


def test_muon_updates_hidden_matrices_of_any_shape():
    for options in ({"tied": True}, {"hidden": VOCAB}, {"hidden": VOCAB, "tied": True}):
        assert moved_by_muon(GPT(**options)) == HIDDEN
    assert moved_by_muon(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))) == {"0.weight", "2.weight"}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(16, DIM))
        self.weights = nn.Parameter(torch.zeros(16, DIM))


# the model, and the embeddings and outputs in it, each with whether it is a guess
RECOGNISED = {
    "an embedding bag": (stage(bag=nn.EmbeddingBag(VOCAB, DIM)), {"bag.weight": False}),
    "the only Linear of an embedding's shape, not the last": (
        stage(readout=nn.Linear(DIM, VOCAB), tokens=nn.Embedding(VOCAB, DIM), layer=Layer()),
        {"readout.weight": True, "tokens.weight": False},
    ),
    "a last square Linear": (
        stage(positions=nn.Embedding(DIM, DIM), proj=nn.Linear(DIM, DIM)),
        {"positions.weight": False, "proj.weight": True},
    ),
    "a projection called output": (stage(attention=stage(output=nn.Linear(DIM, DIM)), layer=Layer()), {}),
    "a parameter called as an embedding": (Named(), {"pos_embed": True}),
    **{
        f"a stage whose head is called {n}": (stage(layer=Layer(), **{n: nn.Linear(DIM, VOCAB)}), {f"{n}.weight": True})
        for n in ("lm_head", "output_layer", "head", "unembed", "output")
    },
}


@pytest.mark.parametrize(("model", "expected"), RECOGNISED.values(), ids=RECOGNISED)
def test_embeddings_and_outputs_are_recognised(model, expected):
    assert recognised(model) == expected


def test_get_input_embeddings_decides_what_an_embedding_is():
    class HuggingFaceLike(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Linear(VOCAB, DIM)
            self.layer = Layer()
            self.odd = nn.Linear(2 * DIM, VOCAB)

        def get_input_embeddings(self):
            return self.table

        def get_output_embeddings(self):
            return self.odd

    class Bare(HuggingFaceLike):
        def get_input_embeddings(self):
            raise NotImplementedError

        def get_output_embeddings(self):
            return None

    assert recognised(wrapped(HuggingFaceLike())) == {"table.weight": False, "odd.weight": False}
    metas = {id.name: meta for id, meta in describe([HuggingFaceLike()]).items()}
    assert metas["table.weight"].is_embedding  # muP scaled its rate as that of a hidden matrix
    assert not metas["odd.weight"].is_embedding
    assert recognised(Bare()) == {}


def test_an_input_embedding_wins_over_a_head_that_is_tied_to_it():
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Linear(DIM, VOCAB, bias=False)

        def get_input_embeddings(self):
            return self.table

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def get_output_embeddings(self):
            return self.body.table

    [meta] = describe([Model()]).values()
    assert meta.is_embedding


@pytest.mark.parametrize("name", ["tokens", "head"])
def test_an_attribute_has_the_last_word(name):
    model = GPT(head="head")
    mark(getattr(model, name).weight, is_embedding_or_output_parameter=False)
    assert f"{name}.weight" in moved_by_muon(model)
    marked = GPT(head="head")
    mark(marked.layers[0].up.weight, is_embedding_or_output_parameter=True)
    assert moved_by_muon(marked) == HIDDEN - {"layers.0.up.weight"}


def test_the_callers_overrides_win():
    overrides = {"head.weight": {"is_embedding_or_output": False}}
    stage = nn.ModuleDict({"layer": Layer(), "head": nn.Linear(DIM, VOCAB)})
    assert recognised(stage, overrides=overrides) == {}
    assert not any(meta.guess for meta in describe([stage], overrides=overrides).values())


def test_a_given_override_wins_over_the_scalar_optimizer():
    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    overrides = {ParamKey(name="tokens.*"): {"optimizer": "lion"}, **get_matrix_rule_overrides(config)}
    groups = get_param_groups([GPT()], config, overrides)
    rule_of = {str(id): group["optimizer"] for group in groups for id in group["param_ids"]}
    assert (rule_of["tokens.weight"], rule_of["positions.weight"]) == ("lion", "adam")


def test_wrappers_within_a_model_are_no_part_of_names():
    """A compiled head was a hidden matrix, and patterns missed compiled layers without a word."""
    plain = stage(layers=nn.ModuleList([Layer(), Layer()]), lm_head=nn.Linear(DIM, VOCAB, bias=False))
    model = stage(
        layers=nn.ModuleList([stage(_orig_mod=Layer()), stage(_checkpoint_wrapped_module=Layer())]),
        lm_head=stage(_orig_mod=nn.Linear(DIM, VOCAB, bias=False)),
    )
    assert [str(id) for id in describe([model])] == [str(id) for id in describe([plain])]
    assert recognised(model) == recognised(plain) == {"lm_head.weight": True}
    assert moved_by_muon(model) == moved_by_muon(plain)
    both = nn.Module()
    both.add_module("_orig_mod", nn.Linear(2, 2, bias=False))
    both.add_module("weight_of", nn.Linear(2, 2, bias=False))
    both.register_parameter("weight", nn.Parameter(torch.ones(3)))
    assert [str(id) for id in describe([both])] == ["weight", "_orig_mod.weight", "weight_of.weight"]
