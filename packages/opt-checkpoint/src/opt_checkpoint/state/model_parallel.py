"""Where the tensors of a tensor-, expert- or pipeline-parallel rank belong in the whole model.

A parameter is described by Megatron-Core's attributes (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
`allreduce`, `shared_embedding`, ...) and the ranks that it is divided over. The keys and shapes do not depend on the
number of ranks wherever the names allow it, so that a checkpoint loads at other sizes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from opt_checkpoint.errors import CheckpointingException, CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.state.factory import Segment, ShardedTensorFactory
from opt_checkpoint.state.sharded import Marks, ShardedTensor, items_of
from opt_checkpoint.state.tensors import is_dtensor
from opt_checkpoint.state.wrappers import NamedModule

_ON_STAGES = ("shared_embedding", "shared_position_embedding", "pipeline_parallel")


class Axis(Protocol):
    """A group of ranks as this rank sees it, such as `run.ranks.Ranks`, or a `Comm` of opt_distributed."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order."""


class Replica(NamedTuple):
    """The number of this rank among those that hold the same parameters, and their number."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAxes:
    """The groups over which a model is divided."""

    all_ranks: Axis
    tp: Axis
    expert_tp: Axis
    ep: Axis
    pp: Axis
    dense: Axis | Replica
    expert: Axis | Replica


def marks_of(modules: Iterable[NamedModule], values: Mapping[str, Any]) -> dict[str, Marks]:
    """Return the marks of tensors of a model, by name.

    Args:
        modules: of the model.
        values: its tensors, by name without wrappers; other values are skipped.
    """
    by_name = {found.name: found.module for found in modules}  # of a wrapper, what it wraps
    direct = {name: list(module.parameters(recurse=False)) for name, module in by_name.items()}
    # Modules whose direct parameters are all experts: their buffers are the experts', too.
    experts = {name for name, own in direct.items() if own and not any(getattr(p, "allreduce", True) for p in own)}
    marks = {}
    for name, tensor in values.items():
        if isinstance(tensor, Tensor):
            dim = getattr(tensor, "partition_dim", None)
            outer = _before_number(name)
            length = 0
            module = None if outer is None else by_name.get(f"{outer}." if outer else "")
            if module is not None:
                numbers = {**module._modules, **module._parameters}  # of a ModuleList, Sequential, ParameterList
                length = len(numbers) if sorted(numbers) == sorted(map(str, range(len(numbers)))) else 0
            is_dense = name.removesuffix(name.rpartition(".")[2]) not in experts or isinstance(tensor, nn.Parameter)
            marks[name] = Marks(
                name=name,
                tensor=tensor,
                is_expert=not getattr(tensor, "allreduce", is_dense),
                is_cut=bool(getattr(tensor, "tensor_model_parallel", False)) and not is_dtensor(tensor),
                dim=None if dim is None or dim < 0 else dim,
                stride=getattr(tensor, "partition_stride", None) or 1,
                is_on_stages=any(getattr(tensor, mark, False) for mark in _ON_STAGES),
                list_name=outer if length else None,
                list_len=length,
            )
    return marks


def _before_number(name: str) -> str | None:
    """The name up to its first component that is a number, such as `decoder.layers`; None if no component is."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else ".".join(parts[:at])


def check_stages(tensors: Iterable[ShardedTensor], stored: Collection[str], where: object) -> None:
    """Refuse a list of layers that was not placed, if more layers are stored than it has: it may be a pipeline stage.

    Raises:
        CheckpointMismatchError: naming the list.
    """
    lists: dict[str, int] = {}
    for tensor in tensors if has_other_ranks() else ():
        if tensor.marks is not None:
            prefix, _, own_list = _split_key(tensor.key, tensor.marks)
            if own_list is not None:
                lists[f"{prefix}{own_list}{own_list and '.'}"] = tensor.marks.list_len
    for key in stored if lists else ():
        for prefix, length in lists.items():
            number = key.removeprefix(prefix).partition(".")[0] if key.startswith(prefix) else ""
            if number.isdigit() and int(number) >= length:
                raise CheckpointMismatchError(
                    f"{prefix[:-1] or 'the model'} has {length} layers, and {where} holds more ({key}): if this is a "
                    f"pipeline stage, which layers it has is unknown without process groups. Pass sharded_model(model, "
                    f"groups=opt_stack.ProcessGroups(dp=..., pp=..., ...)); if every rank loads the same first layers, "
                    f"groups=opt_stack.ProcessGroups(dp=torch.distributed.group.WORLD)"
                )


