"""A state that was saved under another choice of the rule is refused by name, or continues with a warning."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import slow_tiger
import torch
from parity import sharded_state
from stack_models import make_model, over, train
from torch import nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, Registry, get_optimizer, get_optimizer_based_on_param_groups

RULES = Registry().with_formula(slow_tiger.RULE)
CHOSEN = {  # fields, the same with another choice, how the choices are named
    "maximize": (
        {"optimizer": "lion"},
        {"optimizer": "lion", "optimizer_options": {"maximize": True}},
        "was saved with maximize=False, but optimizer 'lion' has maximize=True",
    ),
    "a choice of a user's formula": (
        {"optimizer": "slow_tiger"},
        {"optimizer": "slow_tiger", "optimizer_options": {"ahead": False}},
        "was saved with ahead=True, but optimizer 'slow_tiger' has ahead=False",
    ),
    "a field of the configuration": (
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": False},
        "was saved with decoupled_weight_decay=True, but optimizer 'adam' has decoupled_weight_decay=False",
    ),
}
WARNED = {
    "muon": (
        {"optimizer": "muon"},
        {"optimizer": "muon", "muon_num_ns_steps": 6},
        "continues with num_ns_steps=6, but was saved with num_ns_steps=5",
    ),
    "soap": (
        {"optimizer": "soap"},
        {"optimizer": "soap", "soap_order": "megatron"},
        "continues with order='megatron', but was saved with order='paper'",
    ),
}


def built(fields: dict[str, Any], comm: Comm | None = None) -> tuple[Any, Optimizer]:
    model = make_model()
    roles = over(comm or Alone())
    return model, get_optimizer(OptimizerConfig(lr=1e-2, **fields), [model], rules=RULES, pg_collection=roles)


def saved(fields: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = built(fields)
    train(model, optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(("before", "after", "message"), CHOSEN.values(), ids=CHOSEN)
def test_another_choice_of_a_formula_is_refused_by_name_on_all(
    before: dict[str, Any], after: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Both were loaded without a word: the momentum of a minimizing run would have been ascended."""
    model, optimizer = built(before)
    train(model, optimizer, range(2))
    save(sharded_state(model, optimizer), tmp_path / "saved")
    loaded = load(sharded_state(*built(before)), tmp_path / "saved").state["optimizer"]

    def resume(comm: Comm, state: dict[str, Any], groups: list[dict[str, Any]], **fields: Any) -> None:
        model, optimizer = built({**after, **fields}, comm)
        optimizer.sharded_state_dict(sharded_model(model))
        present = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=f"{message}|other rank" if comm.size > 1 else message):
            optimizer.load_state_dict(state)
        assert str(copy.deepcopy(optimizer.state_dict())) == str(present)
        comm.gather_objects("refused")
        for group in groups:
            group.pop("choices", None)  # as in an older version, and the way to continue nevertheless
        optimizer.load_state_dict(state)
        train(model, optimizer, range(2, 3))
        assert optimizer.param_groups[0]["choices"] == present["param_groups"][0]["choices"]

    local = copy.deepcopy(optimizer.state_dict())
    resume(Alone(), local, local["param_groups"])
    empty = {**loaded, "state": {}}  # groups are what this test is about
    run_threads(3, lambda comm: resume(comm, empty, empty["groups"]["groups"], use_distributed_optimizer=True))


