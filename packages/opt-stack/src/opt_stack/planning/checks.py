"""The checks of a draft that need no other rank: a list of functions, each of which refuses one thing with a sentence.

To add a check, write a function of a `Draft` that raises ConfigError, and its name in `CHECKS`.
"""

from collections.abc import Callable
from importlib.util import find_spec
from math import lcm

import torch
import torch.distributed as dist
from torch import nn

from opt_config import ConfigError, Replicated, WholeParams
from opt_distributed.buffers import CODED_MULTIPLE, FP8, check_apart, not_trained
from opt_distributed.comm import GraphError, group_of
from opt_distributed.comm import device as devices
from opt_distributed.pieces import Numbers
from opt_kernels.hooks import bare, hooks_of
from opt_kernels.rules import ElementwiseRule, Needs
from opt_kernels.works import StateSpec
from opt_stack.planning.draft import Draft
from opt_stack.planning.hooks import check_hooks
from opt_stack.planning.plan import UnitPlan
from opt_stack.planning.wrapped import check_same_groups, check_wrapped

SEPARATE_NORMS = ("mtp",)
"""Values of a parameter's `grad_norm_group`, as in Megatron-Core: its gradients are clipped by a separate norm."""


def _check_materialised(draft: Draft) -> None:
    """Refuse a parameter on the meta device, except in a plan for another world."""
    if draft.sizes is not None:
        return
    named = ((name, param) for chunk in draft.chunks for name, param in nn.Module.named_parameters(chunk))
    found = next((name for name, param in named if param.is_meta), None)
    if found is not None:
        raise ConfigError(
            f"{found!r} is on the meta device, where it has no values; call model.to_empty(device=...) and initialise "
            "the parameters first, then get_optimizer"
        )


def _check_blocks(draft: Draft) -> None:
    """Refuse shards of a wrapper that may cut blocks of state which share one scale. Also on one rank, since the same
    wrapper on more ranks would."""
    cut = {id for buffer in draft.wrapped_buffers if buffer.plan.kind.cuts for id in buffer.params}
    specs: list[tuple[int, StateSpec]] = [
        (id.chunk, spec)
        for id, name in draft.rule_of.items()
        if id in cut
        for spec in draft.rules[name].state_specs
        if spec.block
    ]
    for index, spec in specs:
        if CODED_MULTIPLE % spec.block:
            raise ConfigError(
                f"{spec.name} is kept in blocks of {spec.block} elements, but shards of wrapped chunk {index} "
                f"are cut at multiples of {CODED_MULTIPLE}; pass the plain module, which is cut at multiples of "
                f"{lcm(CODED_MULTIPLE, spec.block)}, or keep blocks of a divisor of {CODED_MULTIPLE} elements"
            )


def _check_reused(draft: Draft) -> None:
    """Refuse a buffer that is reused to gather parameters and holds gradients of another optimizer."""
    for buffer in draft.wrapped_buffers:
        others = [id for id in buffer.params if id not in draft.rule_of]
        if buffer.through_grads is not None and others:
            raise ConfigError(
                f"model chunk {others[0].chunk} was wrapped with reuse_grad_buf_for_mxfp8_param_ag=True, which "
                f"overwrites gradients when an optimizer has used them, but {str(others[0])!r} is not trained by this "
                "one; train all mxfp8 parameters with one optimizer, or set it to False"
            )


def _check_dtypes(draft: Draft) -> None:
    """Refuse parameters of a dtype that the configuration does not name."""
    config = draft.config
    allowed = {torch.float32, config.precision.params}
    wrong = [id for id in draft.rule_of if draft.metas[id].dtype not in allowed]
    if wrong:
        dtype = draft.metas[wrong[0]].dtype
        remedy = {torch.bfloat16: "set bf16=True", torch.float16: "set fp16=True"}.get(dtype, "convert the model")
        raise ConfigError(
            f"parameter {wrong[0].name!r} (and {len(wrong) - 1} more) is {dtype}; fp16={config.fp16} and "
            f"bf16={config.bf16} allow {', '.join(sorted(map(str, allowed)))}: {remedy}"
        )


