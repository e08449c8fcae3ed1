"""Ranks that have other gradients, in another order, still launch the same reductions and gathers in the same order.

A gradient here is the number that a parameter's sum is multiplied with, so that a sum of two parameters' gradients is
wrong by whole units. Ranks are threads whose collectives block: two groups in different orders would be a deadlock."""

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import ref

import pytest
import torch
from data_parallel_net import Config, over, shard_of
from recording_comm import RecordingComm
from tiers import NIGHT
from torch import Tensor, nn

from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, share_launch_order
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World

REPLICATED = Config(overlap_grad_reduce=True, bucket_size=1)
SHARDED = replace(REPLICATED, use_distributed_optimizer=True, overlap_param_gather=True)
configs = pytest.mark.parametrize("config", [REPLICATED, SHARDED], ids=["replicated", "sharded"])
Visit = tuple[int, str]  # a chunk and a parameter of it, whose gradient a backward pass brings


class Sums(nn.Module):
    """Vectors, each of which is used alone; a name with "expert" in it is an expert's."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self.vectors = nn.ParameterDict({name: nn.Parameter(torch.zeros(n).double()) for name, n in sizes.items()})
        for name, param in self.vectors.items():
            if "expert" in name:
                param.allreduce = False

    def forward(self, name: str, factor: float) -> Tensor:
        return self.vectors[name].sum() * factor


def factor(rank: int, iteration: int, visit: Visit) -> float:
    """The gradient of every element of a vector: another power of two plus a part that differs between ranks."""
    chunk, name = visit
    return float(2 ** (4 * chunk + sum(map(ord, name)) % 16)) * (1 + rank) + iteration


def check_owned(chunk: DistributedDataParallel, expected: Mapping[str, float]) -> None:
    for buffer in chunk.synced_buffers:
        for piece in buffer.owned():
            found = buffer.grad(piece.id, piece.of_param).unique().tolist()
            assert found == [expected[piece.id.name.removeprefix("vectors.")]], (piece.id, found)


class Grid(NamedTuple):
    """Groups of ranks that reduce dense parameters, and of those that reduce experts."""

    dense: Sequence[Sequence[int]]
    expert: Sequence[Sequence[int]]

    def roles(self, comm: Comm, worlds: Mapping[Sequence[int], World]) -> Roles:
        def axes(groups: Sequence[Sequence[int]]) -> Axes:
            (group,) = [tuple(group) for group in groups if comm.rank in group]
            return Axes(dp=ThreadComm(worlds[group], group.index(comm.rank)), tp=Alone())

        return Roles(dense=axes(self.dense), expert=axes(self.expert), everyone=comm)

    def members(self, rank: int, name: str) -> Sequence[int]:
        groups = self.expert if "expert" in name else self.dense
        return next(group for group in groups if rank in group)


GRIDS = {
    "experts over the dense replicas": Grid(dense=[(0, 1)], expert=[(0, 1)]),
    "experts over two dense groups (TP 2, ETP 1)": Grid(dense=[(0, 2), (1, 3)], expert=[(0, 1, 2, 3)]),
    "experts across dense groups (EP 2)": Grid(dense=[(0, 1, 2, 3)], expert=[(0, 2), (1, 3)]),
}


def check_training(
    grid: Grid,
    config: Config,
    sizes: Sequence[Mapping[str, int]],  # by chunk: elements of its vectors
    iterations: Sequence[Sequence[Sequence[Visit]]],  # backward passes, by rank
    *,
    linked: bool = True,
) -> None:
    """Reduces and publishes in every iteration, and compares with sums made on one process."""
    worlds = {tuple(group): World(len(group)) for group in (*grid.dense, *grid.expert)}

    def rank_main(comm: ThreadComm) -> None:
        roles = grid.roles(comm, worlds)
        chunks = [DistributedDataParallel(config, Sums(of), groups=roles, chunk=n) for n, of in enumerate(sizes)]
        if linked:
            share_launch_order(chunks)
        for iteration, visits in enumerate(iterations):
            for number, name in visits[comm.rank]:
                chunks[number](name, factor(comm.rank, iteration, (number, name))).backward()
            for chunk in chunks:
                chunk.finish_grad_sync()
            for number, chunk in enumerate(chunks):
                expected = {}
                for name in sizes[number]:
                    having = [r for r in grid.members(comm.rank, name) if (number, name) in visits[r]]
                    total = sum(factor(rank, iteration, (number, name)) for rank in having)
                    expected[name] = total / len(grid.dense[0])
                check_owned(chunk, expected)
                publish(chunk, iteration)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            for chunk in chunks:
                chunk.finish_param_sync()
                check_published(chunk, iteration)

    run_threads(len(iterations[0]), rank_main)


def publish(chunk: DistributedDataParallel, iteration: int) -> None:
    """Writes another number to this rank's shard of each bucket."""
    for number, buffer in enumerate(chunk.synced_buffers):
        for index in range(len(buffer.plan.layout.buckets)) if buffer.memory.param_data is not None else ():
            shard = shard_of(buffer.memory, index, buffer.axes.dp.rank)
            shard.fill_(1000 * iteration + 100 * number + index)
        buffer.place.publish_()


