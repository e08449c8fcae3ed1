"""Rank programs for the tests of matrices that are DTensors; importable, so that spawned processes find them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from parity import Held
from processes import mesh_of, refusal
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from tp_model import Part, cut

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_distributed.comm import Alone, Axes, Comm, Roles, TorchComm
from opt_kernels.hooks import GivenHooks
from opt_stack import QKClip, StepStats, get_optimizer
from opt_stack.qk_clip import separate_qk

STEPS = 3
Shapes = Mapping[str, tuple[int, int]]

# Square: of others SOAP's longer factor is singular at first, and the basis of its null space is rounding errors. Over
# four ranks rows are dealt 3, 3, 3, 1 and 2, 2, 2, 0; query groups of 4 rows are cut.
UNEVEN: Shapes = {"column": (10, 10), "row": (6, 6), "qkv": (20, 20)}
EVEN: Shapes = {"column": (8, 8), "row": (12, 12), "qkv": (16, 16)}
OBLONG: Shapes = {"column": (10, 7), "row": (6, 13), "qkv": (20, 9)}
SMALL: Shapes = {"column": (3, 3), "row": (3, 3), "more": (3, 3), "qkv": (4, 4)}  # one of 3 rows is the last rank's
QKV = (2, 1, 1)


class Net(nn.Module):
    def __init__(self, shapes: Shapes, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {**shapes, "vector": (9,)}.items():
            self.add_module(name, Held(shape, torch.float32, generator))


LayOut = Callable[[Net], None] | None  # None: plain parameters


def fsdp(net: Net) -> None:
    fully_shard(net, mesh=mesh_of(4))


def hsdp(net: Net) -> None:
    fully_shard(net, mesh=mesh_of(2, 2, names=("replicate", "shard")))


def fsdp_x_tp(net: Net) -> None:
    """Tensor parallelism cuts columns of one, rows of the others; FSDP2 cuts rows of what is left."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    _distribute(net, mesh["tp"], lambda name: [Shard(1 if name == "row" else 0)])
    fully_shard(net, mesh=mesh["dp"])


def tp(net: Net) -> None:
    mesh = mesh_of(4, names=("tp",))
    _distribute(net, mesh, lambda name: [Shard(1 if name == "row" else 0)])


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


class Run:
    """A model and its optimizer, stepped on known gradients: those of a second model with the same placements."""

    def __init__(
        self, config: OptimizerConfig, shapes: Shapes, lay_out: LayOut = None, *, seed: int = 0, hooks: GivenHooks = ()
    ):
        self.shapes, self.lay_out = shapes, lay_out
        self.net = laid_out(shapes, seed, lay_out)
        self.net.qkv.weight.qkv_split_shapes = QKV  # sharding makes new parameters
        self.optimizer = get_optimizer(config, [self.net], {}, hooks=hooks)

    def step(self, step: int) -> float:
        grads = dict(laid_out(self.shapes, 1 + step, self.lay_out).named_parameters())
        for name, param in self.net.named_parameters():
            param.grad = grads[name].detach()
        return self.optimizer.step().grad_norm

    def sharded(self) -> dict[str, Any]:
        weights = sharded_model(self.net)
        return {"model": weights, "optimizer": self.optimizer.sharded_state_dict(weights)}

    def weights(self) -> dict[str, Tensor]:
        found = {name: param.detach() for name, param in self.net.named_parameters()}
        return {name: w.full_tensor() if isinstance(w, dist.tensor.DTensor) else w.clone() for name, w in found.items()}


def laid_out(shapes: Shapes, seed: int, lay_out: LayOut) -> Net:
    net = Net(shapes, seed)
    if lay_out is not None:
        lay_out(net)
    return net


