"""Process groups of a run: found from meshes, DTensors and torch's wrapper, or refused on every rank; gloo."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import FSDP2_RUNS, Job, mesh_of, refusal, run_jobs
from tiers import NIGHT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchWrapper

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm import Alone, Axes, Roles, TorchComm, world
from opt_stack import DistributedDataParallel, ProcessGroups, get_optimizer
from opt_stack.planning.ranks import common_device

STEPS = 5
MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
RULES: dict[str, dict[str, Any]] = {"adam": {}, "muon": {**MUON, "muon_tp_mode": "duplicated"}}
SPREADS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "flat": {"use_distributed_optimizer": True},
    "whole": {**MUON, "use_layer_wise_distributed_optimizer": True},
}


class Mlp(nn.Module):
    """Two matrices that a tensor-parallel plan shards, and a norm that it replicates."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)

    def forward(self, x: Tensor, *, uses_matrices: bool = True) -> Tensor:
        if not uses_matrices:
            return self.norm(x).pow(4).mean()
        return self.down(torch.tanh(self.up(self.norm(x)))).square().mean()


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    zeros: list[int | None]


def config(**changes: Any) -> OptimizerConfig:
    base = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.1, "log_num_zeros_in_grad": True}
    return OptimizerConfig(**{**base, **changes})


def train(
    fields: dict[str, Any], model: nn.Module, places: list[int], count: int, *, gaps: bool = False, **given: Any
) -> Trained:
    """Steps on the parts `places` of `count` of the joined batch.

    With `gaps`, the first of two replicas uses the matrices in every other step, the second never.
    """
    optimizer = get_optimizer(config(**fields), [model], {}, **given)
    results = []
    for step in range(STEPS):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(count)
        for place in places:
            options = {"uses_matrices": step % 2 == 0 and place == 0} if gaps else {}
            (model(batch[place], **options) / len(places)).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    weights = {name.removeprefix("module."): whole(param) for name, param in model.named_parameters()}
    return Trained(weights, [r.grad_norm for r in results], [r.num_zeros_in_grad for r in results])


def whole(param: Tensor) -> Tensor:
    return param.detach().full_tensor() if isinstance(param, DTensor) else param.detach().clone()


# --- layouts ----------------------------------------------------------------------------------------------------------


