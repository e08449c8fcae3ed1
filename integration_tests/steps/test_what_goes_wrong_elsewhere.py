"""Failures of Megatron-Core or of earlier runs: each docstring describes the failure, each test the behaviour here."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import LR, Net, roles_over
from processes import refusal
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_stack import get_optimizer, get_optimizer_based_on_param_groups


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": LR, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest", **changes})


class Mixed(nn.Module):
    """A bf16 parameter registered before a larger fp32 one, both in one parameter group."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(8, 8))


@pytest.mark.parametrize("flat", [False, True], ids=["replicated", "flat"])
def test_a_group_of_two_dtypes_keeps_each_parameters_own_state(flat: bool) -> None:
    """Megatron-Core finds states by an order that puts fp32 first, and gives each parameter the other one's."""

    def rank_main(comm: ThreadComm) -> dict[str, dict[str, Tensor]]:
        net = Mixed()
        adam = config(bf16=True, use_distributed_optimizer=flat)
        optimizer = get_optimizer(adam, [net], {}, pg_collection=roles_over(comm))
        net.narrow.grad, net.wide.grad = torch.full((4, 4), 2.0, dtype=torch.bfloat16), torch.full((8, 8), 3.0)
        optimizer.step()
        (group,) = optimizer.state_dict()["param_groups"]
        state = optimizer.state_dict()["state"]
        return {name: state[i] for i, name in zip(group["params"], group["param_names"], strict=True) if i in state}

    found: dict[str, list[dict[str, Tensor]]] = {"narrow": [], "wide": []}
    for of_rank in run_threads(2, rank_main):
        for name, state in of_rank.items():
            found[name].append(state)
    for name, numel, grad in (("narrow", 16, 2.0), ("wide", 64, 3.0)):
        moments = torch.cat([state["exp_avg"].flatten() for state in found[name]])
        assert moments.numel() == numel * (1 if flat else 2)
        torch.testing.assert_close(moments, torch.full_like(moments, 0.1 * grad), rtol=1e-6, atol=0)
        assert all(("fp32_param" in state) == (name == "narrow") for state in found[name])


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_rank_may_own_nothing_of_a_bucket(wrapped: bool) -> None:
    """40 elements over three ranks: Megatron-Core asserts "empty bucket encountered" when it saves such a rank."""

    def rank_main(comm: ThreadComm) -> tuple[int, Tensor]:
        layer = nn.Linear(8, 5, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        model: nn.Module = layer
        roles = roles_over(comm)
        if wrapped:
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
            model = DistributedDataParallel(ddp, layer, groups=roles)
        optimizer = get_optimizer(config(use_distributed_optimizer=True), [model], {}, pg_collection=roles)
        model(torch.ones(2, 8)).sum().backward()
        assert optimizer.step().success
        optimizer.load_state_dict(optimizer.state_dict())
        return len(optimizer.state_dict()["state"]), layer.weight.detach().clone()

    ranks = run_threads(3, rank_main)
    assert [owned for owned, _ in ranks] == [1, 0, 0]
    # The first step of Adam moves every weight by lr, after a decay of 1 - lr * 0.01.
    want = torch.full((5, 8), 1.0 - LR * 0.01 - LR)
    for _, weight in ranks:
        torch.testing.assert_close(weight, want, rtol=1e-6, atol=0)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
        self.expert.allreduce = False


def test_an_overflow_in_the_experts_alone_skips_all_and_moves_the_one_scale() -> None:
    """Each member of Megatron-Core's chain has a scaler of its own: an inf in the experts halves theirs only, while the
    loss goes on to be scaled by the other's."""
    expert_worlds = [World(1).comms(), World(1).comms()]

    def rank_main(comm: ThreadComm) -> tuple[bool, float, bool]:
        expert = Axes(dp=expert_worlds[comm.rank][0], tp=Alone())
        roles = Roles(dense=Axes(dp=comm, tp=Alone()), expert=expert, everyone=comm)
        net = Mixture().half()
        optimizer = get_optimizer(
            config(loss_scale=None, fp16=True, initial_loss_scale=16.0, hysteresis=1), [net], {}, pg_collection=roles
        )
        net.dense.grad, net.expert.grad = torch.ones(3).half(), torch.ones(5).half()
        if comm.rank == 1:
            net.expert.grad[4] = torch.inf
        success = optimizer.step().success
        same = all(torch.equal(p, torch.ones_like(p)) for p in net.parameters())
        return success, optimizer.get_loss_scale().item(), same

    assert run_threads(2, rank_main) == [(False, 8.0, True)] * 2


def test_the_callers_overrides_and_configurations_stay_as_they_were() -> None:
    """Megatron-Core updates config_overrides in place, and writes a bucket size into the caller's DDP configuration."""
    overrides = {ParamKey(name="*.weight"): {"wd_mult": 0.5}}
    muon = config(optimizer="muon")
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True)
    before = copy.deepcopy((overrides, muon, ddp))
    net = Net(torch.float32)
    get_optimizer(muon, [DistributedDataParallel(ddp, net, groups=roles_over(Alone()))], overrides)
    assert (overrides, muon, ddp) == before