class _KeyParts(NamedTuple):
    """The parts of a key: a prefix of the caller or of another form, the name, and the list of layers in the name."""

    prefix: str
    name: str
    list_name: str | None


def _split_key(key: str, marks: Marks) -> _KeyParts:
    """Split the present key of a tensor. If it does not end with the tensor's name, the caller chose it: no prefix."""
    if key.endswith(marks.name):
        return _KeyParts(key.removesuffix(marks.name), marks.name, marks.list_name)
    return _KeyParts("", key, None if marks.list_name is None else _before_number(key))


def has_other_ranks() -> bool:
    """Return whether this process is one of several ranks of torch.distributed."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# The list of experts and the number of one, as in `mlp.experts.3.up.weight` (groups 1 and 2), or its weight and the
# number, as in `mlp.experts.up.weight3` (groups 3 and 4).
_EXPERT_NUMBER = re.compile(
    r"^((?:.*\.)?\w*experts)\.(\d+)(?=\.|$)|^((?:.*\.)?\w*experts\.(?:.*\.)?(?:weight|bias))(\d+)$"
)


class _Expert(NamedTuple):
    """The number of an expert in the name of its tensor, as `experts.3.up.weight` or `experts.up.weight3` have it."""

    list_name: str  # of the list of experts, with its scope
    number: int
    span: tuple[int, int]  # of the number in the name


@dataclass(slots=True)
class _Entry:
    """A tensor of a state that is not placed yet, its container, and its place in the whole model."""

    parent: Any
    at: Any  # key or index in `parent`
    tensor: ShardedTensor
    marks: Marks
    scope: str  # number of the `ScopedState`, and the prefix; names are unique in each
    prefix: str  # of the key, as add_prefix_for_sharding gives it
    name: str
    expert: _Expert | None = None
    layers: str | None = None  # the list of layers that contains it, with its scope
    cuts: tuple[tuple[int, int, int], ...] = ()  # of a stack of experts
    copy: int = 0  # number among the pipeline stages that have a copy

    @property
    def scoped(self) -> str:
        return f"{self.scope}{self.name}"

    @property
    def key(self) -> str:
        return f"{self.prefix}{self.name}"


def place_(state: Any, axes: ModelAxes) -> None:
    """Set key, position and replica number of every tensor in `state` that `sharded_model` described without groups.

    A key that the caller has set or prefixed is kept, with the numbers of layers and experts in it as in a name.

    Collective over `axes.all_ranks`. Writes to the entries of `state`, and replaces those with a partition stride.

    Raises:
        CheckpointingException: on every rank, if groups are missing, or it is unknown which part a rank has.
    """
    entries = list(_entries(state))
    plain = [entry.marks for entry in entries if not is_dtensor(entry.marks.tensor)]
    trains = any(entry.marks.tensor.requires_grad for entry in entries)
    has_experts = any(marks.is_expert for marks in plain)
    per_rank = axes.all_ranks.gather_objects((bool(entries), trains, bool(plain), has_experts))
    have_entries, train, have_plain, have_experts = zip(*per_rank)
    if not any(have_entries):
        return
    error = _missing_groups(axes, sum(train), any(have_plain), any(have_experts))
    if error is None:
        _name_experts(axes.ep, entries)
        _name_layers(axes.pp, entries)
        dense = [entry for entry in entries if not entry.marks.is_expert]
        experts = [entry for entry in entries if entry.marks.is_expert]
        uneven_dense = _uneven_parts(axes.tp, dense)
        uneven_experts = _uneven_parts(axes.expert_tp, experts)  # collective, also for a rank with uneven dense parts
        error = uneven_dense or uneven_experts
    if error is None:
        try:
            for entry in entries:
                entry.parent[entry.at] = _placed_tensor(axes, entry)
        except CheckpointingException as refused:
            error = str(refused)
    for rank, text in enumerate(axes.all_ranks.gather_objects(error)):
        if text is not None:
            raise CheckpointValueError(error or f"rank {rank} refused: {text}")


def _entries(state: Any) -> Iterator[_Entry]:
    """The tensors that are not placed, each under the key that it has now."""
    scopes: dict[int, int] = {}

    def walk(node: Any, scope: int) -> Iterator[_Entry]:
        if hasattr(node, "key_at"):  # a ScopedState
            scope = scopes.setdefault(id(node), len(scopes) + 1)
        for at, value in list(items_of(node)):
            if isinstance(value, ShardedTensor) and (marks := value.marks) is not None:
                prefix, name, list_name = _split_key(value.key, marks)
                entry = _Entry(node, at, value, marks, f"{scope}/{prefix}", prefix, name)
                if marks.is_expert and (found := _EXPERT_NUMBER.match(name)):
                    group = 2 if found[2] is not None else 4  # of the number
                    entry.expert = _Expert(f"{entry.scope}{found[group - 1]}", int(found[group]), found.span(group))
                layers = None if list_name is None else f"{entry.scope}{list_name}"
                entry.layers = None if entry.expert is not None and entry.expert.list_name == layers else layers
                yield entry
            elif isinstance(value, dict | list):
                yield from walk(value, scope)

    return walk(state, 0) if isinstance(state, dict | list) else iter(())


def _missing_groups(axes: ModelAxes, num_training: int, has_plain: bool, has_experts: bool) -> str | None:
    """A sentence if the groups do not account for all ranks; the same on every rank that was given these groups."""
    possible = {axes.all_ranks.size, num_training}  # groups may leave out ranks that train nothing
    dense = {"dp": axes.dense.size, "tp": axes.tp.size, "pp": axes.pp.size}
    expert = {"expt_dp": axes.expert.size, "expt_tp": axes.expert_tp.size, "ep": axes.ep.size, "pp": axes.pp.size}
    wanted = [("dense parameters", dense)] if has_plain else []
    wanted += [("experts", expert)] if has_experts else []
    for what, roles in wanted:
        count = math.prod(roles.values())
        if count not in possible:
            sizes = " x ".join(f"{role} of {size}" for role, size in roles.items())
            return (
                f"the process groups account for {count} of {axes.all_ranks.size} ranks with {what} ({sizes}), so it "
                f"is unknown which part of the model each rank has; pass every group of "
                f"opt_stack.ProcessGroups({', '.join(f'{role}=...' for role in roles)}) with more than one rank"
            )
    return None


def _name_experts(ep: Axis, entries: Sequence[_Entry]) -> None:
    """Name the experts of this rank as if one rank had all of them. Collective over `ep`; writes to the entries."""
    if ep.size == 1:
        return
    numbered: dict[str, set[int]] = defaultdict(set)
    for entry in entries:
        if entry.expert is not None:
            numbered[entry.expert.list_name].add(entry.expert.number)
    others = {entry.scoped for entry in entries if entry.marks.is_expert and entry.expert is None}
    per_rank = ep.gather_objects((numbered, others))
    offsets = {name: _number_offset([own.get(name, set()) for own, _ in per_rank], ep.rank) for name in numbered}
    counts = Counter(name for _, names in per_rank for name in names)
    for entry in entries:
        marks = entry.marks
        expert = entry.expert
        offset = None if expert is None else offsets[expert.list_name]
        if expert is not None and offset is not None:
            low, high = expert.span
            entry.name = f"{entry.name[:low]}{expert.number + offset}{entry.name[high:]}"
        elif expert is not None or (marks.is_expert and counts[entry.scoped] > 1):
            is_stack = expert is None and marks.tensor.dim() == 3 and not (marks.is_cut and marks.dim == 0)
            if is_stack and not is_dtensor(marks.tensor):
                entry.cuts = ((0, ep.rank, ep.size),)
            else:
                entry.name = f"experts{ep.rank}of{ep.size}.{entry.name}"


def _number_offset(per_rank: Sequence[set[int]], rank: int) -> int | None:
    """The number to add to those of this rank's experts. None if ranks neither count from 0 each, nor all together."""
    if all(numbers == set(range(len(numbers))) for numbers in per_rank):
        return sum(map(len, per_rank[:rank]))
    every = sorted(number for numbers in per_rank for number in numbers)
    return 0 if every == list(range(len(every))) else None


