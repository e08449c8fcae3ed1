"""The checks that compare ranks. Collective: every rank raises the same errors.

`RANK_CHECKS` share one exchange. Each is a generator: it yields facts of this rank, gets those of all ranks, and yields
the sentence with which all refuse, if any. `check_peers` then compares the plans of ranks that share parameters.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig, ParamKey, Problem
from opt_distributed.buffers import matches
from opt_distributed.comm import Comm, Roles, agree, agreed, from_all_replicas
from opt_distributed.step import CHOICES
from opt_kernels.matrices import TpMode
from opt_kernels.quantized import quantized
from opt_paramgroups import ParamId, ParamMeta, get_standard_config_overrides
from opt_paramgroups.overrides import read_overrides
from opt_stack.planning.plan import Draft, rule_text
from opt_stack.planning.report import OF_BLOCKS
from opt_stack.rules.entries import TP_MODE

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


RankCheck = Callable[[Draft], Generator[Any, Any, None]]
"""Yields facts of this rank, picklable, and is sent those of all ranks, a list. May raise ConfigError before it
yields them: then every rank raises."""


def check_ranks(draft: Draft, checks: Sequence[RankCheck] | None = None) -> None:
    """Run `checks`, by default `RANK_CHECKS`, in one exchange. Raises ConfigError on every rank."""
    everyone = draft.roles.everyone
    running = [check(draft) for check in checks or RANK_CHECKS]
    per_rank = everyone.gather_objects(agreed(everyone, lambda: [next(check) for check in running]))
    for check, facts in zip(running, zip(*per_rank, strict=True), strict=True):
        try:
            problem = check.send(facts)
        except StopIteration:
            continue
        raise ConfigError(problem)


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


def check_effects(draft: Draft) -> Generator[Any, Any, None]:
    """Each setting without effect on the parameters of all ranks.

    A model may mix dtypes and layouts: one parameter that feels the setting is enough.
    """
    params = (param for chunk in draft.chunks for param in chunk.parameters())
    own = {param.dtype for param in params} | {meta.dtype for meta in draft.metas.values()}
    per_rank = yield own, {draft.metas[id].is_dtensor for id in draft.rule_of}
    dtypes, are_dtensors = (set().union(*facts) for facts in zip(*per_rank, strict=True))
    config = draft.config
    wanted = draft.config.precision.params
    problems = []
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


def _patterns(draft: Draft) -> Generator[Any, Any, None]:
    """Patterns of local fp32 accumulation that match no parameter of any chunk on any rank."""
    found: dict[str, bool] = {}
    for chunk in draft.wrapped.values():
        for pattern in chunk.ddp_config.param_name_patterns_for_fp32_local_accumulation:
            found[pattern] = found.get(pattern, False) or any(matches(id.name, (pattern,)) for id in chunk.metas)
    per_rank = yield found
    for pattern in dict.fromkeys(pattern for of_rank in per_rank for pattern in of_rank):
        if not any(of_rank.get(pattern) for of_rank in per_rank):
            yield (
                f"param_name_patterns_for_fp32_local_accumulation: {pattern!r} matches no parameter of any wrapped "
                'model chunk; pass shell patterns of full names, such as "*.router.weight", or "all"'
            )


def _fp8(draft: Draft) -> Generator[Any, Any, None]:
    """Another recipe than `fp8_recipe`; options of fp8 if no parameter on any rank is stored in it."""
    recipe = draft.config.fp8_recipe
    stored = {id: found.recipe.name for id, param in draft.params.items() if (found := quantized(param)) is not None}
    for id, of_param in stored.items():
        if of_param != recipe:
            raise ConfigError(
                f"fp8_recipe={recipe!r}, but parameter {str(id)!r} is stored with recipe {of_param!r}; set fp8_recipe "
                "to that of the parameters"
            )
    per_rank = yield bool(stored)
    asks = f"fp8_recipe={recipe!r}" if recipe is not None else ""
    if not asks and any(chunk.ddp_config.fp8_param_gather for chunk in draft.wrapped.values()):
        asks = "fp8_param_gather=True"
    if not asks or any(per_rank):
        return
    if not draft.by_name and recipe is not None:  # Megatron-LM's command line cannot leave it out
        if draft.roles.everyone.rank == 0:
            logger.warning("%s: without effect, because no parameter is stored in fp8 on any rank", asks)
    else:
        yield (
            f"{asks}, but no parameter is stored in fp8 on any rank; quantise the model before it is wrapped "
            "(opt_kernels.quantized.quantize_linears_, or TransformerEngine's quantized_model_init), or leave the "
            "option out; fully_shard and other DTensors store parameters dequantised"
        )


def check_devices(draft: Draft) -> Generator[Any, Any, None]:
    """Models on different kinds of device. Sets the draft's device: a rank without tensors takes that of the others."""
    # Megatron-Core's wrapper has a list in place of the method `buffers`.
    tensors = (tensor for chunk in draft.chunks for tensor in (*chunk.parameters(), *nn.Module.buffers(chunk)))
    draft.device = next((tensor.device for tensor in tensors), None)
    per_rank = yield draft.device
    kinds = _by_value([None if device is None else device.type for device in per_rank])
    if len(kinds) > 1:
        ranks = "; ".join(f"{kind} on ranks {at}" for kind, at in kinds.items())
        yield f"model_chunks are on different kinds of device: {ranks}; move all ranks' models to one kind"
    draft.device = draft.device or torch.device(next(iter(kinds), "cpu"))


def _trained(draft: Draft) -> Generator[Any, Any, None]:
    """A model without trainable parameters."""
    per_rank = yield len(draft.rule_of)
    if sum(per_rank) == 0:
        yield "model_chunks hold no trainable parameter on any rank; at least one needs requires_grad=True"


