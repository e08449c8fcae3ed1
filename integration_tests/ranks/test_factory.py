"""The factory on several ranks: one verdict for all, ranks without parameters or that raise, files written once, equal
groups; and in scripts that a launcher starts and that never touch torch.distributed themselves."""

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Net, grads_of
from processes import FSDP2_RUNS, Job, refusal, run_jobs, run_processes, run_program
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_stack import DistributedDataParallel, ProcessGroups, get_optimizer
from opt_stack.adapters import DeferredOptimizer

FP16 = {"fp16": True, "initial_loss_scale": 64.0, "hysteresis": 1, "use_distributed_optimizer": True}


def steps(fields: dict[str, Any], empty: int, bad_step: int) -> Any:
    """Steps of a rank, or of one process; the rank `empty` trains nothing. In `bad_step` the last has an infinity."""
    if dist.is_initialized():
        rank = dist.get_rank()
        size = dist.get_world_size()
    else:
        rank = 0
        size = 1
    training = [other for other in range(size) if other != empty]
    net = Net(torch.float16 if "fp16" in fields else torch.float32)
    net.requires_grad_(rank in training)
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, **fields), [net])
    results = []
    scales = []
    for step in range(5):
        if rank in training:
            optimizer.scale_loss(net(grads_of(step, training.index(rank), len(training)))).backward()
            if step == bad_step and rank == training[-1]:
                net.second.weight.grad[0, 0] = torch.inf
        results.append(tuple(optimizer.step()))
        scales.append(optimizer.get_loss_scale().item())
        optimizer.zero_grad()
    weights = {name: param.detach().clone() for name, param in net.named_parameters()}
    return optimizer.is_stub_optimizer, results, scales, weights


@pytest.mark.parametrize(
    ("size", "empty", "fields", "bad_step"),
    [(2, 1, {"weight_decay": 0.1, "clip_grad": 0.3, "log_num_zeros_in_grad": True}, -1), (3, 0, FP16, 2)],
    ids=["one of two", "first of three, sharded, with an overflow"],
)
def test_a_rank_that_trains_nothing_has_the_same_result(
    size: int, empty: int, fields: dict[str, Any], bad_step: int
) -> None:
    found = run_processes(size, steps, fields, empty, bad_step, reuse=True)
    _, results, scales, alone = steps(fields, -1, bad_step)
    start = dict(Net(torch.float16 if "fp16" in fields else torch.float32).named_parameters())
    assert [result[0] for result in results] == [step != bad_step for step in range(5)]
    assert bad_step < 0 or scales == [64.0, 64.0, 32.0, 32.0, 32.0]
    for rank, (is_stub, of_rank, scales_of_rank, weights) in enumerate(found):
        assert is_stub == (rank == empty)
        assert str(of_rank) == str(found[0][1])  # as text: an infinite norm equals itself, a NaN too
        assert scales_of_rank == scales
        for got, want in zip(of_rank, results, strict=True):
            assert got[0] == want[0]
            assert got[1] == pytest.approx(want[1], rel=1e-5) or not math.isfinite(want[1])
            assert got[2] == want[2]
        for name, weight in (start if rank == empty else alone).items():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-5, atol=1e-6)


def stages(folder: str) -> tuple[list[tuple[str, int]], float, float, str]:
    """Two pipeline stages with other parameters each: groups, norms and files; and logs that cannot be written."""
    rank = dist.get_rank()
    blocked = Path(folder) / "file"
    torch.manual_seed(rank)
    layer = nn.Linear(3, 4) if rank == 0 else nn.Linear(4, 2, bias=False)
    groups = ProcessGroups(dp=None, expt_dp=None, mp=dist.group.WORLD, tp_ep_pp=dist.group.WORLD)
    config = OptimizerConfig(lr=1e-2, config_logger_dir=f"{folder}/logs")
    optimizer = get_optimizer(config, [layer], pg_collection=groups, dump_param_to_param_group_map=f"{folder}/map")
    layer(torch.ones(2, layer.in_features)).square().sum().backward()
    local = torch.stack([param.grad.norm() for param in layer.parameters()]).norm().item()
    norm = optimizer.step().grad_norm
    if rank == 0:
        blocked.write_text("")
    dist.barrier()
    config = OptimizerConfig(lr=1e-2, config_logger_dir=f"{blocked}/logs")
    try:
        error = refusal(lambda: get_optimizer(config, [Net(torch.float32)]))
    except OSError as caught:
        error = type(caught).__name__
    return [(group["name"], len(group["params"])) for group in optimizer.param_groups], norm, local, error


