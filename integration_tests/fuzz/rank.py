"""One rank of a case: builds its part of the model, trains it with the project, and reports the results."""

import dataclasses
import io
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from fuzz import cases
from fuzz.cases import HYPER, OTHER_ORDERS, Case, Param, Setup, is_held, is_trained
from fuzz.gradients import first_weight, local_gradient, part, tokens
from opt_config import DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import ProcessGroups, Roles
from opt_distributed.finalize import finalize_model_grads
from opt_distributed.step import StepResult
from opt_stack import Optimizer, get_optimizer, get_optimizer_based_on_param_groups


@dataclass(slots=True, kw_only=True)
class SeenStep:
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
        weight, grad = self.weight, grad.to(self.weight.dtype)
        if not isinstance(weight, DTensor):
            return (weight * grad).float().sum()
        like = DTensor.from_local(grad, weight.device_mesh, weight.placements, run_check=False)
        return (weight * like).to_local().float().sum()


class Chunk(nn.Module):
    """This rank's parameters of one chunk. `forward` takes the gradients of those that it uses."""

    def __init__(self, case: Case, setup: Setup, rank: int, chunk: int, *, moved: float):
        super().__init__()
        self.recomputes = "recomputes activations" in case.habits
        place = setup.grid.place(rank)
        for param in case.params:
            if is_held(param, place, setup.grid) and cases.chunk_of(param, setup) == chunk:
                value = (part(first_weight(case, param), param, place, setup) + moved).to(case.dtype_of(param, setup))
                self.add_module(param.name, Held(value.contiguous().clone()))
                self.get_submodule(param.name).requires_grad_(not param.frozen)
        if setup.layout != "plain":
            lay_out(case, setup, self)
        for name, module in self.named_children():  # last, since sharding makes new parameters without attributes
            param = case.param(name)
            pieces = cases.cut_of(param, place, setup.grid)[1] if setup.layout == "plain" else 1
            _mark(module.weight, param, pieces, is_copy=cases.is_copy(param, place))

    def forward(self, grads: dict[str, tuple[Tensor, int]]) -> Tensor:
        repeated = [(name, grad / uses) for name, (grad, uses) in grads.items() for _ in range(uses)]
        terms = [self._used(self.get_submodule(name), grad) for name, grad in repeated]
        return torch.stack(terms).sum()

    def _used(self, module: nn.Module, grad: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(module, grad, use_reentrant=False, preserve_rng_state=False)
        return module(grad)


def _mark(weight: nn.Parameter, param: Param, pieces: int, *, is_copy: bool) -> None:
    marks: tuple[tuple[bool, dict[str, Any]], ...] = (
        (pieces > 1, {"tensor_model_parallel": True, "partition_dim": param.cut}),
        (param.expert is not None, {"allreduce": False}),
        (param.embedding, {"is_embedding_or_output_parameter": True}),
        (param.norm_group is not None, {"grad_norm_group": param.norm_group}),
        (param.qkv, {"qkv_split_shapes": (2, 1, 1)}),
        (param.tied, {"shared_embedding": True, "shared": is_copy}),
        (param.over_tp is not None, {str(param.over_tp): True}),
    )
    for name, value in (item for applies, values in marks if applies for item in values.items()):
        setattr(weight, name, value)


class Run:
    """One rank's model and optimizer in one setup.

    `moved` is added to the first weights, so that nothing is right after a load that was not loaded.
    """

    def __init__(
        self, case: Case, setup: Setup, rank: int, groups: Roles | ProcessGroups | None, *, moved: float = 0.0
    ):
        self.case, self.setup, self.rank, self.groups = case, setup, rank, groups
        self.place = setup.grid.place(rank)
        self.nets = [Chunk(case, setup, rank, chunk, moved=moved) for chunk in range(setup.chunks)]
        self.models: list[nn.Module] = [self._wrapped(chunk) for chunk in range(setup.chunks)]
        self.optimizer = self._optimizer()

    def step(self, step: int, *, looks: bool) -> SeenStep:
        loss = sum(self._microbatch(step, number) for number in range(self.setup.microbatches))
        self._prepare(step)
        for group in self.optimizer.param_groups if self.case.schedules else ():
            group["lr"] = group["max_lr"] / (1 + step)
        result = self._stepped()
        self._begin_again()
        return SeenStep(
            success=result.success,
            norm=result.grad_norm,
            zeros=result.num_zeros_in_grad,
            scale=self.optimizer.get_loss_scale().item(),
            weights=self.weights() if looks else None,
            loss=loss,
            steps=self._steps(),
        )

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        return [model for model in self.models if isinstance(model, DistributedDataParallel)]

    def _prepare(self, step: int) -> None:
        if "reduces before the step" in self.case.habits:
            for wrapper in self.wrappers:
                wrapper.start_grad_sync()
            for wrapper in self.wrappers:
                wrapper.finish_grad_sync()
        self._finalize(step)

    def _stepped(self) -> StepResult:
        optimizer = self.optimizer
        if "steps by halves" not in self.case.habits:
            return optimizer.step()
        if optimizer.prepare_grads():
            return StepResult(False, optimizer.get_grad_norm(), None)
        zeros = optimizer.count_zeros() if self.case.counts_zeros else None
        norm = optimizer.clip_grad_norm(self.case.clip)
        return StepResult(optimizer.step_with_ready_grads(), norm, zeros)

    def _begin_again(self) -> None:
        """Zeros, and what some runs do between two iterations."""
        habits = self.case.habits
        for wrapper in self.wrappers:
            if "toggles hooks" in habits and self.setup.overlap_gather:
                wrapper.disable_forward_pre_hook()
                wrapper.enable_forward_pre_hook()
            if "offloads" in habits:
                wrapper.offload_grad_buffers()
                wrapper.restore_grad_buffers()
            else:
                wrapper.zero_grad_buffer()
        if "offloads" in habits:
            self.optimizer.offload_to_cpu()
            self.optimizer.restore_from_cpu()
        self.optimizer.zero_grad(set_to_none=not self.case.keeps_grads)

    def holds(self, param: Param) -> bool:
        return is_held(param, self.place, self.setup.grid)

    def weight(self, param: Param) -> nn.Parameter:
        found = self.nets[cases.chunk_of(param, self.setup)].get_parameter(f"{param.name}.weight")
        assert isinstance(found, nn.Parameter)
        return found

    def complete(self) -> None:
        for wrapper in self.wrappers:
            wrapper.finish_param_sync()

    def weights(self) -> dict[str, Tensor]:
        self.complete()
        return {name: _whole(module.weight) for net in self.nets for name, module in net.named_children()}

    def again(self) -> "Run":
        """A new model and optimizer, loaded from the state dicts of these."""
        self.complete()
        new = Run(self.case, self.setup, self.rank, self.groups, moved=1.0)
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
            for wrapper in self.wrappers if not is_last else ():
                stack.enter_context(wrapper.no_sync())
            for chunk, model in enumerate(self.models):
                grads = self._grads(chunk, step, number)
                if grads:
                    loss = model(grads)
                    found += loss.item()
                    if loss.requires_grad:
                        self.optimizer.scale_loss(loss).backward()
        return found

    def _grads(self, chunk: int, step: int, microbatch: int) -> dict[str, tuple[Tensor, int]]:
        """The gradients of what this rank's forward uses."""
        case, at = self.case, {"step": step, "microbatch": microbatch}
        held = [param for param in case.params if hasattr(self.nets[chunk], param.name)]
        used = [p for p in held if cases.is_used(case, p, replica=cases.replica_of(p, self.place), **at)]
        if used and OTHER_ORDERS in case.habits:
            used = used[(self.rank + step) % len(used) :] + used[: (self.rank + step) % len(used)]
        return {param.name: (local_gradient(case, param, self.rank, **at), param.uses) for param in used}

    def _finalize(self, step: int) -> None:
        per_token = self.setup.per_token
        if self.setup.wrapped and (per_token or any(param.over_tp or param.tied for param in self.case.params)):
            count = tokens(self.case, step, self.place.replica) if per_token else None
            finalize_model_grads(self.models, count, self.groups)

    def _steps(self) -> dict[str, int]:
        """Updates that each parameter had, as far as this rank keeps its state."""
        state = self.optimizer.state_dict()
        return {
            name.split(".")[-2]: int(state["state"][index]["step"])
            for group in state["param_groups"]
            for index, name in zip(group["params"], group["param_names"], strict=True)
            if index in state["state"]
        }

    def _wrapped(self, chunk: int) -> nn.Module:
        setup, net = self.setup, self.nets[chunk]
        if not setup.wrapped:
            return net
        return DistributedDataParallel(
            ddp_config(self.case, setup, self.rank),
            net,
            groups=self.groups,
            optimizer_config=optimizer_config(self.case, setup, self.rank),
            calculate_per_token_loss=setup.per_token,
            chunk=chunk,
        )

    def _optimizer(self) -> Optimizer:
        case, config = self.case, optimizer_config(self.case, self.setup, self.rank)
        if any(param.left_out for param in case.params):
            return get_optimizer_based_on_param_groups(
                config, self.models, self._own_groups(), pg_collection=self.groups
            )
        overrides = None
        if case.overrides is not None:
            overrides = {ParamKey(name=f"{name}.*"): dict(own) for name, own in case.overrides}
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


# --- the case as configurations ---------------------------------------------------------------------------------------

AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
BF16: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "bf16_remainder": AWARE,
    "bf16_short": {**AWARE, "main_params_dtype": torch.int8},
    "bf16_scaled": {**AWARE, "main_params_dtype": torch.float16},
    "bf16_grads": {**AWARE, "main_grads_dtype": torch.bfloat16},
    "bf16_narrow": {**AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
}


def optimizer_config(case: Case, setup: Setup, rank: int) -> OptimizerConfig:
    dynamic = {"initial_loss_scale": case.scale, "loss_scale_window": case.window, "hysteresis": case.hysteresis}
    others = {"fp32": {}, "fp16": {"fp16": True, **dynamic}, "fp16_constant": {"fp16": True, "loss_scale": case.scale}}
    config = OptimizerConfig(
        optimizer=case.rule.removesuffix("_l2"),
        decoupled_weight_decay=case.rule != "adam_l2",
        clip_grad=case.clip,
        log_num_zeros_in_grad=case.counts_zeros,
        muon_nesterov=case.nesterov,
        muon_tp_mode=case.tp_mode,
        muon_fp32_matmul_prec="highest",
        muon_scale_mode=case.scale_mode,
        grad_norm_skip_threshold=case.skip_above,
        adaptive_muon_moment2_method=case.moment2,
        use_distributed_optimizer=setup.sharding == "flat",
        use_layer_wise_distributed_optimizer=setup.sharding == "whole",
        overlap_param_gather=setup.overlap_gather,
        overlap_param_gather_with_optimizer_step=setup.gathers_with_step,
        optimizer_cpu_offload=setup.on_host > 0,
        optimizer_offload_fraction=setup.on_host,
        **HYPER,
        **{**BF16, **others}[case.numbers_of(setup)],
    )
    is_wrong = case.mistake is not None and case.mistake.rank in (None, rank)
    return dataclasses.replace(config, **dict(case.mistake.fields)) if is_wrong else config


def ddp_config(case: Case, setup: Setup, rank: int) -> DistributedDataParallelConfig:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=setup.reduce_in_fp32,
        overlap_grad_reduce=setup.overlap_grads,
        overlap_param_gather=setup.overlap_gather,
        align_param_gather=setup.aligned,
        check_for_nan_in_grad=setup.checks_nan,
        use_distributed_optimizer=setup.is_sharded,
        num_distributed_optimizer_instances=setup.grid.instances,
        bucket_size=setup.bucket_size,
        num_buckets=setup.num_buckets,
        pad_buckets_for_high_nccl_busbw=setup.pads_for_busbw,
        reduce_scatter_with_fp32_accumulation=setup.sum_in_fp32,
        average_in_collective=setup.average_in_collective,
        param_name_patterns_for_fp32_local_accumulation=("all",) if setup.sums_locally else (),
    )
    is_wrong = case.mistake is not None and case.mistake.rank in (None, rank)
    return dataclasses.replace(config, **dict(case.mistake.ddp_fields)) if is_wrong else config


