"""One rank of a case: builds its part of the model, trains it with the project, saves it, and reports what it sees."""

import io
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from fuzz import cases
from fuzz.cases import HYPER, OTHER_ORDERS, Case, Param, Setup, cut, first_weight, is_held, local_gradient
from opt_checkpoint import ShardedBase, ShardedTensor, ShardedTensorFactory, load, save, sharded_model
from opt_config import DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm, ProcessGroups, Roles
from opt_distributed.finalize import finalize_model_grads
from opt_distributed.step import StepResult
from opt_stack import Optimizer, get_optimizer, get_optimizer_based_on_param_groups

Groups = Roles | ProcessGroups | None


@dataclass(slots=True, kw_only=True)
class SeenStep:
    success: bool
    norm: float
    zeros: int | None
    scale: float
    weights: dict[str, Tensor] | None  # this rank's parts; None where the case does not look
    evaluated: dict[str, Tensor] | None  # what evaluation mode shows, where weights are averaged
    loss: float  # summed over microbatches and chunks, before scaling
    steps: dict[str, int]  # of the parameters that this rank keeps state of


# --- the case as configurations ---------------------------------------------------------------------------------------

AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
NUMBERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16_remainder": AWARE,
    "bf16_short": {**AWARE, "main_params_dtype": torch.int8},
    "bf16_scaled": {**AWARE, "main_params_dtype": torch.float16},
    "bf16_grads": {**AWARE, "main_grads_dtype": torch.bfloat16},
    "bf16_narrow": {**AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16": {"fp16": True},
    "fp16_constant": {"fp16": True},
}


def optimizer_config(case: Case, setup: Setup, rank: int) -> OptimizerConfig:
    config = OptimizerConfig(
        optimizer=case.rule.removesuffix("_l2"),
        decoupled_weight_decay=case.rule != "adam_l2",
        muon_fp32_matmul_prec="highest",
        use_distributed_optimizer=setup.sharding == "flat",
        use_layer_wise_distributed_optimizer=setup.sharding == "whole",
        overlap_param_gather=setup.overlaps_gather,
        overlap_param_gather_with_optimizer_step=setup.gathers_with_step,
        optimizer_cpu_offload=setup.on_host > 0,
        optimizer_offload_fraction=setup.on_host,
        **HYPER,
        **case.fields,
        **NUMBERS[case.numbers_of(setup)],
    )
    return replace(config, **case.mistake.fields) if case.is_wrong(rank) else config


def ddp_config(case: Case, setup: Setup, rank: int) -> DistributedDataParallelConfig:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=setup.is_sharded,
        num_distributed_optimizer_instances=setup.grid.instances,
        **setup.ddp,
    )
    return replace(config, **case.mistake.ddp_fields) if case.is_wrong(rank) else config


# --- the model --------------------------------------------------------------------------------------------------------


