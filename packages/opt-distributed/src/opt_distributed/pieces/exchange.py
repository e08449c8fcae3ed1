"""`ComputeStage`: gathers sharded matrices before a rule runs, and scatters the updates after it.

    parts ─ prepare_ ─▶ gather ─▶ whole matrices, on ranks that compute ─ transform_ ─▶ scatter ─▶ parts ─ apply_

Main values and elementwise state stay with the parts. State that a rule declares as `whole` is on the ranks that
compute the matrix. Whole matrices exist only between gather and scatter. A `ComputeLayout` says which ranks compute.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.wires import naming
from opt_distributed.comm.collectives import Comm, Sizes
from opt_distributed.layout import Block, ComputeLayout, Computes
from opt_kernels.matrices import scaled_grads, squares_in_float64, stacks
from opt_kernels.rules import GRAD_SQUARES, MatrixRule, Rule, sums_gradients
from opt_kernels.works import Batch, MatrixSpec, Task, Work
from opt_paramgroups import ParamId

_OF_PARTS = "of matrices that ranks store parts of"
EVERYONE = -1  # in place of the rank that owns a matrix
Parts = Mapping[ParamId, Tensor]


class _Joined(NamedTuple):
    """A matrix that a rank has after parts along one axis were joined."""

    id: ParamId
    shape: tuple[int, ...]  # of the joined block
    dim: int  # along which its parts are joined
    parts: Sequence[tuple[int, ...]]  # shapes of the parts, by peer
    numels: list[int]  # of the parts

    def joined(self, flat: Sequence[Tensor]) -> Tensor:
        """Concatenate flat parts."""
        if self.dim == 0:
            return torch.cat(list(flat)).view(self.shape)
        return torch.cat([part.view(shape) for part, shape in zip(flat, self.parts, strict=True)], self.dim)

    def cut(self, block: Tensor) -> Sequence[Tensor]:
        """Split the joined block into flat parts."""
        if self.dim == 0:
            return torch.split(block.reshape(-1), self.numels)
        parts = torch.split(block, [shape[self.dim] for shape in self.parts], self.dim)
        return [part.reshape(-1) for part in parts]


class _Leg:
    """An exchange along one axis, planned: who sends how many elements of which matrices. Tensors are flat.

    Every peer has parts of the matrices `before`; matrices `after` are joined on this rank. Owners receive from all
    peers by one all-to-all; where every rank computes, `after` are all matrices, and a gather is one all-gather.
    """

    def __init__(
        self, comm: Comm, before: Mapping[ParamId, tuple[int, ...]], to: Sequence[int], after: Sequence[_Joined]
    ):
        """`before` has the shapes of this rank's parts, and `to` the ranks that they are sent to, in this order."""
        self.comm = comm
        self.before = before
        self.after = after
        self.numels = list(map(prod, before.values()))
        sent = [0] * comm.size
        for rank, numel in zip(to, self.numels, strict=True):
            sent[rank] += numel
        # By peer, and by matrix for each peer.
        self.pieces = [joined.numels[peer] for peer in range(comm.size) for joined in after]
        num = len(after)
        received = [sum(self.pieces[peer * num : (peer + 1) * num]) for peer in range(comm.size)]
        self.to_owners = Sizes(received=received, sent=sent)
        self.to_peers = Sizes(received=sent, sent=received)

    def join(self, of_rank: Parts, like: Tensor) -> dict[ParamId, Tensor]:
        """Send this rank's parts to the owners, and join those that it owns."""
        flat = [of_rank[id].reshape(-1) for id in self.before]
        out = like.new_empty(sum(self.to_owners.received))
        with naming(f"exchange {_OF_PARTS}"):
            self.comm.all_to_all_(out, torch.cat(flat) if flat else like.new_empty(0), sizes=self.to_owners)
        return self._joined(out)

    def join_everywhere(self, of_rank: Parts) -> dict[ParamId, Tensor]:
        """Join all matrices on every rank. Pads shorter parts: an all-gather needs equal sizes."""
        received = self.to_owners.received
        length = max(received)
        flat = torch.cat([of_rank[id].reshape(-1) for id in self.before])
        full = flat.new_empty(self.comm.size * length)
        with naming(f"gather {_OF_PARTS}"):
            self.comm.all_gather_(full, torch.cat([flat, flat.new_zeros(length - flat.numel())]))
        if min(received) == length:
            return self._joined(full)
        rows = zip(full.view(-1, length), received, strict=True)
        return self._joined(torch.cat([row[:numel] for row, numel in rows]))

    def part(self, wholes: Parts, like: Tensor) -> dict[ParamId, Tensor]:
        """The inverse of `join`: return this rank's parts of `before`, given the joined blocks `after`."""
        cuts = [joined.cut(wholes[joined.id]) for joined in self.after]
        sent = torch.cat(list(chain.from_iterable(zip(*cuts, strict=True)))) if cuts else like.new_empty(0)
        out = like.new_empty(sum(self.numels))
        with naming(f"exchange {_OF_PARTS}"):
            self.comm.all_to_all_(out, sent, sizes=self.to_peers)
        parts = torch.split(out, self.numels) if self.numels else ()
        return {id: part.view(shape) for (id, shape), part in zip(self.before.items(), parts, strict=True)}

    def _joined(self, flat: Tensor) -> dict[ParamId, Tensor]:
        num = len(self.after)
        parts = torch.split(flat, self.pieces) if num else ()
        return {joined.id: joined.joined(parts[number::num]) for number, joined in enumerate(self.after)}