# --- gradients that are not there, or come twice ---------------------------------------------------------------------


class Optional(nn.Module):
    """A part that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.maybe = nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(70))

    def forward(self, *, use: bool) -> Tensor:
        return self.always.sum() + (self.maybe.sum() if use else 0.0)


@pytest.mark.parametrize("flat", [False, True], ids=["replicated", "flat"])
@pytest.mark.parametrize("used_by", [(), (1,), (0, 1)], ids=["none", "one", "all"])
def test_a_parameter_moves_where_any_rank_used_it_and_keeps_still_where_none_did(
    used_by: tuple[int, ...], flat: bool
) -> None:
    """As torch does in one process: no gradient, no decay, no zeros. The gradient of one rank alone is halved."""

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        net = Optional()
        sgd = config(
            optimizer="sgd",
            sgd_momentum=0.0,
            weight_decay=0.1,
            use_distributed_optimizer=flat,
            log_num_zeros_in_grad=True,
        )
        optimizer = get_optimizer(sgd, [net], {}, pg_collection=roles_over(comm))
        net(use=comm.rank in used_by).backward()
        result = optimizer.step()
        assert result.success
        assert result.num_zeros_in_grad == 0
        return [p.detach().clone() for p in net.parameters()]

    moved = 1 - LR * (len(used_by) / 2 + 0.1) if used_by else 1.0
    for always, maybe in run_threads(2, rank_main):
        torch.testing.assert_close(always, torch.full((9,), 1 - LR * (1 + 0.1)), rtol=1e-6, atol=0)
        torch.testing.assert_close(maybe, torch.full((70,), moved), rtol=1e-6, atol=0)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_two_backward_passes_add_up(wrapped: bool) -> None:
    def rank_main(comm: ThreadComm) -> float:
        net = Optional()
        roles = roles_over(comm)
        model: Any = net
        if wrapped:
            model = DistributedDataParallel(DistributedDataParallelConfig(), net, groups=roles)
        optimizer = get_optimizer(config(optimizer="sgd"), [model], {}, pg_collection=roles)
        for _ in range(2):
            model(use=True).backward()
        return optimizer.step().grad_norm

    assert run_threads(2, rank_main) == pytest.approx([2 * 79**0.5] * 2, rel=1e-6)


CONFIGURED: dict[str, Any] = {
    "optimizer": "sgd", "use_distributed_optimizer": True, "decoupled_weight_decay": False, "lr": 2 * LR,
    "adam_beta2": 0.5, "clip_grad": 7.0, "loss_scale": 8.0, "grad_norm_skip_threshold": 3.0,
    "log_num_zeros_in_grad": True,
}  # fmt: skip
MARKS = {"grad_norm_group": "mtp", "shared": True, "tensor_model_parallel": True}
ALONE = Roles(dense=Axes(dp=Alone(), tp=Alone()), expert=Axes(dp=Alone(), tp=Alone()), everyone=Alone())


def net_with(marks: Mapping[str, Any]) -> Net:
    net = Net(torch.float32)
    for name, value in marks.items():
        setattr(net.second.weight, name, value)
    return net


def built(comm: Comm, *, net: nn.Module | None = None, **fields: Any) -> object:
    return get_optimizer(config(**fields), [net or Net(torch.float32)], {}, pg_collection=roles_over(comm))


def with_groups(comm: Comm) -> object:
    net = Net(torch.float32)
    groups = [{"params": list(net.parameters()), "weight_decay": 0.1 * comm.rank}]
    return get_optimizer_based_on_param_groups(config(), [net], groups, pg_collection=roles_over(comm))


def over_other_ranks(comm: Comm, *, sharded: bool) -> object:
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = DistributedDataParallel(ddp, Net(torch.float32), groups=ALONE)
    return built(comm, net=model, use_distributed_optimizer=sharded)


def with_another_loss(comm: Comm) -> object:
    ddp, per_token = DistributedDataParallelConfig(), comm.rank == 1
    return DistributedDataParallel(ddp, Net(torch.float32), groups=roles_over(comm), calculate_per_token_loss=per_token)


# Only the plan was compared: another learning rate let weights diverge, another norm limit hung. Norms counted an
# element on one rank only, or in two groups' norms. With a wrapper over other ranks, each rank stepped with its own
# gradients, without an error.
DIFFERENT: dict[str, tuple[Callable[[Comm], object], tuple[str, ...]]] = {
    **{
        field: (
            lambda comm, field=field, value=value: built(comm, **({field: value} if comm.rank == 1 else {})),
            (f"{field} is ", f"{value!r} on ranks [1]"),
        )
        for field, value in CONFIGURED.items()
    },
    **{
        mark: (
            lambda comm, mark=mark, value=value: built(comm, net=net_with({mark: value} if comm.rank == 1 else {})),
            ("of second.weight is", f"{value!r} on rank 1"),
        )
        for mark, value in MARKS.items()
    },
    "groups": (with_groups, ("weight_decay of bias.weight is 0.0 on rank 0 and 0.1 on rank 1",)),
    "another loss": (with_another_loss, ("calculate_per_token_loss is False on rank 0 and True on rank 1",)),
    "other ranks": (partial(over_other_ranks, sharded=False), ("data-parallel groups of 1 x 1 ranks",)),
    "other ranks, flat": (partial(over_other_ranks, sharded=True), ("data-parallel groups of 1 x 1 ranks",)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_all_refuse_and_name_what_differs(what: str) -> None:
    attempt, words = DIFFERENT[what]
    for message in run_threads(2, lambda comm: refusal(lambda: attempt(comm))):
        assert all(word in message for word in words)


def test_ranks_may_log_elsewhere_and_write_maps_together_only(tmp_path: Path) -> None:
    """A rank that logged alone waited for the others in another collective than they were in."""

    def rank_main(comm: ThreadComm, rank: int) -> str:
        ours = config(config_logger_dir=str(tmp_path / "logs") if comm.rank == rank else "")
        get_optimizer(ours, [Net(torch.float32)], {}, pg_collection=roles_over(comm))
        path = str(tmp_path / "map") if comm.rank == rank else None
        return refusal(
            lambda: get_optimizer(
                ours, [Net(torch.float32)], {}, pg_collection=roles_over(comm), dump_param_to_param_group_map=path
            )
        )

    for rank in (1, 0):
        for message in run_threads(2, lambda comm, rank=rank: rank_main(comm, rank)):
            assert "dump_param_to_param_group_map is " in message
        assert (tmp_path / "logs").exists() == (rank == 0)


def wrapped(net: nn.Module, **fields: Any) -> DistributedDataParallel:
    return DistributedDataParallel(DistributedDataParallelConfig(**fields), net)


def module_inside_a_wrapper() -> object:
    """Its gradients are in the wrapper's buffers: every step succeeded with a norm of zero and updated nothing."""
    net = Net(torch.float32)
    wrapped(net)
    return built(Alone(), net=net)


