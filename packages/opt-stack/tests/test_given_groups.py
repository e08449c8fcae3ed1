"""Groups that the caller made, and Megatron-Core's function for them."""

from threading import local
from typing import Any

import pytest
from stack_models import assert_equal, backward, make_model, train, weights

import opt_stack.megatron as megatron
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_stack import DistributedDataParallel, get_optimizer, get_optimizer_based_on_param_groups

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, min_lr=1e-4)


def test_torchs_groups_are_completed_from_the_configuration_and_left_as_they_are() -> None:
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


def test_groups_may_have_rules_of_their_own() -> None:
    model = make_model()
    matrices = {"params": [model[0].weight, model[2].weight], "optimizer": "muon", "name": "matrices"}
    rest = {"params": [model[0].bias, model[2].bias], "optimizer": "lion", "name": "rest"}
    optimizer = get_optimizer_based_on_param_groups(CONFIG, [model], [matrices, rest])
    assert [unit.rule.name for unit in optimizer.plan.units] == ["muon", "lion"]
    assert "betas" not in optimizer.param_groups[0]
    assert optimizer.param_groups[1]["betas"] == (0.95, 0.98)


# --- Megatron-Core's function -----------------------------------------------------------------------------------------


def test_it_trains_wrapped_chunks_with_their_buffers() -> None:
    def wrapped() -> Any:
        return DistributedDataParallel(DistributedDataParallelConfig(), make_model())

    first, second = wrapped(), wrapped()
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
        groups, given = [{"params": list(model.parameters())}], {name: value} if comm.rank == 1 else {}
        with pytest.raises(ValueError, match=message):
            megatron._get_megatron_optimizer_based_on_param_groups(CONFIG, [model], groups, **given)
        overrides: Any = {"bias": {}} if comm.rank == 1 else {}
        with pytest.raises(ValueError, match="config_overrides: 'bias': must be a ParamKey"):
            megatron._get_param_groups([model], OptimizerConfig(optimizer="muon"), overrides)

    run_threads(2, rank_main)
