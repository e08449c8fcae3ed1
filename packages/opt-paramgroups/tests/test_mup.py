"""muP: which learning rates and eps are scaled, by rule and by shape."""

import pytest
import torch
from models import Model
from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_paramgroups import (
    ParamId,
    get_mup_config_overrides,
    get_mup_overrides_by_shape,
    get_param_groups,
    get_standard_config_overrides,
    shapes_of,
)

CONFIG = OptimizerConfig(lr=1e-2, min_lr=1e-3, adam_eps=1e-8)
DECOUPLED = OptimizerConfig(lr=1e-2, min_lr=1e-3, adam_eps=1e-8, decoupled_lr=5e-3, decoupled_min_lr=5e-4)
NAMES = ("layers.0.attention.linear_qkv.weight", "output.weight", "embedding.weight", "layers.0.norm.weight")


def numbers(model, config, overrides):
    """(max_lr, min_lr, eps) by parameter; eps None: the configuration's."""
    groups = get_param_groups([model], config, overrides)
    return {
        id.name: (group["max_lr"], group["min_lr"], group.get("eps")) for group in groups for id in group["param_ids"]
    }


WHOLE = (1e-2, 1e-3, None)
SMALLER = (1e-2 / 3, 1e-3 / 3, None)
LARGER = (1e-2 * 3, 1e-3 * 3, None)
SMALLER_EPS = (1e-2 / 3, 1e-3 / 3, 1e-8 / 3)


def test_rates_and_eps_by_rule():
    for optimizer, hidden, output, others in (
        ("adam", SMALLER_EPS, SMALLER_EPS, WHOLE),
        ("sgd", WHOLE, WHOLE, LARGER),
        ("lion", SMALLER, SMALLER, WHOLE),
        ("muon", WHOLE, SMALLER, WHOLE),
    ):
        found = numbers(Model(num_layers=1), CONFIG, get_mup_config_overrides(CONFIG, 3, optimizer))
        assert [found[name] for name in NAMES] == [hidden, output, others, others], optimizer
        assert get_mup_config_overrides(CONFIG, 1.0, optimizer) == {}
        assert get_mup_config_overrides(OptimizerConfig(), 1, optimizer) == {}


def test_decoupled_rates_stay_and_only_their_eps_is_scaled():
    for optimizer, hidden, output, norm in (
        ("Adam", (2.5e-3, 2.5e-4, 2.5e-9), (5e-3, 5e-4, 2.5e-9), (1e-2, 1e-3, None)),
        ("sgd", (1e-2, 1e-3, None), (5e-3, 5e-4, None), (4e-2, 4e-3, None)),
    ):
        overrides = {**get_standard_config_overrides(DECOUPLED), **get_mup_config_overrides(DECOUPLED, 4, optimizer)}
        found = numbers(Model(num_layers=1), DECOUPLED, overrides)
        assert [found[name] for name in NAMES] == [hidden, output, (5e-3, 5e-4, None), norm], optimizer


def test_an_unset_floor_stays_unset():
    overrides = get_mup_config_overrides(OptimizerConfig(lr=1e-2), 4)
    assert all("min_lr" not in override for override in overrides.values())


def test_what_cannot_be_scaled_is_refused():
    for config, width, message in (
        (CONFIG, 0, "muP: width 0: must be greater than 0 and finite"),
        (CONFIG, float("inf"), "muP: width inf: must be greater than 0 and finite"),
        (OptimizerConfig(), 2, "muP: lr=None: muP scales the learning rate; set lr in the OptimizerConfig"),
    ):
        with pytest.raises(ConfigError) as caught:
            get_mup_config_overrides(config, width)
        assert str(caught.value) == message


def test_by_shape_equals_by_width_if_all_dims_grow_equally():
    base = Model(width=4, num_layers=1)
    wide = Model(width=12, num_layers=1)
    for optimizer in ("adam", "sgd", "lion", "muon"):
        by_shape = get_mup_overrides_by_shape(CONFIG, [wide], shapes_of([base]), optimizer)
        by_width = get_mup_config_overrides(CONFIG, 3, optimizer)
        assert numbers(wide, CONFIG, by_shape) == numbers(wide, CONFIG, by_width)


def test_by_shape_each_parameter_has_its_own_width():
    base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    wide = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 2))
    overrides = get_mup_overrides_by_shape(CONFIG, [wide], shapes_of([base]))
    found = numbers(wide, CONFIG, overrides)
    assert found["0.weight"] == (1e-2, 1e-3, None)  # its input is as wide as before
    assert found["1.weight"] == (1e-2 / 4, 1e-3 / 4, 1e-8 / 4)


def test_by_shape_a_stack_of_experts_has_the_width_of_one():
    """The product of its dims was the width squared."""
    with_shape = lambda *shape: nn.ParameterDict({"w": nn.Parameter(torch.empty(shape))})
    found = []
    for wide, base in (((4, 8, 8), (4, 4, 4)), ((8, 8, 3), (8, 4, 3))):  # experts, and a convolution
        model = with_shape(*wide)
        found.append(
            numbers(model, CONFIG, get_mup_overrides_by_shape(CONFIG, [model], shapes_of([with_shape(*base)])))
        )
    assert found[0] == found[1] == {"w": (5e-3, 5e-4, 5e-9)}
    with pytest.raises(ConfigError, match="which of its dims is the width is unknown"):
        get_mup_overrides_by_shape(CONFIG, [with_shape(4, 8, 12)], shapes_of([with_shape(4, 4, 4)]))


def test_by_shape_without_a_base_is_refused():
    base = {ParamId(0, "weight"): (3,)}
    wide = nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match=r"^base_shapes: parameter 'weight' of shape \(2, 2\) has base shape \(3,\); it m"
    ):
        get_mup_overrides_by_shape(CONFIG, [wide], base)


@pytest.mark.parametrize(("widths", "message"), [((8, 4), "4 and 2"), ((2, 4), "1 and 2"), ((4, 2), "2 and 1")])
def test_by_shape_chunks_that_repeat_a_name_must_agree(widths, message):
    chunks = [nn.Linear(width, 2, bias=False) for width in widths]
    base = {ParamId(0, "weight"): (2, 2), ParamId(1, "weight"): (2, 2)}
    with pytest.raises(ConfigError, match=f"model chunks use the name 'weight' for parameters of widths {message};"):
        get_mup_overrides_by_shape(CONFIG, chunks, base)
