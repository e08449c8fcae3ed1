"""`ComputeStage`: gathers sharded matrices before a rule runs, and scatters the updates after it.

    parts ─ prepare_ ─▶ gather ─▶ whole matrices, on ranks that compute ─ transform_ ─▶ scatter ─▶ parts ─ apply_

Main values and elementwise state stay with the parts. State that a rule declares as `whole` is on the ranks that
compute the matrix. Whole matrices exist only between gather and scatter. A `ComputeLayout` says which ranks compute.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm.collectives import Comm, Sizes
from opt_distributed.layout import Block, ComputeLayout, Computes
from opt_kernels.matrices.stacks import scaled_grads, squares_in_float64, stacks
from opt_kernels.rules.base import GRAD_SQUARES, MatrixRule, Rule, sums_gradients
from opt_kernels.rules.base import init_state as state_of_rule
from opt_kernels.works import Batch, MatrixSpec, Task, Work
from opt_paramgroups import ParamId

WHOLE_NUMEL = 1 << 26
"""Elements of whole matrices that a rank computes after one gather, which bounds their memory. At least one matrix."""

Parts = Mapping[ParamId, Tensor]


class ComputeStage:
    """The matrices of one `ComputeLayout`, on one rank. `comms` has a group for each axis, which gives its coordinate.

    Every rank of the grid makes the same calls with the same matrices, at least one, in the same order. All tensors of
    a call have one dtype and device. A gather is one collective for each axis that is not kept, whatever the number of
    matrices, and so is a scatter.
    """

    def __init__(self, layout: ComputeLayout, comms: Sequence[Comm], *, of_whole: Mapping[ParamId, MatrixSpec]):
        self.layout = layout
        self.comms = tuple(comms)
        self.at = tuple(comm.rank for comm in comms)
        self.of_whole = of_whole  # the description of each whole matrix for the rule
        self._slots = {slot.matrix.id: slot for slot in layout.slots}
        self._order = {id: number for number, id in enumerate(self._slots)}
        self._gathered = range(layout.kept, len(layout.sizes))

    def __contains__(self, id: Hashable) -> bool:
        return id in self._slots

    def shape(self, id: ParamId) -> tuple[int, ...]:
        """The shape of the whole parameter, over all axes."""
        return self._slots[id].matrix.shape

    def whole(self, id: ParamId) -> Block:
        """The block of the parameter that is one matrix to the rule."""
        return self.layout.whole(self._slots[id], self.at)

    def computes(self, id: ParamId) -> bool:
        """Whether this rank runs the rule on the matrix."""
        return self.layout.computes_at(self._slots[id], self.at)

    def counts(self, id: ParamId) -> bool:
        """Whether this rank, among those that compute the matrix, is the one that saves its whole state."""
        return self.computes(id) and (self._slots[id].owner is not None or not any(self.at[self.layout.kept :]))

    def runs(self, tasks: Iterable[Task]) -> Iterator[list[Task]]:
        """Divide `tasks` into runs that are gathered together, in the order of the layout: the same on every rank."""
        limit = WHOLE_NUMEL * (self.layout.num_ranks if self.layout.computes is Computes.OWNER else 1)
        run: list[Task] = []
        numel = 0
        for task in sorted(tasks, key=lambda task: self._order[matrix_of(task.work)]):
            size = self.whole(matrix_of(task.work)).numel
            if run and numel + size > limit:
                yield run
                run, numel = [], 0
            run.append(task)
            numel += size
        if run:
            yield run

    def gather(self, parts: Parts) -> dict[ParamId, Tensor]:
        """Gather the matrices that this rank computes. `parts` are this rank's parts of all matrices."""
        held, like = dict(parts), next(iter(parts.values()))
        for axis in reversed(self._gathered):
            held = self._joined_everywhere(axis, held) if self._every else self._joined_at_owners(axis, held, like)
        return held

    def scatter(self, wholes: Parts, *, like: Parts) -> dict[ParamId, Tensor]:
        """Return this rank's part of each matrix in `like`. `wholes` are the matrices that this rank computed."""
        if self._every:
            return {id: _narrow(whole, self._block(id, self.at), self.whole(id)) for id, whole in wholes.items()}
        held = dict(wholes)
        for axis in self._gathered:
            held = self._parted(axis, held, like)
        return {id: held[id] for id in like}

    def summed(self, sums: Parts) -> dict[ParamId, Tensor]:
        """Add up `sums`, of any equal shapes, over the ranks that store the parts of a matrix. Once per axis."""
        flat = torch.cat([x.reshape(-1) for x in sums.values()])
        for axis in self._gathered:
            with _naming("sum"):
                self.comms[axis].all_reduce_(flat)
        by_id = torch.split(flat, [x.numel() for x in sums.values()])
        return {id: total.view(x.shape) for (id, x), total in zip(sums.items(), by_id)}

    @property
    def _every(self) -> bool:
        return self.layout.computes is Computes.EVERY

    def _block(self, id: ParamId, at: tuple[int, ...]) -> Block:
        return self.layout.block(self._slots[id], at)

    def _owner(self, id: ParamId, axis: int) -> int:
        owner = self._slots[id].owner
        assert owner is not None
        return owner[axis - self.layout.kept]

    def _along(self, axis: int, ids: Iterable[ParamId], peer: int) -> list[Block]:
        """The blocks that the peer along `axis` holds, after the parts along later axes were joined."""
        return [self._block(id, (*self.at[:axis], peer)) for id in ids]

    def _cat(self, axis: int, ids: Sequence[ParamId], by_peer: Sequence[Sequence[Tensor]]) -> dict[ParamId, Tensor]:
        dims = (self._slots[id].matrix.dims[axis] for id in ids)
        return {id: torch.cat(list(parts), dim) for id, dim, parts in zip(ids, dims, zip(*by_peer, strict=True))}

    def _joined_at_owners(self, axis: int, held: Parts, like: Tensor) -> dict[ParamId, Tensor]:
        """Send every part to the rank along `axis` with the coordinate of the matrix's owner, and concatenate there."""
        comm = self.comms[axis]
        of_peer = [[id for id in held if self._owner(id, axis) == peer] for peer in range(comm.size)]
        owned = of_peer[comm.rank]
        received = _exchange(
            comm,
            [[held[id] for id in ids] for ids in of_peer],
            [self._along(axis, owned, peer) for peer in range(comm.size)],
            like=like,
        )
        return self._cat(axis, owned, received)

    def _parted(self, axis: int, held: Parts, like: Parts) -> dict[ParamId, Tensor]:
        """The inverse of `_joined_at_owners`: owners along `axis` send every peer its part."""
        comm = self.comms[axis]
        # Matrices whose owner has the coordinates of this rank along all later axes.
        here = [id for id in like if all(self._owner(id, k) == self.at[k] for k in self._gathered if k > axis)]
        of_peer = [[id for id in here if self._owner(id, axis) == peer] for peer in range(comm.size)]
        owned = of_peer[comm.rank]
        sent = [
            [_narrow(held[id], block, self._block(id, self.at[:axis])) for id, block in zip(owned, blocks)]
            for blocks in (self._along(axis, owned, peer) for peer in range(comm.size))
        ]
        expected = [self._along(axis, ids, comm.rank) for ids in of_peer]
        received = _exchange(comm, sent, expected, like=next(iter(like.values())))
        return {id: part for ids, parts in zip(of_peer, received) for id, part in zip(ids, parts)}

    def _joined_everywhere(self, axis: int, held: Parts) -> dict[ParamId, Tensor]:
        """Concatenate every matrix on every rank along `axis`. Pads shorter parts: an all-gather needs equal sizes."""
        comm, ids = self.comms[axis], list(held)
        expected = [self._along(axis, ids, peer) for peer in range(comm.size)]
        length = max(sum(block.numel for block in blocks) for blocks in expected)
        flat = torch.cat([part.reshape(-1) for part in held.values()])
        shard = torch.cat([flat, flat.new_zeros(length - flat.numel())])
        full = flat.new_empty(comm.size * length)
        with _naming("gather"):
            comm.all_gather_(full, shard)
        return self._cat(axis, ids, [_cut(row, blocks) for row, blocks in zip(full.view(comm.size, length), expected)])


