"""Rank programs for the tests of matrices that are DTensors; importable, so that spawned processes find them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from expert_grid import cut
from parity import Held, roles_over
from processes import mesh_of, once_a_world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_distributed.comm import Comm, TorchComm
from opt_kernels.hooks import GivenHooks
from opt_stack import QKClip, StepStats, get_optimizer
from opt_stack.qk_clip import separate_qk

STEPS = 3
SAVED = 1  # steps before the save
Shapes = Mapping[str, tuple[int, int]]

# Square: of others SOAP's longer factor is singular at first, and the basis of its null space is rounding errors. Over
# four ranks rows are dealt 3, 3, 3, 1 and 2, 2, 2, 0; query groups of 4 rows are cut.
UNEVEN: Shapes = {"column": (10, 10), "row": (6, 6), "qkv": (20, 20)}
EVEN: Shapes = {"column": (8, 8), "row": (12, 12), "qkv": (16, 16)}
OBLONG: Shapes = {"column": (10, 7), "row": (6, 13), "qkv": (20, 9)}
SMALL: Shapes = {"column": (3, 3), "row": (3, 3), "more": (3, 3), "qkv": (4, 4)}  # one of 3 rows is the last rank's
QKV = (2, 1, 1)
# Rows of `gated` alternate between two matrices, and pairs are cut; heads of `kv` have a matrix of 3 and one of 2 rows.
FUSED: Shapes = {**OBLONG, "gated": (10, 8), "kv": (20, 6)}
FUSED_EVEN: Shapes = {**EVEN, "gated": (16, 8), "kv": (20, 6)}
MARKS = {"qkv": {"qkv_split_shapes": QKV}, "gated": {"split_rows": (1, 1)}, "kv": {"head_rows": (3, 2)}}


class Net(nn.Module):
    def __init__(self, shapes: Shapes, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {**shapes, "vector": (9,)}.items():
            self.add_module(name, Held(shape, torch.float32, generator))


LayOut = Callable[[Net], None] | None  # None: plain parameters


def fsdp(net: Net) -> None:
    fully_shard(net, mesh=mesh_of(dist.get_world_size()))


def hsdp(net: Net) -> None:
    fully_shard(net, mesh=mesh_of(2, 2, names=("replicate", "shard")))


def two_meshes(net: Net) -> None:
    """Modules alternate between two meshes whose axes have equal names and sizes, and other groups of ranks."""
    names = ("replicate", "shard")
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=names) for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    for number, module in enumerate(net.children()):
        fully_shard(module, mesh=meshes[number % 2])


def fsdp_x_tp(net: Net) -> None:
    """Tensor parallelism cuts columns of one, rows of the others; FSDP2 cuts rows of what is left."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    _distribute(net, mesh["tp"], lambda name: [Shard(1 if name == "row" else 0)])
    fully_shard(net, mesh=mesh["dp"])


def tp(net: Net) -> None:
    mesh = mesh_of(dist.get_world_size(), names=("tp",))
    _distribute(net, mesh, lambda name: [Shard(1 if name == "row" else 0)])


def tp_by_attributes(net: Net) -> None:
    mark_parts(net, TorchComm(dist.group.WORLD))


def mark_parts(net: Net, tp: Comm) -> Net:
    """Leave this rank's parts of the matrices, marked as Megatron-Core marks them."""
    for name, module in net.named_children():
        if name != "vector":
            dim = int(name == "row")
            module.weight = nn.Parameter(cut(module.weight.detach(), tp.rank, tp.size, dim=dim))
            module.weight.tensor_model_parallel = True
            module.weight.partition_dim = dim
    return mark_rows(net)


def mark_rows(net: Net) -> Net:
    """Mark the parameters with rows of several matrices."""
    for name, marks in MARKS.items():
        if hasattr(net, name):
            vars(net.get_submodule(name).weight).update(marks)
    return net


