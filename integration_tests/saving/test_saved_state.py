"""State of stacked experts, of chunks that share a parameter, and of two optimizers, in one checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_checkpoint import ShardedTensor, load, save, sharded_model
from opt_checkpoint.convert.torch_files import checkpoint_to_torch_file
from opt_config import OptimizerConfig, ParamKey
from opt_stack import get_optimizer

BASE: dict[str, Any] = {"lr": 0.1, "clip_grad": 0.0}
ADAPTIVE = {**BASE, "optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "namo"}
EXPERT_RULES: dict[str, dict[str, Any]] = {
    "soap": {**BASE, "optimizer": "soap"},
    "soap one-sided, megatron": {**BASE, "optimizer": "soap", "soap_one_sided": True, "soap_order": "megatron"},
    "normuon, longer": {**ADAPTIVE, "adaptive_muon_moment2_method": "normuon", "adaptive_muon_lines": "longer"},
    "namo": ADAPTIVE,
}


class OneParam(nn.Module):
    def __init__(self, values: Tensor, **marks: Any):
        super().__init__()
        self.weight = nn.Parameter(values.clone())
        for name, value in marks.items():
            setattr(self.weight, name, value)


@pytest.mark.parametrize("rule", EXPERT_RULES)
def test_state_of_stacked_experts_is_loaded_by_another_number_of_ranks(tmp_path: Path, rule: str) -> None:
    """The state of each expert belongs to it: factors, bases, and the numbers of lines and matrices."""
    fields = EXPERT_RULES[rule]
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 6, 4, generator=generator) for _ in range(4))

    def made(rank: int, ranks: int, steps: int) -> tuple[Tensor, Any, dict[str, Any]]:
        """A rank's experts after some steps, with their optimizer and sharded state."""
        model = OneParam(start.chunk(ranks)[rank])
        # Stacks are Adam's unless an override says otherwise.
        overrides = {ParamKey(name="weight"): {"optimizer": fields["optimizer"]}}
        optimizer = get_optimizer(OptimizerConfig(**fields), [model], overrides)
        for grad in grads[:steps]:
            model.weight.grad = grad.chunk(ranks)[rank].clone()
            optimizer.step()
        weights = {"weight": ShardedTensor.from_rank_offsets("weight", model.weight, (0, rank, ranks))}
        return model.weight, optimizer, {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    by_rank = [made(rank, 2, 2)[2] for rank in range(2)]
    state = {str(at): {**mine, "optimizer": mine["optimizer"]["state"]} for at, mine in enumerate(by_rank)}
    groups = {key: value for key, value in by_rank[0]["optimizer"].items() if key != "state"}
    save({**state, "optimizer": groups}, tmp_path / "saved")
    weight, resumed, state = made(0, 1, 0)
    assert set(state["optimizer"]["state"]["weight"]) & {"Q_R", "momentum_buffer"}
    resumed.load_state_dict(load(state, tmp_path / "saved").state["optimizer"])
    weight.grad = grads[2].clone()
    resumed.step()
    torch.testing.assert_close(weight, made(0, 1, 3)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("second_replica", [0, 1])
def test_two_chunks_with_one_shared_parameter_are_saved_and_loaded(tmp_path: Path, second_replica: int) -> None:
    def made(value: float) -> tuple[list[OneParam], Any, dict[str, Any]]:
        chunks = [OneParam(torch.full((4, 3), value), pipeline_parallel=True) for _ in range(2)]
        optimizer = get_optimizer(OptimizerConfig(**BASE), chunks, {})
        for chunk in chunks:
            chunk.weight.grad = torch.full((4, 3), 0.5)
        optimizer.step()
        weights = {
            f"model{number}": ShardedTensor.from_rank_offsets("shared", chunk.weight, replica_id=replica)
            for number, (chunk, replica) in enumerate(zip(chunks, (0, second_replica), strict=True))
        }
        return chunks, optimizer, {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    _, optimizer, state = made(1.0)
    save(state, tmp_path / "saved")
    chunks, other, state = made(9.0)
    for of_param in other.state.values():
        of_param["exp_avg"].zero_()
    other.load_state_dict(load(state, tmp_path / "saved").state["optimizer"])
    for loaded, saved in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(loaded["exp_avg"], saved["exp_avg"])
        assert loaded["exp_avg"].any()
    assert torch.equal(chunks[0].weight, chunks[1].weight)
    assert chunks[0].weight.max() < 2


def test_two_optimizers_of_one_state_keep_their_own_moments(tmp_path: Path) -> None:
    """Also where one of them is converted to a file of torch."""
    models = {"first": nn.Linear(3, 2), "optimizer": nn.Linear(3, 2)}
    rules = {"first": "sgd", "optimizer": "adam"}
    optimizers = {at: get_optimizer(OptimizerConfig(optimizer=rules[at], lr=1e-2), models[at]) for at in models}

    def step(at: str) -> None:
        models[at](torch.ones(4, 3)).square().sum().backward()
        optimizers[at].step()

    def state() -> dict[str, object]:
        parts = {at: sharded_model(model) for at, model in models.items()}
        return {f"model {at}": part for at, part in parts.items()} | {
            at: optimizers[at].sharded_state_dict(part) for at, part in parts.items()
        }

    for at in ("first", "optimizer", "optimizer"):
        step(at)
    before = {at: model.weight.detach().clone() for at, model in models.items()}
    save(state(), tmp_path / "x")
    for at in models:
        nn.init.zeros_(models[at].weight)
        step(at)
    report = load(state(), tmp_path / "x")
    assert report.missing == report.unexpected == ()
    for steps, at in enumerate(models, start=1):
        optimizers[at].load_state_dict(report.state[at])
        assert torch.equal(models[at].weight, before[at])
        assert {int(of_param["step"]) for of_param in report.state[at]["state"].values()} == {steps}
    checkpoint_to_torch_file(tmp_path / "x", tmp_path / "first.pt", at=("first",))
    converted = torch.load(tmp_path / "first.pt")["state"].values()
    assert [set(of_param) for of_param in converted] == [{"momentum_buffer", "step"}] * 2
