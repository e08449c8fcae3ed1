"""Rank programs for `DeferredOptimizer` inside Accelerate and the HF Trainer, with FSDP2 on two gloo ranks."""

from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import nn
from trainer_ranks import (
    MAX_NORM,
    SAVED_AT,
    STEPS,
    Trained,
    as_launched,
    hf_trainer_runs,
    local_batch,
    make_layers,
    whole_weights,
)

from opt_config import OptimizerConfig
from opt_stack.adapters import DeferredOptimizer, StackFactory

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)  # the trainers clip


def use_fsdp2(accelerator: accelerate.Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Select FSDP on a CPU; Accelerate selects it for accelerators only."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # what later states start from
    assert accelerator.is_fsdp2


def fsdp2_plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", **options)


class Accelerated:
    """A run of Accelerate with FSDP2, which replaces the parameters in `prepare`."""

    def __init__(self, config: OptimizerConfig = CONFIG, *, rank_0_loads: bool = False) -> None:
        plugin = fsdp2_plugin(cpu_ram_efficient_loading=rank_0_loads)
        self.accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
        use_fsdp2(self.accelerator, plugin)
        layers = make_layers()
        if rank_0_loads and not self.accelerator.is_main_process:
            for param in layers.parameters():
                nn.init.zeros_(param)  # as a rank that loads no checkpoint has it
        layers[2].weight.is_embedding_or_output_parameter = True
        self.deferred = DeferredOptimizer(config, layers)
        self.model, self.optimizer = self.accelerator.prepare(layers, self.deferred)
        assert isinstance(self.model, torch.distributed.fsdp.FSDPModule)
        self.norms: list[float] = []

    def train(self, steps: range) -> None:
        for step in steps:
            self.accelerator.backward(self.model(local_batch(step)).square().mean())
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def trained(self) -> Trained:
        return Trained(whole_weights(self.model), self.norms)


def accelerate_fsdp2(folder: Path) -> tuple[Trained, Trained]:
    """The uninterrupted run, and one that was saved and resumed."""
    return _accelerate(folder)


def accelerate_fsdp2_rank_0_loads(folder: Path) -> tuple[Trained, Trained]:
    """The same, with the other ranks' values broadcast from rank 0 in `prepare`."""
    return _accelerate(folder, rank_0_loads=True)


def accelerate_fsdp2_saved_before_the_first_step(folder: Path) -> tuple[Trained, Trained]:
    """The same where the checkpoint is of a new run, and is loaded into a new one."""
    return _accelerate(folder, saved_at=0)


def _accelerate(folder: Path, *, rank_0_loads: bool = False, saved_at: int = SAVED_AT) -> tuple[Trained, Trained]:
    as_launched()
    unbroken = Accelerated(rank_0_loads=rank_0_loads)
    unbroken.train(range(STEPS))
    first = Accelerated(rank_0_loads=rank_0_loads)
    first.train(range(saved_at))
    first.accelerator.save_state(str(folder))
    resumed = Accelerated(rank_0_loads=rank_0_loads)
    resumed.accelerator.load_state(str(folder))
    resumed.train(range(saved_at, STEPS))
    return unbroken.trained(), resumed.trained()


def one_rank_reads_built() -> str:
    """What rank 0 gets that reads the optimizer alone before the first step, after which both ranks take one."""
    as_launched()
    run = Accelerated()
    refusal = ""
    if run.accelerator.is_main_process:
        try:
            run.deferred.built  # noqa: B018
        except RuntimeError as error:
            refusal = str(error)
    run.train(range(1))
    return refusal


def rules_after_fsdp2() -> list[str]:
    """The rule of each parameter, in the model's order; an attribute keeps the last matrix away from Muon."""
    as_launched()
    run = Accelerated(OptimizerConfig(optimizer="muon", lr=1e-2, clip_grad=0.0))
    run.train(range(1))
    rules = {id(p): group["optimizer"] for group in run.deferred.param_groups for p in group["params"]}
    return [rules[id(param)] for param in run.model.parameters()]


def hf_trainer_factory(folder: Path) -> tuple[Trained, Trained]:
    """The Trainer over DDP builds the stack itself; uninterrupted, and saved and resumed."""
    return hf_trainer_runs(folder, lambda _: {"optimizer_cls_and_kwargs": (StackFactory, {"config": CONFIG})})
