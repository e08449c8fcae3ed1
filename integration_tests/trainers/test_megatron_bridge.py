"""Megatron-Bridge's call of `provide`, on chunks in Megatron-Core's own wrapper, with its groups and its scheduler."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Job, run_jobs

pytest.importorskip("megatron.core")  # `nox -s megatron` installs it

import bridge_ranks
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from opt_stack import ConfigError, OptimizerConfig, OptimizerParamScheduler, get_optimizer
from opt_stack.adapters.megatron_bridge import StackOptimizerConfig

SETTINGS: dict[str, dict[str, Any]] = {"adam": {}, "muon": {"optimizer": "muon"}, "bf16": {"bf16": True}}


@pytest.fixture
def one_rank() -> Any:
    before = torch.cuda.current_device
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bridge_ranks.initialize()
    yield
    bridge_ranks.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.cuda.current_device = before


def train_plain(settings: dict[str, Any]) -> bridge_ranks.Trained:
    """The whole batch on one rank, without Megatron-Core."""
    model = bridge_ranks.make_model(torch.bfloat16 if "bf16" in settings else torch.float32)
    optimizer = get_optimizer(OptimizerConfig(**{**bridge_ranks.SETTINGS, **settings}), [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=bridge_ranks.LR,
        min_lr=bridge_ranks.LR / 10,
        lr_warmup_steps=2,
        lr_decay_steps=bridge_ranks.STEPS,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=bridge_ranks.STEPS,
        wd_incr_style="constant",
    )
    norms, rates = [], []
    for step in range(bridge_ranks.STEPS):
        rows = bridge_ranks.batch(step).to(next(model.parameters()).dtype)
        model(rows).float().square().mean().backward()
        norms.append(optimizer.step().grad_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        scheduler.step(increment=1)
    return bridge_ranks.Trained(model.state_dict(), norms, rates)


@pytest.fixture(scope="module")
def of_two_ranks() -> dict[str, list[Any]]:
    jobs = {name: Job(bridge_ranks.trained, (settings,)) for name, settings in SETTINGS.items()}
    return run_jobs(2, jobs)


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_train_as_one_process_with_the_joined_batch_and_resume(
    of_two_ranks: dict[str, list[Any]], name: str
) -> None:
    expected = train_plain(SETTINGS[name])
    # Two halves of a batch are summed in another order than its rows at once; in bf16, weights round to 2**-9.
    tolerance = {"rtol": 2**-6, "atol": 2**-7} if name == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    for unbroken, resumed in of_two_ranks[name]:
        assert unbroken.rates == pytest.approx(expected.rates)
        assert resumed.norms == unbroken.norms[bridge_ranks.STEPS // 2 :]
        torch.testing.assert_close(torch.tensor(unbroken.norms), torch.tensor(expected.norms), **tolerance)
        for key, weight in expected.weights.items():
            torch.testing.assert_close(unbroken.weights[key], weight, **tolerance, msg=key)
            assert torch.equal(resumed.weights[key], unbroken.weights[key]), key


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a wrapper that shards": (
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True},
        "model chunk 0 is in Megatron-Core's DistributedDataParallel with use_distributed_optimizer=True",
    ),
    "sharded state": ({}, {"use_distributed_optimizer": True}, "which reduces all gradients to every rank; set both"),
    "layer-wise state": (
        {},
        {"optimizer": "muon", "stack": {"use_layer_wise_distributed_optimizer": True}},
        "use_layer_wise_distributed_optimizer=True: model chunk 0 is in Megatron-Core's",
    ),
    "a graph": (
        {},
        {"stack": {"optimizer_cuda_graph": True}},
        "optimizer_cuda_graph=True: model chunk 0 is in Megatron-Core's",
    ),
    "an unknown field": ({}, {"stack": {"learning_rate": 1.0}}, "learning_rate"),
}


@pytest.mark.parametrize(("of_wrapper", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_lose_gradients_or_state_is_refused(
    one_rank: None, of_wrapper: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    chunk = bridge_ranks.wrap(bridge_ranks.make_model(), **of_wrapper)
    with pytest.raises(ConfigError, match=message):
        bridge_ranks.build(chunk, **settings)


@dataclass
class WithAnotherField(StackOptimizerConfig):
    fold_momentum: bool = False


def test_a_field_that_exists_only_in_megatron_core_is_refused_unless_it_has_its_default() -> None:
    settings = {"lr": 0.1, "stack": {"clip_grad": 0.25}}
    assert WithAnotherField(**settings).to_stack() == OptimizerConfig(lr=0.1, clip_grad=0.25)
    with pytest.raises(ConfigError, match=r"fold_momentum=True: opt_stack.OptimizerConfig has no field of this name"):
        WithAnotherField(lr=0.1, fold_momentum=True).to_stack()


def test_keys_of_megatron_core_choose_the_same_parameters(one_rank: None) -> None:
    predicate = ParamPredicate(name="vectors", fn=lambda param: param.dim() == 1)
    optimizer = StackOptimizerConfig(lr=0.1).provide(
        bridge_ranks.wrap(bridge_ranks.make_model()),
        {ParamKey(name="*2.weight"): {"wd_mult": 0.5}, ParamKey(predicate=predicate): {"wd_mult": 0.25}},
    )
    found = {id.name: group["wd_mult"] for group in optimizer.param_groups for id in group["param_ids"]}
    assert found == {"0.weight": 1.0, "0.bias": 0.25, "2.weight": 0.5, "2.bias": 0.25}


def test_chunks_of_two_wrappers_are_refused(one_rank: None) -> None:
    chunks = [bridge_ranks.wrap(bridge_ranks.make_model()), bridge_ranks.make_model()]
    with pytest.raises(ConfigError, match=r"model chunk 0 is in Megatron-Core's .* and model chunk 1 is a Sequential"):
        StackOptimizerConfig(lr=0.1).provide(chunks)


def test_tensors_of_megatron_cores_sharded_checkpoints_are_refused(one_rank: None) -> None:
    model = bridge_ranks.make_model()
    optimizer = StackOptimizerConfig(lr=0.1).provide([bridge_ranks.wrap(model)])
    state = {name: ShardedTensor.from_rank_offsets(name, param) for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=r"sharded tensors of Megatron-Core; .* set checkpoint.ckpt_format='torch'"):
        optimizer.sharded_state_dict({"model": state})