class Held(nn.Module):
    """One parameter. `forward(g)` has the gradient g."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, grad: Tensor) -> Tensor:
        weight = self.weight
        grad = grad.to(self.weight.dtype)
        if not isinstance(weight, DTensor):
            return (weight * grad).float().sum()
        like = DTensor.from_local(grad, weight.device_mesh, weight.placements, run_check=False)
        return (weight * like).to_local().float().sum()


class Chunk(nn.Module):
    """This rank's parameters of one chunk. `forward` takes the gradients of those that it uses."""

    def __init__(self, case: Case, setup: Setup, rank: int, chunk: int, *, moved: float):
        super().__init__()
        self.recomputes = "recomputes activations" in case.habits
        grid = setup.grid
        place = setup.grid.place(rank)
        held = [p for p in case.params if is_held(p, place, grid) and cases.chunk_of(p, setup) == chunk]
        for param in held:
            value = (cut(first_weight(case, param), param, place, grid) + moved).to(case.dtype_of(param, setup))
            self.add_module(param.name, Held(value.clone()))
            self.get_submodule(param.name).requires_grad_(not param.frozen)
        if setup.layout != "plain":
            lay_out(held, setup, self)
        for param in held:  # last, since sharding makes new parameters without attributes
            is_part = setup.layout == "plain" and cases.num_parts(param, grid) > 1
            mark(self.get_submodule(param.name).weight, param, is_part=is_part, is_copy=cases.is_copy(param, place))

    def forward(self, grads: dict[str, tuple[Tensor, int]]) -> Tensor:
        repeated = [(name, grad / uses) for name, (grad, uses) in grads.items() for _ in range(uses)]
        return torch.stack([self._used(self.get_submodule(name), grad) for name, grad in repeated]).sum()

    def _used(self, module: nn.Module, grad: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(module, grad, use_reentrant=False, preserve_rng_state=False)
        return module(grad)


def mark(weight: Any, param: Param, *, is_part: bool, is_copy: bool) -> None:
    marks: tuple[tuple[bool, dict[str, Any]], ...] = (
        (is_part, {"tensor_model_parallel": True, "partition_dim": param.cut}),
        (param.expert is not None, {"allreduce": False}),
        (param.embedding, {"is_embedding_or_output_parameter": True}),
        (param.norm_group is not None, {"grad_norm_group": param.norm_group}),
        (param.qkv, dict([param.fused])),
        (param.tied, {"shared_embedding": True, "shared": is_copy}),
        (param.over_tp is not None, {str(param.over_tp): True}),
    )
    for name, value in (item for applies, values in marks if applies for item in values.items()):
        setattr(weight, name, value)


def lay_out(held: list[Param], setup: Setup, net: nn.Module) -> None:
    """Make the parameters DTensors: by FSDP2, HSDP, a tensor-parallel plan, or FSDP2 over such a plan."""
    grid = setup.grid
    if setup.layout in ("fsdp2", "hsdp"):
        sizes = {"dp": grid.dp} if setup.layout == "fsdp2" else {"replicate": 2, "shard": grid.dp // 2}
        shard_(net, init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
        return
    mesh = init_device_mesh("cpu", (grid.dp, grid.tp), mesh_dim_names=("dp", "tp"))
    for param in (param for param in held if param.cut is not None):
        module: Any = net.get_submodule(param.name)  # which has this rank's part already
        whole = DTensor.from_local(module.weight.detach(), mesh["tp"], [Shard(param.cut)], run_check=False)
        module.weight = nn.Parameter(whole, requires_grad=module.weight.requires_grad)
    if setup.layout == "fsdp2_x_tp":
        shard_(net, mesh["dp"])


def shard_(net: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each module separately, because FSDP2 requires one dtype per group."""
    for module in (*net.children(), net):
        fully_shard(module, mesh=mesh)


# --- training ---------------------------------------------------------------------------------------------------------


class Run:
    """One rank's model and optimizer in one setup.

    `moved` is added to the first weights, so that nothing is right after a load that was not loaded.
    """

    def __init__(self, case: Case, setup: Setup, rank: int, groups: Groups, *, moved: float = 0.0):
        self.case = case
        self.setup = setup
        self.rank = rank
        self.groups = groups
        self.place = setup.grid.place(rank)
        self.nets = [Chunk(case, setup, rank, chunk, moved=moved) for chunk in range(setup.chunks)]
        self.wrappers = [self._wrapped(net, chunk) for chunk, net in enumerate(self.nets) if setup.wrapped]
        self.models: list[Any] = self.wrappers or self.nets
        self.optimizer = self._optimizer()

    def _wrapped(self, net: nn.Module, chunk: int) -> DistributedDataParallel:
        return DistributedDataParallel(
            ddp_config(self.case, self.setup, self.rank),
            net,
            groups=self.groups,
            optimizer_config=optimizer_config(self.case, self.setup, self.rank),
            calculate_per_token_loss=self.setup.per_token,
            chunk=chunk,
        )

    def _optimizer(self) -> Optimizer:
        case = self.case
        config = optimizer_config(self.case, self.setup, self.rank)
        if not any(param.left_out for param in case.params):
            own = {ParamKey(name=f"{param.name}.*"): param.own_entries() for param in case.params if param.own[0]}
            overrides = None if case.standard_overrides else own
            return get_optimizer(config, self.models, overrides, pg_collection=self.groups)
        weights = {name: module.weight for net in self.nets for name, module in net.named_children()}
        groups = [  # one for each trained parameter of the whole model, so that ranks have the same groups
            {
                "params": [weights[param.name]] if param.name in weights else [],
                "name": param.name,
                "optimizer": case.rule_of(param).removesuffix("_l2"),
                "is_expert_parallel": param.expert is not None,
                **param.own_entries(),
            }
            for param in case.params
            if param.is_trained
        ]
        return get_optimizer_based_on_param_groups(config, self.models, groups, pg_collection=self.groups)

    def step(self, step: int, *, looks: bool) -> SeenStep:
        loss = sum(self._microbatch(step, number) for number in range(self.setup.microbatches))
        if "reduces before the step" in self.case.habits:
            for wrapper in self.wrappers:
                wrapper.start_grad_sync()
            for wrapper in self.wrappers:
                wrapper.finish_grad_sync()
        per_token = self.setup.per_token
        if self.setup.wrapped and (per_token or any(param.over_tp or param.tied for param in self.case.params)):
            count = cases.tokens(self.case, step, self.place.replica) if per_token else None
            finalize_model_grads(self.models, count, self.groups)
        for group in self.optimizer.param_groups if self.case.schedules else ():
            group["lr"] = group["max_lr"] / (1 + step)
        result = self._stepped()
        self._begin_again()
        weights = self.weights() if looks else None
        return SeenStep(
            success=result.success,
            norm=result.grad_norm,
            zeros=result.num_zeros_in_grad,
            scale=self.optimizer.get_loss_scale().item(),
            weights=weights,
            evaluated=None if weights is None or not self.case.is_averaged else self._evaluated(weights),
            loss=loss,
            steps=self._steps(),
        )

    def _microbatch(self, step: int, number: int) -> float:
        found = 0.0
        with ExitStack() as stack:
            for wrapper in self.wrappers if number < self.setup.microbatches - 1 else ():
                stack.enter_context(wrapper.no_sync())
            for net, model in zip(self.nets, self.models, strict=True):
                if grads := self._grads(net, step, number):
                    loss = model(grads)
                    found += loss.item()
                    if loss.requires_grad:
                        self.optimizer.scale_loss(loss).backward()
        return found

    def _grads(self, net: nn.Module, step: int, microbatch: int) -> dict[str, tuple[Tensor, int]]:
        """The gradients of what this rank's forward uses."""
        case = self.case
        at = {"step": step, "microbatch": microbatch}
        held = [param for param in case.params if hasattr(net, param.name)]
        used = [p for p in held if cases.is_used(case, p, replica=cases.replica_of(p, self.place), **at)]
        if used and OTHER_ORDERS in case.habits:
            used = used[(self.rank + step) % len(used) :] + used[: (self.rank + step) % len(used)]
        return {param.name: (local_gradient(case, param, self.rank, **at), param.uses) for param in used}

    def _stepped(self) -> StepResult:
        optimizer = self.optimizer
        if "steps by halves" not in self.case.habits:
            return optimizer.step()
        if optimizer.prepare_grads():
            return StepResult(False, optimizer.get_grad_norm(), None)
        zeros = optimizer.count_zeros() if self.case.fields["log_num_zeros_in_grad"] else None
        norm = optimizer.clip_grad_norm(self.case.fields["clip_grad"])
        return StepResult(optimizer.step_with_ready_grads(), norm, zeros)

    def _begin_again(self) -> None:
        """Zeros, and what some runs do between two iterations."""
        habits = self.case.habits
        for wrapper in self.wrappers:
            if "toggles hooks" in habits and self.setup.overlaps_gather:
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

    def complete(self) -> None:
        for wrapper in self.wrappers:
            wrapper.finish_param_sync()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """This rank's parts, or whole parameters of DTensors. All ranks call it together."""
        self.complete()
        found = {name: module.weight.detach() for net in self.nets for name, module in net.named_children()}
        return {name: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for name, w in found.items()}

    def _evaluated(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """What evaluation mode shows. Training mode must show `weights` again, bit for bit."""
        self.optimizer.eval()
        found = self.weights()
        self.optimizer.train()
        for name, value in self.weights().items():
            assert torch.equal(value.nan_to_num(), weights[name].nan_to_num()), f"{name} after eval() and train()"
        return found

    def _steps(self) -> dict[str, int]:
        """Updates that each parameter had, as far as this rank keeps its state."""
        state = self.optimizer.state_dict()
        return {
            name.split(".")[-2]: int(state["state"][index]["step"])
            for group in state["param_groups"]
            for index, name in zip(group["params"], group["param_names"], strict=True)
            if index in state["state"]
        }

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


# --- a run through opt_checkpoint: ranks as processes together, ranks as threads as one -------------------------------

_ONE_AT_A_TIME = threading.Lock()  # a load of one process, without torch.distributed, is not made for threads


def save_run(run: Run, path: str) -> None:
    """All ranks call it together."""
    run.complete()
    if not isinstance(run.groups, Roles):
        save(sharded(run), path)
        return
    everyone: Comm = run.groups.everyone
    by_rank = everyone.gather_objects(sharded(run))
    if everyone.rank == 0:
        save(_joined(by_rank), path)
    everyone.gather_objects("saved")


def load_run(run: Run, path: str) -> None:
    mine = sharded(run)
    dtype: Any = "exact" if run.case.resume_numbers is None else "cast"
    if not isinstance(run.groups, Roles):
        run.optimizer.load_state_dict(load(mine, path, dtype=dtype).state["optimizer"])
        return
    with _ONE_AT_A_TIME:
        loaded = load(_joined([mine]), path, dtype=dtype).state
    run.optimizer.load_state_dict({**loaded["optimizer"], "state": loaded["tensors"]["0"]["optimizer"]})


def _joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of one process that holds every rank's part: tensors of all ranks, plain values of the first."""
    plain = {key: value for key, value in by_rank[0]["optimizer"].items() if key != "state"}
    tensors = {
        str(rank): {"model": state["model"], "optimizer": state["optimizer"]["state"]}
        for rank, state in enumerate(by_rank)
    }
    return {"tensors": tensors, "optimizer": plain}


def sharded(run: Run) -> dict[str, Any]:
    """A model that is not DTensors is described by the parameters' attributes or by hand: one by the run that saves,
    the other by the run that loads, which is possible where no experts are stacked by hand."""
    case = run.case
    is_resumed = run.setup is run.case.resume
    has_stacks = len({param.number for param in case.params}) < len(case.params)
    by_attributes = run.setup.layout != "plain" or (case.seed + (is_resumed and not has_stacks)) % 2
    model: dict[str, Any] = {}
    for net in run.nets:
        of = {name: (case.param(name), module.weight) for name, module in net.named_children()}
        model |= sharded_model(net) if by_attributes else {name: _described(run, *each) for name, each in of.items()}
    return {"model": model, "optimizer": run.optimizer.sharded_state_dict(model)}


def _described(run: Run, param: Param, weight: Any) -> ShardedBase:
    """Experts of a layer are saved as one stack, fused matrices as two halves of one key, as in Megatron-Core."""
    place = run.place
    index = cases.part_of(param, run.place)
    count = cases.num_parts(param, run.setup.grid)
    if param.expert is None:
        peer = place.tp
        copies = place.replica
    else:
        peer = place.etp
        copies = place.expert_replica
    replica_id = (int(cases.is_copy(param, place)), 0 if count > 1 else peer, copies)
    layer = [other for other in run.case.params if other.number == param.number]
    key = f"{param.name}.weight"
    stack = []
    if len(layer) > 1:
        key = f"experts{param.number}"
        stack = [(0, layer.index(param), len(layer))]
    axis = len(stack)
    rows_are_cut = param.cut == 0

    def part(data: Tensor, number: int, of: int, replica_id: Any) -> ShardedTensor:
        rows = (axis, (of * index if rows_are_cut else 0) + number, of * (count if rows_are_cut else 1))
        others = [] if param.cut in (0, None) else [(param.cut + axis, index, count)]
        offsets = [*stack, *([rows] if rows[2] > 1 else []), *others]
        return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica_id, prepend_axis_num=axis)

    if not param.qkv or stack:
        return part(weight, 0, 1, replica_id)
    halves = lambda key, data, replica_id, flat: [part(x, n, 2, replica_id) for n, x in enumerate(data.chunk(2))]
    return ShardedTensorFactory(key, weight, halves, torch.cat, replica_id)