def tp(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tp_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    tp(model, mesh)
    fully_shard(model, mesh=mesh["dp"])


def by_role(mesh: DeviceMesh) -> dict[str, Any]:
    dp = mesh.get_group("dp")
    tp = mesh.get_group("tp")
    return {"pg_collection": ProcessGroups(dp=dp, expt_dp=dp, mp=tp, tp_ep_pp=tp, tp=tp)}


def as_mesh(mesh: DeviceMesh) -> dict[str, Any]:
    return {"mesh": mesh}


# The axes of a mesh of 2 x 2 ranks, how the model is laid out on it, and the groups that the factory gets.
LAYOUTS: dict[str, tuple[tuple[str, str], Callable[..., Any], Callable[[DeviceMesh], dict[str, Any]]]] = {
    "tp x dp": (("dp", "tp"), tp, lambda mesh: {}),
    "tp x dp, groups by role": (("dp", "tp"), tp, by_role),
    "tp x dp, mesh": (("dp", "tp"), tp, as_mesh),
    "dp x tp, tp outermost": (("tp", "dp"), tp, lambda mesh: {}),
    "tp x fsdp": (("dp", "tp"), tp_fsdp, lambda mesh: {}),
    "tp x fsdp, mesh": (("dp", "tp"), tp_fsdp, as_mesh),
    "tp x cp": (("cp", "tp"), tp, lambda mesh: {}),
    "hsdp": (("dp_replicate", "dp_shard"), lambda model, mesh: fully_shard(model, mesh=mesh), lambda mesh: {}),
    "fsdp in each replica": (
        ("dp_replicate", "dp_shard"), lambda model, mesh: fully_shard(model, mesh=mesh["dp_shard"]), lambda mesh: {},
    ),
    "plain x tp axis, mesh": (("dp", "tp"), lambda model, mesh: None, as_mesh),
    "plain, dp x cp": (("dp", "cp"), lambda model, mesh: None, as_mesh),
}  # fmt: skip
NEWER = {"hsdp", "dp x tp, tp outermost"}  # torch 2.6 runs neither on a CPU
RUNS = [name for name in LAYOUTS if FSDP2_RUNS or ("fsdp" not in name and name not in NEWER)]


# `test_laid_out.py` has matrix rules on most layouts.
TRAINED = [(rule, name) for rule in RULES for name in RUNS if NIGHT or rule == "adam" or name.startswith("tp x dp")]


def train_on(name: str, fields: dict[str, Any]) -> Trained:
    axes, lay_out, given = LAYOUTS[name]
    mesh = mesh_of(2, 2, names=axes)
    model = Mlp()
    lay_out(model, mesh)
    place = 0
    count = 1
    for axis in (axis for axis in axes if axis != "tp"):  # those that split samples
        place = place * 2 + mesh.get_local_rank(axis)
        count = count * 2
    return train(fields, model, [place], count, **given(mesh))


def train_with_gaps() -> Trained:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = Mlp()
    tp(model, mesh)
    return train({}, model, [mesh.get_local_rank("dp")], 2, gaps=True)


SWAPPED = "one unfrozen, another of its size frozen later"  # nothing averaged the gradients of the first


def train_in_torchs_wrapper(spread: str, case: str) -> Trained:
    """One rank of a model in torch's wrapper, which leaves the norm to its user where it is ignored or unfrozen only
    after the model was wrapped, and averages over this rank only where it is alone."""
    model = Mlp()
    model.norm.requires_grad_(case != "all but the norm, unfrozen later")
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()] if case == "each rank alone" else None
    if case == "all but the norm":
        TorchWrapper._set_params_and_buffers_to_ignore_for_model(model, ["norm.weight", "norm.bias"])
    if case == SWAPPED:
        model.norm.bias.requires_grad_(False)
    wrapper = TorchWrapper(model, process_group=alone, find_unused_parameters=case == SWAPPED)
    model.norm.requires_grad_(True)
    model.norm.weight.requires_grad_(case != SWAPPED)
    return train(SPREADS[spread], wrapper, [dist.get_rank()], 4)


# --- refusals ---------------------------------------------------------------------------------------------------------


def build(model: nn.Module | None = None, *, wrapped: bool = False, **given: Any) -> Any:
    if wrapped:
        return DistributedDataParallel(DistributedDataParallelConfig(), model or Mlp(), **given)
    return get_optimizer(config(), [model or Mlp()], **given)


def marked(**attributes: Any) -> nn.Module:
    model = Mlp()
    for name, value in attributes.items():
        setattr(model.up.weight, name, value)
    return model


def tensor_parallel() -> nn.Module:
    return marked(tensor_model_parallel=True, partition_dim=0)


def expert_on_rank_1() -> nn.Module:
    return marked(allreduce=False) if dist.get_rank() == 1 else Mlp()


def on_a_mesh_that_is_no_slice() -> nn.Module:
    model = Mlp()
    (group, _) = dist.new_subgroups(2)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("own",))  # else torch 2.6 takes it for a slice
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    return model


def roles_on_rank_1() -> Roles | None:
    axes = Axes(dp=world(), tp=Alone())
    return Roles(dense=axes, expert=axes, everyone=world()) if dist.get_rank() == 1 else None


class OfMegatron:
    """Megatron-Core's collection of process groups: attributes, of which some may be missing."""

    def __init__(self, **groups: Any):
        vars(self).update(groups)