def matrix_of(work: Work) -> ParamId:
    """The parameter of which a staged work is a part."""
    assert work.matrix.part is not None
    id = work.matrix.part.whole
    assert isinstance(id, ParamId)
    return id


def init_state(
    rule: Rule, main: Tensor, *, id: ParamId, matrix: MatrixSpec, stage: ComputeStage | None
) -> dict[str, Tensor]:
    """Create the state that this rank keeps of a parameter of which it stores `main`, before the first step."""
    whole = {spec.name for spec in rule.state_specs if spec.whole} if stage is not None else set()
    if stage is None or not whole:
        return state_of_rule(rule, main, matrix, of=repr(id.name))
    state = {}
    if len(whole) < len(rule.state_specs):
        state = {name: value for name, value in rule.init_state(main).items() if name not in whole}
    if stage.computes(id):
        made = state_of_rule(rule, main.new_empty(stage.whole(id).shape), stage.of_whole[id], of=repr(id.name))
        state |= {name: value for name, value in made.items() if name in whole}
    return state


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
            stage = _stage_of(work, stages)
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
    return None


def _stage_of(work: Work, stages: Sequence[ComputeStage]) -> ComputeStage | None:
    part = work.matrix.part
    return None if part is None else next((stage for stage in stages if part.whole in stage), None)