def replicas_of_tp(net: Net) -> None:
    """The tensor-parallel part of `fsdp_x_tp`, replicated twice instead of sharded by FSDP2."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    _distribute(net, mesh, lambda name: [Replicate(), Shard(1 if name == "row" else 0)])


def tp_on_a_part_of_the_mesh(net: Net) -> None:
    """Each data-parallel replica on a separate mesh, without a data-parallel axis."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    _distribute(net, mesh["tp"], lambda name: [Shard(1 if name == "row" else 0)])


def two_axes(net: Net) -> None:
    """Placements that no torch API produces: rows cut twice, or rows and columns."""
    mesh = mesh_of(2, 2, names=("outer", "inner"))
    _distribute(net, mesh, lambda name: [Shard(0), Shard(1 if name == "row" else 0)])


def _distribute(net: Net, mesh: Any, placements_of: Callable[[str], list[Placement]]) -> None:
    for name, module in net.named_children():
        if name != "vector":
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements_of(name)))


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    state_numel: int
    planned_bytes: int  # of state, on this rank


def _laid_out(shapes: Shapes, seed: int, lay_out: LayOut, dtype: torch.dtype) -> Net:
    net = Net(shapes, seed).to(dtype)
    if lay_out is not None and dist.is_initialized():
        lay_out(net)
    return net


@once_a_world
def _gradients(shapes: tuple[Any, ...], step: int, lay_out: LayOut, dtype: torch.dtype) -> dict[str, Tensor]:
    """Those of every run of a world with these shapes: sharding a model takes longer than a step."""
    net = _laid_out(dict(shapes), 1 + step, lay_out, dtype)
    return {name: param.detach() for name, param in net.named_parameters()}


class Run:
    """A model and its optimizer, stepped on known gradients: those of a second model with the same placements."""

    def __init__(
        self, config: OptimizerConfig, shapes: Shapes, lay_out: LayOut = None, *, seed: int = 0, hooks: GivenHooks = ()
    ):
        self.config = config
        self.shapes = shapes
        self.lay_out = lay_out
        self.hooks = hooks
        self.net = mark_rows(_laid_out(shapes, seed, lay_out, config.precision.params))  # sharding makes new parameters
        self.optimizer = self.build()

    def build(self) -> Any:
        is_marked = self.lay_out is tp_by_attributes and dist.is_initialized()
        roles = roles_over(tp=TorchComm(dist.group.WORLD)) if is_marked else None
        return get_optimizer(self.config, [self.net], {}, hooks=self.hooks, pg_collection=roles)

    def step(self, step: int) -> float:
        self.set_grads(step)
        return self.optimizer.step().grad_norm

    def set_grads(self, step: int) -> None:
        lay_out = self.lay_out if dist.is_initialized() else None
        grads = _gradients(tuple(self.shapes.items()), step, lay_out, self.config.precision.params)
        for name, param in self.net.named_parameters():
            param.grad = grads[name].clone()

    def sharded(self) -> dict[str, Any]:
        weights = sharded_model(self.net)
        return {"model": weights, "optimizer": self.optimizer.sharded_state_dict(weights)}

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(param) for name, param in self.net.named_parameters()}


def _whole(param: Any) -> Tensor:
    value = param.detach()
    if isinstance(value, dist.tensor.DTensor):
        return value.full_tensor()
    if not dist.is_initialized() or not hasattr(param, "tensor_model_parallel"):
        return value.clone()
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    return torch.cat(parts, param.partition_dim)


def train(config: OptimizerConfig, shapes: Shapes, lay_out: LayOut = None, hooks: GivenHooks = ()) -> Trained:
    run = Run(config, shapes, lay_out, hooks=hooks)
    norms = [run.step(step) for step in range(STEPS)]
    numel = sum(t.numel() for unit in run.optimizer.stepper.units for p in unit.pieces for t in p.state.values())
    return Trained(run.weights(), norms, numel, run.optimizer.plan.state_bytes())


def train_in_two_hops(*case: Any) -> Trained:
    """As `train`; more than two ranks are reached in two hops, by groups that only their members make."""
    with patch("opt_stack.planning.matrices.MAX_PEERS", 2):
        return train(*case)


