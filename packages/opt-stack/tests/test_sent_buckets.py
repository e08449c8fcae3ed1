"""Layer-wise: the first bucket of updated parameters is sent while later ones are updated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from grids import LateComm
from parity import roles_over
from recording_comm import Call, RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import CollectiveError, run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.quantized import quantize_linears_
from opt_stack import Optimizer, get_optimizer

CONFIG = OptimizerConfig(
    optimizer="muon", lr=0.1, clip_grad=0.0, use_layer_wise_distributed_optimizer=True, muon_fp32_matmul_prec="highest"
)


class Net(nn.Module):
    """Six matrices, and a vector that Adam updates."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.bias = nn.Parameter(torch.zeros(8))
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(8, 8, generator=numbers)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias
        for weight in self.layers:
            x = torch.tanh(x @ weight)
        return x


def built(comm: Any, kind: str) -> tuple[nn.Module, Optimizer]:
    net: nn.Module = Net()
    roles = roles_over(comm)
    if kind != "plain":
        overlap = kind == "before use"
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=64
        )
        net = DistributedDataParallel(ddp, net, groups=roles, optimizer_config=CONFIG)
    return net, get_optimizer(CONFIG, [net], {}, pg_collection=roles)


def backward(net: nn.Module, optimizer: Optimizer, step: int, rank: int) -> None:
    if isinstance(net, DistributedDataParallel):
        net.zero_grad_buffer()
    optimizer.zero_grad()
    numbers = torch.Generator().manual_seed(10 * step + rank)
    net(torch.randn(4, 8, generator=numbers)).square().mean().backward()


class Followed:
    """A rule that calls `then` with the number of matrices after each call."""

    def __init__(self, rule: Any, then: Callable[[int], None]):
        self._rule = rule
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def update_(self, batches: Any, **given: Any) -> None:
        self._rule.update_(batches, **given)
        self._then(sum(len(batch.works) for batch in batches))


def unit_of(optimizer: Optimizer) -> Any:
    return next(unit for unit in optimizer.stepper.units if unit.name == "muon")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opt_stack.planning.design.default_bucket_size", lambda num_ranks: 64)


KINDS = ["plain", "in the step", "before use"]


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_are_sent_between_updates(kind: str) -> None:
    """Three buckets of two matrices, one of each rank, after one of the vector in a wrapper: all gathers started after
    the last update."""

    def events(comm: ThreadComm) -> list[str]:
        recorded = RecordingComm(comm)
        net, optimizer = built(recorded, kind)
        backward(net, optimizer, 0, comm.rank)
        muon = unit_of(optimizer)
        muon.rule = Followed(muon.rule, lambda num: recorded.calls.append(Call(f"update {num}", 0, 0)))
        optimizer.step()
        kinds = [call.kind for call in recorded.calls]
        return kinds[kinds.index("update 1") :]

    for found in run_threads(2, events):
        last_update = len(found) - 1 - found[::-1].index("update 1")
        num_before = found[:last_update].count("all_gather")
        assert (found.count("update 1"), num_before) == (3, 2 + (kind != "plain")), found
        assert found[-1] == "all_gather"


@pytest.mark.parametrize("kind", KINDS)
def test_training_has_the_bits_of_one_rank_that_sends_nothing(kind: str) -> None:
    """Late collectives: what was read before it came would be NaN."""

    def train(comm: Any) -> list[Tensor]:
        net, optimizer = built(comm, kind if comm.size > 1 else "plain")
        for step in range(3):
            backward(net, optimizer, step, 0)
            optimizer.step()
        if isinstance(net, DistributedDataParallel):
            net.finish_param_sync()
        return [param.detach().clone() for param in net.parameters()]

    (expected,) = run_threads(1, train)
    for found in run_threads(2, lambda comm: train(LateComm(comm))):
        for weight, other in zip(found, expected, strict=True):
            torch.testing.assert_close(weight, other, rtol=0, atol=0)


