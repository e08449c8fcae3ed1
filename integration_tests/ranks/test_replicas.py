"""Replicas that start from different weights are refused on every rank, or broadcast; threads."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_grid import Net as Parts
from expert_grid import Place, run_grid
from parity import Net, grads_of, roles_over
from processes import refusal
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm
from opt_stack import get_optimizer

REPLICATED = OptimizerConfig(lr=0.01)
CONFIGS = {
    "replicated": REPLICATED,
    "flat": OptimizerConfig(lr=0.01, use_distributed_optimizer=True),
    "layer-wise": OptimizerConfig(optimizer="muon", lr=0.01, use_layer_wise_distributed_optimizer=True),
    "wrapped": REPLICATED,
}
MESSAGE = (
    "ranks hold different values of 'second.weight': [2] differ from rank 0, but copies must start equal; call "
    "torch.manual_seed with the same seed on all ranks before the model is made, load the same checkpoint, or pass "
    "broadcast_params=True to get_optimizer (or DistributedDataParallel) to start from the first rank's values"
)
Change = Callable[[Tensor], object]
CHANGES: dict[str, Change] = {
    "another value": lambda weight: weight.view(-1)[3].add_(1e-6),
    "two elements exchanged": lambda weight: weight.view(-1)[:2].copy_(weight.view(-1)[:2].flip(0).clone()),
    "the sign of a zero": lambda weight: weight.view(-1)[0].copy_(torch.tensor(-0.0)),
    "a NaN": lambda weight: weight.view(-1)[5].fill_(math.nan),
}


def wrap(net: nn.Module, groups: Any, **arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(DistributedDataParallelConfig(), net, groups=groups, **arguments)


def built(net: nn.Module, roles: Any, **options: Any) -> str:
    """The refusal of an optimizer, or "built"."""
    return refusal(lambda: get_optimizer(REPLICATED, [net], {}, pg_collection=roles, **options))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("spread", CONFIGS)
def test_replicas_with_other_weights_are_refused_on_every_rank(spread: str, change: str) -> None:
    @torch.no_grad()
    def rank_main(comm: Comm) -> str:
        net = Net(torch.float32)
        roles = roles_over(comm)
        net.second.weight[0, 0] = 0.0
        if comm.rank == 2:
            CHANGES[change](net.second.weight)
        model = wrap(net, roles) if spread == "wrapped" else net
        return refusal(lambda: get_optimizer(CONFIGS[spread], [model], pg_collection=roles))

    assert set(run_threads(3, rank_main)) == {MESSAGE}


def test_modules_in_another_order_are_refused_by_name() -> None:
    def rank_main(comm: Comm) -> str:
        names = ("first", "second", "third") if comm.rank == 0 else ("first", "third", "second")
        net = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
        return built(net, roles_over(comm), broadcast_params=True)

    for text in run_threads(2, rank_main):
        assert "another order: where rank 0 has second.weight, rank 1 has third.weight" in text


@pytest.mark.parametrize("spread", CONFIGS)
def test_broadcast_params_copies_the_first_replicas_weights(spread: str) -> None:
    def rank_main(comm: Comm) -> dict[str, Tensor]:
        net = Net(torch.float32)
        roles = roles_over(comm)
        is_wrapped = spread == "wrapped"
        with torch.no_grad():
            for param in net.parameters():
                param.add_(comm.rank)
        model: nn.Module = wrap(net, roles, broadcast_params=True) if is_wrapped else net
        optimizer = get_optimizer(CONFIGS[spread], [model], pg_collection=roles, broadcast_params=not is_wrapped)
        model(grads_of(0, 0, 2)).backward()
        optimizer.step()
        return {name: param.detach().clone() for name, param in net.named_parameters()}

    (first, second) = run_threads(2, rank_main)
    (alone,) = run_threads(1, rank_main)
    for name, weight in first.items():
        assert torch.equal(second[name], weight)
        torch.testing.assert_close(weight, alone[name], rtol=1e-5, atol=1e-6)


# The copy, the tensor-parallel rank that has it otherwise, how, and whether values are broadcast.
ADD: Change = lambda weight: weight.data.add_(1)
FREEZE: Change = lambda weight: weight.requires_grad_(False)
COPIES: list[tuple[str, int, Change, str, bool]] = [
    *((name, 1, ADD, f"different values of '{name}", False) for name in ("norm", "bias")),
    *(("norm", at, FREEZE, f"is not trained on ranks [{at}] of [0, 1]", b) for at in (0, 1) for b in (False, True)),
]


@pytest.mark.parametrize(("name", "rank", "change", "message", "broadcasts"), COPIES)
def test_copies_that_differ_by_rank_are_refused_on_every_rank(
    name: str, rank: int, change: Change, message: str, broadcasts: bool
) -> None:
    """Of a dense norm, or an expert's bias. One that is not trained would stay, and be updated on the other rank."""

    def rank_main(place: Place) -> str:
        net = Parts(place)
        if place.tp.rank == rank:
            change({key.rstrip("01"): module for key, module in net.named_children()}[name].weight)
        return built(net, place.roles, broadcast_params=broadcasts)

    reported = run_grid(rank_main, tp=2, ep=2, etp=2)
    assert "built" not in reported
    assert any(message in of_rank for of_rank in reported)