def _update_run_(
    rule: MatrixRule, stage: ComputeStage, run: list[Task], grad_scale: float | Tensor, skip: Tensor | None
) -> None:
    of_id = {matrix_of(task.work): task for task in run}
    parts = {}
    for id, task in of_id.items():
        parts[id] = scaled_grads([task], grad_scale)[0]
    squares: Parts = {}
    if sums_gradients(rule):
        squares = stage.summed({id: squares_in_float64(grad) for id, grad in parts.items()})
    for id, task in of_id.items():
        rule.prepare_(task, parts[id], skip)
    updates = _transformed(rule, stage, of_id, stage.gather(parts), squares, skip)
    for id, update in stage.scatter(updates, like=parts).items():
        rule.apply_(of_id[id], update, skip)


def _transformed(
    rule: MatrixRule,
    stage: ComputeStage,
    of_id: Mapping[ParamId, Task],
    wholes: Parts,
    squares: Parts,  # ‖g‖² of each matrix, for a rule that reads it, else empty
    skip: Tensor | None,
) -> Parts:
    """The directions of whole matrices. Matrices with equal layouts and hyper-parameters are stacked."""
    updates = dict(wholes)  # matrices without elements have no direction
    batches: dict[int, list[Task]] = {}
    names = {}
    for name, whole in wholes.items():
        hyper, part = of_id[name]
        state = {**part.state, GRAD_SQUARES: squares[name]} if squares else part.state
        work = Work(grad=whole, main=None, state=state, matrix=stage.of_whole[name])
        names[id(work)] = name
        batches.setdefault(id(hyper), []).append(Task(hyper, work))
    for tasks in batches.values():
        for stack in stacks([Batch(tasks[0].hyper, [task.work for task in tasks])]):
            moved = rule.transform_(stack, torch.stack([task.work.grad for task in stack]), skip)
            updates.update(zip((names[id(task.work)] for task in stack), moved))
    return updates


def _narrow(tensor: Tensor, part: Block, of: Block) -> Tensor:
    """A view of the block `part` in `tensor`, which holds the block `of`."""
    for dim, (start, base, length) in enumerate(zip(part.offset, of.offset, part.shape)):
        tensor = tensor.narrow(dim, start - base, length)
    return tensor


def _cut(flat: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
    sizes = [block.numel for block in blocks]
    return [part.view(block.shape) for part, block in zip(torch.split(flat[: sum(sizes)], sizes), blocks)]


def _exchange(
    comm: Comm, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Block]], *, like: Tensor
) -> list[list[Tensor]]:
    """Send `sent[r]` to rank r, and return what rank r sent to this rank, in blocks `expected[r]`. One collective."""
    flat = [part.reshape(-1) for parts in sent for part in parts]
    x = torch.cat(flat) if flat else like.new_empty(0)
    sizes = Sizes(
        received=[sum(block.numel for block in blocks) for blocks in expected],
        sent=[sum(part.numel() for part in parts) for parts in sent],
    )
    out = like.new_empty(sum(sizes.received))
    with _naming("exchange"):
        comm.all_to_all_(out, x, sizes=sizes)
    return [_cut(part, blocks) for part, blocks in zip(torch.split(out, list(sizes.received)), expected)]


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a backend raises when a peer is gone
        raise CollectiveError(f"{what} of matrices that ranks store parts of: {error}") from error