def _name_layers(pp: Axis, entries: Sequence[_Entry]) -> None:
    """Name the parameters of this stage as if one stage had all of them. Collective over `pp`; writes to the entries.

    Stages that number their layers from 0 each are renumbered in the order of stages. Other names that several stages
    use get the stage as a prefix.
    """
    if pp.size == 1:
        return
    shared = {entry.scoped for entry in entries if entry.marks.is_on_stages}  # of which several stages have a copy
    names = {entry.scoped for entry in entries} - shared
    lengths = {entry.layers: entry.marks.list_len for entry in entries if entry.layers is not None}
    stages = pp.gather_objects((names, shared, lengths))
    counts = Counter(name for stage_names, _, _ in stages for name in stage_names)
    renumbered = {entry.layers for entry in entries if entry.layers is not None and counts[entry.scoped] > 1}
    renumbered = set().union(*pp.gather_objects(renumbered))
    for entry in entries:
        if entry.scoped in shared:
            entry.copy = sum(entry.scoped in stage_shared for _, stage_shared, _ in stages[: pp.rank])
        elif entry.layers in renumbered:
            parts = entry.name.split(".")
            at = next(index for index, part in enumerate(parts) if part.isdigit())
            num_before = sum(stage_lengths.get(entry.layers, 0) for _, _, stage_lengths in stages[: pp.rank])
            parts[at] = str(int(parts[at]) + num_before)
            entry.name = ".".join(parts)
        elif counts[entry.scoped] > 1:
            entry.name = f"stage{pp.rank}of{pp.size}.{entry.name}"


