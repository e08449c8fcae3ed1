"""A model with fp8 experts on grids of ranks, trained on gradients known to the bit; a rank program that resumes it."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fp8_training import Stored, stored
from parity import Held
from torch import Tensor, nn
from tp_model import cut

from opt_checkpoint import ShardedTensor, load, save
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles, TorchComm
from opt_kernels.quantized import QuantizedTensor
from opt_stack import Optimizer, get_optimizer

EP = 2  # as many experts
STEPS = 3

# name: whole shape, the dim that tensor parallelism cuts; between squares of 128 and runs of 32
DENSE: Mapping[str, tuple[tuple[int, ...], int | None]] = {"column": ((256, 96), 0), "norm": ((64,), None)}
EXPERT: Mapping[str, tuple[tuple[int, ...], int | None]] = {"up": ((256, 64), 0), "down": ((64, 256), 1)}
SPREADS: Mapping[str, dict[str, Any]] = {
    "replicated": {},
    "flat": {"use_distributed_optimizer": True},
    "whole": {"optimizer": "muon", "muon_tp_mode": "duplicated", "use_layer_wise_distributed_optimizer": True},
}


class Place(NamedTuple):
    """Where a rank is; a process that holds everything has one replica and all experts."""

    tp: Comm
    roles: Roles
    experts: tuple[int, ...]
    replica: int  # of num_replicas of the dense parameters
    num_replicas: int


class Net(nn.Module):
    """A rank's part, in bf16, with the matrices `in_fp8`; `forward` takes its gradients by name."""

    def __init__(self, place: Place, recipe: str, in_fp8: Callable[[str], bool], *, seed: int = 0):
        super().__init__()
        self.place, self.in_fp8 = place, in_fp8
        for name, (shape, dim) in DENSE.items():
            self._add(name, shape, dim, recipe, seed=seed)
        for expert in place.experts:
            for name, (shape, dim) in EXPERT.items():
                weight = self._add(f"{name}{expert}", shape, dim, recipe, seed=seed + 1 + expert)
                weight.allreduce = False

    def axes_of(self, name: str) -> Axes:
        roles = self.place.roles
        return roles.expert if name[-1].isdigit() else roles.dense

    def _add(self, name: str, shape: Any, dim: int | None, recipe: str, *, seed: int) -> Any:
        tp = self.axes_of(name).tp
        held = Held(shape, torch.bfloat16, torch.Generator().manual_seed(seed))
        values = cut(held.weight.detach(), tp.rank, tp.size, dim=dim)
        quantises = values.dim() == 2 and self.in_fp8(name)
        held.weight = nn.Parameter(QuantizedTensor.of(values, recipe) if quantises else values)
        weight: Any = held.weight
        if dim is not None and tp.size > 1:
            weight.tensor_model_parallel, weight.partition_dim = True, dim
        self.add_module(name, held)
        return weight

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([module(grads[name]) for name, module in self.named_children()]).sum()

    def here(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole gradients. Ranks of TP that does not cut experts have half of the tokens each."""
        found = {}
        for name, _ in self.named_children():
            tp, tokens = self.axes_of(name).tp, self.axes_of(name).tp.size / self.place.tp.size
            whole = grads.get(name, torch.zeros({**DENSE, **EXPERT}[name.rstrip("0123456789")][0]))
            found[name] = cut(whole, tp.rank, tp.size, dim=dim_of(name)) * tokens
        return found

    def sharded(self) -> dict[str, ShardedTensor]:
        return dict(self._sharded())

    def _sharded(self) -> Iterator[tuple[str, ShardedTensor]]:
        for name, held in self.named_children():
            axes, dim = self.axes_of(name), dim_of(name)
            offsets = [] if dim is None else [(dim, axes.tp.rank, axes.tp.size)]
            replica = (axes.inter.rank, axes.tp.rank if dim is None else 0, axes.dp.rank)
            yield name, ShardedTensor.from_rank_offsets(name, held.weight, *offsets, replica_id=replica)


def dim_of(name: str) -> int | None:
    return {**DENSE, **EXPERT}[name.rstrip("0123456789")][1]


def whole_grads(step: int, replica: int) -> dict[str, Tensor]:
    """Gradients of one dense replica and its tokens, in 64ths: any mean over a power of two is exact."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    shapes = {name: shape for name, (shape, _) in DENSE.items()}
    shapes[f"up{replica % EP}"], shapes[f"down{replica % EP}"] = EXPERT["up"][0], EXPERT["down"][0]
    return {name: torch.randint(-2, 3, shape, generator=generator) / 64 for name, shape in shapes.items()}


def grads_alone(step: int, num_replicas: int) -> dict[str, Tensor]:
    """Means over all replicas; each expert gets tokens from those that hold it."""
    total: dict[str, Tensor] = {}
    for replica in range(num_replicas):
        for name, grad in whole_grads(step, replica).items():
            total[name] = total.get(name, 0) + grad / num_replicas
    return total


class Trained(NamedTuple):
    net: Net
    norms: list[float]
    stored: Stored


def built(
    recipe: str,
    place: Place,
    *,
    wrapped: bool = False,
    seed: int = 0,
    in_fp8: Callable[[str], bool] = lambda name: True,
    **fields: Any,
) -> Any:
    """The model, the module given to the optimizer, and the optimizer."""
    net = Net(place, recipe, in_fp8, seed=seed)
    base = {"lr": 2e-2, "bf16": True, "clip_grad": 0.0, "fp8_recipe": recipe, "muon_fp32_matmul_prec": "highest"}
    config = OptimizerConfig(**{**base, **fields})
    chunk: nn.Module = net
    if wrapped:
        sharded = config.use_distributed_optimizer or config.use_layer_wise_distributed_optimizer
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            grad_reduce_in_fp32=True,
            fp8_param_gather=sharded,
            num_distributed_optimizer_instances=place.roles.dense.inter.size,
            reuse_grad_buf_for_mxfp8_param_ag=config.reuse_grad_buf_for_mxfp8_param_ag,
        )
        chunk = DistributedDataParallel(ddp, net, groups=place.roles, optimizer_config=config)
    return net, chunk, get_optimizer(config, [chunk], pg_collection=place.roles)


