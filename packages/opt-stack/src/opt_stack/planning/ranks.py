"""The checks that compare ranks. Collective: every rank raises the same errors.

`RANK_CHECKS` share one exchange. Each reports facts of this rank, and judges those of all ranks. `check_peers` then
compares the plans of ranks that share parameters.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig, Problem
from opt_distributed.buffers import matches
from opt_distributed.comm import Comm, Roles, agree, agreed, from_all_replicas
from opt_kernels.quantized import quantized
from opt_paramgroups import ParamId, ParamMeta, get_standard_config_overrides
from opt_paramgroups.overrides import read_overrides
from opt_stack.planning.checks import refuse
from opt_stack.planning.plan import rule_text
from opt_stack.planning.planner import Draft

logger = logging.getLogger("opt_stack")
MAY_DIFFER = frozenset({"timers", "config_logger_dir"})
"""Fields of the configuration that may differ between ranks."""
MAX_RANKS_SHOWN = 8  # for each value, in an error
SHOWN = 60  # characters of each rule, from where they differ
_OF_THE_RANK = frozenset({"local_shape", "placements"})  # fields of `ParamMeta` that depend on the rank
_NOT_COMPARED = frozenset({"params", "param_ids", "name"})  # entries of a group
_NAMES_SHOWN = 4
_DECAY = ("wd_mult", "start_wd", "end_wd")
_KEEP = "{**opt_paramgroups.get_standard_config_overrides(config), **yours}"

NOTHING: Mapping[str, bool] = MappingProxyType({})


class RankCheck(NamedTuple):
    """A comparison of all ranks."""

    facts: Callable[[Draft], Any]  # of this rank, picklable; may raise ConfigError
    problems: Callable[[Draft, Sequence[Any]], Iterator[str]]  # given the facts of all ranks


def check_ranks(draft: Draft) -> None:
    """Run `RANK_CHECKS`, in one exchange. Raises ConfigError on every rank."""
    everyone = draft.roles.everyone
    per_rank = everyone.gather_objects(agreed(everyone, lambda: [check.facts(draft) for check in RANK_CHECKS]))
    for check, facts in zip(RANK_CHECKS, zip(*per_rank, strict=True), strict=True):
        refuse(check.problems(draft, facts))


def check_same_config(config: OptimizerConfig, everyone: Comm, *, asked: Mapping[str, bool] = NOTHING) -> None:
    """Raise ConfigError on every rank, naming the fields, ranks and values, if configurations differ. Collective.

    All fields count: a different clip norm or loss scale on one rank would also make weights diverge. `asked` are
    arguments besides the configuration that must be given on all ranks or on none.
    """
    defaults = {field.name: repr(field.default) for field in fields(config)} | dict.fromkeys(asked, "False")
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in MAY_DIFFER}
    texts = {name: repr(value) for name, value in {**values, **asked}.items()}
    # Only fields that do not have their default travel.
    per_rank = everyone.gather_objects({name: text for name, text in texts.items() if text != defaults[name]})
    problems = []
    for name, default in defaults.items():
        ranks = _by_value([of_rank.get(name, default) for of_rank in per_rank])
        if len(ranks) > 1:
            problems.append(f"{name} is " + ", ".join(f"{value} on ranks {_some(at)}" for value, at in ranks.items()))
    if problems:
        raise ConfigError(f"ranks were configured differently: {'; '.join(problems)}; set the same on all ranks")


def _by_value(per_rank: Sequence[str | None]) -> dict[str, list[int]]:
    """Return the ranks that report each value; those that report None are left out."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(per_rank):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return ranks


def _some(ranks: list[int]) -> str:
    more = len(ranks) - MAX_RANKS_SHOWN
    return f"{ranks[:MAX_RANKS_SHOWN]}" + (f" and {more} more" if more > 0 else "")


def _dtypes_and_layouts(draft: Draft) -> tuple[set[torch.dtype], set[bool]]:
    params = (param for chunk in draft.chunks for param in chunk.parameters())
    dtypes = {param.dtype for param in params} | {meta.dtype for meta in draft.metas.values()}
    return dtypes, {draft.metas[id].is_dtensor for id in draft.rule_of}


def _effects(draft: Draft, per_rank: Sequence[tuple[set[torch.dtype], set[bool]]]) -> Iterator[str]:
    """Refuse each setting without effect on the parameters of all ranks.

    A model may mix dtypes and layouts: one parameter that feels the setting is enough.
    """
    dtypes, are_dtensors = (set().union(*facts) for facts in zip(*per_rank, strict=True))
    config, wanted, problems = draft.config, draft.config.precision.params, []
    # fp16 scales the loss of a model in fp32 as well, under autocast.
    if wanted is not torch.float32 and not config.fp16 and dtypes and wanted not in dtypes:
        name = "bf16" if config.bf16 else "params_dtype"
        reason = (
            f"has no effect: the model's parameters are {', '.join(sorted(map(str, dtypes)))}; convert the model to "
            f"{wanted} first, or leave it out (autocast needs none)"
        )
        problems.append(Problem(name, getattr(config, name), reason))
    for name in ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer"):
        if getattr(config, name) and are_dtensors == {True}:
            reason = "has no effect: all trained parameters are DTensors (fully_shard, parallelize_module), and their"
            problems.append(Problem(name, True, f"{reason} state is sharded as they are; leave it at False"))
    if problems:
        raise ConfigError.of("OptimizerConfig", problems)
    yield from ()


