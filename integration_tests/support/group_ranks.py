"""Rank programs for the tests of process groups; importable, so that spawned processes find them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import mesh_of, refusal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm import Alone, Axes, Roles, TorchComm, world
from opt_stack import DistributedDataParallel, ProcessGroups, Registry, get_optimizer
from opt_stack.planning.plan import Draft
from opt_stack.planning.ranks import check_devices

STEPS = 5


class Mlp(nn.Module):
    """Two matrices that a tensor-parallel plan shards, and a norm that it replicates."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    zeros: list[int | None]


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(
        **{"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.1, "log_num_zeros_in_grad": True, **changes}
    )


def train_alone(made: OptimizerConfig) -> Trained:
    """One process, the joined batch."""
    return _train(made, Mlp(), lambda step: batch(step), {})


class Layout(NamedTuple):
    """A mesh, how the model is laid out on it, and the groups that the factory gets."""

    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    lay_out: Callable[[nn.Module, DeviceMesh], None]
    given: Callable[[DeviceMesh], dict[str, Any]] = lambda mesh: {}


def _tp(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], PLAN)


def _tp_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    _tp(model, mesh)
    fully_shard(model, mesh=mesh["dp"])


def _fsdp_inside(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["dp_shard"])


def _hsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])


def _unchanged(model: nn.Module, mesh: DeviceMesh) -> None: ...


def _by_role(mesh: DeviceMesh) -> dict[str, Any]:
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    return {"pg_collection": ProcessGroups(dp=dp, expt_dp=dp, mp=tp, tp_ep_pp=tp, tp=tp)}


def _mesh(mesh: DeviceMesh) -> dict[str, Any]:
    return {"mesh": mesh}


LAYOUTS: Mapping[str, Layout] = {
    "tp x dp": Layout((2, 2), ("dp", "tp"), _tp),
    "tp x dp, groups by role": Layout((2, 2), ("dp", "tp"), _tp, _by_role),
    "tp x dp, mesh": Layout((2, 2), ("dp", "tp"), _tp, _mesh),
    "dp x tp, tp outermost": Layout((2, 2), ("tp", "dp"), _tp),
    "tp x fsdp": Layout((2, 2), ("dp", "tp"), _tp_fsdp),
    "tp x fsdp, mesh": Layout((2, 2), ("dp", "tp"), _tp_fsdp, _mesh),
    "tp x cp": Layout((2, 2), ("cp", "tp"), _tp),
    "hsdp": Layout((2, 2), ("dp_replicate", "dp_shard"), _hsdp),
    "fsdp in each replica": Layout((2, 2), ("dp_replicate", "dp_shard"), _fsdp_inside),
    "plain x tp axis, mesh": Layout((2, 2), ("dp", "tp"), _unchanged, _mesh),
    "plain, dp x cp": Layout((2, 2), ("dp", "cp"), _unchanged, _mesh),
}


def train(name: str, made: OptimizerConfig) -> Trained:
    """One rank: its part of the batch along the axes that split samples."""
    layout = LAYOUTS[name]
    mesh = mesh_of(*layout.sizes, names=layout.axes)
    model = Mlp()
    layout.lay_out(model, mesh)
    data = [axis for axis in layout.axes if axis != "tp"]
    place, count = 0, 1
    for axis in data:
        place = place * mesh[axis].size() + mesh.get_local_rank(axis)
        count *= mesh[axis].size()
    return _train(made, model, lambda step: batch(step).chunk(count)[place], layout.given(mesh))


def _train(
    made: OptimizerConfig, model: nn.Module, batch_of: Callable[[int], Tensor], given: dict[str, Any]
) -> Trained:
    optimizer = get_optimizer(made, [model], {}, **given)
    results = []
    for step in range(STEPS):
        model(batch_of(step)).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    weights = {name: _full(param.detach()) for name, param in model.named_parameters()}
    return Trained(weights, [r.grad_norm for r in results], [r.num_zeros_in_grad for r in results])


def _full(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.clone()


def skip_the_matrices(made: OptimizerConfig) -> Trained:
    """A tensor-parallel plan on two replicas; the first uses the matrices in every other step, the second never."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = Mlp()
    _tp(model, mesh)
    return _with_gaps(made, model, [mesh.get_local_rank("dp")])


def skip_the_matrices_alone(made: OptimizerConfig) -> Trained:
    """The same in one process, which takes the mean of both replicas' losses."""
    return _with_gaps(made, Mlp(), [0, 1])


def _with_gaps(made: OptimizerConfig, model: Any, replicas: list[int]) -> Trained:
    optimizer = get_optimizer(made, [model], {})
    results = []
    for step in range(STEPS):
        for replica in replicas:
            x = batch(step).chunk(2)[replica]
            uses_matrices = step % 2 == 0 and replica == 0
            loss = model(x) if uses_matrices else model.norm(x).pow(4).mean()
            (loss / len(replicas)).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    weights = {name: _full(param.detach()) for name, param in model.named_parameters()}
    return Trained(weights, [r.grad_norm for r in results], [r.num_zeros_in_grad for r in results])


# --- refusals -------------------------------------------------------------------------------------------------------


def _marked(**attributes: Any) -> nn.Module:
    model = Mlp()
    for name, value in attributes.items():
        setattr(model.up.weight, name, value)
    return model


def _expert_on_rank_1() -> nn.Module:
    return _marked(allreduce=False) if dist.get_rank() == 1 else Mlp()


def _tensor_parallel() -> nn.Module:
    return _marked(tensor_model_parallel=True, partition_dim=0)


def _pairs(model: nn.Module) -> nn.Module:
    """Tensor parallelism on a mesh of two ranks that is not a slice of a larger mesh."""
    group, _ = dist.new_subgroups(2)
    parallelize_module(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), PLAN)
    return model