def test_stages_have_the_same_groups_one_norm_and_one_writer(tmp_path: Path) -> None:
    """What rank 0 cannot write fails on all ranks."""
    first, second = run_processes(2, stages, str(tmp_path), reuse=True)
    assert first[0] == [("default", 1), ("bias or vector", 1)]
    assert second[0] == [("default", 1), ("bias or vector", 0)]
    assert first[1] == second[1]
    assert first[1] == pytest.approx(math.hypot(first[2], second[2]), rel=1e-6)
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["optimizer_config.json", "optimizer_plan.txt"]
    # Both stages call their first parameter `weight`, and both have it in the default group.
    assert json.loads((tmp_path / "map.json").read_text())["group_of"] == {"weight": 0, "bias": 1}
    assert (tmp_path / "map" / ".metadata").exists()
    assert first[3] == "NotADirectoryError"
    assert second[3].startswith("rank 0 refused: NotADirectoryError: ")


FLAT = {"use_distributed_optimizer": True}


def raise_in_backward(wrapped: bool) -> tuple[str, bool]:
    """The last rank raises in its second backward pass; the other proceeds to its step. The error, and whether weights
    of before are kept."""
    group = dist.new_group()
    groups = ProcessGroups(dp=group, expt_dp=group, mp=None, tp_ep_pp=None, intra_dist_opt=group)
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 13))
    model = DistributedDataParallel(DistributedDataParallelConfig(**FLAT), net, groups=groups) if wrapped else net
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, **FLAT), [model], {}, pg_collection=groups)
    for step in range(2):
        before = [param.detach().clone() for param in net.parameters()]
        try:
            loss = model(torch.ones(2, 8)).square().mean()
            if step == 1 and dist.get_rank() == 1:
                raise RuntimeError("no memory left on this rank")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            return f"{type(error).__name__}: {error}", all(map(torch.equal, before, net.parameters()))
    return "none", False


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_an_error_in_backward_reaches_all_ranks_keeping_weights(wrapped: bool) -> None:
    (waiting, is_kept), raised = run_processes(2, raise_in_backward, wrapped)
    assert raised == ("RuntimeError: no memory left on this rank", True)
    assert waiting.startswith("CollectiveError: step 2, ")
    assert "gradient" in waiting
    assert "bucket 0" in waiting
    assert is_kept


class WritingScaler(ShardedGradScaler):
    """Unscales gradients as on GPUs, where autograd counts it as a write."""

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(1.0)
        return super()._unscale_grads_(optimizer, *args)


def scaled_by_torch(kind: str) -> tuple[str, list[float], list[Tensor]]:
    """Steps under a scaler of torch; rank 0 overflows in the second. The refusal, the scale after each step, and the
    weights."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    if kind == "torch's wrapper":
        net = nn.parallel.DistributedDataParallel(net)
    elif kind == "fully_shard":
        fully_shard(net)
    elif kind == "wrapped":
        net = DistributedDataParallel(DistributedDataParallelConfig(), net)
    config = OptimizerConfig(lr=0.1)
    optimizer = DeferredOptimizer(config, net) if kind == "deferred" else get_optimizer(config, [net], {})
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    if kind in ("a sharded scaler", "deferred"):
        scaler = WritingScaler("cpu", init_scale=8.0, growth_interval=2)
    refused = ""
    scales = []
    for step in range(4):
        warnings.simplefilter("error")
        factor = torch.inf if step == 1 and dist.get_rank() == 0 else 1.0
        scaler.scale(factor * net(torch.full((3, 4), dist.get_rank() + 1.0)).square().mean()).backward()
        try:
            scaler.step(optimizer)
        except ValueError as error:
            refused = str(error)
            break
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    weights = [param.detach() for param in net.parameters()]
    return refused, scales, [w.full_tensor() if isinstance(w, DTensor) else w for w in weights]


REFUSED = ("plain", "wrapped")
ALLOWED = ("a sharded scaler", "deferred", "torch's wrapper", "fully_shard")


def test_a_scaler_that_skips_on_one_rank_is_refused() -> None:
    """An overflow on one rank skipped its step only; from then on gradients of different iterations were averaged."""
    kinds = [kind for kind in (*REFUSED, *ALLOWED) if FSDP2_RUNS or kind != "fully_shard"]
    for kind, (first, second) in run_jobs(2, {kind: Job(scaled_by_torch, (kind,)) for kind in kinds}).items():
        assert all(map(torch.equal, first[2], second[2])), kind
        for refused, scales, _ in (first, second):
            assert (scales == []) == (kind in REFUSED), (kind, refused)
            assert kind in REFUSED or scales == [8.0, 4.0, 4.0, 8.0], kind
            assert kind in ALLOWED or "torch.amp.GradScaler with 2 ranks: it would skip step()" in refused


# It makes no process group, and ranks draw different weights and samples.
SCRIPT = """
import os, sys, torch
from opt_stack import OptimizerConfig, get_optimizer
torch.manual_seed(1 + int(os.environ["RANK"]))
config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, weight_decay=0.0, clip_grad=0.0)
model = torch.nn.Linear(3, 1, bias=False)
try:
    refusal = str(get_optimizer(config, [model]))