def _matched_patterns(draft: Draft) -> dict[str, bool]:
    """Whether each pattern of local fp32 accumulation matches a parameter."""
    found: dict[str, bool] = {}
    for chunk in draft.wrapped.values():
        for pattern in chunk.config.param_name_patterns_for_fp32_local_accumulation:
            found[pattern] = found.get(pattern, False) or any(matches(id.name, (pattern,)) for id in chunk.metas)
    return found


def _unmatched_patterns(draft: Draft, per_rank: Sequence[Mapping[str, bool]]) -> Iterator[str]:
    """Refuse patterns that match no parameter of any chunk on any rank."""
    for pattern in dict.fromkeys(pattern for of_rank in per_rank for pattern in of_rank):
        if not any(of_rank.get(pattern) for of_rank in per_rank):
            yield (
                f"param_name_patterns_for_fp32_local_accumulation: {pattern!r} matches no parameter of any wrapped "
                'model chunk; pass shell patterns of full names, such as "*.router.weight", or "all"'
            )


def _has_fp8(draft: Draft) -> bool:
    """Whether a parameter is stored in fp8. Refuses another recipe than `fp8_recipe`."""
    stored = {id: found.recipe.name for id, param in draft.params.items() if (found := quantized(param)) is not None}
    for id, recipe in stored.items():
        if recipe != draft.config.fp8_recipe:
            raise ConfigError(
                f"fp8_recipe={draft.config.fp8_recipe!r}, but parameter {str(id)!r} is stored with recipe "
                f"{recipe!r}; set fp8_recipe to that of the parameters"
            )
    return bool(stored)


def _unused_fp8(draft: Draft, per_rank: Sequence[bool]) -> Iterator[str]:
    """Refuse options of fp8 if no parameter on any rank is stored in it."""
    asks = f"fp8_recipe={draft.config.fp8_recipe!r}" if draft.config.fp8_recipe is not None else ""
    if not asks and any(chunk.config.fp8_param_gather for chunk in draft.wrapped.values()):
        asks = "fp8_param_gather=True"
    if asks and not any(per_rank):
        yield (
            f"{asks}, but no parameter is stored in fp8 on any rank; quantise the model before it is wrapped "
            "(opt_kernels.quantized.quantize_linears_, or TransformerEngine's quantized_model_init), or leave the "
            "option out; fully_shard and other DTensors store parameters dequantised"
        )


def device_of(draft: Draft) -> torch.device | None:
    """Return the device of the model; None without tensors."""
    # Megatron-Core's wrapper has a list in place of the method `buffers`.
    tensors = (tensor for chunk in draft.chunks for tensor in (*chunk.parameters(), *nn.Module.buffers(chunk)))
    return next((tensor.device for tensor in tensors), None)


def _different_devices(draft: Draft, per_rank: Sequence[torch.device | None]) -> Iterator[str]:
    """Refuse models on different kinds of device."""
    kinds = _by_value([None if device is None else device.type for device in per_rank])
    if len(kinds) > 1:
        ranks = "; ".join(f"{kind} on ranks {at}" for kind, at in kinds.items())
        yield f"model_chunks are on different kinds of device: {ranks}; move all ranks' models to one kind"


def _nothing_trained(draft: Draft, per_rank: Sequence[int]) -> Iterator[str]:
    """Refuse a model without trainable parameters."""
    if sum(per_rank) == 0:
        yield "model_chunks hold no trainable parameter on any rank; at least one needs requires_grad=True"


