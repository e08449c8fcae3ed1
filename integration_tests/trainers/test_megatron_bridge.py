"""Megatron-Bridge's call of `provide`, on chunks in Megatron-Core's own wrapper, with its groups and its scheduler."""

import copy
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import Job, run_jobs
from torch import Tensor, nn

pytest.importorskip("megatron.core")  # `nox -s megatron` installs it

import megatron.core
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

import opt_checkpoint
import opt_stack
from opt_checkpoint import differences, read_common, read_index
from opt_stack import ConfigError, Optimizer, OptimizerConfig, get_optimizer
from opt_stack.adapters.megatron_bridge import StackOptimizerConfig
from opt_stack.megatron import dist_checkpointing as our_checkpointing

READS_OUR_DIRECTORIES = megatron.core.__version__ >= "0.19"  # earlier releases need a file common.pt
STEPS = 6
LR = 1e-2
WIDTH = 8
BASE: dict[str, Any] = {"lr": LR, "min_lr": LR / 10, "weight_decay": 0.1, "clip_grad": 0.5}
SCHEDULE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": LR,
    "min_lr": LR / 10,
    "lr_warmup_steps": 2,
    "lr_decay_steps": STEPS,
    "lr_decay_style": "linear",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": STEPS,
    "wd_incr_style": "constant",
}


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    rates: list[float]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    numbers = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=numbers) / 2
    return model.to(dtype)


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def initialize() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron-Core's buffers ask for it
    torch.cuda.current_stream = lambda *_: None
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def wrap(model: nn.Module, **fields: Any) -> nn.Module:
    transformer = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=20, **fields)
    return DistributedDataParallel(transformer, config, model)  # type: ignore[no-any-return]