class OfMegatronSince19(OfMegatron):
    """Groups that were not set read as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def mesh(*axes: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)


def everyone(*roles: str) -> dict[str, Any]:
    return dict.fromkeys(roles, dist.group.WORLD)


def pairs(other: int) -> ProcessGroups:
    """Data-parallel pairs, of which `other` is the one with rank 0: 2 or 3, so that each rank has the same place."""
    (pair, _) = dist.new_subgroups_by_enumeration([[0, other], [1, 5 - other]])
    return ProcessGroups(dp=pair, expt_dp=pair, mp=None, tp_ep_pp=None, **everyone("intra_dist_opt"))


UNKNOWN = "neither process groups nor a mesh were given: which ranks hold its replicas is unknown; pass pg_collection="
TP_UNKNOWN = "'up.weight' is tensor parallel (tensor_model_parallel=True) on rank 0 of 4"
EXPERT_UNKNOWN = f"'up.weight' is an expert (allreduce=False) on rank 1 of 4, and {UNKNOWN}"
BUILDS: dict[str, tuple[Callable[[], Any], str]] = {
    "tensor parallel": (lambda: build(tensor_parallel()), f"{TP_UNKNOWN}, and {UNKNOWN}"),
    "tensor parallel, wrapped": (lambda: build(tensor_parallel(), wrapped=True), TP_UNKNOWN),
    "an expert on one rank": (lambda: build(expert_on_rank_1()), f"parameter {EXPERT_UNKNOWN}"),
    "an expert on one rank, wrapped": (lambda: build(expert_on_rank_1(), wrapped=True), EXPERT_UNKNOWN),
    "uninitialized on one rank": (
        lambda: build(nn.LazyLinear(4) if dist.get_rank() == 1 else Mlp()), "parameter 'weight' is uninitialized",
    ),
    "broadcast on one rank": (
        lambda: build(broadcast_params=dist.get_rank() == 1),
        "broadcast_params is False on ranks [0, 2, 3], True on ranks [1]",
    ),
    "groups on one rank": (
        lambda: build(pg_collection=roles_on_rank_1()),
        "different kinds of groups: ['no groups', 'Roles', 'no groups', 'no groups']",
    ),
    "a mesh of its own": (lambda: build(on_a_mesh_that_is_no_slice()), "is a DTensor on 2 of the world's 4 ranks"),
    "tp without its group": (
        lambda: build(
            tensor_parallel(), pg_collection=ProcessGroups(dp=None, expt_dp=None, **everyone("mp", "tp_ep_pp"))
        ),
        "pg_collection lacks tp (tensor-parallel peers of a dense matrix)",
    ),
    "tp without its group, megatron's collection": (
        lambda: build(
            tensor_parallel(), pg_collection=OfMegatronSince19(dp=None, expt_dp=None, **everyone("mp", "tp_ep_pp"))
        ),
        "pg_collection lacks tp (tensor-parallel peers of a dense matrix)",
    ),
    "megatron's collection of something else": (
        lambda: build(pg_collection=OfMegatron(dp="all")), "is a str; pass a torch.distributed.ProcessGroup or None",
    ),
    "megatron's collection": (
        lambda: build(
            pg_collection=OfMegatron(
                mp=None, tp_ep_pp=None, hcp=[dist.group.WORLD], **everyone("dp", "dp_cp", "expt_dp", "tp_dp_cp")
            )
        ),
        "built",
    ),
    "wrapped over other pairs": (
        lambda: build(build(wrapped=True, groups=pairs(2)), pg_collection=pairs(3)),
        "model chunk 0 was wrapped with dense data-parallel groups of 2 x 1 ranks",
    ),
    "wrapped over the same pairs": (
        lambda: build(build(wrapped=True, groups=pairs(2)), pg_collection=pairs(2)), "built",
    ),
    "tensor parallel, mesh": (lambda: build(tensor_parallel(), mesh=mesh("dp", "tp")), "built"),
    "wrapped with a mesh, optimizer without": (
        lambda: build(build(tensor_parallel(), wrapped=True, mesh=mesh("dp", "tp"))), "built",
    ),
}  # fmt: skip


def build_all() -> dict[str, str]:
    return {name: refusal(build) for name, (build, _) in BUILDS.items()}


def broadcasts_in_pairs() -> list[int]:
    """This rank's values after a broadcast from each rank of its pair."""
    comm = TorchComm(dist.new_subgroups(2)[0])
    found = []
    for source in range(2):
        x = torch.tensor([dist.get_rank()])
        comm.broadcast_(x, src=source)
        found.append(int(x))
    return found


