"""A rank that leaves a step, or drops an iteration, is named by the ranks that wait for it, long before the timeout."""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import FSDP2_RUNS, join_world, new_meeting, refusal, run_processes, start
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import CollectiveError
from opt_distributed.comm import Alone, Axes, Roles, TorchComm, notices
from opt_stack import DistributedDataParallel, Optimizer, ProcessGroups, finalize_model_grads, get_optimizer


class Run:
    """A wrapped model with overlap, after two steps; over all ranks, or over two of four with two stages each."""

    def __init__(self) -> None:
        notices.PATIENCE_SECONDS = 0.3
        notices.POLL_SECONDS = 0.05
        self.rank = dist.get_rank()
        groups = None if dist.get_world_size() == 2 else over_stages()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for param in self.model.parameters():
            nn.init.constant_(param, 0.1)
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=16)
        self.chunk = DistributedDataParallel(config, self.model, groups=groups)
        self.optimizer: Optimizer = get_optimizer(
            OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [self.chunk], pg_collection=groups
        )
        for _ in range(2):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, hook: Callable[[Tensor], Tensor] | None = None) -> None:
        out = self.chunk(torch.ones(2, 4) * (1 + self.rank))
        if hook is not None:
            out.register_hook(hook)
        out.square().mean().backward()


def over_stages() -> ProcessGroups:
    """Ranks 0 and 1 hold one stage, ranks 2 and 3 the other."""
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    return ProcessGroups(
        dp=replicas, expt_dp=replicas, mp=stages, tp_ep_pp=stages, pp=stages, intra_dist_opt=dist.group.WORLD
    )


def failing(*_: Any) -> Any:
    raise ArithmeticError("of rank 0 alone")


def drop(run: Run) -> None:
    """Backward raises, and the rank goes on without this iteration."""
    with pytest.raises(ArithmeticError):
        run.backward(failing)
    run.optimizer.zero_grad()


def skip(run: Run) -> None:
    run.chunk(torch.ones(2, 4))
    run.optimizer.zero_grad()


def step_with_hook(run: Run) -> None:
    run.optimizer.register_step_pre_hook(failing)
    run.optimizer.step()


def finish(run: Run) -> None:
    run.backward()
    run.model[0].weight.main_grad = torch.ones(3)  # type: ignore[attr-defined]
    run.chunk.finish_grad_sync()


def finalize(run: Run) -> None:
    run.backward()
    finalize_model_grads([run.chunk], num_tokens=5)


DROPPED = "step 3, .*: rank 0 (waits|stopped waiting) in drop .* bucket . of"  # either may look first
LEAVES: dict[str, tuple[Callable[[Run], None], int, str, str]] = {  # what rank 0 does; ranks; its error; that of others
    "drops a backward": (drop, 2, "GradientError: ranks dropped", DROPPED),
    "drops a stage's": (drop, 4, "GradientError: ranks dropped", "step 3, .*: rank . (waits|stopped waiting) in "),
    "drops a forward": (skip, 2, "GradientError: ranks dropped", DROPPED),
    "raises in a hook": (step_with_hook, 2, "ArithmeticError", "step 3, .*: rank 0 raised ArithmeticError: of rank 0"),
    "raises in a closure": (
        lambda run: run.optimizer.step(failing), 2, "ArithmeticError", "step 3, .*bucket . .*: rank 0 raised Arith",
    ),
    "raises in finish_grad_sync": (finish, 2, "UnusableGrad.*0.weight", "step 3, .*: rank 0 raised Unus.*: main_grad"),
    "raises in finalize_model_grads": (finalize, 2, "ValueError: num_tokens", "step 3, .*: rank 0 raised ValueError: "),
}  # fmt: skip