class ComputeStage:
    """The matrices of one `ComputeLayout`, on one rank. `comms` has a group for each axis, which gives its coordinate.

    Every rank of the grid makes the same calls with the same matrices, at least one, in the same order. All tensors of
    a call have one dtype and device. A gather is one collective for each axis that is not kept, whatever the number of
    matrices, and so is a scatter. Sizes and shapes of an exchange are planned once for the same matrices.
    """

    def __init__(self, layout: ComputeLayout, comms: Sequence[Comm], *, of_whole: Mapping[ParamId, MatrixSpec]):
        self.layout = layout
        self.comms = tuple(comms)
        self.at = tuple(comm.rank for comm in comms)
        self.of_whole = of_whole  # the description of each whole matrix for the rule
        self._slots = {slot.matrix.id: slot for slot in layout.slots}
        self._wholes = {id: layout.whole(slot, self.at) for id, slot in self._slots.items()}
        self._parts = {id: layout.block(slot, self.at) for id, slot in self._slots.items()}
        self._every = layout.computes is Computes.EVERY
        self._legs = lru_cache(maxsize=64)(self._planned)
        self._runs = lru_cache(maxsize=64)(layout.runs)

    def __contains__(self, id: Hashable) -> bool:
        return id in self._slots

    def shape(self, id: ParamId) -> tuple[int, ...]:
        """The shape of the whole parameter, over all axes."""
        return self._slots[id].matrix.shape

    def whole(self, id: ParamId) -> Block:
        """The block of the parameter that is one matrix to the rule."""
        return self._wholes[id]

    def part(self, id: ParamId) -> Block:
        """The block of the parameter that this rank stores."""
        return self._parts[id]

    def computes(self, id: ParamId) -> bool:
        """Whether this rank runs the rule on the matrix, or on its part of it."""
        return self._slots[id].owner in (None, self.at[self.layout.kept :])

    def counts(self, id: ParamId) -> bool:
        """Whether this rank, among those that compute the matrix, is the one that saves its whole state."""
        is_first = not any(self.at[self.layout.kept :])
        return self.computes(id) and (self._slots[id].owner is not None or is_first)

    def runs(self, tasks: Iterable[Task]) -> Iterator[list[Task]]:
        """Divide `tasks` into runs that are gathered together, the same on every rank (`ComputeLayout.runs`)."""
        of_id = {matrix_of(task.work): task for task in tasks}
        for run in self._runs(frozenset(of_id)):
            yield [of_id[id] for id in run]

    def gather(self, parts: Parts) -> dict[ParamId, Tensor]:
        """Gather the matrices that this rank computes. `parts` are this rank's parts of all matrices."""
        blocks = dict(parts)
        like = next(iter(parts.values()))
        for leg in self._legs(tuple(parts)):
            blocks = leg.join_everywhere(blocks) if self._every else leg.join(blocks, like)
        return blocks

    def scatter(self, wholes: Parts, *, like: Parts) -> dict[ParamId, Tensor]:
        """Return this rank's part of each matrix in `like`. `wholes` are the matrices that this rank computed."""
        if self._every:
            parts = {}
            for id, whole in wholes.items():
                part = self._parts[id]
                of = self._wholes[id]
                for dim, (start, base, length) in enumerate(zip(part.offset, of.offset, part.shape)):
                    whole = whole.narrow(dim, start - base, length)
                parts[id] = whole
            return parts
        blocks = dict(wholes)
        for leg in reversed(self._legs(tuple(like))):
            blocks = leg.part(blocks, next(iter(like.values())))
        return {id: blocks[id] for id in like}

    def summed(self, sums: Parts) -> dict[ParamId, Tensor]:
        """Add up `sums`, of any equal shapes, over the ranks that store the parts of a matrix. Once per axis."""
        flat = torch.cat([x.reshape(-1) for x in sums.values()])
        for comm in self.comms[self.layout.kept :]:
            with naming(f"sum {_OF_PARTS}"):
                comm.all_reduce_(flat)
        by_id = torch.split(flat, [x.numel() for x in sums.values()])
        return {id: total.view(x.shape) for (id, x), total in zip(sums.items(), by_id)}

    def _planned(self, ids: tuple[ParamId, ...]) -> list[_Leg]:
        """The exchanges that gather these matrices: along the last axis first."""
        legs = []
        for axis in range(len(self.comms) - 1, self.layout.kept - 1, -1):
            comm = self.comms[axis]
            at = self.at[:axis]
            owners = {}
            for id in ids:
                owner = self._slots[id].owner
                owners[id] = EVERYONE if owner is None else owner[axis - self.layout.kept]
            by_owner = sorted(ids, key=owners.__getitem__)  # stable
            before = {id: self._block(id, self.at[: axis + 1]).shape for id in by_owner}
            after = []
            for id in (id for id in ids if owners[id] in (comm.rank, EVERYONE)):
                parts = [self._block(id, (*at, peer)).shape for peer in range(comm.size)]
                dim = self._slots[id].matrix.dims[axis]
                after.append(_Joined(id, self._block(id, at).shape, dim, parts, list(map(prod, parts))))
            legs.append(_Leg(comm, before, [max(owners[id], 0) for id in by_owner], after))
            ids = tuple(joined.id for joined in after)
        return legs

    def _block(self, id: ParamId, at: tuple[int, ...]) -> Block:
        return self.layout.block(self._slots[id], at)


