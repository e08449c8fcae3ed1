"""Lightning, Accelerate and the HF Trainer with our optimizers: on two ranks the run of one process with the joined
batch, their clipping included, and a resumed run; parameters that FSDP2 replaced; a factory that is called late.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import FSDP2_RUNS, run_processes
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_stack import DistributedDataParallel, get_optimizer
from opt_stack.adapters import DeferredOptimizer, StackFactory

for trainer in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(trainer)  # an optional session installs the trainers

import accelerate  # noqa: E402
import lightning  # noqa: E402
import transformers  # noqa: E402
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

MAX_NORM = 0.05  # of the trainers' own clipping; smaller than every gradient norm of these runs
STEPS = 6
SAVED_AT = 3
ROWS = 4  # of a joined batch
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)  # the trainers clip


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]  # before clipping, where the trainer reports them


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer as a trainer's user builds it; the trainer clips."""
    return get_optimizer(CONFIG, [model])


def joined_batch(step: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))


def local_batch(step: int) -> Tensor:
    return joined_batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for name, param in module.named_parameters()
    }


def train_alone(steps: range = range(STEPS)) -> Trained:
    """One process, the joined batches, torch's own optimizer: what every trainer on two ranks has to equal."""
    model = make_layers()
    decayed = [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in model.parameters()]
    optimizer = torch.optim.AdamW(decayed, lr=1e-2)
    norms = []
    for step in steps:
        model(joined_batch(step)).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(whole_weights(model), norms)


def as_launched() -> None:
    """The variables that torchrun sets, from the world that exists already."""
    rank = str(dist.get_rank())
    size = str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests", ACCELERATE_USE_CPU="true")
    warnings.simplefilter("ignore")


# --- Accelerate -------------------------------------------------------------------------------------------------------


class AcceleratedRun:
    """A run of Accelerate: over DDP, or with FSDP2, which replaces the parameters in `prepare`."""

    def __init__(self, *, fsdp2: bool, rank_0_loads: bool) -> None:
        layers = make_layers()
        if fsdp2:
            options: dict[str, Any] = {"auto_wrap_policy": "no_wrap", "cpu_ram_efficient_loading": rank_0_loads}
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
            self.accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
            _use_fsdp2(self.accelerator, plugin)
            if rank_0_loads and not self.accelerator.is_main_process:
                for param in layers.parameters():
                    nn.init.zeros_(param)  # as a rank that loads no checkpoint has it
        else:
            self.accelerator = accelerate.Accelerator(cpu=True)
        made: Any = DeferredOptimizer(CONFIG, layers) if fsdp2 else make_optimizer(layers)
        self.model, self.optimizer = self.accelerator.prepare(layers, made)
        assert isinstance(self.model, FSDPModule if fsdp2 else nn.parallel.DistributedDataParallel)
        self.norms: list[float] = []

    def train(self, steps: range) -> None:
        for step in steps:
            self.accelerator.backward(self.model(local_batch(step)).square().mean())
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def trained(self) -> Trained:
        return Trained(whole_weights(self.accelerator.unwrap_model(self.model)), self.norms)


def _use_fsdp2(accelerator: accelerate.Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Select FSDP on a CPU; Accelerate selects it for accelerators only."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # what later states start from
    assert accelerator.is_fsdp2


def with_accelerate(folder: Path, fsdp2: bool, rank_0_loads: bool = False) -> tuple[Trained, Trained]:
    """The uninterrupted run, and one that was saved and resumed.

    With `rank_0_loads`, the other ranks' values are broadcast from rank 0 in `prepare`.
    """
    as_launched()
    options = {"fsdp2": fsdp2, "rank_0_loads": rank_0_loads}
    unbroken = AcceleratedRun(**options)
    unbroken.train(range(STEPS))
    first = AcceleratedRun(**options)
    first.train(range(SAVED_AT))
    first.accelerator.save_state(str(folder))
    resumed = AcceleratedRun(**options)
    resumed.accelerator.load_state(str(folder))
    resumed.train(range(SAVED_AT, STEPS))
    return unbroken.trained(), resumed.trained()


def accelerate_with_our_wrapper(folder: Path) -> tuple[Trained, Trained | None]:
    """The model in our wrapper is left out of `prepare`; the prepared optimizer begins each iteration by `zero_grad`.

    Gradients are in `main_grad`, which trainers do not read: the optimizer clips.
    """
    as_launched()
    accelerator = accelerate.Accelerator(cpu=True)
    layers = make_layers()
    model = DistributedDataParallel(
        DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True), layers
    )
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=MAX_NORM, use_distributed_optimizer=True)
    optimizer = get_optimizer(config, [model])
    prepared = accelerator.prepare(optimizer)
    norms = []
    for step in range(STEPS):
        accelerator.backward(model(local_batch(step)).square().mean())
        prepared.step()
        norms.append(optimizer.get_grad_norm())
        prepared.zero_grad()
    return Trained(whole_weights(layers), norms), None