def _check_fp8(draft: Draft) -> None:
    """Refuse parameters in fp8 without `fp8_recipe`, or with a rule that has evaluation weights."""
    stored = [id for id in draft.rule_of if draft.metas[id].codes is not None]
    if stored and draft.config.fp8_recipe is None:
        raise ConfigError(
            f"parameter {str(stored[0])!r} (and {len(stored) - 1} more) is stored in fp8, but fp8_recipe=None; set it "
            "to the recipe of the parameters: delayed, tensorwise, blockwise or mxfp8"
        )
    for id in stored:
        rule = bare(draft.rules[draft.rule_of[id]])
        if isinstance(rule, ElementwiseRule) and rule.formula.evaluation is not None:
            raise ConfigError(
                f"optimizer={rule.name!r} evaluates other weights than it trains, but parameter {str(id)!r} is stored "
                "in fp8, which cannot restore the trained weights bit for bit; use another rule for it"
            )


def _check_norm_groups(draft: Draft) -> None:
    """Refuse norm groups that Megatron-Core does not have."""
    for id, meta in draft.metas.items():
        if meta.grad_norm_group not in (None, *SEPARATE_NORMS):
            raise ConfigError(
                f"parameter {str(id)!r} has grad_norm_group={meta.grad_norm_group!r}; "
                f"allowed are {', '.join(map(repr, SEPARATE_NORMS))}, or None for the model's own norm"
            )


def _check_units(draft: Draft) -> None:
    """Refuse matrix rules on matrices that ranks cut or on other parameters, and hooks on layouts they cannot see."""
    for unit in draft.plan.units:
        if unit.rule.needs is Needs.MATRICES:
            _check_uncut(draft, unit)
            wrong = [id for id in sorted(unit.ids) if len(draft.metas[id].shape) not in (2, 3)]
            if wrong:
                raise ConfigError(
                    f"optimizer={unit.rule.name!r} updates matrices (2-D or 3-D parameters), but {wrong[0]} has shape "
                    f"{draft.metas[wrong[0]].shape}; use an elementwise rule for it through config_overrides"
                )
        check_hooks(unit, draft)


def _check_uncut(draft: Draft, unit: UnitPlan) -> None:
    for buffer in draft.plan.buffers:
        cut = [param.id for param in buffer.params if param.id in unit.ids] if buffer.kind.cuts else []
        if cut and isinstance(draft.config.sharding, WholeParams):  # then the buffer came with a wrapped chunk
            raise ConfigError(
                f"optimizer={unit.rule.name!r} needs whole matrices, but {str(cut[0])!r} was wrapped in a buffer that "
                "is cut between ranks; pass optimizer_config=config to DistributedDataParallel, which keeps matrices "
                "whole that are neither embeddings nor outputs, or use an elementwise rule for it"
            )
        if cut:
            raise ConfigError(
                f"optimizer={unit.rule.name!r} needs whole matrices, but use_distributed_optimizer=True "
                f"({type(draft.config.sharding).__name__}) cuts parameters between ranks; set "
                "use_layer_wise_distributed_optimizer=True and use_distributed_optimizer=False"
            )


def _check_clipping(draft: Draft) -> None:
    """Refuse a group's `clip_grad` that is a number."""
    for group in draft.groups:
        if not isinstance(clips := group.get("clip_grad", True), bool):
            raise ConfigError(
                f"config_overrides: group {group['name']!r} has clip_grad={clips!r}; allowed are True (clip to "
                "OptimizerConfig.clip_grad) and False (do not clip; the group has a separate norm)"
            )


