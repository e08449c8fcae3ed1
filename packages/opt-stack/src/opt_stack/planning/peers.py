"""Checks that ranks agree before anything is built. Every rank raises the same errors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.buffers.agreement import from_all_replicas
from opt_distributed.comm.collectives import Comm, agree
from opt_distributed.comm.groups import Roles
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.plan import Plan, rule_text

MAY_DIFFER = frozenset({"timers", "config_logger_dir"})
"""Fields of the configuration that may differ between ranks."""
MAX_RANKS_SHOWN = 8  # for each value, in an error
SHOWN = 60  # characters of each rule, from where they differ
_OF_THE_RANK = frozenset({"local_shape", "placements"})  # fields of `ParamMeta` that depend on the rank
_NOT_COMPARED = frozenset({"params", "param_ids", "name"})  # entries of a group

NOTHING: Mapping[str, bool] = MappingProxyType({})
Groups = Sequence[Mapping[str, Any]]


def check_same_config(config: OptimizerConfig, everyone: Comm, *, asked: Mapping[str, bool] = NOTHING) -> None:
    """Raise ConfigError on every rank, naming the fields, ranks and values, if configurations differ. Collective.

    All fields count: a different clip norm or loss scale on one rank would also make weights diverge. `asked` are
    arguments besides the configuration that must be given on all ranks or on none.
    """
    per_rank: list[dict[str, str]] = everyone.gather_objects(_set_fields(config, asked))
    defaults = {field.name: repr(field.default) for field in fields(config)} | dict.fromkeys(asked, "False")
    problems = []
    for name, default in defaults.items():
        ranks: dict[str, list[int]] = {}  # by value
        for rank, of_rank in enumerate(per_rank):
            ranks.setdefault(of_rank.get(name, default), []).append(rank)
        if len(ranks) > 1:
            problems.append(f"{name} is " + ", ".join(f"{value} on ranks {_some(at)}" for value, at in ranks.items()))
    if problems:
        raise ConfigError(f"ranks were configured differently: {'; '.join(problems)}; set the same on all ranks")


def _some(ranks: list[int]) -> str:
    more = len(ranks) - MAX_RANKS_SHOWN
    return f"{ranks[:MAX_RANKS_SHOWN]}" + (f" and {more} more" if more > 0 else "")


def _set_fields(config: OptimizerConfig, asked: Mapping[str, bool]) -> dict[str, str]:
    """Return the fields that do not have their default, as text."""
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in MAY_DIFFER}
    defaults = {field.name: field.default for field in fields(config)} | dict.fromkeys(asked, False)
    return {name: repr(value) for name, value in {**values, **asked}.items() if repr(value) != repr(defaults[name])}


def check_peers(plan: Plan, groups: Groups, metas: Mapping[ParamId, ParamMeta], roles: Roles) -> None:
    """Check that ranks that share parameters agree on their plan, hyper-parameters and attributes. Collective.

    Raises:
        ConfigError: on every rank, if they do not, or if no rank has a trainable parameter.
    """
    if sum(roles.everyone.gather_objects(sum(len(unit.ids) for unit in plan.units))) == 0:
        raise ConfigError("model_chunks hold no trainable parameter on any rank; at least one needs requires_grad=True")
    error: ConfigError | None = _rules_that_differ(plan, roles.everyone)
    for axes, experts in ((roles.dense, False), (roles.expert, True)):  # ranks may hold other experts
        local = dict(_described_params(plan, groups, metas, experts=experts))
        digest = sha256(f"{plan.fingerprint(experts=experts)}{local}".encode()).hexdigest()
        digests = from_all_replicas(axes, digest)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            per_rank = from_all_replicas(axes, local)
            error = error or ConfigError(
                f"{'expert ' * experts}data-parallel ranks {others} have another plan than rank 0: config, "
                "overrides and model must be equal on all ranks that share parameters"
                f"{_first_difference(per_rank[0], per_rank[others[0]], rank=others[0])}"
            )
        error = error or _numbers_that_differ(groups, local, axes.tp)
    agree(roles.everyone, error)


class ModelPart(NamedTuple):
    """Which part of the model a rank shares with its data-parallel replicas."""

    text: str  # empty if all ranks hold the same parameters
    has_namesakes: bool  # whether a rank with another part has a parameter of the same name


def model_part(metas: Mapping[ParamId, ParamMeta], roles: Roles) -> ModelPart:
    """Compare the parts of the model that ranks hold: tensor-parallel parts, pipeline stages, experts. Collective."""
    texts, has_namesakes = [], False
    for axes, kind in ((roles.dense, "dense"), (roles.expert, "experts")):
        own = [meta for meta in metas.values() if meta.is_expert == (kind == "experts") and not meta.is_dtensor]
        first = min(axes.inter.gather_objects(min(axes.dp.gather_objects(roles.everyone.rank))))
        among_peers = min(axes.tp.gather_objects(first))
        first = first if any(meta.tensor_parallel for meta in own) else among_peers
        reported = [str(meta.id) for meta in own] if first == roles.everyone.rank else []
        per_rank = roles.everyone.gather_objects((first if own else -1, reported))
        parts = sorted({rank for rank, _ in per_rank} - {-1})
        names = [name for _, of_rank in per_rank for name in of_rank]
        has_namesakes |= len(set(names)) < len(names)
        if own and len(parts) > 1:
            texts.append(f"{kind} part {parts.index(first)} of {len(parts)}")
    return ModelPart(", ".join(texts), has_namesakes)


def _rules_that_differ(plan: Plan, everyone: Comm) -> ConfigError | None:
    """An error if ranks use different rules under one name, because parts of a matrix would diverge; else None."""
    by_unit: dict[str, dict[str, list[int]]] = {}
    per_rank: list[dict[str, str]] = everyone.gather_objects({unit.name: rule_text(unit.rule) for unit in plan.units})
    for rank, of_rank in enumerate(per_rank):
        for name, text in of_rank.items():
            by_unit.setdefault(name, {}).setdefault(text, []).append(rank)
    for name, ranks in by_unit.items():
        if len(ranks) > 1:
            start = _first_difference_in(list(ranks))
            rules = ", ".join(f"{text[start : start + SHOWN]}... on ranks {_some(at)}" for text, at in ranks.items())
            return ConfigError(
                f"ranks have different rules for optimizer {name!r}: {rules}; pass the same ones on all ranks"
            )
    return None


def _first_difference_in(texts: Sequence[str]) -> int:
    """The position of the first argument that differs between the texts."""
    shared = texts[0][: sum(1 for _ in takewhile(lambda chars: len(set(chars)) == 1, zip(*texts)))]
    return max(shared.rfind(before) + len(before) for before in (", ", "("))


def _numbers_that_differ(groups: Groups, local: Mapping[str, Mapping[str, str]], tp: Comm) -> ConfigError | None:
    """Return an error if tensor-parallel ranks have different hyper-parameters for a parameter; else None."""
    keys = {key for group in groups for key in group}
    numbers = {name: {key: text for key, text in entries.items() if key in keys} for name, entries in local.items()}
    per_rank = tp.gather_objects(numbers)
    for rank, of_rank in enumerate(per_rank):
        both = per_rank[0].keys() & of_rank.keys()  # a rank may hold no part of a parameter
        first, other = ({name: entries[name] for name in both} for entries in (per_rank[0], of_rank))
        if first != other:
            return ConfigError(
                "tensor-parallel ranks have different hyper-parameters for one parameter"
                f"{_first_difference(first, other, rank=rank)}; pass the same overrides and groups on all ranks"
            )
    return None


def _described_params(
    plan: Plan, groups: Groups, metas: Mapping[ParamId, ParamMeta], *, experts: bool
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each parameter by name with its hyper-parameters and attributes as text."""
    ids = {id for unit in plan.units if unit.is_expert == experts for id in unit.ids}
    for group in groups:
        numbers = {key: repr(_plain(group[key])) for key in sorted(set(group) - _NOT_COMPARED) if _is_plain(group[key])}
        for id in sorted(ids.intersection(group["param_ids"])):
            known = {f.name: repr(getattr(metas[id], f.name)) for f in fields(ParamMeta) if f.name not in _OF_THE_RANK}
            yield str(id), numbers | known


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any], *, rank: int) -> str:
    for name in sorted({*first, *other}):
        if name not in first or name not in other:
            return f"; {name} is trained on rank {rank if name in other else 0} only"
        for key in sorted({*first[name], *other[name]}):
            ours, theirs = first[name].get(key), other[name].get(key)
            if ours != theirs:
                return f"; {key} of {name} is {ours} on rank 0 and {theirs} on rank {rank}"
    return ""


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value is the same in every process: numbers, names and tuples of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)
