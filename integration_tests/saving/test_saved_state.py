"""Saved optimizer state that ranks, instances or chunks share is saved once and loads on every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Job, run_jobs
from torch import Tensor, nn

from opt_checkpoint import ShardedTensor, ShardedTensorFactory, load, save
from opt_config import OptimizerConfig, ParamKey
from opt_distributed.comm import ProcessGroups
from opt_stack import Optimizer, get_optimizer


class Net(nn.Module):
    """A fused SwiGLU weight, a matrix, and a parameter without elements."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.fused = nn.Parameter(torch.rand(24, 10, generator=generator).to(dtype))
        self.plain = nn.Parameter(torch.rand(9, 7, generator=generator).to(dtype))
        self.none = nn.Parameter(torch.zeros(0, 7, dtype=dtype))

    def sharded(self, replica: int) -> dict[str, Any]:
        """Sharded state as in Megatron-Core: a factory builds the fused weight from two halves of one key."""

        def build(key: str, data: Tensor, replica_id: Any, flat: slice | None) -> list[ShardedTensor]:
            halves = enumerate(data.chunk(2))
            return [ShardedTensor.from_rank_offsets(key, h, (0, i, 2), replica_id=replica_id) for i, h in halves]

        replica_id = (0, 0, replica)
        return {
            "fused": ShardedTensorFactory("fused", self.fused, build, torch.cat, replica_id),
            "plain": ShardedTensor.from_rank_offsets("plain", self.plain, replica_id=replica_id),
            "none": ShardedTensor.from_rank_offsets("none", self.none, replica_id=replica_id),
        }


def config(sharded: bool, bf16: bool, instances: int = 1) -> OptimizerConfig:
    return OptimizerConfig(lr=0.02, clip_grad=0.0, bf16=bf16, use_distributed_optimizer=sharded)


def groups_of(instances: int) -> ProcessGroups | None:
    """Ranks 0 and 1 are one optimizer instance, 2 and 3 another."""
    if instances == 1:
        return None
    world = dist.group.WORLD
    size, rank = dist.get_world_size() // instances, dist.get_rank()
    intra = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(instances)][rank // size]
    inter = [dist.new_group(list(range(k, instances * size, size))) for k in range(size)][rank % size]
    return ProcessGroups(
        dp=world,
        dp_cp=world,
        expt_dp=world,
        mp=None,
        tp_ep_pp=None,
        intra_dist_opt=intra,
        inter_dist_opt=inter,
        intra_dp_cp=intra,
        intra_expt_dp=intra,
    )


def begin(seed: int, *, sharded: bool, bf16: bool, instances: int = 1) -> tuple[Net, Optimizer]:
    net = Net(seed, torch.bfloat16 if bf16 else torch.float32)
    return net, get_optimizer(config(sharded, bf16), [net], {}, pg_collection=groups_of(instances))


def step(net: Net, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for param in net.parameters():
        param.grad = torch.rand(param.shape, generator=generator).to(param.dtype)
    assert optimizer.step().success


def state_of(net: Net, optimizer: Optimizer) -> dict[str, Any]:
    replica = dist.get_rank() if dist.is_initialized() else 0
    weights = net.sharded(replica)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def weights(net: Net) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def train_and_save(path: str, sharded: bool, bf16: bool, instances: int = 1) -> dict[str, Tensor]:
    """Final weights of a run that is saved after two steps."""
    net, optimizer = begin(0, sharded=sharded, bf16=bf16, instances=instances)
    for number in range(2):
        step(net, optimizer, number)
    save(state_of(net, optimizer), path)
    step(net, optimizer, 2)
    return weights(net)


def resume(path: str, sharded: bool, bf16: bool, instances: int = 1) -> dict[str, Tensor]:
    net, optimizer = begin(1, sharded=sharded, bf16=bf16, instances=instances)
    optimizer.load_state_dict(load(state_of(net, optimizer), path).state["optimizer"])
    step(net, optimizer, 2)
    return weights(net)


# --- tests ---

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