COPIED = ("base.weight", "norm.running_mean", "norm.num_batches_tracked", "rope")


class Partly(nn.Module):
    """Frozen weights and buffers, dense, cut and of an expert; values differ by `add` where copies are expected."""

    @torch.no_grad()
    def __init__(self, place: Place, add: float) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(3)  # ranks are threads, which share torch's
        self.base = nn.Linear(6, 5, bias=False)
        self.column = nn.Linear(6, 4)
        self.expert = nn.BatchNorm1d(4)
        self.norm = nn.BatchNorm1d(5)
        self.base.weight.requires_grad_(False)
        self.register_buffer("rope", torch.polar(torch.ones(3, 2), torch.rand(3, 2, generator=numbers)))
        self.register_buffer("scratch", torch.full((3,), float(place.world.rank)), persistent=False)
        self.base.weight.uniform_(generator=numbers)
        for name in COPIED:
            self.state_dict(keep_vars=True)[name].add_(int(add))
        for param in self.column.parameters():
            param.requires_grad_(False).fill_(10.0 + place.tp.rank).tensor_model_parallel = True
        for param in self.expert.parameters():
            param.allreduce = False
        self.column.weight.add_(add * (place.dp.rank > 0))
        self.expert.running_mean.fill_(20.0 + place.experts[0]).add_(add * (place.expert_dp.rank > 0))


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_differing_frozen_weights_and_buffers_are_refused_on_all(name: str, wrapped: bool) -> None:
    """The frozen bases of LoRA were 0.66 apart, without a word."""

    def rank_main(place: Place) -> str:
        net = Partly(place, 0.0)
        if place.world.rank == 3:
            with torch.no_grad():
                net.state_dict(keep_vars=True)[name].view(-1)[-1].add_(1)
        return built(wrap(net, place.roles) if wrapped else net, place.roles)

    for message in run_grid(rank_main, tp=2, ep=2, etp=1):
        assert f"different values of '{name}'" in message
        assert "broadcast_params=True" in message


@pytest.mark.parametrize("way", ["plain", "wrapped", "method"])
def test_broadcast_params_copies_frozen_weights_and_buffers(way: str) -> None:
    """Parts of a cut matrix, and buffers of other experts, are left as they are."""

    def rank_main(place: Place) -> dict[str, Tensor]:
        net = Partly(place, float(place.world.rank))
        roles = place.roles
        model: nn.Module = net if way == "plain" else wrap(net, roles, broadcast_params=way == "wrapped")
        if way == "method":
            model.broadcast_params()
        assert built(model, roles, broadcast_params=way == "plain") == "built"
        assert net.scratch.tolist() == [place.world.rank] * 3
        assert (net.column.weight == 10.0 + place.tp.rank).all()
        assert (net.expert.running_mean == 20.0 + place.experts[0]).all()
        return {name: net.state_dict()[name].clone() for name in COPIED}

    first, *others = run_grid(rank_main, tp=2, ep=2, etp=1)
    assert all(torch.equal(first[name], other[name]) for other in others for name in COPIED)


BUFFERS: dict[str, Callable[[int], Tensor]] = {
    "expanded": lambda rank: torch.tensor([float(rank)]).expand(4),
    "sparse": lambda rank: torch.diag(torch.full((3,), rank + 1.0)).to_sparse(),
    "quantized": lambda rank: torch.quantize_per_tensor(torch.full((3,), float(rank)), 0.1, 0, torch.qint8),
    "zeros of another shape": lambda rank: torch.zeros(rank + 1),
    "zeros of another dtype": lambda rank: torch.zeros(3, dtype=(torch.float32, torch.float64)[rank % 2]),
}


@pytest.mark.parametrize("broadcast", [False, True], ids=["compared", "broadcast"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_other_layouts_are_copied_or_refused_on_all(kind: str, broadcast: bool) -> None:
    """A quantized buffer ended the process, an expanded one raised on some ranks only, and others were not compared."""

    def rank_main(comm: Comm) -> tuple[str, list[float]]:
        net = nn.Linear(2, 2)
        nn.init.ones_(net.weight)
        nn.init.zeros_(net.bias)
        net.register_buffer("table", BUFFERS[kind](comm.rank))
        outcome = built(net, roles_over(comm), broadcast_params=broadcast)
        if outcome != "built":
            return outcome, []
        return outcome, (net.table.to_dense() if net.table.is_sparse else net.table).flatten().tolist()

    first, *others = run_threads(3, rank_main)
    assert all(other == first for other in others)
    assert (first[0] == "built") == (broadcast and kind in ("expanded", "sparse"))
    assert first[0] == "built" or "different values of 'table'" in first[0]