def build(chunk: nn.Module, **settings: Any) -> tuple[Optimizer, Any]:
    """Do what `setup_optimizer` of Megatron-Bridge 0.6.2 does."""
    config = StackOptimizerConfig(**{**BASE, **settings})
    optimizer = config.provide(
        model_chunks=[chunk],
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return optimizer, OptimizerParamScheduler(optimizer, **SCHEDULE)


def iterate(chunk: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> tuple[list[float], list[float]]:
    """Do what `train_step` of Megatron-Bridge 0.6.2 does."""
    norms = []
    rates = []
    for step in steps:
        chunk.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        rows = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = chunk(rows.to(next(chunk.parameters()).dtype)).float().square().mean()
        optimizer.scale_loss(loss).backward()
        chunk.finish_grad_sync()  # type: ignore[operator]  # as finalize_model_grads does
        update_successful, grad_norm, _ = optimizer.step()
        assert update_successful
        assert optimizer.get_loss_scale().item() == 1.0
        norms.append(grad_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return norms, rates


def trained(settings: dict[str, Any]) -> tuple[Trained, Trained]:
    """An unbroken run, and one that resumes from a state dict after half of the steps."""
    initialize()
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    model = make_model(dtype)
    chunk = wrap(model)
    optimizer, scheduler = build(chunk, **settings)
    norms, rates = iterate(chunk, optimizer, scheduler, range(STEPS // 2))
    saved = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, scheduler)], saved)
    after = iterate(chunk, optimizer, scheduler, range(STEPS // 2, STEPS))
    other = make_model(dtype)
    other_chunk = wrap(other)
    other_optimizer, other_scheduler = build(other_chunk, **settings)
    saved.seek(0)
    of_model, of_optimizer, of_scheduler = torch.load(saved, weights_only=False)
    other.load_state_dict(of_model)
    other_optimizer.load_state_dict(of_optimizer)
    other_scheduler.load_state_dict(of_scheduler)
    resumed = iterate(other_chunk, other_optimizer, other_scheduler, range(STEPS // 2, STEPS))
    return (Trained(model.state_dict(), norms + after[0], rates + after[1]), Trained(other.state_dict(), *resumed))


# --- tests ------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {"adam": {}, "muon": {"optimizer": "muon"}, "bf16": {"bf16": True}}


@pytest.fixture
def one_rank() -> Any:
    before = torch.cuda.current_device
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.cuda.current_device = before


def train_plain(settings: dict[str, Any]) -> Trained:
    """The whole batch on one rank, without Megatron-Core."""
    model = make_model(torch.bfloat16 if "bf16" in settings else torch.float32)
    optimizer = get_optimizer(OptimizerConfig(**{**BASE, **settings}), [model])
    scheduler = opt_stack.OptimizerParamScheduler(optimizer, **SCHEDULE)
    norms = []
    rates = []
    for step in range(STEPS):
        rows = batch(step).to(next(model.parameters()).dtype)
        model(rows).float().square().mean().backward()
        norms.append(optimizer.step().grad_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        scheduler.step(increment=1)
    return Trained(model.state_dict(), norms, rates)


@pytest.fixture(scope="module")
def of_two_ranks() -> dict[str, list[Any]]:
    jobs = {name: Job(trained, (settings,)) for name, settings in SETTINGS.items()}
    return run_jobs(2, jobs)


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_train_as_one_with_the_joined_batch_and_resume(of_two_ranks: dict[str, list[Any]], name: str) -> None:
    expected = train_plain(SETTINGS[name])
    # Two halves of a batch are summed in another order than its rows at once; in bf16, weights round to 2**-9.
    tolerance = {"rtol": 2**-6, "atol": 2**-7} if name == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    for unbroken, resumed in of_two_ranks[name]:
        assert unbroken.rates == pytest.approx(expected.rates)
        assert resumed.norms == unbroken.norms[STEPS // 2 :]
        torch.testing.assert_close(torch.tensor(unbroken.norms), torch.tensor(expected.norms), **tolerance)
        for key, weight in expected.weights.items():
            torch.testing.assert_close(unbroken.weights[key], weight, **tolerance, msg=key)
            assert torch.equal(resumed.weights[key], unbroken.weights[key]), key


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a wrapper that shards": (
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True},
        "model chunk 0 is in Megatron-Core's DistributedDataParallel with use_distributed_optimizer=True",
    ),
    "sharded state": ({}, {"use_distributed_optimizer": True}, "which reduces all gradients to every rank; set it"),
    "a graph": (
        {},
        {"stack": {"optimizer_cuda_graph": True}},
        "optimizer_cuda_graph=True: model chunk 0 is in Megatron-Core's",
    ),
    "an unknown field": ({}, {"stack": {"learning_rate": 1.0}}, "learning_rate"),
}


@pytest.mark.parametrize(("of_wrapper", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_lose_gradients_or_state_is_refused(
    one_rank: None, of_wrapper: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    chunk = wrap(make_model(), **of_wrapper)
    with pytest.raises(ConfigError, match=message):
        build(chunk, **settings)


@dataclass
class WithAnotherField(StackOptimizerConfig):
    fold_momentum: bool = False


def test_fields_only_megatron_core_has_must_keep_their_default() -> None:
    settings = {"lr": 0.1, "stack": {"clip_grad": 0.25}}
    tp_mode = StackOptimizerConfig().muon_tp_mode  # its default differs between versions of Megatron-Core
    expected = OptimizerConfig(lr=0.1, clip_grad=0.25, muon_tp_mode=tp_mode)
    assert WithAnotherField(**settings).to_stack() == expected
    with pytest.raises(ConfigError, match=r"fold_momentum=True: opt_stack.OptimizerConfig has no field of this name"):
        WithAnotherField(lr=0.1, fold_momentum=True).to_stack()


def test_keys_of_megatron_core_choose_the_same_parameters(one_rank: None) -> None:
    predicate = ParamPredicate(name="vectors", fn=lambda param: param.dim() == 1)
    optimizer = StackOptimizerConfig(lr=0.1).provide(
        wrap(make_model()),
        {ParamKey(name="*2.weight"): {"wd_mult": 0.5}, ParamKey(predicate=predicate): {"wd_mult": 0.25}},
    )
    found = {id.name: group["wd_mult"] for group in optimizer.param_groups for id in group["param_ids"]}
    assert found == {"0.weight": 1.0, "0.bias": 0.25, "2.weight": 0.5, "2.bias": 0.25}


def test_chunks_of_two_wrappers_are_refused(one_rank: None) -> None:
    chunks = [wrap(make_model()), make_model()]
    with pytest.raises(ConfigError, match=r"model chunk 0 is in Megatron-Core's .* and model chunk 1 is a Sequential"):
        StackOptimizerConfig(lr=0.1).provide(chunks)


@pytest.mark.parametrize("name", SETTINGS)
def test_states_resume_through_megatron_cores_torch_dist(
    one_rank: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("set_device", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, call, lambda *args: None)
    dtype = torch.bfloat16 if SETTINGS[name].get("bf16") else torch.float32

    def trained(steps: int) -> tuple[nn.Module, Optimizer]:
        model = make_model(dtype)
        chunk = wrap(model)
        optimizer, scheduler = build(chunk, **SETTINGS[name])
        iterate(chunk, optimizer, scheduler, range(steps))
        return model, optimizer

    def described(model: nn.Module, optimizer: Optimizer, **options: Any) -> dict[str, Any]:
        weights = {
            key: ShardedTensor.from_rank_offsets(key, param, replica_id=(0, 0, 0))
            for key, param in model.named_parameters()
        }
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, **options)}

    model, optimizer = trained(STEPS)
    before = copy.deepcopy(optimizer.state_dict())
    dist_checkpointing.save(described(model, optimizer), str(tmp_path))
    other, resumed = trained(1)
    loaded = dist_checkpointing.load(described(other, resumed, is_loading=True), str(tmp_path))
    resumed.load_state_dict(loaded["optimizer"])
    assert str(resumed.state_dict()) == str(before)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.skipif(not READS_OUR_DIRECTORIES, reason="needs Megatron-Core 0.19")
def test_plain_values_load_in_each_strict_mode_of_megatron_core(one_rank: None, tmp_path: Path) -> None:
    def described(values: Tensor) -> dict[str, Any]:
        return {"weights": ShardedTensor.from_rank_offsets("weights", values, replica_id=0)}

    state = {"iteration": 7, "scheduler": {"num_steps": [3, {"at": 1.5}]}, **described(torch.arange(4.0))}
    our_checkpointing.save(state, tmp_path / "for both")
    for mode in StrictHandling:
        loaded = dist_checkpointing.load(described(torch.zeros(4)), str(tmp_path / "for both"), strict=mode)
        if StrictHandling.requires_returning_mismatch_keys(mode):
            loaded, *mismatches = loaded
            assert mismatches == [set(), set()]
        assert str(loaded) == str({**state, "weights": torch.arange(4.0)}), mode
    opt_checkpoint.save(state, tmp_path / "ours")  # lists values, which only the default does not parse
    assert dist_checkpointing.load(described(torch.zeros(4)), str(tmp_path / "ours"))["iteration"] == 7
    with pytest.raises(ValueError, match="unpack"):
        dist_checkpointing.load(described(torch.zeros(4)), str(tmp_path / "ours"), strict="log_unexpected")


NUMBERS = ("lr", "weight_decay", "betas", "eps", "wd_mult", "lr_mult", "max_lr", "min_lr")


def plain_state(index: Any) -> Any:
    """The numbers of the groups by decay, step count and loss scale, of each optimizer."""
    saved = read_common(index)["optimizer"]
    found = []
    for entry in [saved[number] for number in sorted(saved)] if 0 in saved else [saved]:
        inner = entry.get("optimizer", entry)
        groups = sorted(str([group.get(key) for key in NUMBERS]) for group in inner["param_groups"])
        step = inner.get("state", {}).get("common_step", inner["param_groups"][0].get("step"))
        found.append((groups, None if step is None else float(step), str(entry.get("grad_scaler"))))
    return found


KINDS = ["fp32", "plain", "fp16", "zero", "fp16-zero", "experts", "chain"]
if find_spec("emerging_optimizers"):
    KINDS += ["muon", "muon-experts", "muon-layer-wise", "muon-layer-wise-zero", "lion-fp32", "laprop"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_side_loads_the_state_that_the_other_saved(kind: str, tmp_path: Path) -> None:
    script = Path(__file__).parent / "resume_by_megatron.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, tmp_path, "2", kind], check=True, timeout=300, env=environment)
    found = [path for path in tmp_path.iterdir() if path.name.startswith(("ours ", "theirs "))]
    assert len(found) == (7 if READS_OUR_DIRECTORIES else 5)
    for path in found:
        first = read_index(tmp_path / path.name.partition(" ")[0])
        second = read_index(path)
        # Plain values have the form of the side that saved them.
        assert {found.key for found in differences(first, second)} <= {"common_state/shard_0_1"}, path
        assert plain_state(first) == plain_state(second), path
