"""Rank programs for `StackOptimizers` in torchtitan, with its meshes, clipping, schedules and checkpoints, on gloo."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed import parallel_dims, utils

from opt_config import OptimizerConfig
from opt_stack.adapters.torchtitan import StackOptimizers

STEPS, SAVED_AT = 5, 3
NO_OTHER_AXES = {"cp": 1, "tp": 1, "pp": 1, "ep": 1}
BASE = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}
CONFIGS = {
    "adamw": OptimizerConfig(**BASE),
    "muon": OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest", **BASE),
    "bf16": OptimizerConfig(bf16=True, **BASE),
    "remainders": OptimizerConfig(bf16=True, use_precision_aware_optimizer=True, store_param_remainders=True, **BASE),
    "bf16 moments": OptimizerConfig(
        bf16=True, use_precision_aware_optimizer=True, exp_avg_dtype=torch.bfloat16, **BASE
    ),
}


class Net(nn.Module):
    """Matrices whose rows two ranks cannot share equally, and vectors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleDict({"0": nn.Linear(6, 5), "1": nn.Linear(5, 7, bias=False)})
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)


def sharded(model: nn.Module) -> nn.Module:
    """By FSDP2 over torchtitan's own mesh, where there are ranks: shards on two of them, and replicas of these."""
    if dist.is_initialized():
        parallel_dims.device_type = "cpu"
        replicas, axes = dist.get_world_size() // 2, ["dp_replicate", "dp_shard"]
        dims = parallel_dims.ParallelDims(dp_replicate=replicas, dp_shard=2, world_size=2 * replicas, **NO_OTHER_AXES)
        fully_shard(model, mesh=dims.get_mesh(axes[-dims.dp_replicate_enabled - 1 :]))
    return model


class Run:
    """The objects that torchtitan's trainer builds, with a model whose gradients are known."""

    def __init__(self, config: OptimizerConfig, folder: str = "", *, seed: int = 0) -> None:
        self.dtype = torch.bfloat16 if config.bf16 else torch.float32
        self.model = sharded(Net(seed).to(self.dtype))
        self.optimizers = StackOptimizers.Config(stack=config).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.checkpointer = CheckpointManager.Config(
            enable=bool(folder), interval=1, initial_load_model_only=False, keep_latest_k=0
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )

    def train(self, steps: range) -> "Run":
        for step in steps:
            grads = dict(sharded(Net(100 + step).to(self.dtype)).named_parameters())
            for name, param in self.model.named_parameters():
                param.grad = grads[name].detach()
            utils.clip_grad_norm_(list(self.model.parameters()), 1.0, foreach=True)
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(param) for name, param in self.model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def finished(config: OptimizerConfig) -> dict[str, Tensor]:
    return Run(config).train(range(STEPS)).weights()


def saved(config: OptimizerConfig, folder: str) -> list[str]:
    """Save a checkpoint, and return the keys of state in it that is neither a DTensor nor a scalar."""
    run = Run(config, folder).train(range(SAVED_AT))
    run.checkpointer.save(SAVED_AT)
    state = run.optimizers.state_dict()
    return [k for k, v in state.items() if isinstance(v, Tensor) and v.dim() and not isinstance(v, DTensor)]


def resumed(config: OptimizerConfig, folder: str) -> dict[str, Tensor]:
    """The weights of another model that loaded the checkpoint."""
    run = Run(config, folder, seed=50)
    assert run.checkpointer.load(SAVED_AT)
    return run.train(range(SAVED_AT, STEPS)).weights()


def saved_or_refused(config: OptimizerConfig, folder: str) -> list[str] | str:
    """As `saved`, or the message of the error that the container meets when it is built."""
    try:
        Run(config)
    except ValueError as error:
        return str(error)
    return saved(config, folder)


def refusals() -> dict[str, str]:
    """The messages where plain parameters have flat shards of state, and where each rank is a pipeline stage."""
    stage = nn.ModuleDict({str(dist.get_rank()): nn.Linear(4, 4)})
    cases = {
        "flat shards": (Net(0), OptimizerConfig(use_distributed_optimizer=True, **BASE)),
        "stages": (stage, CONFIGS["adamw"]),
    }
    messages = {}
    for case, (model, config) in cases.items():
        try:
            StackOptimizers.Config(stack=config).build(model_parts=[model])
        except ValueError as error:
            messages[case] = str(error)
    return messages