# --- Lightning --------------------------------------------------------------------------------------------------------


class _Toy(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.layers)


class _ShardedToy(_Toy):
    def configure_model(self) -> None:
        if not hasattr(self, "is_sharded"):  # Lightning calls this for every entry point
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
            self.is_sharded = True


class _Batches(IterableDataset[Tensor]):
    """This rank's parts of the joined batches."""

    def __init__(self, steps: range) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Tensor]:
        return map(local_batch, self.steps)


def with_lightning(folder: Path, fsdp2: bool) -> tuple[Trained, Trained]:
    as_launched()
    sharded = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}

    def trained(steps: range, *, resume: Path | None = None, save: Path | None = None) -> Trained:
        trainer = lightning.Trainer(
            max_epochs=1 if resume is None else 2,
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(**sharded) if fsdp2 else DDPStrategy(process_group_backend="gloo"),
            gradient_clip_val=MAX_NORM,
            use_distributed_sampler=False,
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
        )
        module = _ShardedToy() if fsdp2 else _Toy()
        trainer.fit(module, DataLoader(_Batches(steps), batch_size=None), ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        return Trained(whole_weights(module.layers), [])

    unbroken = trained(range(STEPS))
    trained(range(SAVED_AT), save=folder / "saved.ckpt")
    return unbroken, trained(range(SAVED_AT, STEPS), resume=folder / "saved.ckpt")


# --- HF Trainer -------------------------------------------------------------------------------------------------------


class _HfToy(nn.Module):
    """Returns its loss the way the Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


class _Rows(Dataset[dict[str, Tensor]]):
    """The rows of all joined batches."""

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": joined_batch(index // ROWS)[index % ROWS]}


class _InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(_Rows())


def train_with_hf_trainer(output: Path, resume: bool, uses_factory: bool) -> Trained:
    """One run over DDP, which is given an optimizer, or builds the stack itself; it saves, or resumes from `output`."""
    model = _HfToy()
    built: dict[str, Any] = {"optimizer_cls_and_kwargs": (StackFactory, {"config": CONFIG})}
    if not uses_factory:
        optimizer = make_optimizer(model)
        built = {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))}
    options: dict[str, Any] = {"max_grad_norm": MAX_NORM, "lr_scheduler_type": "constant", "ddp_backend": "gloo"}
    options |= {"num_train_epochs": 1, "per_device_train_batch_size": ROWS // dist.get_world_size()}
    options |= {"report_to": [], "save_steps": SAVED_AT, "logging_steps": 1, "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(output_dir=str(output), **options)
    trainer = _InOrder(model=model, args=arguments, train_dataset=_Rows(), **built)
    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{SAVED_AT}") if resume else None)
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return Trained(whole_weights(model.layers), norms)


def with_hf_trainer(folder: Path, uses_factory: bool) -> tuple[Trained, Trained]:
    """The uninterrupted run, and one that resumes from its checkpoint."""
    as_launched()
    uninterrupted = train_with_hf_trainer(folder, False, uses_factory)
    dist.barrier()  # rank 0 writes the checkpoints
    return uninterrupted, train_with_hf_trainer(folder, True, uses_factory)


# --- tests ------------------------------------------------------------------------------------------------------------

# Two halves of a batch are summed in another order than its rows at once: a few roundings a step.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ON_TWO_RANKS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # and the arguments
    "accelerate, ddp": (with_accelerate, (False,)),
    "accelerate, fsdp2": (with_accelerate, (True,)),
    "accelerate, fsdp2, rank 0 loads": (with_accelerate, (True, True)),
    "accelerate, with our wrapper": (accelerate_with_our_wrapper, ()),
    "lightning, ddp": (with_lightning, (False,)),
    "lightning, fsdp2": (with_lightning, (True,)),
    "HF Trainer, ddp": (with_hf_trainer, (False,)),
    "HF Trainer, factory": (with_hf_trainer, (True,)),
}


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_are_one_process_with_the_joined_batch(name: str, tmp_path: Path) -> None:
    rank_main, arguments = ON_TWO_RANKS[name]
    if not FSDP2_RUNS and "accelerate, fsdp2" in name:
        pytest.skip("this torch runs FSDP2 on GPUs only")
    alone = train_alone()
    assert min(alone.norms) > 2 * MAX_NORM  # so that clipping matters at every step
    for unbroken, resumed in run_processes(2, rank_main, tmp_path, *arguments):
        assert bool(unbroken.norms) == ("lightning" not in name)  # which reports none
        if unbroken.norms:
            torch.testing.assert_close(torch.tensor(unbroken.norms), torch.tensor(alone.norms), **CLOSE)
        for param, weight in alone.weights.items():
            torch.testing.assert_close(unbroken.weights[param], weight, **CLOSE, msg=param)
            assert resumed is None or torch.equal(resumed.weights[param], unbroken.weights[param]), param
