"""A group in which one rank speaks: sums are of what it brings, and every rank hears them."""

from typing import Any

import pytest
import torch

from opt_distributed.comm.collectives import Alone, Comm, Op
from opt_distributed.comm.populated import OneSpeaks, roles_of_world
from opt_distributed.comm.threads import run_threads


@pytest.mark.parametrize("speaker", [0, 2])
def test_sums_are_of_what_one_rank_brings(speaker: int) -> None:
    def rank_main(comm: Comm) -> list[Any]:
        one = OneSpeaks(comm, speaks=comm.rank == speaker)
        total, shard = torch.tensor([comm.rank + 1.0, torch.inf if comm.rank == 1 else 0.0]), torch.empty(1)
        one.all_reduce_(total)
        one.reduce_scatter_(shard, torch.arange(3.0) + comm.rank)
        return [total.tolist(), shard.item()]

    assert run_threads(3, rank_main) == [[[speaker + 1.0, 0.0], rank + float(speaker)] for rank in range(3)]


def test_what_is_not_summed_is_everybodys() -> None:
    def rank_main(comm: Comm) -> list[Any]:
        one = OneSpeaks(comm, speaks=comm.rank == 1)
        full, dealt, sent = torch.empty(2), torch.empty(2), torch.tensor([float(comm.rank)])
        one.all_gather_(full, torch.tensor([float(comm.rank)]))
        one.all_to_all_(dealt, torch.tensor([10.0, 20.0]) + comm.rank)
        one.broadcast_(sent, src=0)
        return [one.size, full.tolist(), dealt.tolist(), sent.item(), one.gather_objects(comm.rank)]

    first, second = run_threads(2, rank_main)
    assert first == [2, [0.0, 1.0], [10.0, 11.0], 0.0, [0, 1]]
    assert second == [2, [0.0, 1.0], [20.0, 21.0], 0.0, [0, 1]]


def test_a_maximum_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"op is Op\.MAX, but silent ranks can bring a zero to a sum only; use Op\.SUM"
    ):
        OneSpeaks(Alone(), speaks=False).all_reduce_(torch.ones(1), op=Op.MAX)


@pytest.mark.parametrize("has_params", [True, False])
def test_a_process_by_itself_is_alone_whatever_it_holds(has_params: bool) -> None:
    roles = roles_of_world(has_params=has_params)
    assert (roles.dense.dp.size, roles.dense.mp.size, roles.everyone.size) == (1, 1, 1)
