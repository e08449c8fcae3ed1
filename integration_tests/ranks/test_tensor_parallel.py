"""Tensor parallelism, experts, copies: TP 2 x DP 2 gives the weights and norm of the whole model. Threads."""

from typing import Any

import pytest
import torch
from parity import Held
from recording_comm import Call, RecordingComm
from torch import Tensor, nn
from tp_model import Grid, cut, run_grid
from tp_training import SHAPES, Net, config, joined, train, whole_grads

from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_kernels.hooks import CautiousDecay, CentralizeGradient, ClipUpdateRms, RelativeUpdate
from opt_kernels.rules import SOAPRule
from opt_stack import get_optimizer

RULES_OF_HOOKS = {
    "adam": config(optimizer="adam", use_distributed_optimizer=True),
    "muon": config(optimizer="muon", muon_tp_mode="duplicated", use_layer_wise_distributed_optimizer=True),
}


@pytest.mark.parametrize("centers", [False, True], ids=["norms", "row means"])
@pytest.mark.parametrize("rule", RULES_OF_HOOKS)
def test_norms_and_row_means_of_hooks_are_those_of_whole_matrices(rule: str, centers: bool) -> None:
    """Sums over the parts of a parameter on data-parallel and tensor-parallel ranks."""
    hooks = (CautiousDecay(), ClipUpdateRms(0.05), RelativeUpdate(), *[CentralizeGradient()] * centers)
    alone = train(RULES_OF_HOOKS[rule], Grid(Alone(), Alone(), Alone()), hooks=hooks)
    for name, weight in joined(run_grid(lambda grid: train(RULES_OF_HOOKS[rule], grid, hooks=hooks))).items():
        torch.testing.assert_close(weight, alone.weights[name], rtol=2e-5, atol=2e-5)


WHOLE_MATRICES = {
    "muon": {"optimizer": "muon"},
    "adamuon": {"optimizer": "adaptive_muon"},
    "normuon": {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
}


@pytest.mark.parametrize("rule", [*WHOLE_MATRICES, "soap"])
def test_the_update_is_the_same_at_any_tensor_parallel_size(rule: str) -> None:
    """Gathered, to the bit: the whole matrix goes through the same products. Joint, to the rounding of sums in parts,
    which AdaMuon divides by the size of each element."""
    base = {"clip_grad": 0.0, **WHOLE_MATRICES.get(rule, {"optimizer": "soap"})}
    gathered = config(muon_tp_mode="duplicated", **base)
    joint = config(muon_tp_mode="distributed", **base)
    alone = train(gathered, Grid(Alone(), Alone(), Alone())).weights
    for tp in (2, 4):
        weights = joined(run_grid(lambda grid: train(gathered, grid), tp=tp, dp=1), tp=tp)
        assert all(torch.equal(weights[name], alone[name]) for name in ("column", "row", "qkv"))
        if rule in WHOLE_MATRICES:
            weights = joined(run_grid(lambda grid: train(joint, grid), tp=tp, dp=1), tp=tp)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, alone[name], rtol=2e-5, atol=1e-4 if rule == "adamuon" else 2e-5)


