"""Ranks that have other gradients, in another order, still launch the same reductions and gathers in the same order.

A gradient here is the number that a parameter's sum is multiplied with, so that a sum of two parameters' gradients is
wrong by whole units. Ranks are threads whose collectives block: two groups in different orders would be a deadlock."""

import gc
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import ref

import pytest
import torch
from chunk_sums import REPLICATED, SHARDED, Sums, Visit, check_owned, configs, factor
from data_parallel_net import shard_of
from recording_comm import RecordingComm

from opt_config import DistributedDataParallelConfig
from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, share_launch_order
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World


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
Iteration = Sequence[Sequence[Visit]]  # by rank: its backward passes, in order


def check_training(
    grid: Grid,
    config: DistributedDataParallelConfig,
    sizes: Sequence[Mapping[str, int]],  # by chunk: elements of its vectors
    iterations: Sequence[Iteration],
    *,
    linked: bool = True,
) -> None:
    """Reduces and publishes in every iteration, and compares with sums made on one process."""
    size = len(iterations[0])
    worlds = {tuple(group): World(len(group)) for group in (*grid.dense, *grid.expert)}
    num_dense = len(grid.dense[0])

    def rank_main(comm: ThreadComm) -> None:
        roles = grid.roles(comm, worlds)
        chunks = [
            DistributedDataParallel(config, Sums(of_chunk), groups=roles, chunk=number)
            for number, of_chunk in enumerate(sizes)
        ]
        if linked:
            share_launch_order(chunks)
        for iteration, visits in enumerate(iterations):
            for number, name in visits[comm.rank]:
                loss = chunks[number](name, factor(comm.rank, iteration, (number, name)))
                loss.backward()
            for chunk in chunks:
                chunk.finish_grad_sync()
            for number, chunk in enumerate(chunks):
                for name, _ in sizes[number].items():
                    visit = (number, name)
                    members = grid.members(comm.rank, name)
                    total = sum(factor(rank, iteration, visit) for rank in members if visit in visits[rank])
                    check_owned(chunk, name, total / num_dense)
                publish(chunk, iteration)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            for chunk in chunks:
                chunk.finish_param_sync()
                check_published(chunk, iteration)

    run_threads(size, rank_main)


def publish(chunk: DistributedDataParallel, iteration: int) -> None:
    """Writes each bucket of this rank's shards with a number of its own."""
    for number, buffer in enumerate(chunk.synced_buffers):
        if buffer.memory.param_data is not None:
            for index in range(len(buffer.plan.layout.buckets)):
                shard = shard_of(buffer.memory, index, buffer.axes.dp.rank)
                shard.fill_(1000 * iteration + 100 * number + index)
        buffer.publish_()


def check_published(chunk: DistributedDataParallel, iteration: int) -> None:
    for number, buffer in enumerate(chunk.synced_buffers):
        for index, bucket in enumerate(buffer.plan.layout.buckets):
            for slot in bucket.slots:
                if buffer.memory.param_data is not None:
                    expected = [float(1000 * iteration + 100 * number + index)]
                    assert buffer.params[slot.id].unique().tolist() == expected


EQUAL = {"dense0": 5, "expert0": 5, "dense1": 5, "expert1": 5}
UNEQUAL = {"dense0": 5, "expert0": 300, "dense1": 700, "expert1": 9}
sizes_of_buckets = pytest.mark.parametrize("of_chunk", [EQUAL, UNEQUAL], ids=["equal buckets", "unequal buckets"])


def every(num_chunks: int, of_chunk: Mapping[str, int], *, without: Sequence[Visit] = ()) -> list[Visit]:
    """Backward passes as a model makes them: last chunk and last layer first."""
    visits = [(number, name) for number in reversed(range(num_chunks)) for name in reversed(of_chunk)]
    return [visit for visit in visits if visit not in without]