def matrix_of(work: Work) -> ParamId:
    """The parameter of which a staged work is a part."""
    assert work.matrix.part is not None
    id = work.matrix.part.whole
    assert isinstance(id, ParamId)
    return id


def update_(
    rule: Rule,
    batches: Sequence[Batch],
    *,
    grad_scale: float | Tensor,
    stages: Sequence[ComputeStage],
    skip: Tensor | None = None,
) -> None:
    """Call `rule.update_`, then the phases of the rule on the matrices of `stages`, which are gathered in between."""
    if not stages:
        rule.update_(batches, grad_scale=grad_scale, skip=skip)
        return
    assert isinstance(rule, MatrixRule)
    here: list[Batch] = []
    staged: dict[ComputeStage, list[Task]] = {stage: [] for stage in stages}
    for hyper, works in batches:
        left = []
        for work in works:
            part = work.matrix.part
            stage = None if part is None else next((stage for stage in stages if part.whole in stage), None)
            if stage is None:
                left.append(work)
            else:
                staged[stage].append(Task(hyper, work))
        if left:
            here.append(Batch(hyper, left))
    rule.update_(here, grad_scale=grad_scale, skip=skip)
    for stage, tasks in staged.items():
        for run in stage.runs(tasks):
            _update_run_(rule, stage, run, grad_scale, skip)


def _update_run_(
    rule: MatrixRule, stage: ComputeStage, run: list[Task], grad_scale: float | Tensor, skip: Tensor | None
) -> None:
    of_id = {matrix_of(task.work): task for task in run}
    parts = {name: scaled_grads([task], grad_scale)[0] for name, task in of_id.items()}
    squares: Parts = {}  # ‖g‖² of each matrix, for a rule that reads it
    if sums_gradients(rule):
        squares = stage.summed({name: squares_in_float64(grad) for name, grad in parts.items()})
    for name, task in of_id.items():
        rule.prepare_(task, parts[name], skip)
    updates = stage.gather(parts)  # of which matrices without elements stay: they have no direction
    works: dict[int, list[Work]] = {}
    names = {}
    for name, whole in updates.items():
        hyper, part = of_id[name]
        state = {**part.state, GRAD_SQUARES: squares[name]} if squares else part.state
        work = Work(grad=whole, main=None, state=state, matrix=stage.of_whole[name])
        names[id(work)] = name
        works.setdefault(id(hyper), []).append(work)
    for same in works.values():  # matrices with equal layouts and hyper-parameters are stacked
        for stack in stacks([Batch(of_id[names[id(same[0])]].hyper, same)]):
            moved = rule.transform_(stack, torch.stack([task.work.grad for task in stack]), skip)
            updates.update(zip((names[id(task.work)] for task in stack), moved))
    for name, update in stage.scatter(updates, like=parts).items():
        rule.apply_(of_id[name], update, skip)
