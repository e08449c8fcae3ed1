"""Presets, as in Megatron-Core: weight decay, decoupled rates, matrix rules, layer decay."""

import pytest
import torch
from models import Model, mark
from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_paramgroups import (
    get_layer_decay_overrides,
    get_matrix_rule_overrides,
    get_param_groups,
    get_standard_config_overrides,
)


def entry_by_name(model, config, overrides, entry):
    """The entry that each parameter's group has, by the parameter's name."""
    groups = get_param_groups([model], config, overrides)
    return {id.name: group.get(entry) for group in groups for id in group["param_ids"]}


def test_biases_and_vectors_are_spared_the_weight_decay():
    model = Model(num_layers=1)
    mults = entry_by_name(model, OptimizerConfig(lr=1.0), None, "wd_mult")
    spared = {name for name, mult in mults.items() if mult == 0.0}
    assert spared == {name for name, param in model.named_parameters() if name.endswith(".bias") or param.dim() == 1}
    assert set(mults.values()) == {0.0, 1.0}


def with_shapes(**shapes):
    """A module with parameters of these names and shapes; `__` stands for a dot."""
    model = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split("__")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.ones(shape)))
    return model


VECTORS = (
    *("experts__gate_up_proj_bias", "experts__down_proj_bias", "mlp1_bias", "r_w_bias", "pos_bias_u", "a__bias"),
    *("mixer__A_log", "mixer__A_logs", "mixer__A_b_log", "mixer__dt_bias", "relative_position_bias_table"),
    *("q_norm__weight", "attn__ln_k__weight", "norm1__scale", "biases__0"),
)
MATRICES_BY_NAME = ("bias_free__weight", "normal_proj__weight", "A_logits", "unbiased", "log_bias_net__weight", "fc")


@pytest.mark.parametrize("rule", ["adam", "muon", "soap"])
def test_stacks_of_vectors_have_no_decay_and_no_matrix_rule(rule):
    """Symptom: Muon orthogonalised the biases of experts, and A_log of Mamba was decayed."""
    model = with_shapes(**dict.fromkeys((*VECTORS, *MATRICES_BY_NAME), (4, 3)), marked=(4, 3), logit_scale=())
    mark(model.marked, _no_weight_decay=True)
    config = OptimizerConfig(lr=1.0, optimizer=rule)
    for by_name in (True, False):
        routing = get_matrix_rule_overrides(config, by_name=by_name) if rule != "adam" else {}
        overrides = {**get_standard_config_overrides(config, by_name=by_name), **routing}
        mults = entry_by_name(model, config, overrides, "wd_mult")
        rules = entry_by_name(model, config, overrides, "optimizer")
        spared = {name for name, mult in mults.items() if mult == 0.0}
        matrices = {name for name, of_name in rules.items() if of_name == rule}
        if by_name:
            assert spared == {*(name.replace("__", ".") for name in VECTORS), "marked"}
            assert rule == "adam" or matrices == {name.replace("__", ".") for name in MATRICES_BY_NAME}
        else:  # as Megatron-Core
            assert spared == {"a.bias"}
            assert rule == "adam" or matrices == set(mults) - {"logit_scale"}


def test_an_author_may_say_that_a_name_means_nothing():
    model = with_shapes(A_log=(4, 3))
    mark(model.A_log, _no_weight_decay=False)
    assert entry_by_name(model, OptimizerConfig(lr=1.0), None, "wd_mult") == {"A_log": 1.0}


def test_groups_with_stacks_of_vectors_have_the_names_they_had():
    """Saved groups are found by these names."""
    config = OptimizerConfig(lr=1.0, optimizer="muon")
    overrides = {**get_standard_config_overrides(config), **get_matrix_rule_overrides(config)}
    for by_name in (True, False):
        routing = get_matrix_rule_overrides(config, by_name=by_name)
        overrides = {**get_standard_config_overrides(config, by_name=by_name), **routing}
        groups = get_param_groups([with_shapes(fc=(4, 3), A_log=(4, 3), scale=(3,))], config, overrides)
        assert [group["name"] for group in groups] == [
            "default",
            "(bias or vector) and (embedding or output or not for Muon)",
        ]


QK_NORMS = ("q_norm", "k_norm", "qk_norm", "query_norm", "key_layernorm", "norm_q", "q_norms")


@pytest.mark.parametrize("name", QK_NORMS)
def test_decay_of_query_and_key_norms_knows_their_names(name):
    """Symptom: with Qwen3's q_norm and k_norm the setting had no effect."""
    model = with_shapes(**{f"layer__{name}__weight": (3,), "block_norm__weight": (3,), "fc__bias": (3,)})
    config = OptimizerConfig(lr=1.0, apply_wd_to_qk_layernorm=True)
    mults = entry_by_name(model, config, None, "wd_mult")
    assert mults == {f"layer.{name}.weight": 1.0, "block_norm.weight": 0.0, "fc.bias": 0.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (None, "no trainable parameter on any rank belongs to a norm called"),
        (get_standard_config_overrides(OptimizerConfig()), "the overrides leave all norms of queries and keys without"),
    ],
    ids=["no such norm", "overrides that spare it"],
)
def test_decay_of_query_and_key_norms_without_effect_is_refused(overrides, message):
    model = with_shapes(fc__weight=(3, 3), **({} if overrides is None else {"q_norm__weight": (3,)}))
    config = OptimizerConfig(lr=1.0, apply_wd_to_qk_layernorm=True)
    with pytest.raises(ConfigError, match=f"^apply_wd_to_qk_layernorm=True: has no effect: {message}"):
        get_param_groups([model], config, overrides)