def _check_moments(draft: Draft) -> None:
    """Refuse a narrow `exp_avg_dtype` or `exp_avg_sq_dtype` if a rule keeps that moment in fp32, or no rule has it.

    Reads the rules, which are the same on all ranks, and not the units: a rank may hold no parameter of Adam's.
    """
    precision = draft.config.precision
    for state, dtype in (("exp_avg", precision.exp_avg), ("exp_avg_sq", precision.exp_avg_sq)):
        if dtype is torch.float32:
            continue
        kept = {name: spec for name, rule in draft.rules.items() for spec in rule.state_specs if spec.name == state}
        wide = [name for name, spec in kept.items() if spec.dtype is torch.float32]
        if wide or not kept:
            problem = (
                f"optimizer={wide[0]!r} keeps it in fp32" if wide else f"{', '.join(draft.rules)} has no such state"
            )
            raise ConfigError(f"{state}_dtype={dtype}: {problem}; leave it at torch.float32, or use optimizer='adam'")


def _check_memory(draft: Draft) -> None:
    """Refuse parameters that share memory with another one (StorageError).

    If ranks own shards, parameters move into buffers, so that they must not share memory with any tensor of the model.
    """
    params = {id: p for group in draft.groups for id, p in zip(group["param_ids"], group["params"], strict=True)}
    moves = not isinstance(draft.config.sharding, Replicated)
    check_apart(params, (named for chunk in draft.chunks for named in not_trained(chunk) if moves))


CHECKS: tuple[Callable[[Draft], None], ...] = (
    _check_materialised,
    check_same_groups,
    check_wrapped,
    _check_blocks,
    _check_reused,
    _check_dtypes,
    _check_fp8,
    _check_norm_groups,
    _check_units,
    _check_clipping,
    _check_moments,
    _check_memory,
)


# --- once the device is known -----------------------------------------------------------------------------------------

_GRAPH = "optimizer_cuda_graph=True"
_ON_DEVICE = (None, "triton")


def check_graphs(draft: Draft, device: torch.device) -> None:
    """Refuse `optimizer_cuda_graph` if the device, a rule or a group does not support capture."""
    plan, roles = draft.plan, draft.roles
    if not plan.config.optimizer_cuda_graph:
        return
    try:
        devices.device_of(device).graph()
    except GraphError as error:
        raise ConfigError(f"{_GRAPH}: {error}") from error
    if any(buffer.dtype is FP8 for buffer in plan.buffers):
        raise ConfigError(f"{_GRAPH} with parameters in fp8, which are quantised after the update; set it to False")
    for unit in plan.units:
        rule = bare(unit.rule)
        if not getattr(rule, "capturable", False):
            raise ConfigError(
                f"{_GRAPH} with optimizer={rule.name!r}: its update reads values on the host, or the rule does not "
                "declare capturable=True; use another rule, or set it to False"
            )
        if rule is not unit.rule:
            raise ConfigError(
                f"{_GRAPH} with hooks {hooks_of(unit.rule)!r} of {rule.name!r}, which allocate memory in every "
                "step; use hooks that are part of a formula (CautiousDecay, CoupledDecay or LrDecoupledDecay of an "
                "elementwise rule), or set it to False"
            )
        if Numbers.FP16_SCALED in unit.numbers.values():
            raise ConfigError(
                f"{_GRAPH} with main_params_dtype={plan.config.main_params_dtype}, whose values are decoded to new "
                "memory at every step; use remainders or fp32 main values, or set it to False"
            )
        backend = getattr(rule, "backend", None)
        if backend not in _ON_DEVICE:
            raise ConfigError(f"{_GRAPH} with backend={backend!r} of {rule.name!r}: only 'triton' can be captured")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError(f"{_GRAPH}: updates without Triton kernels read values on the host; install triton")
    for comm in (roles.totals, roles.dense.dp, roles.dense.tp, roles.expert.dp, roles.expert.tp):
        group = group_of(comm)
        if device.type == "cuda" and group is not None and comm.size > 1 and "nccl" not in dist.get_backend(group):
            raise ConfigError(
                f"{_GRAPH} with process groups over {dist.get_backend(group)}: only NCCL's collectives can be captured"
            )
