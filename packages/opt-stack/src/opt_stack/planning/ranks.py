"""The checks that compare ranks. Collective: every rank raises the same errors.

`RANK_CHECKS` share one exchange. Each is a generator: it yields facts of this rank, gets those of all ranks, and yields
the sentence with which all refuse, or returns what the ranks have agreed on, if anything. `check_peers` then compares
the plans of ranks that share parameters.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from itertools import chain, islice, takewhile
from typing import Any

import torch
from torch import Tensor

from opt_config import ConfigError, OptimizerConfig, ParamKey, Problem
from opt_distributed.buffers import matches
from opt_distributed.comm import Axes, agree, agreed, from_all_replicas
from opt_distributed.comm import device as devices
from opt_kernels.matrices import TpMode
from opt_kernels.params import CHOICES, Group
from opt_kernels.quantized import quantized
from opt_paramgroups import ParamMeta, get_standard_config_overrides
from opt_paramgroups.overrides import read_overrides
from opt_stack.planning.design import Design, Groups, Request
from opt_stack.planning.plan import BLOCKWISE_NOTE, rule_text, without_addresses
from opt_stack.rules.entries import TP_MODE
from opt_stack.wording import listed, logger

MAY_DIFFER = frozenset({"timers", "config_logger_dir"})
"""Fields of the configuration that may differ between ranks."""
STEPS_COMPARED = (1, 2, 10, 100, 1_000, 10_000)  # of schedules
MAX_RANKS_SHOWN = 8  # for each value, in an error
SHOWN = 60  # characters of each rule, from where they differ
_MAY_DIFFER_IN = frozenset({"local_shape", "placements", "is_vector"})  # fields of `ParamMeta`
_NOT_COMPARED = frozenset({"params", "param_ids", "name"})  # entries of a group
_NAMES_SHOWN = 4
_DECAY = ("wd_mult", "start_wd", "end_wd")
_KEEP = "{**opt_paramgroups.get_standard_config_overrides(config), **yours}"

DescribedParams = dict[str, dict[str, str]]  # numbers and attributes as text, by name of the parameter
Refusals = Generator[Any, Any, None]
RankCheck = Callable[[Design], Generator[Any, Any, Any]]
"""Yields facts of this rank, picklable, and is sent those of all ranks, a list. May raise ConfigError before it
yields them: then every rank raises."""


def check_ranks(design: Design, checks: Sequence[RankCheck]) -> dict[RankCheck, Any]:
    """Run `checks` in one exchange, and return what each returns. Collective. Raises ConfigError on every rank."""
    everyone = design.roles.everyone
    running = [check(design) for check in checks]
    own = agreed(everyone, lambda: [next(generator) for generator in running])
    per_rank = everyone.gather_objects(own)
    found = {}
    for check, generator, facts in zip(checks, running, zip(*per_rank, strict=True), strict=True):
        try:
            problem = generator.send(facts)
        except StopIteration as finished:
            found[check] = finished.value
            continue
        raise ConfigError(problem)
    return found


def _values_of(schedule: Callable[[int], float]) -> dict[int, object]:
    """Return values of a schedule by step; the type of the error where it has none."""
    values: dict[int, object] = {}
    for step in STEPS_COMPARED:
        try:
            values[step] = float(schedule(step))
        except Exception as error:  # of any kind: the step that needs the value raises it
            values[step] = type(error)
    return values


def check_same_config(request: Request, *, dumps_groups: bool = False) -> None:
    """Raise ConfigError on every rank, naming the fields, ranks and values, if configurations differ. Collective.

    All fields count: a different clip norm or loss scale on one rank would also make weights diverge. So do arguments
    for which ranks communicate; `dumps_groups`: whether one is a path of group maps.
    """
    compared = [field for field in fields(OptimizerConfig) if field.name not in MAY_DIFFER]
    values = {field.name: getattr(request.config, field.name) for field in compared}
    values |= {"dump_param_to_param_group_map": dumps_groups, "broadcast_params": request.broadcast_params}
    schedule = request.config.ema_decay
    if callable(schedule) and request.roles.everyone.size > 1:  # whose text does not tell functions apart
        values["ema_decay"] = _values_of(schedule)
    defaults = dict.fromkeys(values, "False") | {field.name: repr(field.default) for field in compared}
    texts = {name: without_addresses(repr(value)) for name, value in values.items()}
    # Only fields that do not have their default travel.
    differing = {name: text for name, text in texts.items() if text != defaults[name]}
    per_rank = request.roles.everyone.gather_objects(differing)
    problems = []
    for name, default in defaults.items():
        ranks = _by_value([of_rank.get(name, default) for of_rank in per_rank])
        if len(ranks) > 1:
            shown = ", ".join(f"{value} on ranks {_some(at)}" for value, at in ranks.items())
            problems.append(f"{name} is {shown}")
    if problems:
        listed_problems = "; ".join(problems)
        raise ConfigError(f"ranks were configured differently: {listed_problems}; set the same on all ranks")


def _by_value(per_rank: Sequence[str | None]) -> dict[str, list[int]]:
    """Return the ranks that report each value; those that report None are left out."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(per_rank):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return ranks