def train(recipe: str, place: Place, grads: Callable[[int], dict[str, Tensor]], **options: Any) -> Trained:
    net, chunk, optimizer = built(recipe, place, **options)
    norms = stepped(net, chunk, optimizer, grads, range(STEPS))
    if isinstance(chunk, DistributedDataParallel):
        chunk.finish_param_sync()
    return Trained(net, norms, stored(net))


def stepped(net: Net, chunk: nn.Module, optimizer: Optimizer, grads: Any, steps: range) -> list[float]:
    norms = []
    for step in steps:
        chunk(net.here(grads(step))).backward()
        result = optimizer.step()
        assert result.success
        norms.append(result.grad_norm)
        optimizer.zero_grad()
        if isinstance(chunk, DistributedDataParallel):
            chunk.zero_grad_buffer()
    return norms


GRIDS: Mapping[str, tuple[int, int, bool]] = {  # dense TP, replicas of each expert, whether TP cuts experts, too
    "TP 2": (2, 1, True),
    "TP 2, experts whole": (2, 1, False),
    "two replicas": (1, 2, True),
}
Groups = list[list[int]]
Grads = Callable[[int], dict[str, Tensor]]  # of a step


def groups_of(name: str) -> tuple[Groups, Groups, Groups]:
    """Of TP, DP and expert DP on four ranks with EP 2: rank = replica * TP + t."""
    tp_size, expert_replicas, cuts_experts = GRIDS[name]
    replicas = EP * expert_replicas
    tp = [[tp_size * replica + t for t in range(tp_size)] for replica in range(replicas)]
    dp = [[tp_size * replica + t for replica in range(replicas)] for t in range(tp_size)]
    held = [[tp_size * r + t for r in range(replicas) if r % EP == e] for e, t in product(range(EP), range(tp_size))]
    return tp, dp, held if cuts_experts else [held[2 * e] + held[2 * e + 1] for e in range(EP)]


def place_on(name: str, everyone: Comm, tp: Comm, dp: Comm, expert_dp: Comm) -> Place:
    tp_size, expert_replicas, cuts_experts = GRIDS[name]
    replica = everyone.rank // tp_size
    expert = Axes(dp=expert_dp, tp=tp if cuts_experts else Alone())
    roles = Roles(dense=Axes(dp=dp, tp=tp), expert=expert, everyone=everyone)
    return Place(tp, roles, (replica % EP,), replica, EP * expert_replicas)


def place_alone() -> Place:
    axes = Axes(dp=Alone(), tp=Alone())
    return Place(Alone(), Roles(dense=axes, expert=axes, everyone=Alone()), tuple(range(EP)), 0, 1)


def own_grads(place: Place) -> Callable[[int], dict[str, Tensor]]:
    """Of this rank's replica."""
    return lambda step: whole_grads(step, place.replica)


class Resumed(NamedTuple):
    weights: dict[str, Tensor]  # this rank's parts
    norms: list[float]


def save_after(place: Place, recipe: str, path: str, group: Any, **options: Any) -> None:
    """Two steps, then a save."""
    net, chunk, optimizer = built(recipe, place, **options)
    stepped(net, chunk, optimizer, own_grads(place), range(2))
    save(state_of(net, optimizer), path, process_group=group)


def resume(place: Place, recipe: str, path: str, group: Any, grads: Grads, **options: Any) -> Resumed:
    """A load into another model, then two steps."""
    net, chunk, optimizer = built(recipe, place, seed=9, **options)
    loaded = load(state_of(net, optimizer), path, process_group=group).state
    optimizer.load_state_dict(loaded["optimizer"])
    norms = stepped(net, chunk, optimizer, grads, range(2, 4))
    return Resumed({name: (held.weight + 0).detach() for name, held in net.named_children()}, norms)


def state_of(net: Net, optimizer: Optimizer) -> dict[str, Any]:
    described = net.sharded()
    return {"model": described, "optimizer": optimizer.sharded_state_dict(described)}


def resume_everywhere(folder: str, recipes: list[str], spreads: list[str]) -> dict[str, Resumed]:
    """Save on TP 2; load on every grid."""
    comms = {name: [_comm_in(groups) for groups in groups_of(name)] for name in GRIDS}
    everyone = TorchComm(dist.group.WORLD)
    found = {}
    for recipe, spread in product(recipes, spreads):
        path = f"{folder}/{recipe} {spread}"
        save_after(place_on("TP 2", everyone, *comms["TP 2"]), recipe, path, dist.group.WORLD, **SPREADS[spread])
        for name in GRIDS:
            place = place_on(name, everyone, *comms[name])
            options = SPREADS[spread]
            found[f"{recipe} {spread} {name}"] = resume(
                place, recipe, path, dist.group.WORLD, own_grads(place), **options
            )
    return found


def _comm_in(groups: Groups) -> Comm:
    made = [dist.new_group(ranks) for ranks in groups]
    return TorchComm(next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks))
