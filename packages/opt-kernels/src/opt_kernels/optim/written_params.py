"""Counts the writes of a step to parameters, and lets float32 mains follow the writes of other code.

A main is a copy: after `model.load_state_dict`, `torch.nn.utils.vector_to_parameters`, `param.data = ...`, or any other
write to a bfloat16 or float16 parameter, the next update of its old main would restore the old weights. torch counts
writes (`_version`), and an assignment moves the parameter; only after either are parameters and mains compared. A write
through `param.data`, such as `param.data.fill_(0)`, is not seen.
"""

from collections.abc import Mapping, Sequence
from operator import is_

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat
from opt_kernels.backends.writes import Mark, Writes, is_unwritten
from opt_kernels.dtensor import is_dtensor, local
from opt_kernels.optim.mains import MAIN
from opt_kernels.optim.rows import Member

CHUNK_NUMEL = 1 << 22  # elements that are compared at a time


class WrittenParams:
    """The parameters that are updated together, and the writes that their mains have followed."""

    def __init__(self, members: Sequence[Member], followed: Mapping[Tensor, Mark]):
        """`followed` are the marks of parameters to which earlier steps adapted their mains."""
        self._others = followed
        # Nothing counts writes to tensors that were made in torch.inference_mode().
        self._counted = [member.param for member in members if not member.param.is_inference()]
        self._copied = [member for member in members if MAIN in member.state]
        self._writes: Writes | None = None  # None: before the first update

    @property
    def followed(self) -> dict[Tensor, Mark]:
        """The marks of the parameters that mains have followed."""
        if self._writes is None:
            return dict(self._others)
        params = [member.param for member in self._copied]
        return {**self._others, **dict(zip(params, self._writes.marks, strict=True))}

    def begin_update_(self) -> None:
        """Let mains take the values of parameters that other code wrote, and count the writes of the update.

        Kernels write memory that autograd does not watch: a backward pass through an older graph must raise. The host
        reads no tensor.
        """
        shards = self._shards()
        if self._writes is None or not _same(self._writes.tensors, shards) or not self._writes.are_all_own():
            followed = self.followed
            for member, shard in zip(self._copied, shards, strict=True):
                mark = followed.get(member.param)
                if mark is None or not is_unwritten(shard, mark):
                    follow_(member.state[MAIN], shard)
            self._writes = Writes(shards)
        torch.autograd.graph.increment_version(self._counted)
        self._writes.accept()

    def end_update_(self) -> None:
        """Count what torch's operations have written in the update, so that the next one does not take it for writes
        of other code."""
        if self._writes is not None:
            self._writes.accept()

    @torch.no_grad()  # else `to_local` returns an alias with a version of its own
    def _shards(self) -> list[Tensor]:
        """The local tensors that hold the parameters: those of DTensors may be replaced."""
        params = [member.param for member in self._copied]
        return list(map(local, params)) if any(map(is_dtensor, params)) else params


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


@torch.no_grad()
def follow_(main: Tensor, param: Tensor) -> None:
    """Copy each element of `param` to `main` unless it is the rounded main. NaNs are equal to NaNs."""
    of_param, of_main = flat(param.detach(), param, "param"), flat(main, param, MAIN)
    for new, kept in zip(torch.split(of_param, CHUNK_NUMEL), torch.split(of_main, CHUNK_NUMEL), strict=True):
        rounded = kept.to(new.dtype)
        is_kept = (rounded == new) | (rounded.isnan() & new.isnan())
        kept.copy_(torch.where(is_kept, kept, new.to(kept.dtype)))
