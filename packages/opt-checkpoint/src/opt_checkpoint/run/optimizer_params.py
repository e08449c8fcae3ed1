"""The parameters of a torch optimizer by name, and where a state of each belongs in the whole model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.groups import Group
from opt_checkpoint.state.model_parallel import has_other_ranks, marks_of
from opt_checkpoint.state.optimizer_state import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from opt_checkpoint.state.sharded import Marks, Shape, ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tensors import is_dtensor, local_tensor, sharded_like
from opt_checkpoint.state.wrappers import NamedModule, named_modules, named_parameters


class NamedParam(NamedTuple):
    """A parameter of an optimizer.

    Args:
        name: its name in the whole model.
        param: the parameter, which may be this rank's part.
        group: the group that contains it.
        shape: its shape in the whole model.
        marks: what is known without process groups.
        placed: where this rank's part belongs, if process groups were given.
    """

    name: str
    param: nn.Parameter
    group: Group
    shape: Shape
    marks: Marks
    placed: ShardedTensor | ShardedTensorFactory | None

    def describe(self, key: str, value: Tensor, rank: int) -> ShardedTensor | ShardedTensorFactory:
        """Describe a state of the parameter under `key`.

        Args:
            key: the key of the state.
            value: this rank's tensor, with the layout of the parameter or equal on all ranks.
            rank: number of this rank among those that have the same plain tensors, if no groups were given.

        Raises:
            CheckpointingException: it is unknown which part of the whole state the tensor is.
        """
        is_like_param = value.dim() > 0 and local_tensor(value).shape == local_tensor(self.param).shape
        if is_dtensor(self.param) and not is_dtensor(value) and value.dim():
            raise CheckpointValueError(
                f"{key} is a plain tensor of shape {tuple(value.shape)} for a DTensor parameter: it may be a "
                f"shard, or the same on all ranks; describe it with make_sharded_state"
            )
        if self.placed is None:
            described = sharded_like(key, value, replica_id=rank)
            described.marks = self.marks if self.marks.problem() else None
            return described
        if is_like_param:
            like_param = make_sharded_optimizer_tensor(self.placed, value, "")
            like_param.key = key
            return like_param
        if value.dim() and not is_dtensor(value) and self.shape != tuple(self.param.shape):
            raise CheckpointValueError(
                f"{key} has shape {tuple(value.shape)}, and its parameter is a part of shape "
                f"{tuple(self.param.shape)} of {self.shape}: which part of the whole state it is, is unknown; describe "
                f"it with make_sharded_state"
            )
        described = sharded_like(key, value)
        described.may_repeat = True  # ranks that have parts of the parameter must agree
        return described


def named_params(model: nn.Module, optimizer: Optimizer, described: ShardedStateDict | None) -> list[NamedParam]:
    """Return the optimizer's parameters in its order. A tied parameter has the name that sorts first.

    Args:
        model: contains them. Parameters that FSDP2 has gathered, as for an evaluation, are sharded again.
        optimizer: the optimizer.
        described: the model by `sharded_model` with process groups; None without.

    Raises:
        CheckpointingException: a parameter has no name in the model, or its states cannot be described.
    """
    modules = list(named_modules(model))
    _refuse_local_shards(modules, optimizer)
    fsdp_module = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for found in modules:
        if isinstance(found.module, fsdp_module):
            found.module.reshard()  # FSDP2 leaves shards gathered after a forward without a backward pass
    params = named_parameters(modules)
    marks = marks_of(modules, params)
    names = {id(params[name]): name for name in sorted(params, reverse=True)}  # the first one of a tied parameter
    members = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    placed: Mapping[int, ShardedTensor | ShardedTensorFactory] = {}
    if described is not None:
        placed = get_param_id_to_sharded_param_map(described, [param for param, _ in members], strict=False)
    named = []
    for index, (param, group) in enumerate(members):
        if id(param) not in names:
            raise CheckpointValueError(
                f"a parameter of shape {tuple(param.shape)} of the optimizer is not in the model; pass the model "
                f"whose parameters the optimizer was built from"
            )
        name = names[id(param)]
        place = placed.get(index)
        shape = tuple(param.shape)
        if isinstance(place, ShardedTensor):
            shape = place.global_shape
        elif place is not None:
            segments = place.declared().segments
            if not segments or any(segment.suffix for segment in segments):
                raise CheckpointValueError(
                    f"{place.key} is stored as several tensors, which states of a torch optimizer cannot be; save it "
                    f"with an optimizer of opt_stack.get_optimizer"
                )
            shape = segments[0].global_shape
        full_name = name if place is None else place.key
        named.append(NamedParam(full_name, param, group, shape, marks[name], place))
    return named


def _refuse_local_shards(modules: Iterable[NamedModule], optimizer: Optimizer) -> None:
    """Raise CheckpointValueError if ranks keep states that no other rank can describe."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if isinstance(optimizer, getattr(zero, "ZeroRedundancyOptimizer", ())):
        raise CheckpointValueError(
            "ZeroRedundancyOptimizer keeps the state of each parameter on one rank only, so that it cannot be saved or "
            "loaded by name; use opt_stack.get_optimizer with use_distributed_optimizer=True, or the optimizer that it "
            "wraps, with torch.distributed.fsdp.fully_shard"
        )
    fsdp1 = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    wrapper = getattr(fsdp1, "FullyShardedDataParallel", ())
    if any(isinstance(found.module, wrapper) for found in modules) and has_other_ranks():
        raise CheckpointValueError(
            "the model is in FullyShardedDataParallel, whose flat shards do not say what part of a parameter they are; "
            "use torch.distributed.fsdp.fully_shard, or save torch.distributed.checkpoint.state_dict.get_state_dict"
        )


def names_by_group(optimizer: Optimizer, members: Sequence[NamedParam]) -> list[list[str]]:
    """Return the names of the parameters of each group; `members` are those of all groups, in order."""
    rest = iter(members)
    return [[next(rest).name for _ in group["params"]] for group in optimizer.param_groups]


def on_all_ranks(per_rank: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Return the names of each group's parameters on any rank.

    Raises:
        CheckpointValueError: ranks have different numbers of groups.
    """
    if len({len(of_rank) for of_rank in per_rank}) > 1:
        raise CheckpointValueError(
            f"ranks have different numbers of parameter groups ({', '.join(str(len(own)) for own in per_rank)}); build "
            f"the optimizer with the same groups on every rank, empty ones included"
        )
    return [list(dict.fromkeys(name for own in of_group for name in own)) for of_group in zip(*per_rank, strict=True)]