def leaving(case: str) -> tuple[str, bool]:
    """What this rank raises, and whether its weights are unchanged."""
    run = Run()
    before = [param.detach().clone() for param in run.model.parameters()]
    raised = ""
    try:
        if run.rank == 0:
            LEAVES[case][0](run)
        else:
            run.backward()
            run.optimizer.step()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    store = default_store()
    size = dist.get_world_size()
    store.set(f"{run.rank} has left", "")
    store.wait([f"{rank} has left" for rank in range(size)])  # its connections stay open until all know
    return raised, all(map(torch.equal, before, run.model.parameters()))


@pytest.mark.parametrize("case", LEAVES)
def test_waiting_ranks_name_the_absent_one_and_update_nothing(case: str) -> None:
    """They waited until the timeout of the group, half an hour by default, and raised an error without a cause."""
    _, size, of_first, of_others = LEAVES[case]
    (first, is_unchanged), *others = run_processes(size, leaving, case)
    assert is_unchanged
    assert re.match(of_first, first)
    for other, is_unchanged_there in others:
        assert is_unchanged_there
        assert re.match(f"CollectiveError: {of_others}", other), other


EXCHANGES = {
    "gather of matrices that ranks store parts of": {"muon_tp_mode": "layer_sharded"},
    "return of matrices that ranks store parts of": {"muon_tp_mode": "layer_sharded"},
    "parameter bucket 0": {"use_layer_wise_distributed_optimizer": True},
}


def loses_its_peer(rank: int, meeting: str, exchange: str) -> None:
    """Rank 1 is killed when it starts an exchange of the second step; rank 0 writes its error to a file."""
    join_world(rank, 2, meeting)
    model = nn.Linear(4, 4, bias=False)
    world = TorchComm(dist.group.WORLD)
    is_cut = "muon_tp_mode" in EXCHANGES[exchange]
    vars(model.weight).update(tensor_model_parallel=is_cut, partition_dim=0)
    axes = Axes(dp=Alone(), tp=world) if is_cut else Axes(dp=world, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=world)
    config = OptimizerConfig(optimizer="muon", lr=0.1, **EXCHANGES[exchange])
    optimizer = get_optimizer(config, [model], {}, pg_collection=roles)
    model.weight.grad = torch.eye(4)
    optimizer.step()
    launch = notices.Board.launch

    def die(board: Any, *launched: Any) -> Any:
        if exchange in notices.here():
            os._exit(9)
        return launch(board, *launched)

    if rank == 1:
        notices.Board.launch = die  # type: ignore[method-assign]
    try:
        optimizer.step()
    except CollectiveError as error:
        Path(f"{meeting}.found").write_text(str(error))
    os._exit(0)  # the group is broken: no peer will answer its farewell


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_error_of_a_killed_peer_names_the_exchange(exchange: str, tmp_path: Path) -> None:
    meeting = new_meeting(tmp_path)
    for process in [start(loses_its_peer, rank, meeting, exchange) for rank in range(2)]:
        process.join(120)
    assert re.match(f"step 2, {exchange}.*: ", Path(f"{meeting}.found").read_text())


# --- an optimizer of some ranks ---------------------------------------------------------------------------------------


def net() -> nn.Module:
    model = nn.Linear(3, 2)
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    return model


def trained(model: nn.Module, config: OptimizerConfig, **options: Any) -> list[Tensor]:
    optimizer = get_optimizer(config, [model], **options)
    for _ in range(2):
        model(torch.ones(2, 3) * (1 + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def meet(*, of: str) -> None:
    """Wait for all ranks of the world, in its store: a collective would not wait for those that are in another."""
    store = default_store()
    store.set(f"{of} {dist.get_rank()}", "")
    store.wait([f"{of} {rank}" for rank in range(dist.get_world_size())])


SGD = {"optimizer": "sgd", "lr": 0.1, "clip_grad": 0.01}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"use_distributed_optimizer": True},
    "wrapped": {},
    "wrapped, sharded": {"use_distributed_optimizer": True},
    **({"fully_shard": {}} if FSDP2_RUNS else {}),
}


