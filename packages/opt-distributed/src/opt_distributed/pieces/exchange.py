"""`ComputeStage`: gathers sharded matrices before a rule runs, and scatters the updates after it.

    parts ─ prepare_ ─▶ gather ─▶ whole matrices, on their owners ─ transform_ ─▶ scatter ─▶ parts ─ apply_

Main values and elementwise state stay with the parts. State that a rule declares as `whole` is on the ranks that
compute the matrix. Whole matrices exist only between gather and scatter. A `ComputeLayout` says which ranks compute.

Matrices are exchanged in runs (`ComputeLayout.runs`): G(k) gathers run k, S(k) returns it. Three are under way.

    collectives  G0 G1        S0 G2        S1 G3        S2 ...
    products           NS0 ───────── NS1 ───────── NS2 ────── ...     S(k) and G(k+2) run beside NS(k+1)
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.stored import ParamTensors
from opt_distributed.buffers.wires import InFlight, naming
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm, Pending, Sizes
from opt_distributed.layout import Block, ComputeLayout, Shape
from opt_kernels.backends import read_main
from opt_kernels.matrices import scaled_grads, squares_in_float64, stacks
from opt_kernels.rules import (
    GRAD_SQUARES,
    WEIGHTS,
    MatrixRule,
    Rule,
    reads_weights,
    sums_gradients,
    update_dtype,
)
from opt_kernels.works import Batch, Hyper, MatrixSpec, Task, Work
from opt_paramgroups import ParamId

_OF_PARTS = "of matrices that ranks store parts of"
AHEAD = 2
"""Runs that are gathered before the first is computed: this one, and one that arrives meanwhile."""


class _Joined(NamedTuple):
    """A matrix that a rank has after parts along one axis were joined."""

    id: ParamId
    shape: Shape  # of the joined block
    dim: int  # along which its parts are joined
    parts: Sequence[Shape]  # shapes of the parts, by peer
    numels: list[int]  # of the parts

    def joined(self, flat: Sequence[Tensor]) -> Tensor:
        """Concatenate flat parts."""
        if self.dim == 0:
            return torch.cat(list(flat)).view(self.shape)
        return torch.cat([part.view(shape) for part, shape in zip(flat, self.parts, strict=True)], self.dim)

    def cut(self, block: Tensor) -> Sequence[Tensor]:
        """Split the joined block into flat parts."""
        lengths = [shape[self.dim] for shape in self.parts]
        if len(set(lengths)) == 1:  # one copy, however many parts there are
            of_parts = torch.unflatten(block, self.dim, (len(lengths), lengths[0])).movedim(self.dim, 0)
            return of_parts.reshape(len(lengths), self.numels[0]).unbind()
        return [part.reshape(-1) for part in torch.split(block, lengths, self.dim)]


class _Way(NamedTuple):
    """A direction of an exchange along one axis."""

    comm: Comm
    sizes: Sizes
    sent: Callable[
        [ParamTensors, Tensor], Tensor
    ]  # flat, by peer, given the blocks that this rank has and a tensor like it
    received: Callable[[Tensor], dict[ParamId, Tensor]]  # the blocks in what has come


class _Leg:
    """An exchange along one axis, planned: who sends how many elements of which matrices.

    Every peer has parts of the matrices `before`; matrices `after` are joined on this rank.
    """

    def __init__(self, comm: Comm, before: Mapping[ParamId, Shape], to: Sequence[int], after: Sequence[_Joined]):
        """`before` has the shapes of this rank's parts, and `to` the ranks that they are sent to, in this order."""
        self._before = before
        self._after = after
        self._numels = list(map(prod, before.values()))
        sent = [0] * comm.size
        for rank, numel in zip(to, self._numels, strict=True):
            sent[rank] += numel
        # By peer, and by matrix for each peer.
        self._pieces = [joined.numels[peer] for peer in range(comm.size) for joined in after]
        received = [sum(joined.numels[peer] for joined in after) for peer in range(comm.size)]
        self.to_owners = _Way(comm, Sizes(received=received, sent=sent), self._flat, self._joined)
        self.to_peers = _Way(comm, Sizes(received=sent, sent=received), self._cut, self._parts)

    def _flat(self, blocks: ParamTensors, like: Tensor) -> Tensor:
        return torch.cat([like.new_empty(0), *(blocks[id].reshape(-1) for id in self._before)])

    def _joined(self, flat: Tensor) -> dict[ParamId, Tensor]:
        parts = torch.split(flat, self._pieces)
        num = len(self._after)
        return {joined.id: joined.joined(parts[number::num]) for number, joined in enumerate(self._after)}

    def _cut(self, wholes: ParamTensors, like: Tensor) -> Tensor:
        cuts = [joined.cut(wholes[joined.id].to(like.dtype)) for joined in self._after]
        return torch.cat([like.new_empty(0), *chain.from_iterable(zip(*cuts, strict=True))])

    def _parts(self, flat: Tensor) -> dict[ParamId, Tensor]:
        parts = torch.split(flat, self._numels)
        return {id: part.view(shape) for (id, shape), part in zip(self._before.items(), parts, strict=True)}


