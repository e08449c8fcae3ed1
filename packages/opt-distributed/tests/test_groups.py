"""Process groups by role: which ranks the step reduces and counts over, seen from every rank of a fake world."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from opt_distributed import ProcessGroupError, run_threads
from opt_distributed.comm import Alone, Axes, Comm, ProcessGroups, Roles, find_roles, group_of
from opt_distributed.comm import groups as process_groups
from opt_distributed.comm.roles import PEERS, peers_of, roles_of


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


@pytest.mark.parametrize("sharded", [False, True])
def test_roles_that_follow_from_a_data_parallel_group_of_all_ranks_need_not_be_set(sharded: bool) -> None:
    with fake_world(4):
        roles = roles_of(groups(dp=[0, 1, 2, 3]), sharded=sharded, has_experts=False)
        assert ranks(roles.dense.dp) == ranks(roles.totals) == [0, 1, 2, 3]
        with pytest.raises(ProcessGroupError, match=r"lacks expt_dp .*; tp_ep_pp"):
            roles_of(groups(dp=[0, 1, 2, 3]), sharded=sharded)
        with pytest.raises(ProcessGroupError, match=r"lacks expt_dp .*; mp "):
            roles_of(groups(dp=[0, 1]), sharded=sharded, has_experts=False)
        with pytest.raises(ProcessGroupError, match=r"dp .* and tp of 2 ranks; the ranks of tp hold other parts"):
            roles_of(groups(dp=[0, 1, 2, 3], tp=[0, 1]), sharded=sharded, has_experts=False)


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


def test_a_shard_group_of_none_is_one_rank_in_a_larger_data_parallel_group() -> None:
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
        if "expt_dp" not in made.roles:
            made.expt_dp = made.dp
        with pytest.raises(ProcessGroupError, match=message):
            roles_of(made, sharded=False)


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ProcessGroupError, match="unknown role 'data' of a process group"):
        ProcessGroups(data=None)


@pytest.mark.parametrize("role", PEERS)
def test_gradients_are_finalized_over_the_group_of_each_role(role: str) -> None:
    with fake_world(4):
        (found,) = peers_of(groups(**{role: [0, 3]})).items()
        assert (found[0], ranks(found[1])) == (role, [0, 3])


# --- meshes -----------------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """What a mesh (pp, dp_replicate, dp_shard, cp, ep, tp) = 2 x 1 x 2 x 2 x 2 x 2 means for rank 0."""

    role: str
    members: list[int]


# The last axis changes fastest: strides are pp 16, dp_shard 8, cp 4, ep 2, tp 1.
OF_MESH = [
    Axis("dp", [0, 2, 8, 10]),
    Axis("dp_cp", [0, 2, 4, 6, 8, 10, 12, 14]),
    Axis("expt_dp", [0, 4, 8, 12]),
    Axis("mp", [0, 1, 16, 17]),
    Axis("tp_ep_pp", [0, 1, 2, 3, 16, 17, 18, 19]),
    Axis("tp", [0, 1]),
    Axis("expt_tp", [0, 1]),
    Axis("pp", [0, 16]),
    Axis("cp", [0, 4]),
    Axis("ep", [0, 2]),
    Axis("intra_dist_opt", list(range(32))),
]


def test_every_role_is_found_along_the_axes_of_a_mesh() -> None:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
    with fake_world(32):
        mesh = init_device_mesh("cpu", (2, 1, 2, 2, 2, 2), mesh_dim_names=names)
        made = ProcessGroups.from_mesh(mesh)
        for role, members in OF_MESH:
            assert dist.get_process_group_ranks(getattr(made, role)) == members, role
        roles = roles_of(made, sharded=True)
        assert (roles.dense.num_replicas, roles.expert.num_replicas) == (8, 4)
        submesh = ProcessGroups.from_mesh(mesh["tp"])  # understood through the mesh that it was sliced from
        assert dist.get_process_group_ranks(submesh.dp_cp) == dist.get_process_group_ranks(made.dp_cp)


BAD_MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "have no names": lambda: init_device_mesh("cpu", (4,)),
    "mesh axis 'data' is unknown; allowed are dp, ": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("data",)),
    "has 2 of the world's 4 ranks": lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
}


@pytest.mark.parametrize("message", BAD_MESHES)
def test_a_mesh_that_does_not_say_who_is_where_is_refused(message: str) -> None:
    with fake_world(4), pytest.raises(ProcessGroupError, match=message):
        ProcessGroups.from_mesh(BAD_MESHES[message]())


# --- Megatron-Core ----------------------------------------------------------------------------------------------------


class ParallelState(ModuleType):
    """Megatron-Core's module of initialised groups, as far as it is read: TP 2, CP 2, DP 2 of one instance, no EP."""

    def __init__(self) -> None:
        super().__init__(process_groups.PARALLEL_STATE)
        self.dp, self.dp_cp, self.one = (dist.new_group(of) for of in ([0, 4], [0, 2, 4, 6], [0]))
        self.tp, self.cp = dist.new_group([0, 1]), dist.new_group([0, 2])

    def model_parallel_is_initialized(self) -> bool:
        return True

    def get_data_parallel_group(self, with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
        return self.dp_cp if with_context_parallel else self.dp

    def get_expert_data_parallel_group(self, check_initialized: bool = True) -> Any:
        return self.dp_cp

    def get_tensor_model_parallel_group(self, check_initialized: bool = True) -> Any:
        return self.tp

    get_model_parallel_group = get_expert_tensor_parallel_group = get_tensor_model_parallel_group
    get_expert_tensor_model_pipeline_parallel_group = get_tensor_model_parallel_group

    def get_context_parallel_group(self, check_initialized: bool = True) -> Any:
        return self.cp

    def get_pipeline_model_parallel_group(self, check_initialized: bool = True) -> Any:
        return self.one

    def get_intra_distributed_optimizer_instance_group(self) -> Any:
        return dist.group.WORLD

    def get_inter_distributed_optimizer_instance_group(self) -> Any:
        raise AssertionError("one instance")


def test_the_groups_of_megatron_cores_parallel_state_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8):
        assert not process_groups.megatron_is_initialized()
        monkeypatch.setitem(sys.modules, process_groups.PARALLEL_STATE, ParallelState())
        assert process_groups.megatron_is_initialized()
        roles = roles_of(process_groups.groups_of_parallel_state(), sharded=True)
        assert ranks(roles.dense.dp) == [0, 2, 4, 6]
        assert ranks(roles.dense.tp) == ranks(roles.expert.tp) == [0, 1]
        assert ranks(roles.expert.dp) == [0, 2, 4, 6]
        assert isinstance(roles.dense.inter, Alone)
        assert ranks(roles.totals) == list(range(8))


def test_what_is_no_mesh_on_one_rank_is_an_error_on_every_rank() -> None:
    def rank_main(comm: Comm) -> str:
        axes = Axes(dp=comm, tp=Alone())
        mesh: Any = "dp" if comm.rank == 1 else None
        with pytest.raises(ValueError) as refusal:
            find_roles([], Roles(dense=axes, expert=axes, everyone=comm), mesh=mesh, sharded=False)
        return str(refusal.value)

    for text in run_threads(2, rank_main):
        assert "both pg_collection and mesh were given" in text