def test_soap_computes_each_matrix_on_one_rank_and_sends_every_part_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved to its owner and back; no other rank computes it or keeps its factors."""
    computed: list[tuple[int, ...]] = []  # by all ranks; appending is atomic
    transform_ = SOAPRule.transform_

    def counting(self: SOAPRule, tasks: Any, inputs: Tensor, skip: Any) -> Tensor:
        computed.extend(tuple(matrix.shape) for matrix in inputs)
        return transform_(self, tasks, inputs, skip)

    monkeypatch.setattr(SOAPRule, "transform_", counting)

    def rank_main(grid: Grid) -> tuple[list[Call], int, int]:
        tp = RecordingComm(grid.tp)
        net = Net(tp)
        optimizer = get_optimizer(config(optimizer="soap"), [net], {}, pg_collection=grid._replace(tp=tp).roles)
        net(
            {name: cut(grad, tp.rank, tp.size, dim=SHAPES[name][1]) for name, grad in whole_grads(0, 0).items()}
        ).backward()
        tp.calls.clear()
        optimizer.step()
        unit = next(unit for unit in optimizer.stepper.units if unit.name == "soap")
        kept = sum(piece.state["L"].numel() for piece in unit.pieces if "L" in piece.state)
        return tp.calls, kept, sum(piece.main.target.numel() for piece in unit.pieces)

    ranks = run_grid(rank_main, dp=1)
    matrices = [SHAPES[name][0] for name in ("column", "row", "qkv", "vector") if len(SHAPES[name][0]) == 2]
    assert sorted(computed) == sorted(matrices)
    assert sum(kept for _, kept, _ in ranks) == sum(rows**2 for rows, _ in matrices)
    received = 0
    for calls, _, parts_numel in ranks:
        assert [call.kind for call in calls] == ["all_to_all", "all_to_all"]
        received += sum(call.numel for call in calls)
        assert all(call.numel >= parts_numel for call in calls)
    # A call is counted with what it sends or receives, whichever is more: here its matrices, or its parts of all.
    numels = [rows * cols for rows, cols in matrices]
    assert received == 2 * (max(sum(numels) // 2, max(numels)) + max(sum(numels) // 2, sum(numels) - max(numels)))


def test_blockwise_muon_orthogonalises_the_local_block() -> None:
    """The only mode that depends on the number of tensor-parallel ranks; the plan says so."""
    blockwise = config(optimizer="muon", muon_tp_mode="blockwise")
    alone = train(blockwise, Grid(Alone(), Alone(), Alone()))
    whole = joined(run_grid(lambda grid: train(blockwise, grid)))
    assert not torch.allclose(whole["column"], alone.weights["column"], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(whole["vocab"], alone.weights["vocab"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "flat"])
def test_zeros_are_counted_once_and_padding_never(sharded: bool) -> None:
    """Buffers are padded to shards and to 64-element starts with zeros, and norms are on both tensor-parallel ranks."""

    class Sparse(nn.Module):
        def __init__(self, tp: Comm):
            super().__init__()
            self.cut, self.copy = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7))
            self.cut.tensor_model_parallel, self.cut.partition_dim = True, 0

    def rank_main(grid: Grid) -> int | None:
        net = Sparse(grid.tp)
        counts = config(log_num_zeros_in_grad=True, use_distributed_optimizer=sharded)
        optimizer = get_optimizer(counts, [net], {}, pg_collection=grid.roles)
        net.cut.grad, net.copy.grad = torch.zeros(5), torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.0])
        net.cut.grad[grid.tp.rank] = 1.0
        return optimizer.step().num_zeros_in_grad

    assert run_grid(rank_main) == [4 + 4 + 3] * 4


def test_a_shared_parameter_and_a_copy_count_once_in_the_norm() -> None:
    """`shared` marks the copy that another rank counts; what is not cut is counted on the first rank only."""

    class Tied(nn.Module):
        def __init__(self, tp: Comm):
            super().__init__()
            self.tied, self.norm = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
            self.tied.tensor_model_parallel, self.tied.partition_dim = True, 0
            self.tied.shared = tp.rank == 1

    def rank_main(grid: Grid) -> float:
        net = Tied(grid.tp)
        optimizer = get_optimizer(config(), [net], {}, pg_collection=grid.roles)
        net.tied.grad, net.norm.grad = torch.full((3,), 2.0), torch.full((2,), 1.0)
        return optimizer.step().grad_norm

    assert run_grid(rank_main) == pytest.approx([(3 * 4 + 2 * 1) ** 0.5] * 4, rel=1e-6)


# --- experts ---------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """A dense weight, and the one expert of this rank. `forward` takes both gradients."""

    def __init__(self, expert: int):
        super().__init__()
        self.dense = Held((5, 9), torch.float32, torch.Generator().manual_seed(1))
        self.expert = Held((6, 8), torch.float32, torch.Generator().manual_seed(10 + expert))
        self.expert.weight.allreduce = False

    def forward(self, dense: Tensor, expert: Tensor) -> Tensor:
        return self.dense(dense) + self.expert(expert)


def expert_grads(step: int, rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


@pytest.mark.parametrize("flat", [False, True], ids=["replicated", "flat"])
@pytest.mark.parametrize("expert_parallel", [2, 4])
def test_an_experts_gradient_is_the_mean_over_all_dense_replicas(expert_parallel: int, flat: bool) -> None:
    """Tokens of every rank come to an expert, and the loss is the mean over ranks: its gradient is the sum over the
    ranks that hold it, divided by all of them; also where one rank alone holds it. SGD without momentum shows it."""

    def rank_main(comm: ThreadComm) -> Tensor:
        expert_dp = worlds[comm.rank % expert_parallel][comm.rank // expert_parallel]
        dense = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=dense, expert=Axes(dp=expert_dp, tp=Alone()), everyone=comm)
        net = Mixture(comm.rank % expert_parallel)
        start = net.expert.weight.detach().clone()
        sgd = config(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=flat)
        optimizer = get_optimizer(sgd, [net], {}, pg_collection=roles)
        net(torch.zeros(5, 9), expert_grads(0, comm.rank)).backward()
        norm = optimizer.step().grad_norm
        return torch.cat([((start - net.expert.weight.detach()) / 0.02).flatten(), torch.tensor([norm])])

    worlds = [World(4 // expert_parallel).comms() for _ in range(expert_parallel)]
    ranks = run_threads(4, rank_main)
    means = [
        sum(expert_grads(0, rank) for rank in range(4) if rank % expert_parallel == expert) / 4
        for expert in range(expert_parallel)
    ]
    norm = sum(mean.double().square().sum() for mean in means).sqrt().item()
    for rank, found in enumerate(ranks):
        # The difference of two weights near 1, divided by lr: 2**-24 / 0.02.
        torch.testing.assert_close(found[:-1].view(6, 8), means[rank % expert_parallel], rtol=0, atol=1e-5)
        assert found[-1].item() == pytest.approx(norm, rel=1e-6)
