"""`nccl_ub`: buffers from a pool of NCCL memory. The calls to torch and NCCL are recorded by a double."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_parallel_net import Config, over
from processes import world_of_one
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_distributed import ProcessGroupError, run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles, TorchComm, user_buffers
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.comm.user_buffers import nccl_backend
from opt_distributed.layout import LayoutError

CONFIG = Config(use_distributed_optimizer=True, nccl_ub=True)
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


def wrap(comm: Comm | None = None, config: Config = CONFIG) -> DistributedDataParallel:
    """By default over a group of one rank that is not `Alone`, so that its buffers are registered."""
    return DistributedDataParallel(config, nn.Linear(4, 4), groups=over(comm or RecordingComm(Alone())))


@pytest.mark.parametrize(("config", "symmetric"), [(CONFIG, True), (LOCAL, False)], ids=["symmetric", "local"])
def test_buffers_come_from_a_pool_registered_with_the_group(double: Double, config: Config, symmetric: bool) -> None:
    comm = RecordingComm(Alone())
    (buffer,) = wrap(comm, config).synced_buffers
    (pool,) = double.pools
    assert pool.allocator == "ncclMemAlloc"
    in_pool = {tensor.data_ptr() for tensor in pool.tensors}
    assert in_pool == {buffer.memory.grad_data.data_ptr(), buffer.memory.param_data.data_ptr()}  # type: ignore[union-attr]
    assert double.backends[id(comm)].registered == [(2, symmetric)]  # after both were allocated
    assert comm.of("all_reduce")  # without which torch's group has no communicator to register with


def test_a_familys_pool_is_registered_with_its_reducing_groups(double: Double) -> None:
    dense, experts, inter = (RecordingComm(Alone()) for _ in range(3))
    model = nn.ModuleDict({"expert": nn.Linear(3, 3), "dense": nn.Linear(4, 4)})
    for param in model["expert"].parameters():
        param.allreduce = False  # type: ignore[assignment]
    axes = [Axes(dp=comm, tp=Alone(), inter=inter) for comm in (dense, experts)]
    DistributedDataParallel(CONFIG, model, groups=Roles(dense=axes[0], expert=axes[1], everyone=dense))
    assert len(double.pools) == 2
    assert [len(double.backends[id(comm)].registered) for comm in (dense, experts, inter)] == [1, 1, 2]


def test_a_world_of_one_rank_has_nothing_to_register(double: Double) -> None:
    wrap(Alone())
    assert (double.pools, double.backends) == ([], {})


def test_what_torch_cannot_register_is_refused(double: Double) -> None:
    """And registered gradients are not freed."""
    with pytest.raises(ValueError, match="nccl_ub=True: gradients are in registered memory"):
        wrap().offload_grad_buffers()
    double.knows_symmetric = False
    with pytest.raises(ProcessGroupError, match=r"set disable_symmetric_registration=True, or install torch 2\.9"):
        wrap()
    wrap(config=LOCAL)
    double.is_expandable = True
    double.backends.clear()
    with pytest.raises(ProcessGroupError, match="remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"):
        wrap(config=LOCAL)
    assert all(not backend.registered for backend in double.backends.values())


def test_groups_of_other_kinds_are_refused_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> str:
        with pytest.raises((ProcessGroupError, LayoutError)) as caught:
            wrap(comm)
        return str(caught.value)

    message = "with process groups of backend 'nccl', but collectives of this group use ThreadComm; set nccl_ub=False"
    assert all(message in found for found in run_threads(2, rank_main))


def test_only_backends_that_register_cuda_memory_are_accepted() -> None:
    """A real gloo group of one rank, and stand-ins for NCCL's."""
    cuda = torch.device("cuda")
    with world_of_one() as gloo:
        comm = TorchComm(gloo)
        allocating = TorchComm(gloo, allocate=lambda n, **how: torch.zeros(n, **how))
        for other, device, message in (
            (comm, torch.device("cpu"), "parameters are on cpu and this group uses gloo; set nccl_ub=False"),
            (comm, cuda, "backend 'nccl', but this group uses gloo; set nccl_ub=False"),
            (allocating, cuda, r"TorchComm\(group, allocate=...\) allocates the buffers"),
        ):
            with pytest.raises(ProcessGroupError, match=message):
                nccl_backend(other, device)
        backend: Any = SimpleNamespace(register_mem_pool=None)  # of torch 2.6
        comm.group = SimpleNamespace(_get_backend=lambda device: backend)  # type: ignore[assignment]
        with pytest.raises(ProcessGroupError, match="has no allocator of NCCL memory; set nccl_ub=False, or install"):
            nccl_backend(comm, cuda)
        backend = Backend()
        assert nccl_backend(comm, cuda) is backend
