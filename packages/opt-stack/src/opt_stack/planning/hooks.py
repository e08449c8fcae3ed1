"""Hooks around updates: attach them to rules, check the layouts they support, record them in parameter groups."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from torch import Tensor

from opt_config import ConfigError
from opt_distributed.buffers import BufferPlan
from opt_distributed.comm import Comm, is_outside, mesh_of
from opt_distributed.layout import AS_IT_CAME
from opt_distributed.pieces import mesh_comms
from opt_distributed.step import CutParams, CutRows
from opt_kernels.hooks import (
    CentralizeGradient,
    GivenHooks,
    Hook,
    HookedUpdate,
    HookError,
    Hyperball,
    SpannedRows,
    hooked,
    hooks_of,
    shape_problem,
)
from opt_kernels.rules import Needs, Rule
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.draft import Draft
from opt_stack.planning.plan import UnitPlan

logger = logging.getLogger("opt_stack")


def with_hooks(made: Mapping[str, Rule], given: GivenHooks) -> dict[str, Rule]:
    """Return the rules with their hooks. Raise ConfigError if a rule is not used or does not support a hook."""
    by_rule = given if isinstance(given, Mapping) else dict.fromkeys(made, given)
    unused = [name for name, hooks in by_rule.items() if name not in made and hooks]
    if unused:
        raise ConfigError(f"hooks has {unused[0]!r}, but parameters are updated by {', '.join(made)}; use these names")
    try:
        return {name: hooked(rule, by_rule.get(name, ())) for name, rule in made.items()}
    except HookError as error:
        raise ConfigError(f"hooks: {error}") from error


def check_hooks(unit: UnitPlan, draft: Draft) -> None:
    """Raise ConfigError for a hook that does not support the shape or layout of a parameter."""
    buffer_of = {id: buffer for buffer, id in _placed(unit, draft)}
    for hook in hooks_of(unit.rule):
        for id in sorted(unit.ids):
            if problem := _problem(hook, unit, draft.metas[id], buffer_of[id]):
                raise ConfigError(f"hooks: {hook!r} of rule {unit.rule.name!r} on {str(id)!r}: {problem}")


def check_weight_decay(groups: Iterable[Mapping[str, Any]], made: Mapping[str, Rule]) -> None:
    """Raise ConfigError for weight decay under Hyperball, which would ignore it."""
    for group in groups:
        ball = any(isinstance(hook, Hyperball) for hook in hooks_of(made[group["optimizer"]]))
        for key in ("weight_decay", "start_wd", "end_wd"):
            if ball and group.get(key):
                raise ConfigError(
                    f"group {group['name']!r} has {key}={group[key]}, but Hyperball() fixes the norm of the weights "
                    "instead of decaying them; set weight_decay=0.0"
                )


def check_start(hook_owner: Rule, id: ParamId, value: Tensor) -> None:
    """Raise ConfigError for weights of norm 0, which Hyperball would keep at 0."""
    stuck = any(isinstance(hook, Hyperball) and hook.radius is None for hook in hooks_of(hook_owner))
    if stuck and value.numel() and not value.any():
        raise ConfigError(
            f"hooks: Hyperball() keeps the initial norm of weights, but {str(id)!r} is all zeros; use "
            "Hyperball(radius=...), or initialise the parameter first"
        )


def cut_params(unit: UnitPlan, draft: Draft) -> tuple[CutParams, ...]:
    """Return the parameters of a unit whose norms are summed over ranks, by group of ranks; equal on all of them."""
    if not (isinstance(unit.rule, HookedUpdate) and unit.rule.sums_norms):
        return ()
    found: dict[tuple[int, ...], CutParams] = {}
    for buffer, id in _placed(unit, draft):
        comms = tuple(_comms(buffer, id, draft))
        before = found.get(key := _key(comms), CutParams((), comms))
        found[key] = before._replace(ids=(*before.ids, id))
    return tuple(cut for cut in found.values() if cut.comms)


def cut_rows(unit: UnitPlan, draft: Draft) -> tuple[CutRows, ...]:
    """Return the parameters of a unit whose gradient rows span ranks, by group of ranks; equal on all of them."""
    if not (isinstance(unit.rule, HookedUpdate) and unit.rule.centralizes):
        return ()
    found: dict[tuple[int, ...], CutRows] = {}
    for buffer, id in _placed(unit, draft):
        meta = draft.metas[id]
        dims = len(meta.shape) - 1 if unit.rule.needs is Needs.MATRICES else 1
        if len(meta.shape) > 1 and meta.numel and (comms := tuple(_comms(buffer, id, draft, from_dim=dims))):
            num_parts = prod(peers.size for peers in _tensor_peers(buffer, id, draft, dims))
            before = found.get(key := _key(comms), CutRows({}, comms))
            found[key] = before._replace(rows={**before.rows, id: _spanned(meta, dims, num_parts)})
    return tuple(found.values())


def _placed(unit: UnitPlan, draft: Draft) -> Iterator[tuple[BufferPlan, ParamId]]:
    """Yield the parameters of a unit with their buffers."""
    return ((b, param.id) for b in draft.plan.buffers for param in b.params if param.id in unit.ids)


def _key(comms: tuple[Comm, ...]) -> tuple[int, ...]:
    return tuple(map(id, comms))


def _comms(buffer: BufferPlan, id: ParamId, draft: Draft, *, from_dim: int = 0) -> Iterator[Comm]:
    """Yield the groups over which a parameter is cut along dim `from_dim` or later."""
    if buffer.kind is AS_IT_CAME:
        dims = [placed.shard_dim if placed.size > 1 else None for placed in draft.metas[id].placements]
        cuts = [axis for axis, dim in enumerate(dims) if dim is not None and dim >= from_dim]
        yield from mesh_comms(draft.params[id], cuts)
    elif buffer.kind.cuts and buffer.layout.num_shards > 1:
        yield draft.axes_of(buffer).dp
    yield from _tensor_peers(buffer, id, draft, from_dim)


def _tensor_peers(buffer: BufferPlan, id: ParamId, draft: Draft, from_dim: int) -> tuple[Comm, ...]:
    """Return the tensor-parallel group if it is outside the parameter's mesh and cuts dim `from_dim` or later."""
    meta, peers = draft.metas[id], draft.axes_of(buffer).tp
    cuts = meta.tensor_parallel and (meta.partition_dim is None or meta.partition_dim >= from_dim)
    outside = buffer.kind is not AS_IT_CAME or is_outside(peers, mesh_of(draft.params[id]))
    return (peers,) if cuts and peers.size > 1 and outside else ()