def _union(per_rank: Sequence[Iterable[str]]) -> list[str]:
    """Return the names that any rank reports, without repetitions."""
    return list(dict.fromkeys(chain.from_iterable(per_rank)))


def _some(ranks: list[int]) -> str:
    others = len(ranks) - MAX_RANKS_SHOWN
    return f"{ranks[:MAX_RANKS_SHOWN]} and {others} more" if others > 0 else str(ranks)


def check_effects(design: Design) -> Refusals:
    """Refuse each setting without effect on the parameters of all ranks.

    A model may mix dtypes and layouts: one parameter that feels the setting is enough.
    """
    metas = design.metas
    own = {meta.dtype for meta in metas.values()}
    for chunk in design.request.chunks:
        own.update(param.dtype for param in chunk.parameters())
    per_rank = yield own, {metas[id].is_dtensor for id in design.groups.rule_of}
    dtypes, are_dtensors = (set().union(*facts) for facts in zip(*per_rank, strict=True))
    config = design.config
    wanted = config.precision.params
    problems = []
    # fp16 scales the loss of a model in fp32 as well, under autocast.
    if wanted is not torch.float32 and not config.fp16 and dtypes and wanted not in dtypes:
        name = "bf16" if config.bf16 else "params_dtype"
        present = ", ".join(sorted(map(str, dtypes)))
        reason = (
            f"has no effect: the model's parameters are {present}; convert the model to {wanted} first, or leave it "
            "out (autocast needs none)"
        )
        problems.append(Problem(name, getattr(config, name), reason))
    for name in ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer"):
        if getattr(config, name) and are_dtensors == {True}:
            reason = "has no effect: all trained parameters are DTensors (fully_shard, parallelize_module), and their"
            problems.append(Problem(name, True, f"{reason} state is sharded as they are; leave it at False"))
    if problems:
        raise ConfigError.of("OptimizerConfig", problems)


def _patterns(design: Design) -> Refusals:
    """Refuse patterns of local fp32 accumulation that match no parameter of any chunk on any rank."""
    found: dict[str, bool] = {}
    for chunk in design.model.wrapped.values():
        for pattern in chunk.ddp_config.param_name_patterns_for_fp32_local_accumulation:
            is_found = any(matches(id.name, (pattern,)) for id in chunk.metas)
            found[pattern] = found.get(pattern, False) or is_found
    per_rank = yield found
    for pattern in _union(per_rank):
        if not any(of_rank.get(pattern) for of_rank in per_rank):
            yield (
                f"param_name_patterns_for_fp32_local_accumulation: {pattern!r} matches no parameter of any wrapped "
                'model chunk; pass shell patterns of full names, such as "*.router.weight", or "all"'
            )


def _fp8(design: Design) -> Refusals:
    """Refuse another recipe than `fp8_recipe`; options of fp8 if no parameter on any rank is stored in it."""
    recipe = design.config.fp8_recipe
    is_any_stored = False
    for id, param in design.params.items():
        stored = quantized(param)
        if stored is None:
            continue
        is_any_stored = True
        if stored.recipe.name != recipe:
            raise ConfigError(
                f"fp8_recipe={recipe!r}, but parameter {str(id)!r} is stored with recipe {stored.recipe.name!r}; set "
                "fp8_recipe to that of the parameters"
            )
    per_rank = yield is_any_stored
    asks = ""
    if recipe is not None:
        asks = f"fp8_recipe={recipe!r}"
    elif any(chunk.ddp_config.fp8_param_gather for chunk in design.model.wrapped.values()):
        asks = "fp8_param_gather=True"
    if not asks or any(per_rank):
        return
    if not design.request.by_name and recipe is not None:  # Megatron-LM's command line cannot leave it out
        if design.roles.everyone.rank == 0:
            logger.warning("%s: without effect, because no parameter is stored in fp8 on any rank", asks)
    else:
        yield (
            f"{asks}, but no parameter is stored in fp8 on any rank; quantise the model before it is wrapped "
            "(opt_kernels.quantized.quantize_linears_, or TransformerEngine's quantized_model_init), or leave the "
            "option out; fully_shard and other DTensors store parameters dequantised"
        )