def check_published(chunk: DistributedDataParallel, iteration: int) -> None:
    for number, buffer in enumerate(chunk.synced_buffers):
        for index, bucket in enumerate(buffer.plan.layout.buckets) if buffer.memory.param_data is not None else ():
            expected = [float(1000 * iteration + 100 * number + index)]
            assert all(buffer.params[slot.id].unique().tolist() == expected for slot in bucket.slots)


def every(num_chunks: int, of_chunk: Mapping[str, int]) -> list[Visit]:
    """Backward passes as a model makes them: last chunk and last layer first."""
    return [(number, name) for number in reversed(range(num_chunks)) for name in reversed(of_chunk)]


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("seed", range(8 if NIGHT else 2))
@configs
@pytest.mark.filterwarnings("ignore:overlap_grad_reduce=True")
def test_any_ranks_may_skip_anything_in_any_order(config: Config, grid: Grid, seed: int) -> None:
    """The order of expert buckets was agreed among dense replicas, so that gradients of two experts were summed; each
    of two chunks had an order of its own, so that another chunk went first. Odd seeds: chunks share no order."""
    numbers = random.Random(seed)
    of_chunk = {f"{kind}{index}": numbers.choice([3, 3, 40]) for index in range(3) for kind in ("dense", "expert")}
    iterations = []
    for _ in range(4):
        by_rank = []
        for _ in range(sum(map(len, grid.dense))):
            visits = every(2, of_chunk)
            if numbers.random() < 0.7:
                numbers.shuffle(visits)
            by_rank.append([visit for visit in visits if numbers.random() < numbers.choice([0.6, 1.0])])
        iterations.append(by_rank)
    check_training(grid, config, [of_chunk] * 2, iterations, linked=seed % 2 == 0)


def launches(recording: RecordingComm) -> list[int]:
    return [call.numel for call in recording.of("all_reduce")]


def make_chunks(recording: RecordingComm, *, linked: bool) -> list[DistributedDataParallel]:
    sizes = [{"dense0": 1, "dense1": 2}, {"dense0": 10, "dense1": 20}]
    chunks = [
        DistributedDataParallel(REPLICATED, Sums(s), groups=over(recording), chunk=i) for i, s in enumerate(sizes)
    ]
    if linked:
        share_launch_order(chunks)
    return chunks


def backward(chunks: Sequence[DistributedDataParallel], visits: Sequence[Visit]) -> None:
    for number, name in visits:
        chunks[number](name, 1.0).backward()


def test_chunks_of_one_order_overlap_backward_and_take_turns() -> None:
    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        chunks = make_chunks(recording, linked=True)
        for iteration in range(3):
            recording.calls.clear()
            if iteration < 2:
                backward(chunks, every(2, {"dense0": 1, "dense1": 2}))
                assert launches(recording) == ([] if iteration == 0 else [20, 10, 2, 1])
            else:  # the first chunk is ready first
                backward(chunks, [(0, "dense1"), (0, "dense0"), (1, "dense1")])
                chunks[0].start_grad_sync()
                assert launches(recording) == [20]
                backward(chunks, [(1, "dense0")])
            for chunk in chunks:
                chunk.finish_grad_sync()
                chunk.zero_grad_buffer()
            assert launches(recording) == [20, 10, 2, 1]

    run_threads(2, rank_main)