# --- models whose parameters torch lays out as DTensors: FSDP2, HSDP, tensor-parallel plans, and both -----------------


def lay_out(case: Case, setup: Setup, net: nn.Module) -> None:
    grid = setup.grid
    if setup.layout in ("fsdp2", "hsdp"):
        sizes = {"dp": grid.dp} if setup.layout == "fsdp2" else {"replicate": 2, "shard": grid.dp // 2}
        _shard_(net, init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
        return
    mesh = init_device_mesh("cpu", (grid.dp, grid.tp), mesh_dim_names=("dp", "tp"))
    _cut_(case, net, mesh["tp"])
    if setup.layout == "fsdp2_x_tp":
        _shard_(net, mesh["dp"])


def _shard_(net: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each module separately, because FSDP2 requires one dtype per group."""
    for module in net.children():
        fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _cut_(case: Case, net: nn.Module, mesh: DeviceMesh) -> None:
    """What tensor parallelism cuts becomes a DTensor; this rank's part is there already."""
    for param in case.params:
        module: Any = getattr(net, param.name, None)
        if module is not None and param.cut is not None:
            local = module.weight.detach()
            cut = DTensor.from_local(local, mesh, [Shard(param.cut)], run_check=False)
            module.weight = nn.Parameter(cut, requires_grad=module.weight.requires_grad)


@torch.no_grad()
def _whole(weight: Tensor) -> Tensor:
    """The whole parameter; all ranks call it together."""
    found = weight.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()
