"""Anyone's optimizer: torch.optim under FSDP2, tensor-parallel DTensors, DDP and alone, from each to each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trained_networks import (
    STEPS,
    Holder,
    assert_same_state,
    grouped,
    mesh_of,
    network,
    save_optimizer,
    state_of,
    train,
    two_linears,
    wrap,
)

from opt_checkpoint import (
    load,
    load_optimizer,
    read_index,
    save,
    sharded_like,
    sharded_model,
    sharded_optimizer,
)


def train_and_save(rank: int, size: int, kind: str, path: str) -> list[float]:
    model = wrap(kind, network(), size)
    optimizer = grouped(model)
    losses = train(model, optimizer, 0, STEPS)
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, path)
    return losses + train(model, optimizer, STEPS, 2 * STEPS)


def load_and_train(rank: int, size: int, kind: str, path: str) -> list[float]:
    model = wrap(kind, network(), size)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = grouped(model, lr=9.0)
    load({"model": sharded_model(model)}, path)
    report = load_optimizer(model, optimizer, path)
    assert report.uninitialised == report.gone == report.groups.new == ()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.025]
    if kind == "fsdp2":
        assert all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())
    return train(model, optimizer, STEPS, 2 * STEPS)


# On torch 2.6 a model that FSDP2 sharded cannot run without a GPU: `torch.cpu.Stream` records no events.
FSDP2_RUNS = hasattr(torch.cpu.Stream, "record_event")
WORLDS = [("alone", 1), ("ddp", 2), *([("fsdp2", 2), ("fsdp2", 3)] if FSDP2_RUNS else [])]


@pytest.mark.parametrize("before", WORLDS, ids=lambda w: f"{w[0]}{w[1]}")
def test_from_each_to_each_the_losses_go_on(ranks: RankPool, tmp_path: Path, before: tuple[str, int]) -> None:
    path = str(tmp_path / "x")
    (losses, *_) = ranks.run(before[1], train_and_save, before[0], path)
    for kind, size in WORLDS:
        for resumed in ranks.run(size, load_and_train, kind, path):
            if (kind, size) == before:
                assert resumed == losses[STEPS:]
            # Averaging equal gradients over three ranks rounds: a few units of float32 in the third digit of Adam.
            assert resumed == pytest.approx(losses[STEPS:], rel=1e-4)


class HalvesApart(torch.optim.SGD):
    """Keeps a moment of local shards as code; its state_dict hands out DTensors of plain numbers."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            local = param.to_local() if isinstance(param, DTensor) else param
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            state = self.state[param]
            code = state.setdefault("code", torch.zeros_like(local, dtype=torch.int32).detach())
            code += (grad * 1024).round().int()
            with torch.no_grad():
                local.sub_(0.01 * code.float() / 1024)

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        params = self.param_groups[0]["params"]
        packed["state"] = {
            i: {"moment": distributed(self.state[p]["code"].float() / 1024, p)}
            for i, p in enumerate(params)
            if self.state[p]
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, states in state_dict["state"].items():
            if states["moment"].dtype != torch.float32:
                raise ValueError("the moment must be float32")
            param, moment = self.param_groups[0]["params"][number], states["moment"]
            local = moment.to_local() if isinstance(moment, DTensor) else moment
            self.state[param] = {"code": (local * 1024).round().int()}
        for group, loaded in zip(self.param_groups, state_dict["param_groups"]):
            group.update({k: v for k, v in loaded.items() if k != "params"})


def distributed(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def train_coded(rank: int, size: int, kind: str, path: str, start: int) -> list[torch.Tensor]:
    model = network()
    if size > 1:
        mesh = init_device_mesh("cpu", (size,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for name, param in list(model[3].named_parameters()):
            model[3].register_parameter(name, nn.Parameter(DTensor.from_local(param, mesh, [Replicate()])))
    optimizer = HalvesApart(model.parameters(), lr=0.5 if start else 0.25)
    if start:
        load({"model": sharded_model(model)}, path)
        load_optimizer(model, optimizer, path)
        assert optimizer.param_groups[0]["lr"] == 0.25
    for param in model.parameters():
        param.grad = torch.ones_like(param) * (start + 1)
    optimizer.step()
    if not start:
        save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, path)
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_an_optimizer_that_keeps_local_codes_is_saved_as_it_hands_its_state_out(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    """It was refused together with DTensors; without them its codes were saved, which other layouts could not read."""
    path = str(tmp_path / "x")
    ranks.run(before, train_coded, "", path, 0)
    (index, moment) = (read_index(path), torch.zeros(7, 5))
    assert not any("code" in key for key in index.tensors)
    load({"m": sharded_like("optimizer.state.moment.0.weight", moment)}, path)
    assert torch.equal(moment, torch.ones(7, 5))
    (first, *_) = ranks.run(after, train_coded, "", path, 1)
    (again, *_) = ranks.run(1, train_coded, "", path, 1)
    for ours, expected in zip(first, again, strict=True):
        assert torch.equal(ours, expected)


def train_two_linears(rank: int, size: int, path: str) -> list[float]:
    model = two_linears(mesh_of(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = train(model, optimizer, 0, STEPS)
    if size == 4:
        assert any(type(p).__name__ == "_StridedShard" for p in model[0].weight.placements)
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, path)
    return losses + train(model, optimizer, STEPS, 2 * STEPS)


def resume_two_linears(rank: int, size: int, path: str) -> list[float]:
    model = two_linears(mesh_of(size))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    load({"model": sharded_model(model)}, path)
    load_optimizer(model, optimizer, path)
    return train(model, optimizer, STEPS, 2 * STEPS)


@pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs no model that FSDP2 sharded without a GPU")
def test_fsdp2_of_tensor_parallel_parameters_to_and_from_it(ranks: RankPool, tmp_path: Path) -> None:
    """Both cut the rows of the first matrix: FSDP2 what tensor parallelism left, though its mesh axis stands first."""
    weights = {}
    for before, after in ((4, (4, 1)), (2, (4,))):
        path = tmp_path / str(before)
        (losses, *_) = ranks.run(before, train_two_linears, str(path))
        for size in after:
            for resumed in ranks.run(size, resume_two_linears, str(path)):
                if before == size:
                    assert resumed == losses[STEPS:]
                assert resumed == pytest.approx(losses[STEPS:], rel=1e-4)
        weights[before] = torch.zeros(8, 5)
        load({"model": {"0.weight": sharded_like("0.weight", weights[before])}}, path)
    torch.testing.assert_close(weights[4], weights[2], rtol=1e-4, atol=1e-5)


# ----- one process


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    model = network()
    optimizer = grouped(model)
    train(model, optimizer, 0, STEPS)
    return model, optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.Adam(ps, amsgrad=True),
        lambda ps: torch.optim.Adagrad(ps),
        lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
        lambda ps: torch.optim.NAdam(ps),
        lambda ps: torch.optim.Adafactor(ps),
    ],
    ids=["sgd", "amsgrad", "adagrad", "rmsprop", "nadam", "adafactor"],
)
def test_other_optimizers_come_back_with_every_state(tmp_path: Path, make: Any) -> None:
    model = network()
    optimizer = make(list(model.parameters()))
    train(model, optimizer, 0, STEPS)
    path = save_optimizer(model, optimizer, tmp_path / "x")
    again = copy.deepcopy(model)
    other = make(list(again.parameters()))
    load_optimizer(again, other, path)
    assert_same_state(state_of(again, other), state_of(model, optimizer))
    assert train(again, other, STEPS, 6) == train(model, optimizer, STEPS, 6)


def test_groups_and_parameters_in_another_order_keep_their_own(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    path = save_optimizer(model, optimizer, tmp_path / "x")
    again = copy.deepcopy(model)
    backwards = list(again.parameters())[::-1]
    groups = [{"params": [p for p in backwards if p.dim() <= 1]}, {"params": [p for p in backwards if p.dim() > 1]}]
    other = torch.optim.AdamW(groups, lr=1.0)
    load_optimizer(again, other, path)
    assert [g["weight_decay"] for g in other.param_groups] == [0.0, 0.1]
    assert_same_state(state_of(again, other), state_of(model, optimizer))
    assert train(again, other, STEPS, 6) == pytest.approx(train(model, optimizer, STEPS, 6), rel=1e-6)


def test_never_stepped_frozen_and_zero_gradient_parameters(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    path = save_optimizer(model, optimizer, tmp_path / "never")
    report = load_optimizer(model, optimizer, path)
    assert len(report.uninitialised) == 6
    assert not optimizer.state
    model[0].weight.requires_grad_(False)
    model[2].bias.register_hook(torch.zeros_like)
    train(model, optimizer, 0, 2)
    again = copy.deepcopy(model)
    other = torch.optim.AdamW(again.parameters())
    report = load_optimizer(again, other, save_optimizer(model, optimizer, tmp_path / "frozen"))
    assert report.uninitialised == ("0.weight",)
    assert other.state[again[2].bias]["step"].item() == 2
    assert_same_state(state_of(again, other), state_of(model, optimizer))


def test_tied_parameters_are_saved_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"output": nn.Linear(3, 3, bias=False), "embedding": nn.Linear(3, 3, bias=False)})
    model["output"].weight = model["embedding"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model["output"].weight.square().sum().backward()
    optimizer.step()
    saved = sharded_optimizer(model, optimizer)
    assert list(saved["state_names"]) == ["embedding.weight"]
    load_optimizer(model, optimizer, save_optimizer(model, optimizer, tmp_path / "x"))
    assert optimizer.state[model["output"].weight]["step"].item() == 1


def test_a_wide_moment_of_a_narrow_parameter_stays_wide(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    model = nn.ParameterDict({"w": param})
    optimizer = torch.optim.AdamW([param])
    optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.full((4,), 1.001)}
    path = save_optimizer(model, optimizer, tmp_path / "x")
    load_optimizer(model, optimizer, path)
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    assert optimizer.state[param]["exp_avg"][0].item() == pytest.approx(1.001, rel=1e-7)


def test_names_are_those_without_wrappers() -> None:
    wrapped = Holder(
        "module", Holder("_orig_mod", Holder("layers", Holder("_checkpoint_wrapped_module", nn.Linear(2, 2))))
    )
    assert set(sharded_model(wrapped)) == {"layers.weight", "layers.bias"}
    assert set(sharded_model(Holder("encoder", Holder("module", nn.Linear(2, 2))))) == {
        "encoder.module.weight",
        "encoder.module.bias",
    }


def test_a_module_named_module_keeps_its_name_next_to_others(tmp_path: Path) -> None:
    """`module.weight` and `weight` were one key, and one of the tensors was lost."""
    model = Holder("module", nn.Linear(2, 2, bias=False), weight=True)
    optimizer = torch.optim.AdamW(model.parameters())
    (model.module.weight.sum() + 2 * model.weight.sum()).backward()
    optimizer.step()
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, tmp_path / "x")
    again = Holder("module", nn.Linear(2, 2, bias=False), weight=True)
    other = torch.optim.AdamW(again.parameters())
    load({"model": sharded_model(again)}, tmp_path / "x")
    load_optimizer(again, other, tmp_path / "x")
    for name, param in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], param)
        assert torch.equal(
            other.state[dict(again.named_parameters())[name]]["exp_avg"], optimizer.state[param]["exp_avg"]
        )