def devices() -> tuple[str, str]:
    """The device of a rank without tensors, and the message where one rank's model is on another device."""
    device = str(build(nn.Identity() if dist.get_rank() == 1 else Mlp()).stepper.device)
    of_rank = SimpleNamespace(device=torch.device("meta" if dist.get_rank() == 2 else "cpu"))
    check = common_device(SimpleNamespace(model=of_rank))
    return device, check.send(world().gather_objects(next(check)))


# --- tests ------------------------------------------------------------------------------------------------------------

IN_TORCHS_WRAPPER = ("all", "all but the norm", "each rank alone", "all but the norm, unfrozen later", SWAPPED)


@pytest.fixture(scope="module")
def four() -> dict[str, list[Any]]:
    jobs = {f"{rule}, {name}": Job(train_on, (name, RULES[rule])) for rule, name in TRAINED}
    jobs |= {
        f"{spread}, {case}": Job(train_in_torchs_wrapper, (spread, case))
        for spread in SPREADS
        for case in IN_TORCHS_WRAPPER
    }
    functions = (train_with_gaps, build_all, broadcasts_in_pairs, devices)
    return run_jobs(4, jobs | {function.__name__: Job(function) for function in functions})


def assert_same(found: list[Trained], want: Trained) -> None:
    """Means over ranks are summed in another order than one batch; Adam divides small gradients by their own size."""
    for got in found:
        for name, weight in want.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-4, atol=0)
        assert got.zeros == want.zeros


@pytest.mark.parametrize(("rule", "name"), TRAINED)
def test_every_layout_of_four_ranks_takes_the_steps_of_one(rule: str, name: str, four: Any) -> None:
    """Replicas that lie outside of a DTensor's mesh are averaged, those inside of it are not averaged twice."""
    assert_same(four[f"{rule}, {name}"], train(RULES[rule], Mlp(), [0], 1))


@pytest.mark.parametrize("case", IN_TORCHS_WRAPPER)
@pytest.mark.parametrize("spread", SPREADS)
def test_a_model_in_torchs_ddp_takes_the_steps_of_one_process(spread: str, case: str, four: Any) -> None:
    """The step averages what the wrapper ignores, and all parameters if the wrapper averages over other ranks.

    Parameters that were unfrozen after the model was wrapped had each rank's own gradients, and replicas diverged.
    """
    model = Mlp()
    model.norm.weight.requires_grad_(case != SWAPPED)
    assert_same(four[f"{spread}, {case}"], train(SPREADS[spread], model, [0], 1))


def test_a_dtensor_moves_on_all_replicas_if_one_used_it(four: Any) -> None:
    assert_same(four["train_with_gaps"], train({}, Mlp(), [0, 1], 2, gaps=True))


@pytest.mark.parametrize("name", BUILDS)
def test_what_cannot_be_known_is_refused_on_every_rank(name: str, four: Any) -> None:
    for outcomes in four["build_all"]:
        assert BUILDS[name][1] in outcomes[name]


def test_a_broadcast_in_a_group_starts_at_the_groups_rank(four: Any) -> None:
    assert four["broadcasts_in_pairs"] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_empty_ranks_follow_and_mixed_devices_are_refused(four: Any) -> None:
    message = (
        "model_chunks are on different kinds of device: cpu on ranks [0, 1, 3]; meta on ranks [2]; move all ranks' "
        "models to one kind"
    )
    assert four["devices"] == [("cpu", message)] * 4