def _spanned(meta: ParamMeta, dims: int, num_parts: int) -> SpannedRows:
    """Describe the rows. The shape of `meta` is one of `num_parts` parts of the parameter."""
    return SpannedRows(
        num=prod(meta.local_shape[:dims]),
        dims=dims,
        local_numel=prod(meta.local_shape[dims:]),
        whole_numel=prod(meta.shape[dims:]) * num_parts,
    )


def _problem(hook: Hook, unit: UnitPlan, meta: ParamMeta, buffer: BufferPlan) -> str:
    """Return why a hook does not support a parameter; empty if it does."""
    problem = shape_problem(hook, unit.rule.needs, meta.shape)
    if problem:
        return f"its shape is {meta.shape}, and {problem}"
    if isinstance(hook, CentralizeGradient):
        unknown = meta.tensor_parallel and meta.partition_dim is None and len(meta.shape) > 1
        return "tensor parallelism cuts it along an unknown dim; set its partition_dim" if unknown else ""
    if hook.needs_rows and len(meta.shape) > 1 and _cuts_rows(meta, buffer):
        return (
            "the hook needs whole rows, which this layout cuts over ranks; replicate the state, use layer-wise "
            "sharding, or shard by rows"
        )
    return ""


def _cuts_rows(meta: ParamMeta, buffer: BufferPlan) -> bool:
    if buffer.kind is AS_IT_CAME:
        return any(placed.shard_dim not in (None, 0) and placed.size > 1 for placed in meta.placements)
    flat = buffer.kind.cuts and buffer.layout.num_shards > 1
    return flat or (meta.tensor_parallel and meta.partition_dim != 0)
