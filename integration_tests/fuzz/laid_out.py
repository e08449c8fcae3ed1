"""Models whose parameters torch lays out as DTensors: FSDP2, HSDP, tensor-parallel plans, and both."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fuzz.cases import Case, Setup


def lay_out(case: Case, setup: Setup, net: nn.Module) -> None:
    """Makes DTensors of the parameters of `net`, each in a module of its name."""
    grid = setup.grid
    match setup.layout:
        case "fsdp2":
            _shard(net, init_device_mesh("cpu", (grid.dp,), mesh_dim_names=("dp",)))
        case "hsdp":
            sizes = (2, grid.dp // 2)
            _shard(net, init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")))
        case "tp_plan":
            mesh = init_device_mesh("cpu", (grid.dp, grid.tp), mesh_dim_names=("dp", "tp"))
            _cut(case, net, mesh["tp"])
        case "fsdp2_x_tp":
            mesh = init_device_mesh("cpu", (grid.dp, grid.tp), mesh_dim_names=("dp", "tp"))
            _cut(case, net, mesh["tp"])
            _shard(net, mesh["dp"])


def _shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each module separately, because FSDP2 requires one dtype per group."""
    for module in net.children():
        fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _cut(case: Case, net: nn.Module, mesh: DeviceMesh) -> None:
    """What tensor parallelism cuts becomes a DTensor; this rank's part is there already."""
    for param in case.params:
        module: Any = getattr(net, param.name, None)
        if module is not None and param.cut is not None:
            local = module.weight.detach()
            cut = DTensor.from_local(local, mesh, [Shard(param.cut)], run_check=False)
            module.weight = nn.Parameter(cut, requires_grad=module.weight.requires_grad)


def like(grad: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of a gradient as a DTensor where the weight is one."""
    if not isinstance(weight, DTensor):
        return grad
    return DTensor.from_local(grad, weight.device_mesh, weight.placements, run_check=False)


def local(product: Tensor) -> Tensor:
    """The part that this rank has of a product."""
    return product.to_local() if isinstance(product, DTensor) else product


@torch.no_grad()
def whole(weight: Tensor) -> Tensor:
    """The whole parameter; all ranks call it together."""
    found = weight.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()