@pytest.mark.parametrize(("before", "after", "message"), WARNED.values(), ids=WARNED)
def test_other_options_of_a_matrix_rule_log_a_warning(
    before: dict[str, Any], after: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    state = saved(before)
    (_, optimizer) = built(after)
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(state)
    assert message in caplog.text
    caplog.clear()
    model, first = built(before)
    save(sharded_state(model, first), tmp_path / "saved")
    model, other = built(after)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(load(sharded_state(model, other), tmp_path / "saved").state["optimizer"])
    assert message in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        built(before)[1].load_state_dict(state)
    assert "continues with" not in caplog.text


def cut(mode: str, tp: Comm, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of a rank that has rows of a matrix, after a load of the state `before`."""
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.ones(4, 4)))
    vars(model.w).update(tensor_model_parallel=tp.size > 1, partition_dim=0)
    axes = Axes(dp=Alone(), tp=tp)
    config = OptimizerConfig(lr=1e-2, optimizer="muon", muon_tp_mode=mode)
    optimizer = get_optimizer(config, [model], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=tp))
    if before is not None:
        optimizer.load_state_dict(before)
    return copy.deepcopy(optimizer.state_dict())


def recorded(state: Mapping[str, Any]) -> list[str]:
    return [text for text in state["param_groups"][0]["choices"] if text.startswith("tp_mode")]


OF_OLD = ("tp_mode='duplicated'",)  # what earlier versions recorded in every layout


def test_the_tensor_parallel_mode_is_recorded_where_it_acts(caplog: pytest.LogCaptureFixture) -> None:
    """Symptom: with another default every saved run of Muon would have warned at its next load."""
    alone = cut("blockwise", Alone())
    assert recorded(alone) == recorded(cut("duplicated", Alone(), alone)) == []
    alone["param_groups"][0]["choices"] += OF_OLD
    cut("blockwise", Alone(), alone)
    assert caplog.text == ""
    assert [recorded(state) for state in run_threads(2, lambda tp: cut("blockwise", tp))] == [
        ["tp_mode='blockwise'"]
    ] * 2
    assert (
        caplog.text.count("updates depend on the number of tensor-parallel ranks; set muon_tp_mode='duplicated'") == 1
    )


@pytest.mark.parametrize(("before", "after"), [("duplicated", "blockwise"), ("blockwise", "distributed")])
def test_blocks_and_whole_matrices_do_not_continue_each_other(before: str, after: str) -> None:
    def resume(tp: Comm) -> None:
        state = cut(before, tp)
        message = f"was saved with muon_tp_mode='{before}', but has muon_tp_mode='{after}'"
        with pytest.raises(ValueError, match=message):
            cut(after, tp, state)
        tp.gather_objects("refused")
        del state["param_groups"][0]["choices"]
        cut(after, tp, state)

    run_threads(2, resume)


def test_state_of_every_parallel_rank_loads_on_the_owner() -> None:
    """Earlier versions updated a matrix of "duplicated" on all ranks, each of which kept its second moments."""

    def trained(tp: Comm, before: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(torch.ones(4, 4)))
        vars(model.w).update(tensor_model_parallel=True, partition_dim=0)
        fields = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"}
        config = OptimizerConfig(lr=1e-2, muon_tp_mode="layer_sharded", **fields)
        axes = Axes(dp=Alone(), tp=tp)
        optimizer = get_optimizer(config, [model], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=tp))
        if before is not None:
            optimizer.load_state_dict(before)
        model.w.grad = torch.ones(4, 4)
        optimizer.step()
        return copy.deepcopy(optimizer.state_dict())

    def resume(tp: Comm) -> None:
        own = trained(tp)
        of_owner = tp.gather_objects(own["state"][0])[0]
        whole = {name: value for name, value in of_owner.items() if name not in ("step", "momentum_buffer@0of2")}
        old = {**own, "state": {0: {**own["state"][0], **whole}}}
        assert (len(own["state"][0]), len(old["state"][0])) == (2 + (tp.rank == 0), 3)
        for found, expected in zip(trained(tp, old)["state"].values(), trained(tp, own)["state"].values(), strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)

    run_threads(2, resume)


def test_choices_that_only_round_differently_are_not_recorded() -> None:
    state = saved({})
    assert "order" not in str(state["param_groups"][0]["choices"])
    built({"optimizer_options": {"order": "te"}})[1].load_state_dict(state)


def test_groups_of_another_optimizer_get_their_new_rules_record() -> None:
    model, first = built({"optimizer": "lion", "optimizer_options": {"maximize": True}})
    config = OptimizerConfig(optimizer="lion", lr=1e-2)
    second = get_optimizer_based_on_param_groups(config, [model], first.param_groups)
    assert second.param_groups[0]["choices"] == ("maximize=False",)


def test_a_choice_that_is_written_to_a_group_is_refused() -> None:
    model, optimizer = built({"optimizer": "slow_tiger"})
    optimizer.param_groups[0]["ahead"] = False
    with pytest.raises(ValueError, match="ahead=False was added, but it was chosen when the optimizer was built"):
        train(model, optimizer, range(1))