@configs
@sizes_of_buckets
@pytest.mark.parametrize("first", [True, False], ids=["in the first iteration", "in a later iteration"])
def test_experts_over_several_dense_groups_have_one_order(
    config: DistributedDataParallelConfig, of_chunk: Mapping[str, int], first: bool
) -> None:
    """The order of expert buckets was agreed among dense replicas: gradients of two experts were summed."""
    grid = GRIDS["experts over two dense groups (TP 2, ETP 1)"]
    regular = [every(1, of_chunk)] * 4
    skipping = [every(1, of_chunk), every(1, of_chunk, without=[(0, "expert1")])] + [every(1, of_chunk)] * 2
    iterations = [skipping, regular, regular] if first else [regular, skipping, regular]
    check_training(grid, config, [of_chunk], iterations)


@configs
@sizes_of_buckets
@pytest.mark.parametrize("linked", [True, False], ids=["one order", "apart"])
@pytest.mark.parametrize("first", [True, False], ids=["in the first iteration", "in a later iteration"])
@pytest.mark.filterwarnings("ignore:overlap_grad_reduce=True")
def test_chunks_of_which_a_rank_skips_a_layer_have_one_order(
    config: DistributedDataParallelConfig, of_chunk: Mapping[str, int], first: bool, linked: bool
) -> None:
    """Each chunk had an order of its own: on a rank that waits for the skipped layer, the other chunk went first."""
    grid = GRIDS["experts over the dense replicas"]
    regular = [every(2, of_chunk)] * 2
    skipping = [every(2, of_chunk), every(2, of_chunk, without=[(1, "dense1"), (1, "expert0")])]
    iterations = [skipping, regular, skipping] if first else [regular, skipping, regular]
    check_training(grid, config, [of_chunk] * 2, iterations, linked=linked)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("seed", range(4))
@configs
def test_any_ranks_may_skip_anything_in_any_order(config: DistributedDataParallelConfig, grid: Grid, seed: int) -> None:
    numbers = random.Random(seed)
    size = sum(map(len, grid.dense))
    of_chunk = {f"{kind}{index}": numbers.choice([3, 3, 40]) for index in range(3) for kind in ("dense", "expert")}
    iterations = []
    for _ in range(4):
        by_rank = []
        for _ in range(size):
            visits = every(2, of_chunk)
            if numbers.random() < 0.7:
                numbers.shuffle(visits)
            by_rank.append([visit for visit in visits if numbers.random() < numbers.choice([0.6, 1.0])])
        iterations.append(by_rank)
    check_training(grid, config, [of_chunk] * 2, iterations)


# --- what is launched when -------------------------------------------------------------------------------------


def launches(recording: RecordingComm) -> list[int]:
    return [call.numel for call in recording.of("all_reduce")]


def make_chunks(recording: RecordingComm, *, linked: bool) -> list[DistributedDataParallel]:
    axes = Axes(dp=recording, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=recording)
    sizes = [{"dense0": 1, "dense1": 2}, {"dense0": 10, "dense1": 20}]
    chunks = [DistributedDataParallel(REPLICATED, Sums(s), groups=roles, chunk=i) for i, s in enumerate(sizes)]
    if linked:
        share_launch_order(chunks)
    return chunks


def backward(chunks: Sequence[DistributedDataParallel], visits: Sequence[Visit]) -> None:
    for number, name in visits:
        chunks[number](name, 1.0).backward()


def test_chunks_of_one_order_overlap_with_backward() -> None:
    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        chunks = make_chunks(recording, linked=True)
        for iteration in range(2):
            recording.calls.clear()
            backward(chunks, every(2, {"dense0": 1, "dense1": 2}))
            assert launches(recording) == ([] if iteration == 0 else [20, 10, 2, 1])
            for chunk in chunks:
                chunk.finish_grad_sync()
                chunk.zero_grad_buffer()
            assert launches(recording) == [20, 10, 2, 1]

    run_threads(2, rank_main)


def test_a_chunk_that_is_ready_first_waits_for_its_turn() -> None:
    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        chunks = make_chunks(recording, linked=True)
        for iteration in range(2):
            recording.calls.clear()
            backward(chunks, [(0, "dense1"), (0, "dense0"), (1, "dense1")])
            chunks[0].start_grad_sync()
            assert launches(recording) == ([] if iteration == 0 else [20])
            backward(chunks, [(1, "dense0")])
            assert launches(recording) == ([] if iteration == 0 else [20, 10, 2, 1])
            for chunk in chunks:
                chunk.finish_grad_sync()
                chunk.zero_grad_buffer()

    run_threads(2, rank_main)


