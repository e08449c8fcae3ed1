"""Checks before anything is built, without communication: functions that yield the reasons of a refusal.

To add a check, write a function of a `Design` that yields why it cannot be built, and its name in `CHECKS`, or in
`CHECKS_HERE` if it does not hold for the plan of another world.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from math import lcm

import torch
from torch import nn

from opt_config import ConfigError, DynamicScale, FlatShards, Replicated, WholeParams
from opt_distributed.buffers import (
    CODED_MULTIPLE,
    PRE_SHARDED,
    BufferPlan,
    DistributedDataParallel,
    check_apart,
    is_bound,
    not_trained,
)
from opt_distributed.comm import Axes, Comm, members
from opt_kernels.hooks import CentralizeGradient, Hook, HookedUpdate, Hyperball, bare, hooks_of, shape_problem
from opt_kernels.params import MainFormat
from opt_kernels.rules import ElementwiseRule, MuownRule
from opt_paramgroups import ParamMeta
from opt_stack.planning.design import Design, has_main_grads, is_megatron_wrapper
from opt_stack.planning.plan import UnitPlan
from opt_stack.rules.entries import evaluation_of
from opt_stack.wording import and_more

SEPARATE_NORMS = ("mtp",)
"""Values of a parameter's `grad_norm_group`, as in Megatron-Core: its gradients are clipped by a separate norm."""
SHARED_FIELDS = ("use_distributed_optimizer", "overlap_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
"""Fields that the configurations of the optimizer and of a wrapper both have."""

Reasons = Iterator[str]  # of a refusal
Check = Callable[[Design], Reasons]


def refuse(design: Design, checks: Iterable[Check]) -> None:
    """Raise ConfigError with the first problem of each check that has one."""
    problems = [problem for check in checks if (problem := next(check(design), None)) is not None]
    if problems:
        raise ConfigError("\n".join(problems))


# --- parameters and groups --------------------------------------------------------------------------------------------


def _check_values(design: Design) -> Reasons:
    """Refuse parameters without values."""
    for chunk in design.request.chunks:
        for name, param in nn.Module.named_parameters(chunk):
            if param.is_meta:
                yield (
                    f"{name!r} is on the meta device, where it has no values; call model.to_empty(device=...) and "
                    "initialise the parameters first, then get_optimizer"
                )


def _check_params(design: Design) -> Reasons:
    """Refuse parameters of dtypes that the configuration does not name, in fp8 without `fp8_recipe` or with a rule
    that has evaluation weights, and in norm groups that Megatron-Core does not have."""
    config = design.config
    metas = design.metas
    allowed = {torch.float32, config.precision.params}
    trained = design.groups.rule_of
    if wrong := [id for id in trained if metas[id].dtype not in allowed]:
        dtype = metas[wrong[0]].dtype
        remedy = {torch.bfloat16: "set bf16=True", torch.float16: "set fp16=True"}.get(dtype, "convert the model")
        names = and_more([id.name for id in wrong])
        dtypes = ", ".join(sorted(map(str, allowed)))
        yield f"parameter {names} is {dtype}; fp16={config.fp16} and bf16={config.bf16} allow {dtypes}: {remedy}"
    stored = [id for id in trained if metas[id].codes is not None]
    if stored and config.fp8_recipe is None:
        yield (
            f"parameter {and_more(stored)} is stored in fp8, but fp8_recipe=None; set it to the recipe of the "
            "parameters: delayed, tensorwise, blockwise or mxfp8"
        )
    for id in stored:
        rule = bare(design.groups.rules[trained[id]])
        if isinstance(rule, ElementwiseRule) and rule.formula.evaluation is not None:
            yield (
                f"optimizer={rule.name!r} evaluates other weights than it trains, but parameter {str(id)!r} is stored "
                "in fp8, which cannot restore the trained weights bit for bit; use another rule for it"
            )
    for id, meta in metas.items():
        if meta.grad_norm_group not in (None, *SEPARATE_NORMS):
            yield (
                f"parameter {str(id)!r} has grad_norm_group={meta.grad_norm_group!r}; "
                f"allowed are {', '.join(map(repr, SEPARATE_NORMS))}, or None for the model's own norm"
            )


def _check_groups(design: Design) -> Reasons:
    """Refuse a group's `clip_grad` that is a number, and a narrow dtype of a moment that rules keep in fp32 or lack.

    Refuses hooks that need all updates where the device has two runs at a time.

    Reads the rules, which are the same on all ranks, and not the units: a rank may hold no parameter of Adam's.
    """
    config = design.config
    hooked = [name for name, rule in design.groups.rules.items() if isinstance(rule, HookedUpdate)]
    if hooked and config.optimizer_offload_compute == "device":
        yield (
            f"optimizer_offload_compute='device': hooks of {hooked[0]!r} read norms of all updates before one is made, "
            "but only two runs are on the device; set it to 'host', or leave out the hooks"
        )
    source = "param_groups" if design.request.has_given_groups else "config_overrides"
    for group in design.groups.groups:
        if not isinstance(clips := group.get("clip_grad", True), bool):
            yield (
                f"{source}: group {group['name']!r} has clip_grad={clips!r}; allowed are True (clip to "
                "OptimizerConfig.clip_grad) and False (do not clip; the group has a separate norm)"
            )
    precision = config.precision
    rules = design.groups.rules
    for state, dtype in (("exp_avg", precision.exp_avg), ("exp_avg_sq", precision.exp_avg_sq)):
        if dtype is torch.float32:
            continue
        problem = f"{', '.join(rules)} has no such state"
        for name, rule in rules.items():
            of_state = [spec for spec in rule.state_specs if spec.name == state]
            if any(spec.dtype is torch.float32 for spec in of_state):
                problem = f"optimizer={name!r} keeps it in fp32"
                break
            if of_state:
                problem = ""
        if problem:
            yield f"{state}_dtype={dtype}: {problem}; leave it at torch.float32, or use optimizer='adam'"


def _check_averages(design: Design) -> Reasons:
    """Refuse averages beside those of a rule, of parameters in fp8, and look-aheads of main values in scaled fp16, or
    that a rule or hook would drop or add up."""
    config = design.config
    given = next((f"{name}={number}" for name, number in config.averaged.items()), "")
    for unit in design.plan.units if given else ():
        rule = unit.rule
        if evaluation_of(rule) or any(spec.name in unit.averages.names for spec in rule.state_specs):
            yield f"{given}: optimizer={rule.name!r} keeps an average of its own; use only one of them"
        if not unit.averages.looks_ahead:
            continue
        ahead = f"ema_nesterov_beta={config.ema_nesterov_beta}"
        if isinstance(bare(rule), MuownRule):
            yield f"{ahead}: optimizer='muown' keeps the lengths of rows, of which it would drop the look-ahead"
        if any(isinstance(hook, Hyperball) and hook.radius is None for hook in hooks_of(rule)):
            yield f"{ahead}: Hyperball() would keep the norm of the weights with their look-ahead; pass a radius"
        if MainFormat.FP16_SCALED in unit.numbers.values():
            yield (
                f"{ahead} with main_params_dtype={config.main_params_dtype}: "
                "blocks of main values would be scaled by the look-ahead; use fp32 main values or remainders"
            )
    for id in design.groups.rule_of if given else ():
        if design.metas[id].codes is not None:
            yield (
                f"{given}: parameter {str(id)!r} is stored in fp8, in which eval() could not restore the trained "
                "weights bit for bit; leave it at None, or keep the parameter in bf16"
            )


def _check_memory(design: Design) -> Reasons:
    """Refuse parameters that share memory with another one (StorageError).

    If ranks own shards, parameters move into buffers, so that they must not share memory with any tensor of the model.
    """
    params = {id: design.params[id] for id in design.groups.rule_of}
    request = design.request
    moved = () if isinstance(request.config.sharding, Replicated) else request.chunks
    check_apart(params, (named for chunk in moved for named in not_trained(chunk)))
    yield from ()


# --- wrapped chunks ---------------------------------------------------------------------------------------------------


def _check_chunks(design: Design) -> Reasons:
    """Refuse wrappers of another chunk, or with another value of a shared field than the optimizer's configuration;
    plain modules where a wrapper is needed; overlaps that the model does not support."""
    config = design.config
    chunks = design.request.chunks
    if config.overlap_param_gather_with_optimizer_step and len(chunks) == 1:
        yield (
            "overlap_param_gather_with_optimizer_step=True gathers the first model chunk while the others are stepped, "
            "but the model has one chunk; set it to False, or pass two or more (interleaved pipeline stages)"
        )
    for index, chunk in enumerate(chunks):
        if design.model.shards_reduced and not has_main_grads(chunk):
            yield (
                f"model chunk {index} is a plain {type(chunk).__name__}, but others are in wrappers with "
                "use_distributed_optimizer=False; wrap all chunks in the same way"
            )
        if isinstance(chunk, DistributedDataParallel):
            yield from _check_wrapper(design, index, chunk)
            continue
        if is_megatron_wrapper(chunk):
            yield from _check_megatron_wrapper(design, index, chunk)
        # The step would read `param.grad` of a module inside a wrapper, which is empty.
        elif bound := [name for name, param in chunk.named_parameters() if param.requires_grad and is_bound(param)]:
            yield (
                f"model chunk {index} is a plain {type(chunk).__name__}, but gradients of {bound[0]!r} accumulate in "
                "main_grad, as a wrapper set up; pass the DistributedDataParallel around it to get_optimizer; if it "
                "has none, as a model from torch.load, delete the attribute: del param.main_grad"
            )
        plain = f"but model chunk {index} is a plain {type(chunk).__name__}"
        if config.reuse_grad_buf_for_mxfp8_param_ag:
            yield (
                f"reuse_grad_buf_for_mxfp8_param_ag=True, {plain}, which has no gradient buffer; wrap it in "
                "DistributedDataParallel, or leave it at False"
            )
        if config.overlap_param_gather:
            yield (
                f"overlap_param_gather=True, {plain}: gathers overlap with the forward of a chunk in "
                "DistributedDataParallel; wrap it, or set overlap_param_gather=False"
            )


def check_same_groups(design: Design) -> Reasons:
    """Refuse wrappers that reduce over other groups than the optimizer's: their sum would pass for the mean."""
    for index, chunk in design.model.wrapped.items():
        for name in ("dense", "expert"):
            ours = getattr(design.roles, name)
            theirs = getattr(chunk.roles, name)
            if not (_is_same(ours.dp, theirs.dp) and _is_same(ours.inter, theirs.inter)):
                yield (
                    f"model chunk {index} was wrapped with {name} data-parallel groups of {_in_words(theirs)}, but the "
                    f"optimizer's are of {_in_words(ours)}; pass the same groups to both"
                )


def _is_same(one: Comm, other: Comm) -> bool:
    """Return whether both span the same ranks; by size and rank only, if one has no process group."""
    if (one.size, one.rank) != (other.size, other.rank):
        return False
    ours = members(one)
    theirs = members(other)
    return ours == theirs or not ours or not theirs


def _in_words(axes: Axes) -> str:
    ranks = members(axes.dp)
    listed = f" of {ranks}" if ranks else ""
    return f"{axes.dp.size} x {axes.inter.size} ranks (this one is {axes.dp.rank}, {axes.inter.rank}{listed})"


def _check_wrapper(design: Design, index: int, chunk: DistributedDataParallel) -> Reasons:
    config = design.config
    wrapper = f"model chunk {index} was wrapped with"
    if any(id.chunk != index for id in chunk.metas):
        yield f"model chunk {index} was wrapped as another chunk; pass chunk={index} to DistributedDataParallel"
    if chunk.ddp_config.check_for_large_grads and isinstance(config.loss_scaling, DynamicScale):
        yield (
            f"{wrapper} check_for_large_grads=True, which compares gradients of different iterations, but the loss "
            "scale is dynamic (fp16=True without loss_scale); set loss_scale, or wrap with check_for_large_grads=False "
            "and use grad_norm_skip_threshold, which compares unscaled norms"
        )
    if chunk.ddp_config.align_param_gather and config.overlap_param_gather_with_optimizer_step:
        yield (
            f"overlap_param_gather_with_optimizer_step=True starts gathers in the step, but {wrapper} "
            "align_param_gather=True, which starts them from the pipeline's schedule; set one of the two to False"
        )
    if config.main_grads_dtype is torch.bfloat16 and chunk.ddp_config.grad_reduce_in_fp32:
        yield (
            f"main_grads_dtype=torch.bfloat16, but {wrapper} grad_reduce_in_fp32=True; wrap it with "
            "grad_reduce_in_fp32=False, or leave main_grads_dtype at torch.float32"
        )
    for name in SHARED_FIELDS:
        is_sharding = name == "use_distributed_optimizer"
        if is_sharding and design.model.shards_reduced:
            continue
        ours = not isinstance(config.sharding, Replicated) if is_sharding else getattr(config, name)
        theirs = getattr(chunk.ddp_config, name)
        if ours != theirs:
            yield (
                f"OptimizerConfig has {name}={ours}, but {wrapper} {name}={theirs}; wrap it with {name}=True, or leave "
                f"{name} at False"
            )


def _check_megatron_wrapper(design: Design, index: int, chunk: nn.Module) -> Reasons:
    """Refuse chunks in different wrappers, and sharded state: Megatron-Core's wrapper has its own layout of shards."""
    config = design.config
    wrapper = f"model chunk {index} is in Megatron-Core's DistributedDataParallel"
    for at, other in enumerate(design.request.chunks):
        if not is_megatron_wrapper(other):
            yield f"{wrapper} and model chunk {at} is a {type(other).__name__}; wrap all chunks in the same class"
    if chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
        yield (
            f"{wrapper} with use_distributed_optimizer=True, which leaves each rank a shard of the gradients in its "
            "own layout; wrap it with use_distributed_optimizer=False, or use "
            "opt_stack.megatron.DistributedDataParallel, which shards"
        )
    if isinstance(config.sharding, FlatShards):
        yield (
            f"use_distributed_optimizer={config.use_distributed_optimizer}: {wrapper}, which reduces all gradients to "
            "every rank; set it to False, or use opt_stack.megatron.DistributedDataParallel"
        )
    if config.optimizer_cuda_graph:
        yield f"optimizer_cuda_graph=True: {wrapper}, whose gradients may be bound to other memory; set it to False"


def _check_buffers(design: Design) -> Reasons:
    """Refuse shards of a wrapper that may cut blocks of state which share one scale, also on one rank, since the same
    wrapper on more ranks would; and a buffer that is reused to gather parameters and holds others' gradients.
    """
    groups = design.groups
    for buffer in design.wrapped_buffers:
        for id in buffer.params:
            if id in groups.rule_of:
                specs = groups.rules[groups.rule_of[id]].state_specs if buffer.plan.kind.cuts else ()
                for spec in specs:
                    if spec.block and CODED_MULTIPLE % spec.block:
                        multiple = lcm(CODED_MULTIPLE, spec.block)
                        yield (
                            f"{spec.name} is kept in blocks of {spec.block} elements, but shards of wrapped chunk "
                            f"{id.chunk} are cut at multiples of {CODED_MULTIPLE}; pass the plain module, which is cut "
                            f"at multiples of {multiple}, or keep blocks of a divisor of {CODED_MULTIPLE} elements"
                        )
            elif buffer.through_grads is not None:
                yield (
                    f"model chunk {id.chunk} was wrapped with reuse_grad_buf_for_mxfp8_param_ag=True, which overwrites "
                    f"gradients when an optimizer has used them, but {str(id)!r} is not trained by this one; train all "
                    "mxfp8 parameters with one optimizer, or set it to False"
                )


# --- rules and layouts ------------------------------------------------------------------------------------------------


def _check_units(design: Design) -> Reasons:
    """Refuse matrix rules on matrices that ranks cut or on other parameters, and hooks whose layout they cannot see."""
    sharding = design.config.sharding
    for unit in design.plan.units:
        name = f"optimizer={unit.rule.name!r}"
        buffer_of = {id: buffer for buffer, id in unit.placed(design.plan.buffers)}
        for id, buffer in buffer_of.items() if unit.needs_matrices else ():
            if buffer.kind.cuts and isinstance(sharding, WholeParams):  # it came with a wrapped chunk
                yield (
                    f"{name} needs whole matrices, but {str(id)!r} was wrapped in a buffer that is cut between ranks; "
                    "pass optimizer_config=config to DistributedDataParallel, which keeps matrices whole that are "
                    "neither embeddings nor outputs, or use an elementwise rule for it"
                )
            if buffer.kind.cuts:
                yield (
                    f"{name} needs whole matrices, but use_distributed_optimizer=True ({type(sharding).__name__}) cuts "
                    "parameters between ranks; set use_layer_wise_distributed_optimizer=True and "
                    "use_distributed_optimizer=False"
                )
        for id in sorted(unit.ids):
            shape = design.metas[id].shape
            if unit.needs_matrices and len(shape) not in (2, 3):
                remedy = "use an elementwise rule for it through config_overrides"
                if design.request.has_given_groups:
                    remedy = 'move it to a group with "optimizer": "adam", or another elementwise rule'
                yield f"{name} updates matrices (2-D or 3-D parameters), but {id} has shape {shape}; {remedy}"
        for hook, id in product(hooks_of(unit.rule), sorted(unit.ids)):
            if problem := _problem_of_hook(hook, unit, design.metas[id], buffer_of[id]):
                yield f"hooks: {hook!r} of rule {unit.rule.name!r} on {str(id)!r}: {problem}"


def _problem_of_hook(hook: Hook, unit: UnitPlan, meta: ParamMeta, buffer: BufferPlan) -> str:
    """Return why a hook does not support a parameter; empty if it does."""
    if problem := shape_problem(hook, unit.rule.needs, meta.shape):
        return f"its shape is {meta.shape}, and {problem}"
    if isinstance(hook, CentralizeGradient):
        if meta.tensor_parallel and meta.partition_dim is None and len(meta.shape) > 1:
            return "tensor parallelism cuts it along an unknown dim; set its partition_dim"
        return ""
    if not hook.needs_rows or len(meta.shape) < 2:
        return ""
    if buffer.kind is PRE_SHARDED:
        cuts_rows = any(placed.shard_dim not in (None, 0) and placed.size > 1 for placed in meta.placements)
    else:
        is_flat = buffer.kind.cuts and buffer.layout.num_shards > 1
        cuts_rows = is_flat or (meta.tensor_parallel and meta.partition_dim != 0)
    if not cuts_rows:
        return ""
    return (
        "the hook needs whole rows, which this layout cuts over ranks; replicate the state, use layer-wise sharding, "
        "or shard by rows"
    )


CHECKS_HERE: tuple[Check, ...] = (check_same_groups, _check_values)
"""Those of the world and the values as they are."""
CHECKS: tuple[Check, ...] = (
    _check_params,
    _check_chunks,
    _check_buffers,
    _check_units,
    _check_groups,
    _check_averages,
    _check_memory,
)
