"""Saved optimizer state that ranks, instances or chunks share is saved once and loads on every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Job, run_jobs
from state_ranks import begin, resume, state_of, train_and_save
from torch import nn

from opt_checkpoint import ShardedTensor, load, save
from opt_config import OptimizerConfig, ParamKey
from opt_stack import get_optimizer

# (sharded, bf16, instances) of four ranks
LAYOUTS = {
    "replicated fp32": (False, False, 1),
    "flat shards": (True, False, 1),
    "flat shards with mains": (True, True, 1),
    "two instances": (True, True, 2),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("layouts")
    alone = {bf16: train_and_save(str(folder / f"alone {bf16}"), False, bf16) for bf16 in (False, True)}
    jobs = {f"save {name}": Job(train_and_save, (str(folder / name), *of)) for name, of in LAYOUTS.items()}
    for name, of in LAYOUTS.items():
        jobs[f"load {name}"] = Job(resume, (str(folder / f"alone {of[1]}"), *of))
    return folder, {**run_jobs(4, jobs), "alone": [alone]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_saves_and_loads_the_state_of_a_fused_weight(made: Any, name: str) -> None:
    folder, results = made
    _, bf16, _ = LAYOUTS[name]
    want = results["alone"][0][bf16]
    resumed_alone = resume(str(folder / name), False, bf16)
    for got in (*results[f"save {name}"], *results[f"load {name}"], resumed_alone):
        for param in want:
            torch.testing.assert_close(got[param], want[param], rtol=0, atol=0)


def test_a_parameter_without_elements_has_no_saved_state() -> None:
    net, optimizer = begin(0, sharded=False, bf16=True)
    assert sorted(state_of(net, optimizer)["optimizer"]["state"]) == ["fused", "plain"]


class Experts(nn.Module):
    def __init__(self, weights: torch.Tensor):
        super().__init__()
        self.experts = nn.Parameter(weights.clone())


SOAP_OF_EXPERTS: dict[str, Any] = {"optimizer": "soap", "lr": 0.1, "clip_grad": 0.0}
EXPERT_RULES: dict[str, dict[str, Any]] = {
    "soap": SOAP_OF_EXPERTS,
    "soap one-sided, megatron": SOAP_OF_EXPERTS | {"soap_one_sided": True, "soap_order": "megatron"},
    "normuon, longer": {
        "optimizer": "adaptive_muon", "lr": 0.1, "clip_grad": 0.0, "adaptive_muon_moment2_method": "normuon",
        "adaptive_muon_lines": "longer",
    },
    "namo": {"optimizer": "adaptive_muon", "lr": 0.1, "clip_grad": 0.0, "adaptive_muon_moment2_method": "namo"},
}  # fmt: skip


@pytest.mark.parametrize("rule", EXPERT_RULES)
def test_state_of_stacked_experts_is_loaded_by_another_number_of_ranks(tmp_path: Path, rule: str) -> None:
    # The state of each expert belongs to it: factors, bases, and the numbers of lines and matrices.
    fields = EXPERT_RULES[rule]
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 6, 4, generator=generator) for _ in range(4))

    def made(rank: int, ranks: int) -> tuple[Experts, Any, dict[str, Any]]:
        model = Experts(start.chunk(ranks)[rank])
        # Stacks are Adam's unless an override says otherwise.
        overrides = {ParamKey(name="experts"): {"optimizer": fields["optimizer"]}}
        optimizer = get_optimizer(OptimizerConfig(**fields), [model], overrides)
        weights = {"experts": ShardedTensor.from_rank_offsets("experts", model.experts, (0, rank, ranks))}
        return model, optimizer, {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    def stepped(model: Experts, optimizer: Any, part: slice, grad: torch.Tensor) -> torch.Tensor:
        model.experts.grad = grad[part].clone()
        optimizer.step()
        return model.experts.detach()

    unbroken, optimizer, _ = made(0, 1)
    for grad in grads:
        want = stepped(unbroken, optimizer, slice(0, 4), grad)
    states = {}
    for rank in range(2):
        model, optimizer, _ = made(rank, 2)
        for grad in grads[:2]:
            stepped(model, optimizer, slice(2 * rank, 2 * rank + 2), grad)
        weights = {"experts": ShardedTensor.from_rank_offsets("experts", model.experts, (0, rank, 2))}
        states[f"rank {rank}"] = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)["state"]}
    groups = {key: value for key, value in optimizer.sharded_state_dict(weights).items() if key != "state"}
    save({**states, "optimizer": groups}, tmp_path / "saved")
    model, resumed, state = made(0, 1)
    assert set(state["optimizer"]["state"]["experts"]) & {"Q_R", "momentum_buffer"}
    resumed.load_state_dict(load(state, tmp_path / "saved").state["optimizer"])
    torch.testing.assert_close(stepped(model, resumed, slice(0, 4), grads[2]), want, rtol=0, atol=1e-4)


class Chunk(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.shared = nn.Parameter(torch.full((4, 3), value))
        self.shared.pipeline_parallel = True


@pytest.mark.parametrize("second_replica", [0, 1])
def test_two_chunks_with_one_shared_parameter_are_saved_and_loaded(tmp_path: Path, second_replica: int) -> None:
    def made(value: float) -> tuple[list[Chunk], Any, dict[str, Any]]:
        chunks = [Chunk(value), Chunk(value)]
        optimizer = get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), chunks, {})
        for chunk in chunks:
            chunk.shared.grad = torch.full((4, 3), 0.5)
        optimizer.step()
        weights = {
            f"model{number}": ShardedTensor.from_rank_offsets("shared", chunk.shared, replica_id=replica)
            for number, (chunk, replica) in enumerate(zip(chunks, (0, second_replica), strict=True))
        }
        return chunks, optimizer, {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    _, optimizer, state = made(1.0)
    save(state, tmp_path / "saved")
    chunks, other, state = made(9.0)
    for of_param in other.state.values():
        of_param["exp_avg"].zero_()
    other.load_state_dict(load(state, tmp_path / "saved").state["optimizer"])
    for ours, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        assert ours["exp_avg"].any()
    assert torch.equal(chunks[0].shared, chunks[1].shared)
    assert chunks[0].shared.max() < 2
