"""Counts the writes of a step to parameters, and lets float32 mains follow the writes of other code.

A main is a copy: after `model.load_state_dict`, `copy_` from an average of the weights, or any other write to a
bfloat16 or float16 parameter, the next update of its old main would restore the old weights. torch counts such writes
(`_version`), except those through `param.data`. Only after one are parameters and mains compared.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat
from opt_kernels.backends.writes import Writes
from opt_kernels.dtensor import local
from opt_kernels.optim.mains import MAIN
from opt_kernels.optim.rows import Member

CHUNK_NUMEL = 1 << 22  # elements that are compared at a time

_VERSION: Callable[[Tensor], int] = attrgetter("_version")


class WrittenParams:
    """The parameters that are updated together, and the writes that their mains have followed."""

    def __init__(self, members: Sequence[Member], followed: Mapping[Tensor, int]):
        """`followed` are the versions of parameters to which earlier steps adapted their mains."""
        self._others = followed
        self._writes = Writes([member.param for member in members])
        # Nothing counts writes to tensors that were made in torch.inference_mode().
        self._copied = [member for member in members if MAIN in member.state and not member.param.is_inference()]
        with torch.no_grad():  # else `to_local` returns an alias with a version of its own
            self._shards = [local(member.param) for member in self._copied]
        # Writes to the local tensors of DTensors are not counted by their parameters.
        self._are_local = any(shard is not member.param for member, shard in zip(self._copied, self._shards))
        self._followed = [followed.get(member.param) for member in self._copied]

    @property
    def followed(self) -> dict[Tensor, int]:
        """The versions of the parameters that mains have followed."""
        pairs = zip(self._copied, self._followed, strict=True)
        return {**self._others, **{member.param: version for member, version in pairs if version is not None}}

    def begin_update_(self) -> None:
        """Let mains take the values of parameters that other code wrote, and count the writes of the update.

        Kernels write memory that autograd does not watch: a backward pass through an older graph must raise. The host
        reads no tensor.
        """
        if (present := list(map(_VERSION, self._shards))) != self._followed:
            for member, shard, before, now in zip(self._copied, self._shards, self._followed, present, strict=True):
                if before != now:
                    follow_(member.state[MAIN], shard)
        self._writes.count()
        self._followed = list(map(_VERSION, self._shards))

    def end_update_(self) -> None:
        """Count what torch's operations have written in the update, so that the next one does not take it for writes
        of other code."""
        if self._shards and (self._are_local or not self._writes.are_all_own()):
            self._writes.accept()
            self._followed = list(map(_VERSION, self._shards))


@torch.no_grad()
def follow_(main: Tensor, param: Tensor) -> None:
    """Copy each element of `param` to `main` unless it is the rounded main. NaNs are equal to NaNs."""
    of_param, of_main = flat(param.detach(), param, "param"), flat(main, param, MAIN)
    for new, kept in zip(torch.split(of_param, CHUNK_NUMEL), torch.split(of_main, CHUNK_NUMEL), strict=True):
        rounded = kept.to(new.dtype)
        is_kept = (rounded == new) | (rounded.isnan() & new.isnan())
        kept.copy_(torch.where(is_kept, kept, new.to(kept.dtype)))
