"""What one rank of a case does with the project: builds its part of the model, trains it, and tells what it saw."""

import dataclasses
import io
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.cases import (
    ADAM_BETAS,
    ADAM_EPS,
    ADAPTIVE_BETA2,
    ADAPTIVE_EPS,
    LION_BETAS,
    LR,
    MATRIX_RULES,
    MUON_MOMENTUM,
    SGD_MOMENTUM,
    WEIGHT_DECAY,
    Case,
    Param,
    Setup,
    chunk_of,
    cut_of,
    is_copy,
    is_held,
    is_trained,
    is_used,
    replica_of,
)
from fuzz.gradients import first_weight, local_gradient, part, tokens
from fuzz.laid_out import lay_out, like, local, whole
from opt_config import DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.grouping import matrices_whole, nothing_whole
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import ProcessGroups, Roles
from opt_distributed.finalize import Peers, finalize_model_grads
from opt_stack import Optimizer, get_optimizer, get_optimizer_based_on_param_groups


@dataclass(slots=True, kw_only=True)
class SeenStep:
    """What a rank saw of one step."""

    success: bool
    norm: float
    zeros: int | None
    scale: float
    weights: dict[str, Tensor] | None  # this rank's parts; None where the case does not look
    loss: float  # summed over microbatches and chunks, before scaling
    steps: dict[str, int]  # of the parameters that this rank keeps state of


class Held(nn.Module):
    """One parameter. `forward(g)` has the gradient g."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, grad: Tensor) -> Tensor:
        return local(self.weight * like(grad.to(self.weight.dtype), self.weight)).float().sum()


class Chunk(nn.Module):
    """This rank's parameters of one chunk. `forward` takes the gradients of those that it uses."""

    def __init__(self, case: Case, setup: Setup, rank: int, chunk: int, *, moved: float):
        super().__init__()
        place = setup.grid.place(rank)
        for param in case.params:
            if is_held(param, place, setup.grid) and chunk_of(param, setup) == chunk:
                value = (part(first_weight(case, param), param, place, setup) + moved).to(case.dtype_of(param, setup))
                self.add_module(param.name, Held(value.contiguous().clone()))
                self.get_submodule(param.name).requires_grad_(not param.frozen)
        if setup.layout != "plain":
            lay_out(case, setup, self)
        for name, module in self.named_children():  # last, since sharding makes new parameters without attributes
            param = case.param(name)
            pieces = cut_of(param, place, setup.grid)[1] if setup.layout == "plain" else 1
            _mark(module.weight, param, pieces, is_copy=is_copy(param, place))

    def forward(self, grads: dict[str, tuple[Tensor, int]]) -> Tensor:
        terms = [self.get_submodule(name)(grad / uses) for name, (grad, uses) in grads.items() for _ in range(uses)]
        return torch.stack(terms).sum()


def _mark(weight: nn.Parameter, param: Param, pieces: int, *, is_copy: bool) -> None:
    """Says what the parameter is by Megatron-Core's attributes."""
    marks: dict[str, Any] = {}
    if pieces > 1:
        marks |= {"tensor_model_parallel": True, "partition_dim": param.cut}
    if param.expert is not None:
        marks |= {"allreduce": False}
    if param.embedding:
        marks |= {"is_embedding_or_output_parameter": True}
    if param.norm_group:
        marks |= {"grad_norm_group": param.norm_group}
    if param.qkv:
        marks |= {"qkv_split_shapes": (2, 1, 1)}
    if param.tied:
        marks |= {"shared_embedding": True, "shared": is_copy}
    if param.over_tp:
        marks |= {param.over_tp: True}
    for name, value in marks.items():
        setattr(weight, name, value)