except ValueError as error:
    refusal = str(error)
optimizer = get_optimizer(config, [model], broadcast_params=True)
start, x = model.weight.detach().clone(), torch.randn(4, 3)
model(x).sum().backward()
norm = optimizer.step().grad_norm
found = {"refusal": refusal, "start": start, "x": x, "norm": norm, "weight": model.weight.detach()}
torch.save(found, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
"""


def test_a_script_under_a_launcher_averages_gradients_over_ranks(tmp_path: Path) -> None:
    """With different seeds it is refused on every rank, and the refusal says what to type."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run_program(tmp_path / "script.py", tmp_path, ranks=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["start"], second["start"])
    assert not torch.equal(first["x"], second["x"])
    mean = (first["x"].double().sum(0) + second["x"].double().sum(0)) / 2
    for rank in (first, second):
        for words in ("ranks hold different values of 'weight': [1] differ from rank 0", "torch.manual_seed"):
            assert words in rank["refusal"]
        assert "broadcast_params=True" in rank["refusal"]
        torch.testing.assert_close(rank["weight"], (first["start"].double() - 0.5 * mean).float(), rtol=1e-6, atol=1e-6)
        assert rank["norm"] == pytest.approx(mean.norm().item(), rel=1e-6)


def test_half_set_world_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    message = (
        r"WORLD_SIZE=2 in the environment, but torch\.distributed is not initialised and these variables are not set: "
        "MASTER_ADDR, MASTER_PORT; start the script with torchrun, .* or unset WORLD_SIZE to train in one process"
    )
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=message):
        get_optimizer(OptimizerConfig(lr=0.1), [model])
    with pytest.raises(ConfigError, match=message):
        DistributedDataParallel(DistributedDataParallelConfig(), model)
    assert not dist.is_initialized()


LAUNCHERS = ("WORLD_SIZE", "SLURM_", "OMPI_", "MV2_", "PMI_")
SRUN = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_NAME": "train"}
STEP = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"}


@pytest.mark.parametrize(
    ("variables", "announced"),
    [
        (SRUN, "2 tasks were announced (SLURM_NTASKS=2)"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2"}, "2 tasks were announced (SLURM_STEP_NUM_TASKS=2)"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "3 tasks were announced (OMPI_COMM_WORLD_SIZE=3)"),
        ({"PMI_SIZE": "2"}, "2 tasks were announced (PMI_SIZE=2)"),
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # one task of an allocation for several
        (SRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (SRUN | {"WORLD_SIZE": "1"}, None),  # torchrun in every task
        (STEP, None),
        (SRUN | {"SLURM_JOB_NAME": "bash"}, None),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "40123"}, None),  # srun --pty
        ({"SLURM_NTASKS": "2"}, None),  # the shell of salloc
    ],
)
def test_tasks_that_train_alone_are_warned_of_once(
    variables: dict[str, str], announced: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(variable)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            get_optimizer(OptimizerConfig(lr=0.1), [nn.Linear(2, 2)])
    texts = [str(warning.message) for warning in caught if "announced" in str(warning.message)]
    assert len(texts) == (announced is not None)
    assert all(announced in text and "torch.distributed is not initialised" in text for text in texts)


def test_a_bad_world_size_is_refused_and_size_one_trains_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size in ("two", "0", "-1"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(ConfigError, match="WORLD_SIZE"):
            get_optimizer(OptimizerConfig(lr=0.1), [nn.Linear(2, 2)])
    for size in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", size)
        get_optimizer(OptimizerConfig(lr=0.1), [nn.Linear(2, 2)])
        assert not dist.is_initialized()
