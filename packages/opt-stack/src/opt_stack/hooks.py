"""Hooks around updates: which rule has which, on what layouts they can be had, and what checkpoints record of them."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from opt_config import ConfigError
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.groups import Roles
from opt_distributed.comm.mesh import is_outside, mesh_of
from opt_distributed.step.dtensor import mesh_comms
from opt_distributed.step.hooked import CutParams
from opt_distributed.step.hooked_rows import CutRows
from opt_kernels.hooks import (
    CentralizeGradient,
    GivenHooks,
    Hook,
    HookedUpdate,
    HookError,
    Hyperball,
    described,
    hooked,
    hooks_of,
    shape_problem,
)
from opt_kernels.hooks.rows import SpannedRows
from opt_kernels.rules.base import Needs, Rule
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.plan import BufferPlan, Spread, UnitPlan

logger = logging.getLogger("opt_stack")

HOOKS = "hooks"  # the entry of a group that records them


def with_hooks(made: Mapping[str, Rule], given: GivenHooks) -> dict[str, Rule]:
    """The rules with their hooks. Raises ConfigError for hooks of a rule that is not used, or that it cannot have."""
    by_rule = given if isinstance(given, Mapping) else dict.fromkeys(made, given)
    unused = [name for name, hooks in by_rule.items() if name not in made and hooks]
    if unused:
        raise ConfigError(f"hooks has {unused[0]!r}, but the rules that move parameters are {', '.join(made)}")
    try:
        return {name: hooked(rule, by_rule.get(name, ())) for name, rule in made.items()}
    except HookError as error:
        raise ConfigError(f"hooks: {error}") from error


def record_hooks_(groups: Iterable[dict[str, Any]], made: Mapping[str, Rule]) -> None:
    """Writes to each group the hooks of its rule, as text, where there are any."""
    for group in groups:
        hooks = hooks_of(made[group["optimizer"]])
        if hooks:
            group[HOOKS] = described(hooks)


def warn_of_other_hooks(name: str, now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Logs a warning where a group was saved under other hooks: the run goes on differently from then on."""
    before, after = (tuple(group.get(HOOKS, ())) for group in (saved, now))
    if before != after:
        logger.warning(
            "group %r continues with hooks %s, but was saved with %s",
            name, ", ".join(after) or "none", ", ".join(before) or "none",
        )  # fmt: skip


def check_hooks(unit: UnitPlan, metas: Mapping[ParamId, ParamMeta], buffers: Sequence[BufferPlan]) -> None:
    """Raises ConfigError for a hook that cannot see what it needs of a parameter on its layout."""
    spread = {param.id: buffer for buffer in buffers for param in buffer.params if param.id in unit.ids}
    for hook in hooks_of(unit.rule):
        for id in sorted(unit.ids):
            problem = _problem(hook, unit, metas[id], spread[id])
            if problem:
                raise ConfigError(f"hooks: {hook!r} of rule {unit.rule.name!r} on {str(id)!r}: {problem}")


def check_weight_decay(groups: Iterable[Mapping[str, Any]], made: Mapping[str, Rule]) -> None:
    """Raises ConfigError for a weight decay that Hyperball would leave out."""
    for group in groups:
        ball = any(isinstance(hook, Hyperball) for hook in hooks_of(made[group["optimizer"]]))
        for key in ("weight_decay", "start_wd", "end_wd"):
            if ball and group.get(key):
                raise ConfigError(
                    f"group {group['name']!r} has {key}={group[key]}, but Hyperball() keeps the norm of the weights in "
                    "its place; give weight_decay=0.0"
                )


def check_start(hook_owner: Rule, id: ParamId, value: Tensor) -> None:
    """Raises ConfigError for weights of norm 0 that Hyperball would keep at 0."""
    stuck = any(isinstance(hook, Hyperball) and hook.radius is None for hook in hooks_of(hook_owner))
    if stuck and value.numel() and not value.any():
        raise ConfigError(
            f"hooks: Hyperball() keeps the norm that weights have, and {str(id)!r} is all zeros; give "
            "Hyperball(radius=...), or initialise it first"
        )


def cut_params(
    unit: UnitPlan,
    buffers: Sequence[BufferPlan],
    params: Mapping[ParamId, Tensor],
    metas: Mapping[ParamId, ParamMeta],
    roles: Roles,
) -> tuple[CutParams, ...]:
    """The parameters of a unit whose norms are sums over ranks, by the ranks. The same on all of these."""
    if not (isinstance(unit.rule, HookedUpdate) and unit.rule.sums_norms):
        return ()
    found: dict[tuple[int, ...], CutParams] = {}
    for buffer in buffers:
        for shape in buffer.params:
            if shape.id in unit.ids:
                comms = tuple(_comms(buffer, params[shape.id], metas[shape.id], roles))
                key = tuple(id(comm) for comm in comms)
                before = found.get(key, CutParams((), comms))
                found[key] = before._replace(ids=(*before.ids, shape.id))
    return tuple(cut for cut in found.values() if cut.comms)