class Exchange:
    """An exchange that was started: along one axis, or along several, one after the other.

    On an accelerator all of it is queued, if there are several on the side stream. Memory that this stream reads, or
    that the current one reads afterwards, is allocated on the current stream and kept until `finish`.
    """

    def __init__(self, what: str, ways: Sequence[_Way], blocks: ParamTensors, like: Tensor):
        self._sent = blocks
        self._last = ways[-1]
        self._received = like.new_empty(sum(self._last.sizes.received))
        stages = self._stages(ways, blocks, self._received)
        what = f"{what} {_OF_PARTS}"
        self._flight = InFlight(stages, what, device=devices.device_of(like.device), is_staged=len(ways) > 1)

    @staticmethod
    def _stages(ways: Sequence[_Way], blocks: ParamTensors, received: Tensor) -> Iterator[Pending]:
        for way in ways:
            is_last = way is ways[-1]
            out = received if is_last else received.new_empty(sum(way.sizes.received))
            sent = way.sent(blocks, received)
            yield way.comm.all_to_all_(out, sent, sizes=way.sizes, async_op=True)
            blocks = {} if is_last else way.received(out)

    def finish(self) -> dict[ParamId, Tensor]:
        """Wait, and return the blocks that this rank has received. On an accelerator the current stream waits.

        Raises:
            CollectiveError: the exchange failed, or exceeded the timeout of its group.
        """
        self._flight.finish()
        self._sent = {}
        return self._last.received(self._received)


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
        self.matrices = {matrix.id: matrix for matrix in layout.matrices}
        self._legs = lru_cache(maxsize=64)(self._planned)
        self._runs = lru_cache(maxsize=64)(layout.runs)

    def whole(self, id: ParamId) -> Block:
        """The block of the parameter that is one matrix to the rule."""
        return self.layout.whole(self.matrices[id], self.at)

    def part(self, id: ParamId) -> Block:
        """The block of the parameter that this rank stores."""
        return self._block(id, self.at)

    def computes(self, id: ParamId) -> bool:
        """Whether this rank runs the rule on the matrix, and saves its whole state."""
        return self.matrices[id].owner == self.at[self.layout.kept :]

    def runs(self, tasks: Iterable[Task]) -> list[list[Task]]:
        """Divide `tasks` into runs that are gathered together, the same on every rank (`ComputeLayout.runs`)."""
        of_id = {matrix_of(task.work): task for task in tasks}
        return [[of_id[id] for id in run] for run in self._runs(frozenset(of_id))]

    def start_gather(self, parts: ParamTensors) -> Exchange:
        """Start to gather the matrices that this rank computes. `parts` are this rank's parts of all matrices."""
        ways = [leg.to_owners for leg in self._legs(tuple(parts))]
        return Exchange("gather", ways, parts, next(iter(parts.values())))

    def start_scatter(self, wholes: ParamTensors, *, ids: Sequence[ParamId], like: Tensor) -> Exchange:
        """Start to return this rank's parts of the matrices `ids`, in the dtype of `like`.

        `wholes` are the matrices among them that this rank computed.
        """
        ways = [leg.to_peers for leg in reversed(self._legs(tuple(ids)))]
        return Exchange("return", ways, wholes, like)

    def summed(self, sums: ParamTensors) -> dict[ParamId, Tensor]:
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
            owners = {id: self.matrices[id].owner[axis - self.layout.kept] for id in ids}
            by_owner = sorted(ids, key=owners.__getitem__)  # stable
            before = {id: self._block(id, self.at[: axis + 1]).shape for id in by_owner}
            after = []
            for id in ids:
                if owners[id] != comm.rank:
                    continue
                parts = [self._block(id, (*at, peer)).shape for peer in range(comm.size)]
                dim = self.matrices[id].dims[axis]
                after.append(_Joined(id, self._block(id, at).shape, dim, parts, list(map(prod, parts))))
            legs.append(_Leg(comm, before, [owners[id] for id in by_owner], after))
            ids = tuple(joined.id for joined in after)
        return legs

    def _block(self, id: ParamId, at: tuple[int, ...]) -> Block:
        return self.matrices[id].block(self.layout.sizes, at)


def matrix_of(work: Work) -> ParamId:
    """The parameter of which a staged work is a part."""
    assert work.matrix.part is not None
    id = work.matrix.part.whole
    assert isinstance(id, ParamId)
    return id


