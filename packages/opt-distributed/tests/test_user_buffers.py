"""`nccl_ub`: buffers from a pool of NCCL memory. The calls to torch and NCCL are recorded by a double."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_net import shard_of
from processes import world_of_one
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed import ProcessGroupError, run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles, TorchComm, user_buffers
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.comm.user_buffers import nccl_backend
from opt_distributed.layout import LayoutError

CONFIG = DistributedDataParallelConfig(use_distributed_optimizer=True, nccl_ub=True)
LOCAL = replace(CONFIG, disable_symmetric_registration=True)


@dataclass
class Pool:
    """A `torch.cuda.MemPool` that notes what was allocated in it."""

    allocator: object
    tensors: list[Tensor] = field(default_factory=list)
    is_expandable: bool = False

    def snapshot(self) -> list[dict[str, Any]]:
        return [{"is_expandable": self.is_expandable}]


@dataclass
class Backend:
    """The part of `ProcessGroupNCCL` that registers memory: of a torch with or without symmetric registration."""

    knows_symmetric: bool = True
    mem_allocator: object = "ncclMemAlloc"
    registered: list[tuple[int, bool]] = field(default_factory=list)  # tensors in the pool, symmetric

    def register_mem_pool(self, pool: Pool, **options: bool) -> None:
        if options and not self.knows_symmetric:
            raise TypeError("incompatible function arguments")
        self.registered.append((len(pool.tensors), options.get("symm", False)))


@dataclass
class Double:
    """What a run of a wrapper recorded."""

    pools: list[Pool] = field(default_factory=list)
    backends: dict[int, Backend] = field(default_factory=dict)  # by id of the group
    knows_symmetric: bool = True
    is_expandable: bool = False

    def backend_of(self, comm: Comm, device: torch.device) -> Backend:
        return self.backends.setdefault(id(comm), Backend(self.knows_symmetric))

    def make_pool(self, allocator: object) -> Pool:
        self.pools.append(Pool(allocator, is_expandable=self.is_expandable))
        return self.pools[-1]

    @contextmanager
    def use_pool(self, pool: Pool, device: torch.device) -> Iterator[None]:
        zeros = torch.zeros

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            pool.tensors.append(zeros(*args, **kwargs))
            return pool.tensors[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "zeros", recorded)
            yield


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    made = Double()
    monkeypatch.setattr(user_buffers, "nccl_backend", made.backend_of)
    monkeypatch.setattr(torch.cuda, "MemPool", made.make_pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", made.use_pool)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


def group() -> RecordingComm:
    """A group of one rank that is not `Alone`, so that its buffers are registered."""
    return RecordingComm(Alone())


def roles(comm: Comm, *, experts: Comm | None = None, inter: Comm | None = None) -> Roles:
    dense = Axes(dp=comm, tp=Alone(), inter=inter or Alone())
    expert = Axes(dp=experts or comm, tp=Alone(), inter=inter or Alone())
    return Roles(dense=dense, expert=expert, everyone=comm)


def with_an_expert() -> nn.ModuleDict:
    model = nn.ModuleDict({"expert": nn.Linear(3, 3), "dense": nn.Linear(4, 4)})
    for param in model["expert"].parameters():
        param.allreduce = False  # type: ignore[assignment]
    return model


def test_buffers_come_from_a_pool_registered_with_the_group(double: Double) -> None:
    comm = group()
    ddp = DistributedDataParallel(CONFIG, nn.Linear(4, 4), groups=roles(comm))
    (pool,) = double.pools
    (buffer,) = ddp.synced_buffers
    assert pool.allocator == "ncclMemAlloc"
    in_pool = {tensor.data_ptr() for tensor in pool.tensors}
    assert in_pool == {buffer.memory.grad_data.data_ptr(), buffer.memory.param_data.data_ptr()}  # type: ignore[union-attr]
    assert double.backends[id(comm)].registered == [(2, True)]  # after both were allocated
    assert comm.of("all_reduce")  # without which torch's group has no communicator to register with


@pytest.mark.parametrize(("config", "symmetric"), [(CONFIG, True), (LOCAL, False)], ids=["symmetric", "local"])
def test_registration_is_symmetric_unless_disabled(
    double: Double, config: DistributedDataParallelConfig, symmetric: bool
) -> None:
    comm = group()
    DistributedDataParallel(config, nn.Linear(4, 4), groups=roles(comm))
    assert double.backends[id(comm)].registered == [(2, symmetric)]


def test_each_family_has_a_pool_registered_with_all_groups_that_reduce_it(double: Double) -> None:
    dense, experts, inter = group(), group(), group()
    DistributedDataParallel(CONFIG, with_an_expert(), groups=roles(dense, experts=experts, inter=inter))
    assert len(double.pools) == 2
    assert [len(double.backends[id(comm)].registered) for comm in (dense, experts, inter)] == [1, 1, 2]


def test_training_in_registered_memory_gives_the_same_bits(double: Double) -> None:
    def train(config: DistributedDataParallelConfig) -> Tensor:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(config, nn.Linear(4, 4), groups=roles(group()))
        for _ in range(2):
            ddp(torch.ones(2, 4)).square().sum().backward()
            ddp.finish_grad_sync()
            for buffer in ddp.synced_buffers:
                for index in range(len(buffer.plan.layout.buckets)):
                    shard_of(buffer.memory, index, 0).add_(buffer.memory.result(index, 0), alpha=-0.1)
                buffer.publish_()
            ddp.zero_grad_buffer()
        return ddp.module.weight.detach().clone()

    assert torch.equal(train(CONFIG), train(replace(CONFIG, nccl_ub=False)))


def test_a_world_of_one_rank_has_nothing_to_register(double: Double) -> None:
    DistributedDataParallel(CONFIG, nn.Linear(4, 4), groups=roles(Alone()))
    assert not double.pools
    assert not double.backends


def test_a_torch_without_symmetric_registration_is_refused(double: Double) -> None:
    double.knows_symmetric = False
    with pytest.raises(ProcessGroupError, match=r"set disable_symmetric_registration=True, or install torch 2\.9"):
        DistributedDataParallel(CONFIG, nn.Linear(4, 4), groups=roles(group()))
    DistributedDataParallel(LOCAL, nn.Linear(4, 4), groups=roles(group()))


def test_expandable_segments_are_refused(double: Double) -> None:
    double.is_expandable = True
    with pytest.raises(ProcessGroupError, match="remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"):
        DistributedDataParallel(CONFIG, nn.Linear(4, 4), groups=roles(group()))
    assert all(not backend.registered for backend in double.backends.values())


def test_registered_gradients_are_not_freed(double: Double) -> None:
    ddp = DistributedDataParallel(CONFIG, nn.Linear(4, 4), groups=roles(group()))
    with pytest.raises(ValueError, match="nccl_ub=True: gradients are in registered memory"):
        ddp.offload_grad_buffers()
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.finish_grad_sync()


def test_groups_of_other_kinds_are_refused_on_every_rank() -> None:
    def wrap(comm: ThreadComm) -> str:
        with pytest.raises((ProcessGroupError, LayoutError)) as caught:
            DistributedDataParallel(CONFIG, nn.Linear(4, 4), groups=roles(comm))
        return str(caught.value)

    message = "with process groups of backend 'nccl', but collectives of this group use ThreadComm; set nccl_ub=False"
    assert all(message in found for found in run_threads(2, wrap))


# --- which backends are accepted: a real gloo group of one rank, and stand-ins for NCCL's -----------------------------


@pytest.fixture
def gloo() -> Iterator[dist.ProcessGroup]:
    with world_of_one() as group:
        yield group


def test_gloo_is_refused_by_name(gloo: dist.ProcessGroup) -> None:
    with pytest.raises(ProcessGroupError, match="parameters are on cpu and this group uses gloo; set nccl_ub=False"):
        DistributedDataParallel(CONFIG, nn.Linear(4, 4), groups=roles(TorchComm(gloo)))
    with pytest.raises(ProcessGroupError, match="backend 'nccl', but this group uses gloo; set nccl_ub=False"):
        nccl_backend(TorchComm(gloo), torch.device("cuda"))


def test_a_groups_own_allocator_is_refused(gloo: dist.ProcessGroup) -> None:
    own = TorchComm(gloo, allocate=lambda numel, *, dtype, device: torch.zeros(numel, dtype=dtype, device=device))
    with pytest.raises(ProcessGroupError, match=re.escape("TorchComm(group, allocate=...) allocates the buffers")):
        nccl_backend(own, torch.device("cuda"))


class Registers:
    """torch 2.6's NCCL backend."""

    def register_mem_pool(self, pool: object) -> None: ...


def test_a_torch_without_an_allocator_of_nccl_memory_is_refused(gloo: dist.ProcessGroup) -> None:
    comm = TorchComm(gloo)
    comm.group = StandIn(Registers())  # type: ignore[assignment]
    with pytest.raises(ProcessGroupError, match="has no allocator of NCCL memory; set nccl_ub=False, or install torch"):
        nccl_backend(comm, torch.device("cuda"))
    backend = Backend()
    comm.group = StandIn(backend)  # type: ignore[assignment]
    assert nccl_backend(comm, torch.device("cuda")) is backend


@dataclass
class StandIn:
    """A process group with this backend."""

    backend: object

    def _get_backend(self, device: torch.device) -> object:
        return self.backend