def _comms(buffer: BufferPlan, param: Tensor, meta: ParamMeta, roles: Roles, *, from_dim: int = 0) -> Iterator[Comm]:
    """The groups over which elements that differ in dims `from_dim` and later alone are spread."""
    axes = roles.expert if buffer.is_expert else roles.dense
    if buffer.spread is Spread.LAID_OUT:
        dims = [placed.shard_dim if placed.size > 1 else None for placed in meta.placements]
        yield from mesh_comms(param, [axis for axis, dim in enumerate(dims) if dim is not None and dim >= from_dim])
    elif buffer.spread is Spread.FLAT and buffer.layout.num_shards > 1:
        yield axes.dp
    yield from _tensor_peers(buffer, param, meta, roles, from_dim)


def _tensor_peers(buffer: BufferPlan, param: Tensor, meta: ParamMeta, roles: Roles, from_dim: int) -> tuple[Comm, ...]:
    """Tensor-parallel ranks that no mesh of the parameter has, where they cut it in dim `from_dim` or later."""
    peers = (roles.expert if buffer.is_expert else roles.dense).tp
    cuts = meta.tensor_parallel and (meta.partition_dim is None or meta.partition_dim >= from_dim)
    outside = buffer.spread is not Spread.LAID_OUT or is_outside(peers, mesh_of(param))
    return (peers,) if cuts and peers.size > 1 and outside else ()


def cut_rows(
    unit: UnitPlan,
    buffers: Sequence[BufferPlan],
    params: Mapping[ParamId, Tensor],
    metas: Mapping[ParamId, ParamMeta],
    roles: Roles,
) -> tuple[CutRows, ...]:
    """The parameters of a unit whose gradient rows span ranks, by the ranks. The same on all of these."""
    if not (isinstance(unit.rule, HookedUpdate) and unit.rule.centralizes):
        return ()
    found: dict[tuple[int, ...], CutRows] = {}
    for buffer in buffers:
        for shape in buffer.params:
            meta = metas[shape.id]
            dims = len(meta.shape) - 1 if unit.rule.needs is Needs.MATRICES else 1
            if shape.id not in unit.ids or len(meta.shape) < 2 or not meta.numel:
                continue
            comms = tuple(_comms(buffer, params[shape.id], meta, roles, from_dim=dims))
            if comms:
                num_parts = prod(peers.size for peers in _tensor_peers(buffer, params[shape.id], meta, roles, dims))
                key = tuple(id(comm) for comm in comms)
                before = found.get(key, CutRows({}, comms))
                found[key] = before._replace(rows={**before.rows, shape.id: _spanned(meta, dims, num_parts)})
    return tuple(found.values())


def _spanned(meta: ParamMeta, dims: int, num_parts: int) -> SpannedRows:
    """`num_parts`: of the parameter of which the meta's shape is one part."""
    return SpannedRows(
        num=prod(meta.local_shape[:dims]),
        dims=dims,
        local_numel=prod(meta.local_shape[dims:]),
        whole_numel=prod(meta.shape[dims:]) * num_parts,
    )


def _problem(hook: Hook, unit: UnitPlan, meta: ParamMeta, buffer: BufferPlan) -> str:
    """Why a hook cannot be had on a parameter; empty where it can."""
    problem = shape_problem(hook, unit.rule.needs, meta.shape)
    if problem:
        return f"its shape is {meta.shape}, and {problem}"
    if isinstance(hook, CentralizeGradient):
        unknown = meta.tensor_parallel and meta.partition_dim is None and len(meta.shape) > 1
        return "tensor parallelism cuts it in an unknown dim; set partition_dim" if unknown else ""
    if hook.needs_rows and len(meta.shape) > 1 and _cuts_rows(meta, buffer):
        return (
            "it sees whole rows, which span ranks on this layout; replicate the state, deal whole parameters, or "
            "shard by rows"
        )
    return ""


def _cuts_rows(meta: ParamMeta, buffer: BufferPlan) -> bool:
    if buffer.spread is Spread.LAID_OUT:
        return any(placed.shard_dim not in (None, 0) and placed.size > 1 for placed in meta.placements)
    flat = buffer.spread is Spread.FLAT and buffer.layout.num_shards > 1
    return flat or (meta.tensor_parallel and meta.partition_dim != 0)