def test_models_that_share_groups_but_no_order_are_reduced_when_they_are_finished() -> None:
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


def test_chunks_with_one_number_have_no_order() -> None:
    axes = Axes(dp=Alone(), tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=Alone())
    chunks = [DistributedDataParallel(REPLICATED, Sums({"dense0": 1}), groups=roles) for _ in range(2)]
    with pytest.raises(ValueError, match=r"have the numbers \[0, 0\]; pass a different chunk= to each"):
        share_launch_order(chunks)


def test_dropped_gradients_leave_no_rank_waiting() -> None:
    """One rank had launched more than another when both dropped the iteration, and waited for it for ever."""

    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        ddp = DistributedDataParallel(REPLICATED, Sums({"dense0": 3, "dense1": 4}), groups=roles)
        for iteration in range(3):
            names = ["dense1", "dense0"] if iteration != 1 or comm.rank == 0 else ["dense0"]
            for name in names:
                ddp(name, 1.0 + comm.rank).backward()
            if iteration != 1:
                ddp.finish_grad_sync()
                check_owned(ddp, "dense0", 1.5)
                check_owned(ddp, "dense1", 1.5)
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


@configs
def test_one_rank_may_evaluate_with_gradients_enabled(config: DistributedDataParallelConfig) -> None:
    """It launched reductions when it zeroed its gradients, which other ranks took for those of the next iteration."""

    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        ddp = DistributedDataParallel(config, Sums({"dense0": 4, "dense1": 4}), groups=roles)
        for iteration in range(4):
            for name in ("dense1", "dense0"):
                ddp(name, 1.0 + comm.rank + iteration).backward()
            ddp.finish_grad_sync()
            for name in ("dense1", "dense0"):
                check_owned(ddp, name, 1.5 + iteration)
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
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        ddp = DistributedDataParallel(REPLICATED, Sums({"dense0": 4}), groups=roles)
        for iteration in range(2):
            ddp("dense0", 1.0).backward()
            try:
                ddp.finish_grad_sync()
                statistics = torch.ones(1)  # the step's, before its update
                comm.all_reduce_(statistics)
                assert statistics == 2.0
            except Exception as error:
                return error
            ddp.zero_grad_buffer()
            if comm.rank == 0 and iteration == 0:
                ddp("dense0", 1.0)
            try:
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
    axes = Axes(dp=Alone(), tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=Alone())
    ddp = DistributedDataParallel(SHARDED, Sums({"dense0": 3}), groups=roles)
    ddp("dense0", 1.0).backward()
    ddp.finish_grad_sync()
    alive = ref(ddp)
    del ddp
    gc.collect()
    assert alive() is None


def test_a_model_that_one_rank_keeps_disturbs_no_dropped_iteration() -> None:
    """Only the rank that had dropped the other model launched reductions early; the next iteration met these."""

    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        ddp, other = (DistributedDataParallel(REPLICATED, Sums({"dense0": 3, "dense1": 4}), groups=roles) for _ in "12")
        kept = [other] if comm.rank == 0 else []
        del other
        comm.gather_objects(None)  # a collection while another thread collects does nothing
        gc.collect()
        comm.gather_objects(None)
        for iteration in range(4):
            for name in ("dense1", "dense0"):
                ddp(name, 1.0 + comm.rank + iteration).backward()
            if iteration != 2:
                ddp.finish_grad_sync()
                check_owned(ddp, "dense0", 1.5 + iteration)
                check_owned(ddp, "dense1", 1.5 + iteration)
            ddp.zero_grad_buffer()
        assert ddp.grad_sync.launch_order.may_launch_early == (not kept)

    with pytest.warns(UserWarning, match="1 more wrapped model chunks"):
        run_threads(2, rank_main)
