"""Rank programs for the tests of torch's checkpoint functions; importable, so that spawned processes find them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cut_ranks import Net
from processes import mesh_of
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import opt_checkpoint
from opt_checkpoint import sharded_model, sharded_optimizer
from opt_config import OptimizerConfig
from opt_kernels.optim import AdamW
from opt_stack import get_optimizer

SHAPES = {"column": (10, 10), "row": (6, 7), "qkv": (20, 3)}
BEFORE, AFTER = 3, 2  # steps before a checkpoint and after it
BASE = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}

CONFIGS: Mapping[str, OptimizerConfig] = {
    "adamw": OptimizerConfig(**BASE),
    "sgd": OptimizerConfig(optimizer="sgd", **BASE),
    "muon": OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest", **BASE),
    "bf16": OptimizerConfig(bf16=True, **BASE),
    "bf16, remainder": OptimizerConfig(
        bf16=True, use_precision_aware_optimizer=True, store_param_remainders=True, **BASE
    ),
}
SHARDED = {
    "flat shards": OptimizerConfig(bf16=True, use_distributed_optimizer=True, **BASE),
    "layer-wise": OptimizerConfig(
        bf16=True, optimizer="muon", use_layer_wise_distributed_optimizer=True, muon_fp32_matmul_prec="highest", **BASE
    ),
}
DROP_INS: Mapping[str, Mapping[str, Any]] = {
    "drop-in": {},
    "drop-in, fp32 mains": {"mains": "float32"},
    "drop-in, remainder": {"mains": "remainder"},
    "drop-in, 8 bit": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8},
}


class Run:
    """A model, sharded by FSDP2 where there are ranks, and its optimizer; stepped on known gradients."""

    def __init__(self, kind: str, *, seed: int = 0):
        self.is_bf16 = "bf16" in kind or kind in ("drop-in, fp32 mains", "drop-in, remainder")
        self.model = self._laid_out(seed)
        if kind in CONFIGS:
            self.optimizer: torch.optim.Optimizer = get_optimizer(CONFIGS[kind], [self.model], {})
        else:
            self.optimizer = AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1, **DROP_INS[kind])

    def _laid_out(self, seed: int) -> Net:
        net = Net(SHAPES, seed).to(torch.bfloat16 if self.is_bf16 else torch.float32)
        if dist.is_initialized():
            fully_shard(net, mesh=mesh_of(dist.get_world_size()))
        return net

    def train(self, start: int, stop: int) -> "Run":
        for step in range(start, stop):
            grads = dict(self._laid_out(1 + step).named_parameters())
            for name, param in self.model.named_parameters():
                param.grad = grads[name].detach()
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: full(param) for name, param in self.model.named_parameters()}


class Sharded(Run):
    """Plain parameters, whose state is cut over the ranks."""

    def __init__(self, kind: str, *, seed: int = 0):
        self.is_bf16 = True
        self.model = self._laid_out(seed)
        self.optimizer = get_optimizer(SHARDED[kind], [self.model], {})

    def _laid_out(self, seed: int) -> Net:
        return Net(SHAPES, seed).to(torch.bfloat16)


def full(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def finished(kind: str) -> dict[str, Tensor]:
    """The weights of an uninterrupted run."""
    return Run(kind).train(0, BEFORE + AFTER).weights()


def save(kind: str, path: str, flatten: bool = False) -> None:
    run = Run(kind).train(0, BEFORE)
    model, optim = get_state_dict(
        run.model, run.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten)
    )
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path)


def save_with_ours(kind: str, path: str) -> None:
    run = Run(kind).train(0, BEFORE)
    state = {"model": sharded_model(run.model), "optimizer": sharded_optimizer(run.model, run.optimizer)}
    opt_checkpoint.save(state, path)


def resume_with_ours(kind: str, path: str) -> dict[str, Tensor]:
    """The weights after the last steps, from another model and an optimizer without a step."""
    run = Run(kind, seed=50)
    opt_checkpoint.load({"model": sharded_model(run.model)}, path)
    opt_checkpoint.load_optimizer(run.model, run.optimizer, path)
    return run.train(BEFORE, BEFORE + AFTER).weights()


def resume(kind: str, path: str, flatten: bool = False) -> dict[str, Tensor]:
    """The weights after the last steps, from another model and an optimizer without a step."""
    run = Run(kind, seed=50)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=options,
    )
    return run.train(BEFORE, BEFORE + AFTER).weights()


def full_state(kind: str, cpu_offload: bool) -> dict[str, Any]:
    """Rank 0's whole state."""
    run = Run(kind).train(0, BEFORE)
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    return get_optimizer_state_dict(run.model, run.optimizer, options=options)


def broadcast_full(kind: str, cpu_offload: bool) -> dict[str, Tensor]:
    """Weights after the last steps, where rank 0 gave its whole state to all."""
    run = Run(kind).train(0, BEFORE)
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    again = Run(kind, seed=50)
    given = (model, optim) if dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again.model, given[0], options=options)
    set_optimizer_state_dict(again.model, again.optimizer, given[1], options=options)
    return again.train(BEFORE, BEFORE + AFTER).weights()


def round_trip_before_the_first_step(kind: str) -> dict[str, Tensor]:
    run = Run(kind)
    set_optimizer_state_dict(run.model, run.optimizer, get_optimizer_state_dict(run.model, run.optimizer))
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    return run.train(0, BEFORE + AFTER).weights()


def finished_sharded(kind: str) -> dict[str, Tensor]:
    return Sharded(kind).train(0, BEFORE + AFTER).weights()


class Dealt(Run):
    """FSDP2 shards of matrices, whose factors one rank each keeps."""

    def __init__(self) -> None:
        self.is_bf16 = False
        self.model = self._laid_out(0)
        self.optimizer = get_optimizer(OptimizerConfig(optimizer="soap", **BASE), [self.model], {})


def refusal_by_name(kind: str) -> str:
    """What torch's function for states by parameter name raises."""
    run = (Dealt() if kind == "dealt" else Sharded(kind)).train(0, BEFORE)
    try:
        get_optimizer_state_dict(run.model, run.optimizer)
    except ValueError as error:
        return str(error)
    return ""


def save_sharded(kind: str, path: str) -> None:
    """The state by parameter index, as dcp takes any state dict."""
    run = Sharded(kind).train(0, BEFORE)
    dcp.save({"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}, checkpoint_id=path)


def resume_sharded(kind: str, path: str) -> dict[str, Tensor] | str:
    """Weights after the last steps, or what dcp raised."""
    run = Sharded(kind, seed=50)
    state = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        return str(error)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optim"])
    return run.train(BEFORE, BEFORE + AFTER).weights()