class Run:
    """One rank's model and optimizer in one setup.

    `moved` is added to the first weights, so that nothing is right after a load that was not loaded. `embedding`: the
    stages that hold the tied embedding, where ranks are threads.
    """

    embedding: Comm = Alone()

    def __init__(
        self, case: Case, setup: Setup, rank: int, groups: Roles | ProcessGroups | None, *, moved: float = 0.0
    ):
        self.case, self.setup, self.rank, self.groups = case, setup, rank, groups
        self.place = setup.grid.place(rank)
        self.nets = [Chunk(case, setup, rank, chunk, moved=moved) for chunk in range(setup.chunks)]
        self.models: list[nn.Module] = [self._wrapped(chunk) for chunk in range(setup.chunks)]
        self.optimizer = self._optimizer()

    def step(self, step: int, *, looks: bool) -> SeenStep:
        """One iteration: forwards and backwards, the step, zeros."""
        loss = sum(self._microbatch(step, number) for number in range(self.setup.microbatches))
        self._finalize(step)
        for group in self.optimizer.param_groups if self.case.schedules else ():
            group["lr"] = group["max_lr"] / (1 + step)
        result = self.optimizer.step()
        for model in self.models:
            if isinstance(model, DistributedDataParallel):
                model.zero_grad_buffer()
        self.optimizer.zero_grad(set_to_none=not self.case.keeps_grads)
        return SeenStep(
            success=result.success,
            norm=result.grad_norm,
            zeros=result.num_zeros_in_grad,
            scale=self.optimizer.get_loss_scale().item(),
            weights=self.weights() if looks else None,
            loss=loss,
            steps=self._steps(),
        )

    def holds(self, param: Param) -> bool:
        return is_held(param, self.place, self.setup.grid)

    def weight(self, param: Param) -> nn.Parameter:
        """This rank's part."""
        found = self.nets[chunk_of(param, self.setup)].get_parameter(f"{param.name}.weight")
        assert isinstance(found, nn.Parameter)
        return found

    def complete(self) -> None:
        """Waits for parameters on their way."""
        for model in self.models:
            if isinstance(model, DistributedDataParallel):
                model.finish_param_sync()

    def weights(self) -> dict[str, Tensor]:
        """This rank's parts, complete."""
        self.complete()
        return {name: whole(module.weight) for net in self.nets for name, module in net.named_children()}

    def again(self) -> "Run":
        """A new model and optimizer that took the state dicts of these."""
        self.complete()
        new = Run(self.case, self.setup, self.rank, self.groups, moved=1.0)
        new.embedding = self.embedding
        for model, old in zip(new.models, self.models, strict=True):
            model.load_state_dict(old.state_dict())
        stored = io.BytesIO()
        torch.save(self.optimizer.state_dict(), stored)
        stored.seek(0)
        new.optimizer.load_state_dict(torch.load(stored, weights_only=False))
        return new

    def _microbatch(self, step: int, number: int) -> float:
        is_last = number == self.setup.microbatches - 1
        found = 0.0
        with ExitStack() as stack:
            for model in self.models:
                if isinstance(model, DistributedDataParallel) and not is_last:
                    stack.enter_context(model.no_sync())
            for chunk, model in enumerate(self.models):
                grads = self._grads(chunk, step, number)
                if grads:
                    loss = model(grads)
                    found += loss.item()
                    self.optimizer.scale_loss(loss).backward()
        return found

    def _grads(self, chunk: int, step: int, microbatch: int) -> dict[str, tuple[Tensor, int]]:
        """The gradients of what this rank's forward uses, unless nothing in it is trainable."""
        held = [param for param in self.case.params if hasattr(self.nets[chunk], param.name)]
        used = [
            param
            for param in held
            if is_used(self.case, param, step=step, microbatch=microbatch, replica=replica_of(param, self.place))
        ]
        if all(param.frozen for param in used):
            return {}
        return {
            param.name: (local_gradient(self.case, param, self.rank, step=step, microbatch=microbatch), param.uses)
            for param in used
        }

    def _finalize(self, step: int) -> None:
        needs = self.setup.per_token or any(param.over_tp or param.tied for param in self.case.params)
        if not (self.setup.wrapped and needs):
            return
        peers: Any = self.groups
        if isinstance(peers, Roles):
            peers = Peers(tensor=peers.dense.tp, expert_tensor=peers.expert.tp, embedding=self.embedding)
        count = tokens(self.case, step, self.place.replica) if self.setup.per_token else None
        finalize_model_grads(self.models, count, peers)

    def _steps(self) -> dict[str, int]:
        """Updates that each parameter had, as far as this rank keeps its state."""
        found = {}
        held = self.optimizer.state_dict()
        for group in held["param_groups"]:
            for index, name in zip(group["params"], group["param_names"], strict=True):
                if index in held["state"]:
                    found[name.split(".")[-2]] = int(held["state"][index]["step"])
        return found

    def _wrapped(self, chunk: int) -> nn.Module:
        setup, net = self.setup, self.nets[chunk]
        if not setup.wrapped:
            return net
        return DistributedDataParallel(
            ddp_config(self.case, setup, self.rank),
            net,
            groups=self.groups,
            is_whole=matrices_whole if setup.sharding == "whole" and self.case.rule in MATRIX_RULES else nothing_whole,
            calculate_per_token_loss=setup.per_token,
            chunk=chunk,
        )

    def _optimizer(self) -> Optimizer:
        case, config = self.case, optimizer_config(self.case, self.setup, self.rank)
        if any(param.left_out for param in case.params):
            return get_optimizer_based_on_param_groups(
                config, self.models, self._own_groups(), pg_collection=self.groups
            )
        overrides = case.overrides and {ParamKey(name=f"{name}.*"): dict(own) for name, own in case.overrides}
        overrides = None if case.overrides is None else overrides or {}
        return get_optimizer(config, self.models, overrides, pg_collection=self.groups)

    def _own_groups(self) -> list[dict[str, Any]]:
        """A group for each trained parameter of the whole model, so that ranks have the same groups."""
        weights = {name: module.weight for net in self.nets for name, module in net.named_children()}
        return [
            {
                "params": [weights[param.name]] if param.name in weights else [],
                "name": param.name,
                "optimizer": self.case.rule_of(param).removesuffix("_l2"),
                "is_expert_parallel": param.expert is not None,
                **self.case.overrides_of(param),
            }
            for param in self.case.params
            if is_trained(param)
        ]


