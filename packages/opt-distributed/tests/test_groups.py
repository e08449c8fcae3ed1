"""Process groups by role: which ranks the step reduces and counts over, seen from every rank of a fake world."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from opt_distributed.comm.collectives import Alone, Comm, group_of
from opt_distributed.comm.groups import ProcessGroupError, ProcessGroups, roles_of


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """torch.distributed as rank `rank` of `size` sees it; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks(comm: Comm | None) -> list[int]:
    """The world ranks of a communicator; none for a world of one."""
    group = None if comm is None else group_of(comm)
    return [] if group is None else dist.get_process_group_ranks(group)


def groups(**ranks_of: list[int] | None) -> ProcessGroups:
    return ProcessGroups(**{role: None if of is None else dist.new_group(of) for role, of in ranks_of.items()})


def test_dense_gradients_are_reduced_over_context_parallel_ranks_too() -> None:
    """Context-parallel ranks see other parts of the same samples: their gradients are summed with the replicas'."""
    with fake_world(4):
        made = groups(dp=[0, 2], cp=[0, 1], dp_cp=[0, 1, 2, 3], expt_dp=[0, 1, 2, 3], mp=None, tp_ep_pp=None)
        roles = roles_of(made, sharded=False)
        assert ranks(roles.dense.dp) == [0, 1, 2, 3]


def test_context_parallelism_needs_the_group_that_gradients_are_reduced_over() -> None:
    with fake_world(4):
        made = groups(dp=[0, 2], cp=[0, 1], expt_dp=[0, 2], mp=None, tp_ep_pp=None)
        with pytest.raises(ProcessGroupError, match="pg_collection lacks dp_cp"):
            roles_of(made, sharded=False)


def test_experts_and_dense_parameters_have_tensor_parallel_groups_of_their_own() -> None:
    with fake_world(4):
        made = groups(
            dp=[0, 2], expt_dp=[0, 1, 2, 3], mp=[0, 1], tp_ep_pp=None, tp=[0, 1], expt_tp=None, intra_dist_opt=[0, 1]
        )
        roles = roles_of(made, sharded=False)
        assert ranks(roles.dense.tp) == [0, 1]
        assert isinstance(roles.expert.tp, Alone)
        made.expt_tp, made.tp = made.tp, None
        roles = roles_of(made, sharded=False)
        assert ranks(roles.expert.tp) == [0, 1]
        assert isinstance(roles.dense.tp, Alone)


def test_a_shard_group_of_none_is_one_rank_beside_a_larger_data_parallel_group() -> None:
    """Two instances of one rank each: every rank keeps a whole optimizer, and gradients are summed between them."""
    with fake_world(2):
        made = groups(
            dp=[0, 1],
            dp_cp=[0, 1],
            intra_dp_cp=None,
            expt_dp=[0, 1],
            intra_expt_dp=None,
            inter_dist_opt=[0, 1],
            mp=None,
            tp_ep_pp=None,
            intra_dist_opt=None,
        )
        roles = roles_of(made, sharded=True)
        for axes in (roles.dense, roles.expert):
            assert isinstance(axes.dp, Alone)
            assert ranks(axes.inter) == [0, 1]
            assert axes.num_replicas == 2


CONTRADICTIONS: dict[str, Callable[[], ProcessGroups]] = {
    "dp_cp of 1 ranks, but dp of 2": lambda: groups(dp=[0, 1], dp_cp=None, cp=None, expt_dp=[0, 1]),
    "dp_cp or dp of 2 ranks, but intra_dp_cp of 1": lambda: groups(dp=[0, 1], intra_dp_cp=None, inter_dist_opt=None),
    "expt_dp of 2 ranks, but intra_expt_dp of 1": lambda: groups(
        dp=[0, 1], expt_dp=[0, 1], intra_expt_dp=None, inter_dist_opt=None
    ),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_groups_that_would_leave_replicas_out_of_a_reduction_are_refused(message: str) -> None:
    with fake_world(2):
        made = CONTRADICTIONS[message]()
        made.mp = made.tp_ep_pp = None
        if "expt_dp" not in made._groups:
            made.expt_dp = made.dp
        with pytest.raises(ProcessGroupError, match=message):
            roles_of(made, sharded=False)


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ProcessGroupError, match="no process group plays the role 'data'"):
        ProcessGroups(data=None)