def test_a_read_within_the_update_starts_no_gather() -> None:
    """Buckets that were not updated yet would be sent with the values of the last step, and again."""

    def train(comm: ThreadComm, *, reads: bool) -> tuple[int, list[Tensor]]:
        recorded = RecordingComm(comm)
        net, optimizer = built(recorded, "before use")
        muon = unit_of(optimizer)
        if reads:
            muon.rule = Followed(muon.rule, lambda num: list(net.parameters()))
        for step in range(2):
            backward(net, optimizer, step, comm.rank)
            optimizer.step()
        return len(recorded.of("all_gather")), [param.detach().clone() for param in net.parameters()]

    found = run_threads(2, lambda comm: train(comm, reads=True))
    expected = run_threads(2, lambda comm: train(comm, reads=False))
    for (count, weights), (other_count, others) in zip(found, expected, strict=True):
        assert count == other_count
        assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_a_failed_update_left_apart_are_refused(kind: str) -> None:
    """What a broken step had begun to send must not count as sent in the next one."""

    def train(comm: ThreadComm) -> None:
        net, optimizer = built(comm, kind)
        backward(net, optimizer, 0, comm.rank)
        muon = unit_of(optimizer)
        updated = []

        def fail(num: int) -> None:
            updated.append(num)
            if len(updated) == 2:
                raise ArithmeticError

        muon.rule = Followed(muon.rule, fail)
        with pytest.raises(ArithmeticError):
            optimizer.step()
        backward(net, optimizer, 1, comm.rank)
        with pytest.raises(ValueError, match="ranks hold different values of 'layers"):
            optimizer.step()

    run_threads(2, train)


class Failing(RecordingComm):
    """No gather starts once it `fails`, as when a peer is gone."""

    fails = False

    def all_gather_(self, *tensors: Tensor, **options: Any) -> Any:
        if self.fails:
            raise RuntimeError("connection closed by peer")
        return self.inner.all_gather_(*tensors, **options)


def test_no_bucket_is_read_after_a_gather_that_did_not_start() -> None:
    """Only the first bucket raised: the others, which were never sent, were read with the values of the last step."""

    def train(comm: ThreadComm) -> None:
        failing = Failing(comm)
        net, optimizer = built(failing, "before use")
        backward(net, optimizer, 0, comm.rank)
        failing.fails = True
        with pytest.raises(CollectiveError, match="closed by peer"):
            optimizer.step()
        layers = net.get_submodule("module.layers")
        for name in layers._parameters:
            with pytest.raises(CollectiveError, match="closed by peer"):
                layers.get_parameter(name)

    run_threads(2, train)


class Mixed(nn.Module):
    """Two matrices in fp8, one of each rank, and three in bf16: one rank has none in their second bucket."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.in_fp8 = nn.Sequential(*[nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(2)])
        for linear in self.in_fp8:
            nn.init.normal_(linear.get_parameter("weight"), generator=numbers)
        quantize_linears_(self.in_fp8, "delayed")
        made = (torch.randn(8, 8, generator=numbers, dtype=torch.bfloat16) for _ in range(3))
        self.in_bf16 = nn.ParameterList(map(nn.Parameter, made))


def test_buckets_are_sent_before_fp8_weights_on_every_rank() -> None:
    """A rank without early buckets reduced the scales first, while the other one gathered: a deadlock."""

    def train(comm: ThreadComm) -> list[Tensor]:
        net = Mixed()
        config = replace(CONFIG, bf16=True, fp8_recipe="delayed")
        optimizer = get_optimizer(config, [net], {}, pg_collection=roles_over(comm))
        for param in net.parameters():
            param.grad = torch.ones(param.shape, dtype=torch.bfloat16)
        assert optimizer.step().success
        return [param.detach().to(torch.float32) for param in net.parameters()]

    first, second = run_threads(2, train)
    assert all(map(torch.equal, first, second))