def updating_(
    rule: Rule,
    batches: Sequence[Batch],
    *,
    grad_scale: float | Tensor,
    stages: Sequence[ComputeStage],
    skip: Tensor | None,
    is_one_run: bool = False,
) -> Iterator[None]:
    """Call `rule.update_`, and the phases of the rule on the matrices of `stages`, which are gathered in between.

    Pauses once, if there are stages: while the first matrices are gathered. The order of exchanges is the same on every
    rank: the next gather is queued before the products that hide it. The works of a stage may be `is_one_run` already.
    """
    if not stages:
        rule.update_(batches, grad_scale=grad_scale, skip=skip)
        return
    assert isinstance(rule, MatrixRule)
    here, staged = by_stage(batches, stages)
    states: dict[str, ParamTensors] = {}  # more states of each matrix, for a rule that reads them
    if sums_gradients(rule):
        squares: dict[ParamId, Tensor] = {}
        for stage, tasks in staged.items():
            scaled = ((matrix_of(task.work), scaled_grads([task], grad_scale)[0]) for task in tasks)
            squares |= stage.summed({name: squares_in_float64(grad) for name, grad in scaled})
        states[GRAD_SQUARES] = squares
    waiting = (
        _exchanged(rule, stage, run, states, grad_scale, skip)
        for stage, tasks in staged.items()
        for run in ([tasks] if is_one_run else stage.runs(tasks))
    )
    started = (run for run in waiting if next(run) is None)
    gathered = deque(islice(started, AHEAD))
    yield
    rule.update_(here, grad_scale=grad_scale, skip=skip)
    returning: Iterator[None] = iter(())
    while gathered:
        run = gathered.popleft()
        next(run)
        next(returning, None)  # before the next gather, whose memory it frees
        returning = run
        gathered.extend(islice(started, 1))
    next(returning, None)


def by_stage(
    batches: Sequence[Batch], stages: Sequence[ComputeStage]
) -> tuple[list[Batch], dict[ComputeStage, list[Task]]]:
    """Divide works into those of matrices that are whole here, and the tasks of each stage that has any."""
    here: list[Batch] = []
    staged: dict[ComputeStage, list[Task]] = {stage: [] for stage in stages}
    for hyper, works in batches:
        left = []
        for work in works:
            part = work.matrix.part
            stage = None if part is None else next((stage for stage in stages if part.whole in stage.matrices), None)
            if stage is None:
                left.append(work)
            else:
                staged[stage].append(Task(hyper, work))
        if left:
            here.append(Batch(hyper, left))
    return here, {stage: tasks for stage, tasks in staged.items() if tasks}


def _exchanged(
    rule: MatrixRule,
    stage: ComputeStage,
    run: Sequence[Task],
    states: Mapping[str, ParamTensors],
    grad_scale: float | Tensor,
    skip: Tensor | None,
) -> Iterator[None]:
    """Update matrices that are exchanged together. Pauses while they are gathered, and while updates return."""
    of_id = {matrix_of(task.work): task for task in run}
    inputs = {name: scaled_grads([task], grad_scale)[0] for name, task in of_id.items()}
    for name, task in of_id.items():
        rule.prepare_(task, inputs[name], skip)
    like = next(iter(inputs.values())).new_empty(0)
    gathering = [stage.start_gather(inputs)]
    if reads_weights(rule):
        gathering.append(stage.start_gather({name: read_main(task.work) for name, task in of_id.items()}))
    del inputs
    yield
    wholes, *weights = [exchange.finish() for exchange in gathering]
    updates = _transformed(rule, stage, of_id, wholes, {**states, **dict(zip([WEIGHTS], weights))}, skip)
    del gathering, wholes, weights
    narrow = like.to(update_dtype(rule, like.dtype, like.device))
    returning = stage.start_scatter(updates, ids=tuple(of_id), like=narrow)
    del updates
    yield
    for name, update in returning.finish().items():
        rule.apply_(of_id[name], update.to(like.dtype), skip)


def _transformed(
    rule: MatrixRule,
    stage: ComputeStage,
    of_id: Mapping[ParamId, Task],
    wholes: dict[ParamId, Tensor],
    states: Mapping[str, ParamTensors],
    skip: Tensor | None,
) -> dict[ParamId, Tensor]:
    """The directions of whole matrices. Those without elements have none, and stay."""
    batches: dict[int, tuple[Hyper, list[Work]]] = {}
    names = {}
    for name, whole in wholes.items():
        hyper, part = of_id[name]
        state = {**part.state, **{kind: of_all[name] for kind, of_all in states.items()}}
        work = Work(grad=whole, main=None, state=state, matrix=stage.of_whole[name])
        names[id(work)] = name
        batches.setdefault(id(hyper), (hyper, []))[1].append(work)
    for hyper, works in batches.values():  # matrices with equal layouts and hyper-parameters are stacked
        for stack in stacks([Batch(hyper, works)]):
            moved = rule.transform_(stack, torch.stack([task.work.grad for task in stack]), skip)
            wholes.update(zip((names[id(task.work)] for task in stack), moved))
    return wholes