def test_models_without_a_common_order_are_reduced_when_finished() -> None:
    """Two models, such as a generator and a discriminator: nothing says which one's reductions come first."""

    def rank_main(comm: ThreadComm) -> list[int]:
        recording = RecordingComm(comm)
        chunks = make_chunks(recording, linked=False)
        for _ in range(2):
            recording.calls.clear()
            for chunk in chunks:
                chunk.zero_grad_buffer()
            backward(chunks, every(2, {"dense0": 1, "dense1": 2}))
            assert launches(recording) == []
            for chunk in chunks:
                chunk.finish_grad_sync()
        return launches(recording)

    with pytest.warns(UserWarning, match="1 more wrapped model chunks reduce over the same process groups"):
        assert run_threads(2, rank_main) == [[2, 1, 20, 10]] * 2
    chunks = [DistributedDataParallel(REPLICATED, Sums({"dense0": 1}), groups=over(Alone())) for _ in range(2)]
    with pytest.raises(ValueError, match=r"have the numbers \[0, 0\]; pass a different chunk= to each"):
        share_launch_order(chunks)


NAMES = ("dense1", "dense0")


def wrap(comm: Comm, config: Config = REPLICATED) -> DistributedDataParallel:
    return DistributedDataParallel(config, Sums({"dense0": 3, "dense1": 4}), groups=over(comm))


def iterate(ddp: DistributedDataParallel, rank: int, iteration: int, names: Sequence[str] = NAMES) -> None:
    for name in names:
        ddp(name, 1.0 + rank + iteration).backward()


def finish(ddp: DistributedDataParallel, iteration: int) -> None:
    ddp.finish_grad_sync()
    check_owned(ddp, {"dense0": 1.5 + iteration, "dense1": 1.5 + iteration})


@configs
def test_dropped_grads_and_evaluation_on_one_rank_are_harmless(config: Config) -> None:
    """One rank had launched more than another when both dropped the iteration, and waited for it for ever. A rank that
    evaluated launched reductions when it zeroed its gradients, which others took for those of the next iteration."""

    def rank_main(comm: ThreadComm) -> None:
        ddp = wrap(comm, config)
        for iteration in range(5):
            if iteration == 2:
                iterate(ddp, comm.rank, iteration, NAMES if comm.rank == 0 else NAMES[1:])
            else:
                iterate(ddp, comm.rank, iteration)
                finish(ddp, iteration)
            ddp.zero_grad_buffer()
            if comm.rank == 0:
                ddp.eval()
                ddp("dense0", 1.0)
                ddp.train()
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


def test_a_training_forward_on_one_rank_alone_is_an_error_on_all() -> None:
    """The other ranks would add this rank's dropped gradients to their own in silence, an iteration apart."""

    def rank_main(comm: ThreadComm) -> Exception | None:
        ddp = wrap(comm)
        try:
            for iteration in range(2):
                iterate(ddp, comm.rank, iteration)
                ddp.finish_grad_sync()
                statistics = torch.ones(1)  # the step's, before its update
                comm.all_reduce_(statistics)
                assert statistics == 2.0
                ddp.zero_grad_buffer()
                if comm.rank == 0 and iteration == 0:
                    ddp("dense0", 1.0)
                ddp.zero_grad_buffer()
        except Exception as error:
            return error
        return None

    first, second = run_threads(2, rank_main)
    assert isinstance(first, GradientError)
    assert "dropped the gradients of different iterations" in str(first)
    assert second is not None


def test_a_wrapped_model_that_nobody_uses_is_freed() -> None:
    """Hooks of its parameters kept it, its buffers and its share of the process groups for ever."""
    ddp = wrap(Alone(), SHARDED)
    iterate(ddp, 0, 0)
    ddp.finish_grad_sync()
    alive = ref(ddp)
    del ddp
    gc.collect()
    assert alive() is None


def test_a_model_kept_by_one_rank_is_harmless_when_grads_drop() -> None:
    """Only the rank that had dropped the other model launched reductions early; the next iteration met these."""

    def rank_main(comm: ThreadComm) -> None:
        ddp = wrap(comm)
        other = wrap(comm)
        kept = [other] if comm.rank == 0 else []
        del other
        comm.gather_objects(None)  # a collection while another thread collects does nothing
        gc.collect()
        comm.gather_objects(None)
        for iteration in range(4):
            iterate(ddp, comm.rank, iteration)
            if iteration != 2:
                finish(ddp, iteration)
            ddp.zero_grad_buffer()
        assert ddp.grad_sync.launch_order.may_launch_early == (not kept)

    with pytest.warns(UserWarning, match="1 more wrapped model chunks"):
        run_threads(2, rank_main)