def on_two_of_three() -> dict[str, list[Tensor]]:
    """The weights after steps of ranks 0 and 1, in a world of two or with groups in a larger one."""
    is_part = dist.get_world_size() > 2
    found = {}
    pair = dist.new_group([0, 1]) if is_part else dist.group.WORLD
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    given: dict[str, Any] = {"pg_collection": ProcessGroups(dp=pair, intra_dist_opt=pair)} if is_part else {}
    for name, fields in SETUPS.items() if dist.get_rank() < 2 else ():
        model = net()
        config = OptimizerConfig(**SGD, **fields)
        options = dict(given)
        if "wrapped" in name:
            of_wrapper = DistributedDataParallelConfig(**fields)
            model = DistributedDataParallel(of_wrapper, model, groups=options.pop("pg_collection", None))
        if name == "fully_shard":
            fully_shard(model, mesh=mesh)
        weights = trained(model, config, **options)
        found[name] = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]
    meet(of="training")
    return found


def test_some_ranks_of_the_world_may_train() -> None:
    """They waited for the others for ever, even with groups of their own."""
    *trainers, other = run_processes(3, on_two_of_three)
    assert other == {}
    wanted = run_processes(2, on_two_of_three)[0]
    for found in trainers:
        assert found.keys() == wanted.keys() == SETUPS.keys()
        for name in wanted:
            assert all(map(torch.equal, found[name], wanted[name])), name


INCOMPLETE: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "lacks expt_dp .* mp ": lambda pair, mesh: {"pg_collection": ProcessGroups(dp=pair)},
    "dp and mp make up 2 of the world's 3 ranks; pass intra_dist_opt": lambda pair, mesh: {
        "pg_collection": ProcessGroups(dp=pair, expt_dp=pair, mp=None, tp_ep_pp=None)
    },
    "2 of the world's 3 ranks; pass one that has all of them, or pass the groups": lambda pair, mesh: {"mesh": mesh},
}


def refused_on_two() -> list[str]:
    pair = dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    made = [make(pair, mesh) for make in INCOMPLETE.values()] if dist.get_rank() < 2 else []
    found = [refusal(lambda given=given: trained(net(), OptimizerConfig(**SGD), **given)) for given in made]
    meet(of="refused")
    return found


def test_groups_that_do_not_say_who_trains_are_refused_at_once() -> None:
    for messages in run_processes(3, refused_on_two)[:2]:
        for wanted, message in zip(INCOMPLETE, messages, strict=True):
            assert re.search(wanted, message), message


def waiting_for_one(comes: bool) -> tuple[list[str], str]:
    """Ranks 0 and 1 build without groups. Rank 2 comes when both have warned, or ends its connections."""
    notices.PATIENCE_SECONDS = 0.3
    notices.POLL_SECONDS = 0.05
    notices.ADVISE_SECONDS = 1.0
    warned: list[str] = []
    raised = ""
    store = default_store()

    def note(message: object, *_: Any) -> None:
        warned.append(str(message))
        store.set(f"warned {dist.get_rank()}", "")

    warnings.showwarning = note
    if dist.get_rank() == 2:
        store.wait(["warned 0", "warned 1"])
    try:
        if comes or dist.get_rank() < 2:
            trained(net(), OptimizerConfig(**SGD))
        else:
            dist.destroy_process_group()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return warned, raised


WARNING = r"get_optimizer or DistributedDataParallel: rank . has waited for 1 s for ranks \[(., )?2\]; all ranks of"
ADVICE = r"if only some ranks train, .* pg_collection=opt_stack.ProcessGroups\(dp=GROUP, intra_dist_opt=GROUP\)"


@pytest.mark.parametrize("comes", [True, False])
def test_ranks_that_wait_in_get_optimizer_say_what_to_pass(comes: bool) -> None:
    *waiting, last = run_processes(3, waiting_for_one, comes)
    assert last == ([], "")
    for (warning,), raised in waiting:
        assert re.match(f"{WARNING}.*{ADVICE}", warning), warning
        assert re.match("$" if comes else f"CollectiveError: get_optimizer or .*{ADVICE}", raised), raised