def train(config: OptimizerConfig, shapes: Shapes, lay_out: LayOut = None, hooks: GivenHooks = ()) -> Trained:
    run = Run(config, shapes, lay_out, hooks=hooks)
    norms = [run.step(step) for step in range(STEPS)]
    numel = sum(t.numel() for unit in run.optimizer.stepper.units for p in unit.pieces for t in p.state.values())
    return Trained(run.weights(), norms, numel, run.optimizer.plan.state_bytes())


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
    """Save before the last step; return the weights after it."""
    run = Run(config, shapes, lay_out)
    for step in range(STEPS):
        if step == STEPS - 1:
            save(run.sharded(), path)
        run.step(step)
    return run.weights()


def resume(config: OptimizerConfig, shapes: Shapes, lay_out: LayOut, path: str) -> dict[str, Tensor]:
    """Load what was saved into other weights and an empty state, and run the last step."""
    run = Run(config, shapes, lay_out, seed=50)
    run.optimizer.load_state_dict(load(run.sharded(), path).state["optimizer"])
    run.step(STEPS - 1)
    return run.weights()


def save_apart(path: str) -> str:
    """The message of a save whose replicas of a tensor differ."""
    net = laid_out(EVEN, 0, tp_on_a_part_of_the_mesh)
    with torch.no_grad():
        net.column.weight.to_local()[0, 0] += float(dist.get_rank() >= 2)
    return refusal(lambda: save(sharded_model(net), path))


class Parts(nn.Module):
    """The same matrices, plain and marked as tensor parallel."""

    def __init__(self, shapes: Shapes, seed: int, tp: Comm):
        super().__init__()
        for name, held in Net(shapes, seed).named_children():
            dim = None if name == "vector" else int(name == "row")
            self.add_module(name, Part(held.weight.detach(), tp, dim=dim))
        self.qkv.weight.qkv_split_shapes = QKV

    def sharded(self) -> dict[str, Any]:
        return {name: part.sharded(f"{name}.weight") for name, part in self.named_children()}

    def joined(self, tp: Comm) -> dict[str, Tensor]:
        """Join the parts in rank order, without using the checkpoint's metadata."""
        by_rank = tp.gather_objects({name: part.weight.detach() for name, part in self.named_children()})
        dims = {name: part.dim for name, part in self.named_children()}
        whole = {name: [rank[name] for rank in by_rank] for name in dims}
        return {f"{n}.weight": whole[n][0] if dim is None else torch.cat(whole[n], dim) for n, dim in dims.items()}


def resume_by_attributes(
    saved: OptimizerConfig, loaded: OptimizerConfig, shapes: Shapes, path: str
) -> dict[int, dict[str, Tensor]]:
    """Whole weights after the last step, by the number of tensor-parallel ranks that made it; two made the others."""
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    found = {}
    for size, config, steps in ((2, saved, range(STEPS - 1)), *((size, loaded, [STEPS - 1]) for size in groups)):
        if dist.get_rank() < size:
            found[size] = _run_by_attributes(config, shapes, TorchComm(groups[size]), list(steps), path)
        dist.barrier()
    return found


def _run_by_attributes(
    config: OptimizerConfig, shapes: Shapes, tp: TorchComm, steps: list[int], path: str
) -> dict[str, Tensor]:
    """Start from scratch and save, or resume from what was saved."""
    net = Parts(shapes, 50 if steps[0] else 0, tp)
    axes = Axes(dp=Alone(), tp=tp)
    optimizer = get_optimizer(config, [net], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=tp))
    weights = net.sharded()
    state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}
    if steps[0]:
        optimizer.load_state_dict(load(state, path, process_group=tp.group).state["optimizer"])
    for step in steps:
        for name, part in net.named_children():
            grad = dict(Net(shapes, 1 + step).named_children())[name].weight.detach()
            part.weight.grad = cut(grad, tp.rank, tp.size, dim=part.dim)
        optimizer.step()
    if not steps[0]:
        weights = net.sharded()
        save({"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}, path, process_group=tp.group)
    return net.joined(tp)