@pytest.mark.parametrize("applies", [False, True])
def test_qk_layernorm_is_decayed_only_if_requested(applies):
    config = OptimizerConfig(lr=1.0, apply_wd_to_qk_layernorm=applies)
    mults = entry_by_name(Model(num_layers=1), config, None, "wd_mult")
    of_qk = {mult for name, mult in mults.items() if "q_layernorm." in name or "k_layernorm." in name}
    assert of_qk == {1.0 if applies else 0.0}
    assert mults["layers.0.norm.weight"] == mults["layers.0.attention.linear_qkv.bias"] == 0.0


@pytest.mark.parametrize(
    ("decoupled_min_lr", "expected"), [(None, 1e-5), (1e-6, 1e-6)], ids=["common floor", "floor of its own"]
)
def test_decoupled_lr_moves_embedding_and_output_only(decoupled_min_lr, expected):
    config = OptimizerConfig(lr=1e-2, min_lr=1e-5, decoupled_lr=1e-3, decoupled_min_lr=decoupled_min_lr)
    for entry, own, common in (("max_lr", 1e-3, 1e-2), ("min_lr", expected, 1e-5), ("is_decoupled_lr", True, False)):
        found = entry_by_name(Model(num_layers=1), config, None, entry)
        assert {name for name, value in found.items() if value == own} >= {"embedding.weight", "output.weight"}
        assert found["layers.0.attention.linear_qkv.weight"] == common


def test_decoupled_lr_that_nothing_takes_is_refused():
    with pytest.raises(ConfigError, match=r"config_overrides\[embedding or output\]: matches no parameter"):
        get_param_groups([nn.Linear(2, 2)], OptimizerConfig(lr=1.0, decoupled_lr=0.5), None)


MATRICES = {"layers.0.attention.linear_qkv.weight", "layers.0.attention.linear_proj.weight"}


def test_non_matrix_parameters_use_the_scalar_optimizer():
    for optimizer, given, scalar in (
        ("muon", "adam", "adam"),
        ("muon", "lion", "lion"),
        ("adaptive_muon", "lion", "lion"),
        ("soap", "lion", "adam"),
    ):
        config = OptimizerConfig(optimizer=optimizer, muon_scalar_optimizer=given)
        rules = entry_by_name(Model(num_layers=1), config, get_matrix_rule_overrides(config), "optimizer")
        assert {name for name, rule in rules.items() if rule == optimizer} == MATRICES
        assert set(rules.values()) == {optimizer, scalar}


def test_use_muon_has_an_effect_with_muon_only():
    for optimizer, expected in (("muon", "adam"), ("soap", "soap")):
        model = Model(num_layers=1)
        config = OptimizerConfig(optimizer=optimizer)
        mark(model.layers[0].attention.linear_proj.weight, use_muon=False)
        rules = entry_by_name(model, config, get_matrix_rule_overrides(config), "optimizer")
        assert rules["layers.0.attention.linear_proj.weight"] == expected