def common_device(design: Design) -> Generator[Any, Any, devices.Device]:
    """Refuse models on different kinds of device. Return this rank's; without tensors, one of the others' kind."""
    own = design.model.device
    per_rank = yield own
    kinds = _by_value([None if device is None else device.type for device in per_rank])
    if len(kinds) > 1:
        ranks = "; ".join(f"{kind} on ranks {at}" for kind, at in kinds.items())
        yield f"model_chunks are on different kinds of device: {ranks}; move all ranks' models to one kind"
    return devices.device_of(own or torch.device(next(iter(kinds), "cpu")))


def _trained(design: Design) -> Refusals:
    """Refuse a model without trainable parameters."""
    per_rank = yield len(design.groups.rule_of)
    if not any(per_rank):
        yield "model_chunks hold no trainable parameter on any rank; at least one needs requires_grad=True"


def _rules(design: Design) -> Refusals:
    """Refuse different rules under one name, because parts of a matrix would diverge."""
    own = {unit.name: rule_text(unit.rule) for unit in design.plan.units}
    per_rank = yield own
    for name in _union(per_rank):
        ranks = _by_value([of_rank.get(name) for of_rank in per_rank])
        if len(ranks) < 2:
            continue
        columns = takewhile(lambda chars: len(set(chars)) == 1, zip(*ranks))
        shared = "".join(chars[0] for chars in columns)  # shown from the argument that differs
        start = max(shared.rfind(before) + len(before) for before in (", ", "("))
        end = start + SHOWN
        rules = ", ".join(f"{text[start:end]}... on ranks {_some(at)}" for text, at in ranks.items())
        yield f"ranks have different rules for optimizer {name!r}: {rules}; pass the same ones on all ranks"


def _decay(design: Design) -> Refusals:
    """Refuse overrides that leave out the standard ones which apply `decoupled_lr`. Warn, on rank 0, of biases and
    vectors that have weight decay for the same reason.

    Parameters for which an override sets the decay are the caller's choice, and so is {}: no overrides at all.
    """
    request = design.request
    config = request.config
    given = read_overrides(config, request.overrides or {}, extra_group_keys=None)
    of_outputs = ParamKey(attr="is_embedding_or_output_parameter")
    is_decoupled = request.overrides is None or of_outputs in given  # then the rates are the caller's own
    is_decoupled = is_decoupled or any("is_decoupled_lr" in override for override in given.values())
    if config.decoupled_lr is not None and not is_decoupled:
        raise ConfigError(
            f"decoupled_lr={config.decoupled_lr!r} has no effect: config_overrides replace the standard overrides, "
            f"which apply it; pass {_KEEP}, or leave it at None"
        )
    newly_decayed = _newly_decayed(design, given) if given else ()
    per_rank = yield list(islice(newly_decayed, _NAMES_SHOWN + 1))
    names = _union(per_rank)
    if names and request.roles.everyone.rank == 0:
        logger.warning(
            "config_overrides replace the standard ones, so biases and vectors have weight decay now: %s. To keep them "
            "without decay, pass %s; to decay them on purpose, give them an override with wd_mult=1.0",
            listed([repr(name) for name in names], _NAMES_SHOWN), _KEEP,
        )  # fmt: skip


def _newly_decayed(design: Design, given: Mapping[ParamKey, Group]) -> Iterator[str]:
    """Yield the parameters with weight decay that the standard overrides would not decay, and `given` do not set."""
    request = design.request
    standard = get_standard_config_overrides(request.config, by_name=request.by_name)
    undecayed = [key for key, override in standard.items() if override.get("wd_mult") == 0.0]
    chosen = [key for key, override in given.items() if not override.keys().isdisjoint(_DECAY)]
    for group in design.groups.groups:
        is_decayed = group.get("weight_decay") or group.get("end_wd")
        if not is_decayed:
            continue
        for id, param in zip(group["param_ids"], group["params"], strict=True):
            is_undecayed = any(key.matches(param, id.name) for key in undecayed)
            is_chosen = any(key.matches(param, id.name) for key in chosen)
            if is_undecayed and not is_chosen:
                yield str(id)


