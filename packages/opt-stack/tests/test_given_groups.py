"""Groups that the caller made, and Megatron-Core's function for them."""

from threading import local
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, train, weights
from torch import nn

import opt_stack.megatron as megatron
from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_paramgroups import get_matrix_rule_overrides, get_param_groups
from opt_stack import DistributedDataParallel, get_optimizer, get_optimizer_based_on_param_groups

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, min_lr=1e-4)


def test_torchs_groups_are_completed_without_being_modified() -> None:
    model = make_model()
    given = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": model[2].weight, "wd_mult": 0.5, "lr_mult": 0.5, "name": "head"},
    ]
    keys = [set(group) for group in given]
    optimizer = get_optimizer_based_on_param_groups(CONFIG, [model], given)
    first, head = optimizer.param_groups
    assert [set(group) for group in given] == keys
    assert (first["name"], first["lr"], first["max_lr"], first["weight_decay"]) == ("group 0", 0.5, 0.5, 0.1)
    assert (head["name"], head["lr"], head["max_lr"], head["weight_decay"]) == ("head", 5e-3, 5e-3, 0.05)
    assert (head["min_lr"], head["betas"], head["optimizer"]) == (5e-5, (0.9, 0.999), "adam")
    before = weights(model)
    train(model, optimizer, range(2))
    assert_equal(model[2].bias.detach(), before["2.bias"])  # in no group: not trained
    assert (model[2].weight != before["2.weight"]).any()


def test_an_iterator_of_groups_loses_none() -> None:
    """The first one was not trained."""
    model = make_model()
    layers = (model[0], model[2])
    given = ({"params": layer.parameters(), "name": str(at)} for at, layer in enumerate(layers))
    optimizer = get_optimizer_based_on_param_groups(CONFIG, [model], given)
    assert [group["name"] for group in optimizer.param_groups] == ["0", "1"]


def test_a_tensor_rate_of_a_group_is_not_its_own_bound() -> None:
    """A scheduler that filled the rate overwrote the peak that it reads."""
    model = make_model()
    given = [{"params": model.parameters(), "lr": torch.tensor(0.5)}]
    (group,) = get_optimizer_based_on_param_groups(OptimizerConfig(), [model], given).param_groups
    group["lr"].fill_(0.25)
    assert group["max_lr"] == 0.5


def test_groups_may_have_rules_of_their_own() -> None:
    model = make_model()
    matrices = {"params": [model[0].weight, model[2].weight], "optimizer": "muon", "name": "matrices"}
    rest = {"params": [model[0].bias, model[2].bias], "optimizer": "lion", "name": "rest"}
    optimizer = get_optimizer_based_on_param_groups(CONFIG, [model], [matrices, rest])
    assert [unit.rule.name for unit in optimizer.plan.units] == ["muon", "lion"]
    assert "betas" not in optimizer.param_groups[0]
    assert optimizer.param_groups[1]["betas"] == (0.95, 0.98)


@pytest.mark.parametrize(("name", "value"), [("betas", 0.9), ("weight_decay", [0.1, 0.2])])
def test_a_tensor_of_another_shape_is_named(name: str, value: Any) -> None:
    model = make_model()
    groups = [{"params": list(model.parameters()), name: torch.tensor(value)}]
    with pytest.raises(ConfigError, match=rf"group 'group 0': {name}=tensor.* is not allowed; pass "):
        get_optimizer_based_on_param_groups(CONFIG, [model], groups)