def test_layer_decay_shrinks_rates_towards_the_input():
    model = Model(num_layers=3)
    config = OptimizerConfig(lr=1.0, min_lr=0.5)
    overrides = get_layer_decay_overrides([model], 0.5)
    rates = entry_by_name(model, config, overrides, "max_lr")
    assert rates["embedding.weight"] == 0.5**4
    assert [rates[f"layers.{i}.norm.weight"] for i in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert rates["output.weight"] == 1.0
    assert entry_by_name(model, config, overrides, "min_lr")["layers.2.norm.weight"] == 0.25
    of_nine = get_layer_decay_overrides([model], 0.5, num_layers=9)  # of a stage that holds the first three
    assert entry_by_name(model, config, of_nine, "max_lr")["layers.0.norm.weight"] == 0.5**9


LAYERS = {  # names of parameters from the input to the output, with their depths
    "BERT, ViT": {"embeddings.patch_embeddings": 0, "encoder.layer.0.output": 1, "encoder.layer.1.output": 2},
    "T5": {"shared": 0, "encoder.block.0.layer.1.wi": 1, "encoder.block.1.layer.0.q": 2, "decoder.block.2.wi": 3},
    "CLIP": {"visual.conv1": 0, "visual.transformer.resblocks.0.mlp": 1, "visual.transformer.resblocks.1.mlp": 2},
    "Megatron": {"embedding.word_embeddings": 0, "decoder.layers.0.mlp": 1, "decoder.layers.1.mlp": 2},
    "GPT-2": {"transformer.wte": 0, "transformer.h.0.mlp": 1, "transformer.h.1.mlp": 2},
    "torchvision's ViT": {"conv_proj": 0, "encoder.layers.encoder_layer_0.ln_1": 1},
    "Swin": {
        "patch_embed.proj": 0, "layers.0.blocks.0.mlp": 1, "layers.0.blocks.1.mlp": 2, "layers.0.downsample.norm": 2,
        "layers.1.blocks.0.mlp": 3, "layers.1.blocks.1.mlp": 4,
    },
    "timm's Swin": {"layers.0.blocks.0.mlp": 1, "layers.1.downsample.norm": 2, "layers.1.blocks.0.mlp": 2},
    "timm's ConvNeXt": {
        "stem.0": 0, "stages.0.blocks.0.mlp": 1, "stages.1.downsample.0": 2, "stages.1.blocks.0.mlp": 2,
    },
    "ConvNeXt": {
        "downsample_layers.0.0": 0, "stages.0.0.dwconv": 1, "downsample_layers.1.1": 2, "stages.1.0.dwconv": 2,
    },
    "Hugging Face's ConvNeXt": {"encoder.stages.0.layers.0.dwconv": 1, "encoder.stages.1.layers.0.dwconv": 2},
    "torchvision's Swin": {"features.0.0": 0, "features.1.0.mlp": 1, "features.2.norm": 2, "features.3.0.mlp": 2},
}  # fmt: skip


def test_layers_of_multi_token_prediction_come_after_all_others():
    model = with_shapes(decoder__layers__0__w=(2, 2), decoder__layers__1__w=(2, 2), mtp__layers__0__w=(2, 2))
    rates = entry_by_name(model, OptimizerConfig(lr=1.0), get_layer_decay_overrides([model], 0.5), "max_lr")
    assert rates == {"decoder.layers.0.w": 0.25, "decoder.layers.1.w": 0.5, "mtp.layers.0.w": 1.0}


@pytest.mark.parametrize("depths", LAYERS.values(), ids=LAYERS)
def test_layer_decay_finds_the_layers_of_common_models(depths):
    """Symptom: the layers of BERT, T5 and CLIP had the full rate, and in stages the count began again."""
    model = with_shapes(**{f"{name}.weight".replace(".", "__"): (2, 2) for name in (*depths, "classifier")})
    rates = entry_by_name(model, OptimizerConfig(lr=1.0), get_layer_decay_overrides([model], 0.5), "max_lr")
    last = max(depths.values())
    expected = {f"{name}.weight": 0.5 ** (last + 1 - depth) for name, depth in depths.items()}
    assert rates == {**expected, "classifier.weight": 1.0}


def test_frozen_stages_count():
    model = with_shapes(stages__0__0__fc__weight=(2, 2), stages__1__0__fc__weight=(2, 2))
    model.get_parameter("stages.0.0.fc.weight").requires_grad_(False)
    (key, *_) = [key for key, entries in get_layer_decay_overrides([model], 0.5).items() if entries["lr_mult"] == 0.5]
    assert key.label == "depth 2"


def test_layer_decay_without_layers_says_so(caplog):
    model = with_shapes(body__0__weight=(2, 2))
    with pytest.raises(ConfigError, match=r"no layers are found in 1 names such as 'body.0.weight'; pass depth_of="):
        get_layer_decay_overrides([model], 0.5)
    get_layer_decay_overrides([model], 0.5, num_layers=3)  # may be a stage of a pipeline
    assert "no layers are found" in caplog.text
    assert get_layer_decay_overrides([nn.Identity()], 0.5)  # a rank without parameters
    with pytest.raises(ConfigError, match=r"stage 0 is not in the model chunks"):
        get_layer_decay_overrides([with_shapes(stages__1__0__fc__weight=(2, 2))], 0.5)


def test_layers_that_begin_again_in_another_chunk_are_refused():
    """Symptom: the layers of the second chunk of a virtual pipeline had the rates of the first."""
    first, second = [with_shapes(layers__0__w=(2, 2), norm__w=(2, 2)) for _ in range(2)]
    for options in ({}, {"num_layers": 2}):
        with pytest.raises(ConfigError, match=r"several chunks have a parameter 'layers.0.w'"):
            get_layer_decay_overrides([first, second], 0.5, **options)
    assert get_layer_decay_overrides([first, with_shapes(layers__1__w=(2, 2), norm__w=(2, 2))], 0.5)


def test_bad_layer_decay_is_refused():
    for model, options, message in (
        (Model(num_layers=2), {"decay": 0.0}, "decay=0.0: must be in (0, 1]"),
        (Model(num_layers=2), {"decay": 0.5, "num_layers": 1}, "num_layers=1: must be at least 2, the depth of a"),
        (nn.Linear(2, 2), {"decay": 0.5, "num_layers": -1}, "num_layers=-1: must be at least 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            get_layer_decay_overrides([model], **options)
        assert str(caught.value).startswith(f"get_layer_decay_overrides: {message}")