def record(config: OptimizerConfig, shapes: Shapes, lay_out: LayOut) -> StepStats:
    """The statistics of the second step, with the spread of singular values."""
    run = Run(config, shapes, lay_out)
    run.optimizer.stats_every(1, spectrum=True)
    for step in range(2):
        run.step(step)
    return run.optimizer.stats()


def clip_attention(shapes: Shapes, lay_out: LayOut, *, clips: bool = True) -> dict[str, Tensor]:
    """Queries `qkv`, keys `column`, heads of two rows of which some have too large logits. The whole weights then."""
    run = Run(OptimizerConfig(optimizer="sgd", lr=0.01, clip_grad=0.0), shapes, lay_out)
    numbers = {"num_heads": shapes["qkv"][0] // 2, "num_query_groups": shapes["column"][0] // 2, "head_dim": 2}
    layer = separate_qk(run.net.qkv.weight, run.net.column.weight, **numbers)
    if clips:
        QKClip(run.optimizer, [layer])([60.0 * (1 + torch.arange(numbers["num_heads"]) % 3)])
    return run.weights()


def train_and_save(config: OptimizerConfig, shapes: Shapes, lay_out: LayOut, path: str) -> dict[str, Tensor]:
    """Save before the last two steps; return the weights after them."""
    run = Run(config, shapes, lay_out)
    for step in range(STEPS):
        if step == SAVED:
            save(run.sharded(), path)
        run.step(step)
    return run.weights()


def resume(config: OptimizerConfig, shapes: Shapes, lay_out: LayOut, path: str) -> dict[str, Tensor]:
    """Load what was saved into other weights and an empty state, and run the last two steps."""
    run = Run(config, shapes, lay_out, seed=50)
    run.optimizer.load_state_dict(load(run.sharded(), path, dtype="cast").state["optimizer"])
    for step in range(SAVED, STEPS):
        run.step(step)
    return run.weights()


# --- writes beside a step, while FSDP2 holds gathered copies ----------------------------------------------------------


def _sharded_layers(is_sharded: bool, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of which the last two are the root's own, so that a forward without backward leaves them gathered."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 4)).to(dtype)
    if is_sharded:
        mesh = mesh_of(dist.get_world_size())
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def write_beside_steps(config: OptimizerConfig, write: str) -> dict[str, Tensor]:
    """Train with a forward without backward in each step, and `write` after it. Return the whole weights."""
    dtype = config.precision.params
    net = _sharded_layers(dist.is_initialized(), dtype)
    optimizer = get_optimizer(config, [net], {})
    first = {name: param.detach().clone() for name, param in net.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5)).to(dtype)
    for step in range(4):
        net(x).square().mean().backward()
        if write == "a step":
            _look(net, x)
        optimizer.step()
        optimizer.zero_grad()
        if write == "eval and train":
            optimizer.eval()
            _look(net, x)
            optimizer.train()
        elif write == "a reload" and step == 1:
            _look(net, x)
            optimizer.reload_model_params(first)
        elif write == "a load" and step == 1:
            _look(net, x)
            optimizer.load_state_dict(state)
        elif write.startswith("a move"):
            optimizer.offload_to_cpu()
            _look(net, x)
            net._apply(torch.clone)  # as to the host and back
            optimizer.restore_from_cpu()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return {name: _whole(param) for name, param in net.named_parameters()}


def clip_twice() -> tuple[float, float]:
    """The norms before and after the gradients of a prepared step, DTensors, become a hundred times as large."""
    net = _sharded_layers(True)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [net], {})
    net(torch.ones(2, 6)).sum().backward()
    before = optimizer.clip_grad_norm_(1.0)
    with torch.no_grad():
        for param in net.parameters():
            assert param.grad is not None
            param.grad.mul_(100.0)
    return before, optimizer.clip_grad_norm_(1.0)


@torch.no_grad()
def _look(net: nn.Module, x: Tensor) -> None:
    net(x)


def step_after_a_forward() -> str:
    """What the first step says if FSDP2 held gathered copies when the optimizer was built."""
    net = _sharded_layers(True)
    x = torch.ones(2, 6)
    _look(net, x)
    optimizer = get_optimizer(OptimizerConfig(), [net], {})
    net(x).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"