def _different_rules(draft: Draft, per_rank: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Refuse different rules under one name, because parts of a matrix would diverge."""
    for name in dict.fromkeys(name for of_rank in per_rank for name in of_rank):
        ranks = _by_value([of_rank.get(name) for of_rank in per_rank])
        if len(ranks) > 1:
            texts = list(ranks)  # shown from the argument that differs
            shared = texts[0][: sum(1 for _ in takewhile(lambda chars: len(set(chars)) == 1, zip(*texts)))]
            start = max(shared.rfind(before) + len(before) for before in (", ", "("))
            rules = ", ".join(f"{text[start : start + SHOWN]}... on ranks {_some(at)}" for text, at in ranks.items())
            yield f"ranks have different rules for optimizer {name!r}: {rules}; pass the same ones on all ranks"


def _decayed_by_overrides(draft: Draft) -> list[str]:
    """The biases and vectors that have weight decay because `overrides` leave out the standard ones.

    Parameters for which an override sets the decay are the caller's choice, and so is {}: no overrides at all. Refuses
    overrides that leave out those that apply `decoupled_lr`.
    """
    config, overrides = draft.config, draft.overrides
    if overrides is None:
        return []
    given = read_overrides(config, overrides, extra_group_keys=None)
    if config.decoupled_lr is not None and not any("is_decoupled_lr" in override for override in given.values()):
        raise ConfigError(
            f"decoupled_lr={config.decoupled_lr!r} has no effect: config_overrides replace the standard overrides, "
            f"which apply it; pass {_KEEP}, or leave it at None"
        )
    standard = get_standard_config_overrides(config)
    undecayed = [key for key, override in standard.items() if override.get("wd_mult") == 0.0]
    chosen = [key for key, override in given.items() if not override.keys().isdisjoint(_DECAY)]
    decayed = (
        str(id)
        for group in draft.groups
        if given and any(group.get(name) for name in ("weight_decay", "end_wd"))
        for id, param in zip(group["param_ids"], group["params"], strict=True)
        if any(key.matches(param, id.name) for key in undecayed)
        and not any(key.matches(param, id.name) for key in chosen)
    )
    return list(islice(decayed, _NAMES_SHOWN + 1))


def _warn_of_decay(draft: Draft, per_rank: Sequence[Sequence[str]]) -> Iterator[str]:
    """Warn, on rank 0, of weight decay that overrides bring back."""
    names = list(dict.fromkeys(name for of_rank in per_rank for name in of_rank))
    if names and draft.roles.everyone.rank == 0:
        shown = ", ".join(map(repr, names[:_NAMES_SHOWN])) + ", ..." * (len(names) > _NAMES_SHOWN)
        logger.warning(
            "config_overrides replace the standard ones, so biases and vectors have weight decay now: %s. To keep them "
            "without decay, pass %s; to decay them on purpose, give them an override with wd_mult=1.0",
            shown, _KEEP,
        )  # fmt: skip
    yield from ()


DEVICES = RankCheck(device_of, _different_devices)
EFFECTS = RankCheck(_dtypes_and_layouts, _effects)
RANK_CHECKS = (
    RankCheck(_decayed_by_overrides, _warn_of_decay),
    RankCheck(_matched_patterns, _unmatched_patterns),
    EFFECTS,
    RankCheck(_has_fp8, _unused_fp8),
    DEVICES,
    RankCheck(lambda draft: len(draft.rule_of), _nothing_trained),
    RankCheck(lambda draft: {unit.name: rule_text(unit.rule) for unit in draft.plan.units}, _different_rules),
)


def check_peers(draft: Draft) -> None:
    """Check that ranks that share parameters agree on their plan, hyper-parameters and attributes. Collective.

    Raises:
        ConfigError: on every rank, if they do not.
    """
    problems: list[str] = []
    keys = {key for group in draft.groups for key in group}
    for axes, experts in ((draft.roles.dense, False), (draft.roles.expert, True)):  # ranks may hold other experts
        local = dict(_described_params(draft, experts=experts))
        digest = sha256(f"{draft.plan.fingerprint(experts=experts)}{local}".encode()).hexdigest()
        digests = from_all_replicas(axes, digest)
        if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
            per_rank = from_all_replicas(axes, local)
            problems.append(
                f"{'expert ' * experts}data-parallel ranks {others} have another plan than rank 0: config, "
                "overrides and model must be equal on all ranks that share parameters"
                f"{_difference(per_rank[0], per_rank[others[0]], rank=others[0])}"
            )
        # Tensor-parallel ranks compare the hyper-parameters of the parameters of which both hold a part.
        numbers = {name: {key: text for key, text in all.items() if key in keys} for name, all in local.items()}
        per_rank = axes.tp.gather_objects(numbers)
        for rank, of_rank in enumerate(per_rank):
            both = per_rank[0].keys() & of_rank.keys()
            first, other = ({name: texts[name] for name in both} for texts in (per_rank[0], of_rank))
            if first != other:
                problems.append(
                    "tensor-parallel ranks have different hyper-parameters for one parameter"
                    f"{_difference(first, other, rank=rank)}; pass the same overrides and groups on all ranks"
                )
    agree(draft.roles.everyone, ConfigError(problems[0]) if problems else None)


def _described_params(draft: Draft, *, experts: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each parameter by name with its hyper-parameters and attributes as text."""
    ids = {id for unit in draft.plan.units if unit.is_expert == experts for id in unit.ids}
    for group in draft.groups:
        values = {key: value for key, value in group.items() if key not in _NOT_COMPARED and _is_plain(value)}
        numbers = {key: repr(v.tolist() if isinstance(v, Tensor) else v) for key, v in sorted(values.items())}
        for id in sorted(ids.intersection(group["param_ids"])):
            known = {
                f.name: repr(getattr(draft.metas[id], f.name)) for f in fields(ParamMeta) if f.name not in _OF_THE_RANK
            }
            yield str(id), numbers | known


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value is the same in every process: numbers, names and tuples of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], *, rank: int) -> str:
    for name in sorted({*first, *other}):
        if name not in first or name not in other:
            return f"; {name} is trained on rank {rank if name in other else 0} only"
        for key in sorted({*first[name], *other[name]}):
            ours, theirs = first[name].get(key), other[name].get(key)
            if ours != theirs:
                return f"; {key} of {name} is {ours} on rank 0 and {theirs} on rank {rank}"
    return ""


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