def wrapped_twice(*, nested: bool) -> object:
    """The first wrapper took every gradient, and the second reduced zeros."""
    net = Net(torch.float32)
    first = wrapped(net)
    return wrapped(first if nested else net)


def cut_matrices() -> object:
    """The message asked for fields that were already set."""
    muon = config(optimizer="muon", use_layer_wise_distributed_optimizer=True)
    return get_optimizer(muon, [wrapped(Net(torch.float32), use_distributed_optimizer=True)])


TWICE = "gradients of 'embedding.weight' (and 7 more) accumulate in a buffer already"


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda: built(Alone(), net=net_with({"grad_norm_group": "other"})),
            "has grad_norm_group='other'; allowed are",
        ),
        (lambda: built(Alone(), net=net_with({"grad_norm_group": ""})), "has grad_norm_group=''; allowed are 'mtp'"),
        (module_inside_a_wrapper, "model chunk 0 is a plain Net, but gradients of 'embedding.weight' accumulate in"),
        (partial(wrapped_twice, nested=False), TWICE),
        (partial(wrapped_twice, nested=True), TWICE),
        (cut_matrices, "pass optimizer_config=config to DistributedDataParallel"),
    ],
)
def test_models_that_would_not_train_are_refused(attempt: Callable[[], object], message: str) -> None:
    assert message in refusal(attempt)