def optimizer_config(case: Case, setup: Setup, rank: int) -> OptimizerConfig:
    """The case in the project's words."""
    numbers: dict[str, Any] = {
        "fp32": {},
        "bf16": {"bf16": True},
        "bf16_remainder": {"bf16": True, "use_precision_aware_optimizer": True},
        "bf16_grads": {"bf16": True, "use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16},
        "bf16_narrow": {
            "bf16": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
        },
        "fp16": {
            "fp16": True,
            "initial_loss_scale": case.scale,
            "loss_scale_window": case.window,
            "hysteresis": case.hysteresis,
        },
        "fp16_constant": {"fp16": True, "loss_scale": case.scale},
    }[case.numbers_of(setup)]
    config = OptimizerConfig(
        optimizer=case.rule.removesuffix("_l2"),
        decoupled_weight_decay=case.rule != "adam_l2",
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        clip_grad=case.clip,
        log_num_zeros_in_grad=case.counts_zeros,
        adam_beta1=ADAM_BETAS[0],
        adam_beta2=ADAM_BETAS[1],
        adam_eps=ADAM_EPS,
        sgd_momentum=SGD_MOMENTUM,
        lion_beta1=LION_BETAS[0],
        lion_beta2=LION_BETAS[1],
        muon_momentum=MUON_MOMENTUM,
        muon_nesterov=case.nesterov,
        muon_tp_mode=case.tp_mode,
        muon_fp32_matmul_prec="highest",
        muon_scale_mode=case.scale_mode,
        grad_norm_skip_threshold=case.skip_above,
        adaptive_muon_moment2_method=case.moment2,
        adaptive_muon_beta2=ADAPTIVE_BETA2,
        adaptive_muon_eps=ADAPTIVE_EPS,
        use_distributed_optimizer=setup.sharding == "flat",
        use_layer_wise_distributed_optimizer=setup.sharding == "whole",
        overlap_param_gather=setup.overlap_gather,
        overlap_param_gather_with_optimizer_step=setup.gathers_with_step,
        **numbers,
    )
    if case.mistake is not None and case.mistake.rank in (None, rank):
        return dataclasses.replace(config, **dict(case.mistake.fields))
    return config


def ddp_config(case: Case, setup: Setup, rank: int) -> DistributedDataParallelConfig:
    """The wrapper's part of the setup."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=setup.reduce_in_fp32,
        overlap_grad_reduce=setup.overlap_grads,
        overlap_param_gather=setup.overlap_gather,
        check_for_nan_in_grad=setup.checks_nan,
        use_distributed_optimizer=setup.is_sharded,
        num_distributed_optimizer_instances=setup.grid.instances,
        bucket_size=setup.bucket_size,
        num_buckets=setup.num_buckets,
        pad_buckets_for_high_nccl_busbw=setup.pads_for_busbw,
        reduce_scatter_with_fp32_accumulation=setup.sum_in_fp32,
        average_in_collective=setup.average_in_collective,
    )
    if case.mistake is not None and case.mistake.rank in (None, rank):
        return dataclasses.replace(config, **dict(case.mistake.ddp_fields))
    return config