def tp_modes(design: Design) -> Generator[Any, Any, Mapping[str, str]]:
    """Return `muon_tp_mode` by rule where it has an effect on a matrix of any rank. Warn, on rank 0, of
    blocks that are updated as separate matrices."""
    own = {
        unit.name.partition("/")[0]: plan.tp_mode.value
        for unit in design.plan.units
        for plan in unit.compute
        if plan.tp_mode is not None
    }
    per_rank = yield own
    modes = {rule: mode for of_rank in per_rank for rule, mode in of_rank.items()}
    if TpMode.BLOCKWISE.value in modes.values() and design.roles.everyone.rank == 0:
        logger.warning("%s", BLOCKWISE_NOTE)
    return modes


RANK_CHECKS: tuple[RankCheck, ...] = (
    _decay, _patterns, check_effects, _fp8, common_device, _trained, _rules, tp_modes,
)  # fmt: skip


def record_tp_modes(groups: Groups, modes: Mapping[str, str]) -> Groups:
    """Return the groups with the tensor-parallel mode of their rule among its choices."""

    recorded = []
    for group in groups.groups:
        choices = group[CHOICES]
        if mode := modes.get(group["optimizer"]):
            choices = tuple(sorted((*choices, f"{TP_MODE}={mode!r}")))
        recorded.append({**group, CHOICES: choices})
    return replace(groups, groups=recorded)


def check_peers(design: Design) -> None:
    """Check that ranks that share parameters agree on their plan, hyper-parameters and attributes. Collective.

    Raises:
        ConfigError: on every rank, if they do not.
    """
    roles = design.roles
    # Ranks may hold other experts.
    problems = _peer_problems(design, roles.dense, experts=False)
    problems += _peer_problems(design, roles.expert, experts=True)
    agree(roles.everyone, ConfigError(problems[0]) if problems else None)


def _peer_problems(design: Design, axes: Axes, *, experts: bool) -> list[str]:
    """Return how the dense parameters or the experts of this rank's peers differ. Collective."""
    problems = []
    ids = {id for unit in design.plan.units if unit.is_expert == experts for id in unit.ids}
    attributes = [field.name for field in fields(ParamMeta) if field.name not in _MAY_DIFFER_IN]
    numbers: DescribedParams = {}  # hyper-parameters
    local: DescribedParams = {}  # these, and the attributes
    for group in design.groups.groups:
        of_group = {}
        for key, value in sorted(group.items()):
            if key not in _NOT_COMPARED and _is_plain(value):
                of_group[key] = repr(value.tolist() if isinstance(value, Tensor) else value)
        for id in sorted(ids.intersection(group["param_ids"])):
            meta = design.metas[id]
            numbers[str(id)] = of_group
            local[str(id)] = of_group | {name: repr(getattr(meta, name)) for name in attributes}
    plan = design.plan.fingerprint(experts=experts)
    digest = sha256(f"{plan}{local}".encode()).hexdigest()
    digests = from_all_replicas(axes, digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:  # the same on all peers
        order = [str(id) for id in design.params if str(id) in local]
        replies = from_all_replicas(axes, (local, order))
        first, first_order = replies[0]
        other, other_order = replies[others[0]]
        difference = _difference(first, other, first.keys() | other.keys(), rank=others[0])
        difference = difference or _first_out_of_order(first_order, other_order, rank=others[0])
        family = "expert " * experts
        problems.append(
            f"{family}data-parallel ranks {others} have another plan than rank 0: config, overrides and model must be "
            f"equal on all ranks that share parameters{difference}"
        )
    # Tensor-parallel ranks compare the hyper-parameters of the parameters of which both hold a part.
    per_rank = axes.tp.gather_objects(numbers)
    first = per_rank[0]
    for rank, of_rank in enumerate(per_rank):
        if difference := _difference(first, of_rank, first.keys() & of_rank.keys(), rank=rank):
            problems.append(
                "tensor-parallel ranks have different hyper-parameters for one parameter"
                f"{difference}; pass the same overrides and groups on all ranks"
            )
    return problems


def _is_plain(value: Any) -> bool:
    """Return whether the repr of a value is the same in every process: numbers, names and tuples of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _difference(first: DescribedParams, other: DescribedParams, names: Iterable[str], *, rank: int) -> str:
    for name in sorted(names):
        if name not in first:
            return f"; {name} is trained on rank {rank} only"
        if name not in other:
            return f"; {name} is trained on rank 0 only"
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
