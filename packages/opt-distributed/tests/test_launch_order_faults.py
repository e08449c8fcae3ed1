"""Iterations that some ranks drop, evaluate or keep: no rank waits for ever."""

import gc
from weakref import ref

import pytest
import torch
from chunk_sums import REPLICATED, SHARDED, Sums, check_owned, configs

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.binding import GradientError
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads


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
