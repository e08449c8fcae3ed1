"""State of stacked experts, of chunks that share a parameter, and of two optimizers, in one checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opt_checkpoint import ShardedTensor, load, save, sharded_model
from opt_checkpoint.convert.torch_files import checkpoint_to_torch_file
from opt_config import OptimizerConfig, ParamKey
from opt_stack import get_optimizer


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


@pytest.mark.filterwarnings("ignore")
def test_two_optimizers_of_one_state_keep_their_own_moments(tmp_path: Path) -> None:
    torch.manual_seed(1)
    models = {name: torch.nn.Linear(3, 2) for name in ("generator", "discriminator")}
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0)
    optimizers = {name: get_optimizer(config, model) for name, model in models.items()}
    for steps, (name, model) in enumerate(models.items(), start=1):
        for _ in range(steps):
            optimizers[name].zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizers[name].step()

    def state() -> dict[str, object]:
        parts = {name: sharded_model(model) for name, model in models.items()}
        moved = {f"{name}_optimizer": optimizers[name].sharded_state_dict(part) for name, part in parts.items()}
        return {**parts, **moved}

    before = {name: model.weight.detach().clone() for name, model in models.items()}
    save(state(), tmp_path / "x")
    for name, model in models.items():
        torch.nn.init.zeros_(model.weight)
        model(torch.randn(4, 3)).square().sum().backward()
        optimizers[name].step()
    report = load(state(), tmp_path / "x")
    assert report.missing == report.unexpected == ()
    for steps, name in enumerate(models, start=1):
        optimizers[name].load_state_dict(report.state[f"{name}_optimizer"])
        assert torch.equal(models[name].weight, before[name])
        loaded = report.state[f"{name}_optimizer"]["state"]
        assert {int(own["step"]) for own in loaded.values()} == {steps}


def test_a_converted_optimizer_has_none_of_another_optimizers_states(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    part, state = sharded_model(model), {}
    for at, rule in (("first", "sgd"), ("optimizer", "adam")):
        optimizer = get_optimizer(OptimizerConfig(optimizer=rule, lr=1e-2), model)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        state[at] = optimizer.sharded_state_dict(part)
    save({"model": part, **state}, tmp_path / "x")
    checkpoint_to_torch_file(tmp_path / "x", tmp_path / "first.pt", at=("first",))
    states = torch.load(tmp_path / "first.pt")["state"].values()
    assert [set(own) for own in states] == [{"momentum_buffer", "step"}] * 2