def _uneven_parts(tp: Axis, entries: Sequence[_Entry]) -> str | None:
    """A sentence if ranks have parts of different shapes of one parameter. Collective over `tp`."""
    if tp.size == 1:
        return None
    cut = {entry.key: tuple(entry.marks.tensor.shape) for entry in entries if entry.marks.is_cut}
    per_rank = tp.gather_objects(cut)
    for key, shape in per_rank[0].items():
        shapes = [of_rank.get(key, shape) for of_rank in per_rank]
        if len(set(shapes)) > 1:
            return (
                f"{key} is tensor parallel, and its parts have different shapes: {', '.join(map(str, shapes))} by "
                f"rank; only equal parts have a place in the whole parameter: pad it to a multiple of {tp.size}, or "
                f"describe the parts with ShardedTensor in a sharded_state_dict(prefix) method of its module"
            )
    return None


def _placed_tensor(axes: ModelAxes, entry: _Entry) -> ShardedTensor | ShardedTensorFactory:
    """Return the tensor of an entry with its key, its position in the whole model, and its replica number.

    Raises:
        CheckpointingException: a tensor-parallel parameter has no `partition_dim`, or a stride that is not supported.
    """
    marks = entry.marks
    tensor = entry.tensor
    if is_dtensor(marks.tensor):  # its mesh describes it, but not its experts or stages
        return replace(tensor, key=entry.key, marks=None)
    assert tensor.data is not None
    if marks.is_expert:
        tp = axes.expert_tp
        replica = axes.expert
    else:
        tp = axes.tp
        replica = axes.dense
    cuts = entry.cuts
    is_cut = marks.is_cut and tp.size > 1
    replica_id = (entry.copy, 0 if is_cut else tp.rank, replica.rank)
    options: dict[str, Any] = {"replica_id": replica_id, "has_mains": tensor.has_mains, "source": tensor.source}
    if is_cut:
        if marks.dim is None or marks.dim >= marks.tensor.dim():
            given = "no partition_dim" if marks.dim is None else f"partition_dim={marks.dim}"
            raise CheckpointValueError(
                f"{marks.name} of shape {tuple(marks.tensor.shape)} has tensor_model_parallel=True, but {given}; set "
                f"param.partition_dim to the dim of which each tensor-parallel rank has a part, or "
                f"tensor_model_parallel=False if all ranks have the same values"
            )
        if marks.stride > 1:
            segments = _segments(entry, tp, marks.dim)
            shape = tuple(tensor.data.shape)
            return ShardedTensorFactory(entry.key, tensor.data, segments=segments, local_shape=shape, **options)
        cuts += ((marks.dim, tp.rank, tp.size),)
    return ShardedTensor.from_rank_offsets(entry.key, tensor.data, *cuts, **options)


def _segments(entry: _Entry, tp: Axis, dim: int) -> tuple[Segment, ...]:
    """The runs of rows of the whole tensor that a part has, one below the other, as of a fused gate and value."""
    marks = entry.marks
    shape = entry.tensor.local_shape
    if dim != 0 or entry.cuts or shape[0] % marks.stride:
        raise CheckpointValueError(
            f"{marks.name} of shape {shape} has partition_stride={marks.stride} and partition_dim={dim}; a stride "
            f"above 1 is supported along dim 0 of a single matrix with a multiple of {marks.stride} rows; describe "
            f"this parameter with a ShardedTensorFactory in a sharded_state_dict(prefix) method of its module"
        )
    rows = shape[0] // marks.stride
    whole = (shape[0] * tp.size, *shape[1:])
    segments = []
    for number in range(marks.stride):
        offset = ((number * tp.size + tp.rank) * rows, *(0 for _ in shape[1:]))
        stop = (number + 1) * rows
        segments.append(Segment(row_start=number * rows, row_stop=stop, global_shape=whole, global_offset=offset))
    return tuple(segments)