class Tagger(nn.Module):
    """An embedding, a hidden matrix, biases of experts, and a head that only its name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.down_proj_bias = nn.Parameter(torch.zeros(2, 4))


MATRIX_RULES = ("muon", "adaptive_muon", "muown", "soap", "soap_muon")


@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_a_matrix_rule_for_a_vector_says_what_a_group_takes(rule: str) -> None:
    """Symptom: the hint named config_overrides, which this function does not have."""
    model = make_model()
    with pytest.raises(ConfigError, match=r'0.bias has shape \(7,\); move it to a group with "optimizer": "adam"') as e:
        get_optimizer_based_on_param_groups(
            OptimizerConfig(optimizer=rule, lr=0.1), [model], [{"params": model.parameters()}]
        )
    assert "config_overrides" not in str(e.value)
    with pytest.raises(ConfigError, match=r"^param_groups: group 'group 0' has clip_grad=1;"):
        get_optimizer_based_on_param_groups(CONFIG, [model], [{"params": model.parameters(), "clip_grad": 1}])


@pytest.mark.parametrize("named_by", ["configuration", "group"])
@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_embeddings_and_heads_of_a_matrix_rule_are_named(
    rule: str, named_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: Muon orthogonalised embeddings and heads of the caller's groups without a word."""
    model = Tagger()
    config = OptimizerConfig(optimizer=rule if named_by == "configuration" else "adam", lr=0.1)
    given = {} if named_by == "configuration" else {"optimizer": rule}
    matrices = [param for param in model.parameters() if param.dim() == 2]
    groups = [{"params": matrices, **given}, {"params": [model.hidden.bias], "optimizer": "adam"}]
    get_optimizer_based_on_param_groups(config, [model], groups)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(" of shape")[0] for text in warnings] == [
        "parameter 'down_proj_bias'",
        "parameter 'head.weight'",
        "parameter 'tokens.weight'",
    ]
    assert "is an embedding or output layer (it is called 'head'), but its group gives it to" in warnings[1]
    caplog.clear()
    for param, mark in (
        (model.tokens.weight, "is_embedding_or_output_parameter"),
        (model.head.weight, "is_embedding_or_output_parameter"),
        (model.down_proj_bias, "_no_weight_decay"),
    ):
        setattr(param, mark, False)
    get_optimizer_based_on_param_groups(config, [model], groups)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_groups_of_get_param_groups_are_the_callers_choice(caplog: pytest.LogCaptureFixture) -> None:
    """An override that gives an embedding to Muon is not named by `get_optimizer` either."""
    model = Tagger()
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    overrides = {**get_matrix_rule_overrides(config), ParamKey(name="tokens.*"): {"optimizer": "muon"}}
    groups = get_param_groups([model], config, overrides)
    optimizer = get_optimizer_based_on_param_groups(config, [model], groups)
    by_muon = [group for group in optimizer.param_groups if group["optimizer"] == "muon"]
    assert {str(id) for group in by_muon for id in group["param_ids"]} == {"tokens.weight", "hidden.weight"}
    assert not [record for record in caplog.records if "its group gives it" in record.getMessage()]


# --- Megatron-Core's function -----------------------------------------------------------------------------------------


def test_it_trains_wrapped_chunks_with_their_buffers() -> None:
    def wrapped() -> Any:
        return DistributedDataParallel(DistributedDataParallelConfig(), make_model())

    first = wrapped()
    second = wrapped()
    groups, buffers = megatron._get_param_groups_and_buffers([first], 0, CONFIG, None, lambda g: True, "synced_buffers")
    assert list(buffers) == [0]
    optimizer = megatron._get_megatron_optimizer_based_on_param_groups(CONFIG, [first], groups, buffers)
    other = get_optimizer(CONFIG, [second])
    for step in range(3):
        for chunk, each in ((first, optimizer), (second, other)):
            backward(chunk, step)
            assert each.step().success
            chunk.zero_grad_buffer()
    assert_equal(weights(first.module), weights(second.module))


def test_a_state_of_another_data_parallel_group_is_refused() -> None:
    def built(index: int | None) -> Any:
        model = make_model()
        groups = megatron._get_param_groups([model], CONFIG, None)
        return megatron._get_megatron_optimizer_based_on_param_groups(
            CONFIG, [model], groups, data_parallel_group_idx=index
        )

    saved = built(3).state_dict()
    built(3).load_state_dict(saved)
    for other in (4, None):
        with pytest.raises(ValueError, match="saved on layout data-parallel group 3, replicated"):
            built(other).load_state_dict(saved)


IMPOSSIBLE: dict[str, tuple[Any, str]] = {
    "distributed_optimizer_instance_id": (1, "=1: several instances need the groups between them; call "),
    "per_model_buffers": ({0: [None]}, r"\[0\] holds buffers that no chunk of model_chunks has"),
    "model_parallel_group": ("a group", "data_parallel_group=None, but other groups are given; pass the ranks that "),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_one_rank_cannot_do_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, message = IMPOSSIBLE[name]
    of_thread = local()
    monkeypatch.setattr(megatron, "world", lambda: of_thread.comm)

    def rank_main(comm: Comm) -> None:
        of_thread.comm = comm
        model = make_model()
        groups = [{"params": list(model.parameters())}]
        given = {name: value} if comm.rank == 1 else {}
        with pytest.raises(ValueError, match=message):
            megatron._get_megatron_optimizer_based_on_param_groups(CONFIG, [model], groups, **given)
        overrides: Any = {"bias": {}} if comm.rank == 1 else {}
        with pytest.raises(ValueError, match="config_overrides: 'bias': must be a ParamKey"):
            megatron._get_param_groups([model], OptimizerConfig(optimizer="muon"), overrides)

    run_threads(2, rank_main)