def _mesh_of(*axes: str, sizes: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=axes)


class OfMegatron:
    """Megatron-Core's collection of process groups: attributes, of which some may be missing."""

    def __init__(self, **groups: Any):
        vars(self).update(groups)


def _roles_on_rank_1() -> Roles | None:
    axes = Axes(dp=world(), tp=Alone())
    return Roles(dense=axes, expert=axes, everyone=world()) if dist.get_rank() == 1 else None


def _wrapped(model: nn.Module, **given: Any) -> Any:
    return DistributedDataParallel(DistributedDataParallelConfig(), model, **given)


BUILDS: Mapping[str, Callable[[], Any]] = {
    "tensor parallel": lambda: get_optimizer(config(), [_tensor_parallel()]),
    "tensor parallel, wrapped": lambda: _wrapped(_tensor_parallel()),
    "an expert on one rank": lambda: get_optimizer(config(), [_expert_on_rank_1()]),
    "an expert on one rank, wrapped": lambda: _wrapped(_expert_on_rank_1()),
    "uninitialized on one rank": lambda: get_optimizer(config(), [nn.LazyLinear(4) if dist.get_rank() == 1 else Mlp()]),
    "broadcast on one rank": lambda: get_optimizer(config(), [Mlp()], broadcast_params=dist.get_rank() == 1),
    "unknown axis": lambda: get_optimizer(config(), [Mlp()], mesh=_mesh_of("dp", "model")),
    "both": lambda: get_optimizer(config(), [Mlp()], mesh=_mesh_of("dp", "tp"), pg_collection=ProcessGroups(dp=None)),
    "groups on one rank": lambda: get_optimizer(config(), [Mlp()], pg_collection=_roles_on_rank_1()),
    "a mesh of its own": lambda: get_optimizer(config(), [_pairs(Mlp())]),
    "tp without its group": lambda: get_optimizer(
        config(),
        [_tensor_parallel()],
        pg_collection=ProcessGroups(dp=None, expt_dp=None, mp=dist.group.WORLD, tp_ep_pp=dist.group.WORLD),
    ),
    "megatron's collection of something else": lambda: get_optimizer(
        config(), [Mlp()], pg_collection=OfMegatron(dp="all")
    ),
    "megatron's collection": lambda: get_optimizer(
        config(),
        [Mlp()],
        pg_collection=OfMegatron(
            dp=dist.group.WORLD,
            dp_cp=dist.group.WORLD,
            expt_dp=dist.group.WORLD,
            mp=None,
            tp_ep_pp=None,
            hcp=[dist.group.WORLD],
            tp_dp_cp=dist.group.WORLD,
        ),
    ),
    "tensor parallel, mesh": lambda: get_optimizer(config(), [_tensor_parallel()], mesh=_mesh_of("dp", "tp")),
    "wrapped with a mesh, optimizer without": lambda: get_optimizer(
        config(), [_wrapped(_tensor_parallel(), mesh=_mesh_of("dp", "tp"))]
    ),
}


def build_all() -> dict[str, str]:
    """The message of each rank, by build."""
    return {name: refusal(build) for name, build in BUILDS.items()}


def broadcasts_in_pairs() -> list[int]:
    """This rank's values after a broadcast from each rank of its pair."""
    group, _ = dist.new_subgroups(2)
    comm = TorchComm(group)
    found = []
    for source in range(2):
        x = torch.tensor([dist.get_rank()])
        comm.broadcast_(x, src=source)
        found.append(int(x))
    return found


def device_of_a_rank_without_tensors() -> str:
    """The device of the step's statistics on a rank whose chunk holds no tensors."""
    model = nn.Identity() if dist.get_rank() == 1 else Mlp()
    return str(get_optimizer(config(), [model]).stepper.device)


def chunks_on_different_devices() -> str:
    """Each rank's error message if one of them has its model on another device."""
    device = "meta" if dist.get_rank() == 2 else "cpu"
    draft = Draft(config=OptimizerConfig(), chunks=[Mlp().to(device)], registry=Registry())
    check = check_devices(draft)
    return check.send(world().gather_objects(next(check)))