def _rules(draft: Draft) -> Generator[Any, Any, None]:
    """Different rules under one name, because parts of a matrix would diverge."""
    per_rank = yield {unit.name: rule_text(unit.rule) for unit in draft.plan.units}
    for name in dict.fromkeys(name for of_rank in per_rank for name in of_rank):
        ranks = _by_value([of_rank.get(name) for of_rank in per_rank])
        if len(ranks) > 1:
            texts = list(ranks)  # shown from the argument that differs
            shared = texts[0][: sum(1 for _ in takewhile(lambda chars: len(set(chars)) == 1, zip(*texts)))]
            start = max(shared.rfind(before) + len(before) for before in (", ", "("))
            rules = ", ".join(f"{text[start : start + SHOWN]}... on ranks {_some(at)}" for text, at in ranks.items())
            yield f"ranks have different rules for optimizer {name!r}: {rules}; pass the same ones on all ranks"


def _decay(draft: Draft) -> Generator[Any, Any, None]:
    """Overrides that leave out the standard ones which apply `decoupled_lr`. Warns, on rank 0, of biases and vectors
    that have weight decay for the same reason.

    Parameters for which an override sets the decay are the caller's choice, and so is {}: no overrides at all.
    """
    config = draft.config
    given = {} if draft.overrides is None else read_overrides(config, draft.overrides, extra_group_keys=None)
    is_decoupled = draft.overrides is None or any("is_decoupled_lr" in override for override in given.values())
    is_decoupled = is_decoupled or ParamKey(attr="is_embedding_or_output_parameter") in given  # the caller's own rates
    if config.decoupled_lr is not None and not is_decoupled:
        raise ConfigError(
            f"decoupled_lr={config.decoupled_lr!r} has no effect: config_overrides replace the standard overrides, "
            f"which apply it; pass {_KEEP}, or leave it at None"
        )
    standard = get_standard_config_overrides(config, by_name=draft.by_name)
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
    per_rank = yield list(islice(decayed, _NAMES_SHOWN + 1))
    names = list(dict.fromkeys(name for of_rank in per_rank for name in of_rank))
    if names and draft.roles.everyone.rank == 0:
        shown = ", ".join(map(repr, names[:_NAMES_SHOWN])) + ", ..." * (len(names) > _NAMES_SHOWN)
        logger.warning(
            "config_overrides replace the standard ones, so biases and vectors have weight decay now: %s. To keep them "
            "without decay, pass %s; to decay them on purpose, give them an override with wd_mult=1.0",
            shown, _KEEP,
        )  # fmt: skip


def _tp_modes(draft: Draft) -> Generator[Any, Any, None]:
    """Nothing. Records `muon_tp_mode` in the groups of rules for which it has an effect on a matrix of any rank, and
    warns, on rank 0, of blocks that are updated as separate matrices."""
    plans = [(unit.name.split("/")[0], plan.tp_mode) for unit in draft.plan.units for plan in unit.compute]
    per_rank = yield {rule: mode.value for rule, mode in plans if mode is not None}
    modes = {rule: mode for of_rank in per_rank for rule, mode in of_rank.items()}
    for group in draft.groups:
        if (mode := modes.get(group["optimizer"])) is not None:
            group[CHOICES] = tuple(sorted((*group[CHOICES], f"{TP_MODE}={mode!r}")))
    if TpMode.BLOCKWISE.value in modes.values() and draft.roles.everyone.rank == 0:
        logger.warning("%s", OF_BLOCKS)


RANK_CHECKS: tuple[RankCheck, ...] = (
    _decay, _patterns, check_effects, _fp8, check_devices, _trained, _rules, _tp_modes,
)  # fmt: skip


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
            order = [str(id) for id in draft.params if str(id) in local]
            per_rank, orders = zip(*from_all_replicas(axes, (local, order)), strict=True)
            difference = _difference(per_rank[0], per_rank[others[0]], rank=others[0])
            difference = difference or _first_out_of_order(orders[0], orders[others[0]], rank=others[0])
            problems.append(
                f"{'expert ' * experts}data-parallel ranks {others} have another plan than rank 0: config, "
                "overrides and model must be equal on all ranks that share parameters"
                f"{difference}"
            )
        # Tensor-parallel ranks compare the hyper-parameters of the parameters of which both hold a part.
        numbers = {name: {key: text for key, text in all.items() if key in keys} for name, all in local.items()}
        of_tp = axes.tp.gather_objects(numbers)
        for rank, of_rank in enumerate(of_tp):
            both = of_tp[0].keys() & of_rank.keys()
            first, other = ({name: texts[name] for name in both} for texts in (of_tp[0], of_rank))
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
            ours = first[name].get(key)
            theirs = other[name].get(key)
            if ours != theirs:
                return f"; {key} of {name} is {ours} on rank 0 and {theirs} on rank {rank}"
    return ""


def _first_out_of_order(first: Sequence[str], other: Sequence[str], *, rank: int) -> str:
    """Name the first parameter that another one takes the place of; both hold the same names."""
    for ours, theirs in zip(first, other, strict=True):
        if ours != theirs:
            return (
                f"; the parameters have another order: where rank 0 has {ours}, rank {rank} has {theirs}; register "
                "modules and parameters in the same order on all ranks"
            )
    return ""


class ModelPart(NamedTuple):
    """Which part of the model a rank shares with its data-parallel replicas."""

    text: str  # empty if all ranks hold the same parameters
    has_namesakes: bool  # whether a rank with another part has a parameter of the same name


def model_part(metas: Mapping[ParamId, ParamMeta], roles: Roles) -> ModelPart:
    """Compare the parts of the model that ranks hold: tensor-parallel parts, pipeline stages, experts. Collective."""
    texts = []
    has_namesakes = False
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
