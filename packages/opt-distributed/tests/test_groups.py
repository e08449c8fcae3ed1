"""Process groups by role: which ranks the step reduces and counts over, seen from every rank of a fake world."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_net import over
from processes import world_of_one
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from opt_distributed import ProcessGroupError, run_threads
from opt_distributed.comm import Alone, Comm, ProcessGroups, TorchComm, find_roles, group_of
from opt_distributed.comm import groups as process_groups
from opt_distributed.comm.collectives import zeros
from opt_distributed.comm.roles import peers_of, roles_of


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


def test_dense_grads_are_reduced_over_context_parallel_ranks_too() -> None:
    """Context-parallel ranks see other parts of the same samples: their gradients are summed with the replicas'."""
    with fake_world(4):
        made = groups(dp=[0, 2], cp=[0, 1], dp_cp=[0, 1, 2, 3], expt_dp=[0, 1, 2, 3], mp=None, tp_ep_pp=None)
        assert ranks(roles_of(made, sharded=False).dense.dp) == [0, 1, 2, 3]


@pytest.mark.parametrize("sharded", [False, True])
def test_roles_follow_from_a_data_parallel_group_of_all_ranks(sharded: bool) -> None:
    with fake_world(4):
        roles = roles_of(groups(dp=[0, 1, 2, 3]), sharded=sharded, has_experts=False)
        assert ranks(roles.dense.dp) == ranks(roles.totals) == [0, 1, 2, 3]
        with pytest.raises(ProcessGroupError, match=r"lacks expt_dp .*; tp_ep_pp"):
            roles_of(groups(dp=[0, 1, 2, 3]), sharded=sharded)


def test_experts_and_dense_params_use_own_tensor_parallel_groups() -> None:
    with fake_world(4):
        made = groups(dp=[0, 2], expt_dp=[0, 1, 2, 3], mp=[0, 1], tp_ep_pp=None, tp=[0, 1], expt_tp=None)
        roles = roles_of(made, sharded=False)
        assert (ranks(roles.dense.tp), ranks(roles.expert.tp), ranks(roles.totals)) == ([0, 1], [], [0, 1, 2, 3])
        made.expt_tp = made.tp
        made.tp = None
        made.intra_dist_opt = made.mp
        roles = roles_of(made, sharded=False)
        assert (ranks(roles.dense.tp), ranks(roles.expert.tp), ranks(roles.totals)) == ([], [0, 1], [0, 1])


def test_no_shard_group_means_one_rank_in_a_larger_group() -> None:
    """Two instances of one rank each: every rank keeps a whole optimizer, and gradients are summed between them."""
    with fake_world(2):
        both = {role: [0, 1] for role in ("dp", "dp_cp", "expt_dp", "inter_dist_opt")}
        alone = dict.fromkeys(("intra_dp_cp", "intra_expt_dp", "mp", "tp_ep_pp", "intra_dist_opt"))
        roles = roles_of(groups(**both, **alone), sharded=True)
        for axes in (roles.dense, roles.expert):
            assert isinstance(axes.dp, Alone)
            assert (ranks(axes.inter), axes.num_replicas) == ([0, 1], 2)


ALONE = {"mp": None, "tp_ep_pp": None}
PAIR = [0, 1]
REFUSALS: dict[str, dict[str, Any]] = {  # the groups, by role
    "dp_cp or dp of 1 ranks, but dp of 2": {"dp": PAIR, "dp_cp": None, "cp": None, "expt_dp": PAIR, **ALONE},
    "dp_cp or dp of 2 ranks, but intra_dp_cp of 1": {
        "dp": PAIR, "intra_dp_cp": None, "inter_dist_opt": None, "expt_dp": PAIR, **ALONE,
    },
    "expt_dp of 2 ranks, but intra_expt_dp of 1": {
        "dp": PAIR, "expt_dp": PAIR, "intra_expt_dp": None, "inter_dist_opt": None, **ALONE,
    },
    "lacks dp_cp .*: needed with context parallelism": {"dp": [0, 2], "cp": PAIR, "expt_dp": [0, 2], **ALONE},
    r"lacks expt_dp .*; mp ": {"dp": PAIR},
    r"dp .* and tp of 2 ranks; the ranks of tp hold other parts": {"dp": [0, 1, 2, 3], "tp": PAIR},
    "dp and mp make up 2 of the world's 4 ranks; pass intra_dist_opt": {"dp": PAIR, "expt_dp": PAIR, **ALONE},
    "unknown role 'data' of a process group": {"data": None},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSALS)
def test_groups_that_omit_ranks_from_a_reduction_are_refused(message: str) -> None:
    with fake_world(4), pytest.raises(ProcessGroupError, match=message):
        roles_of(groups(**REFUSALS[message]), sharded=False, has_experts=False)


def test_gradients_are_finalized_over_the_group_of_each_role() -> None:
    with fake_world(4):
        for role in ("tp", "expt_tp", "embd", "pos_embd", "pp"):
            found = peers_of(groups(**{role: [0, 3]}))
            assert {name: ranks(comm) for name, comm in found.items()} == {role: [0, 3]}


# What a mesh (pp, dp_replicate, dp_shard, cp, ep, tp) = 2 x 1 x 2 x 2 x 2 x 2 means for rank 0.
# The last axis changes fastest: strides are pp 16, dp_shard 8, cp 4, ep 2, tp 1.
OF_MESH = {
    "dp": [0, 2, 8, 10],
    "dp_cp": [0, 2, 4, 6, 8, 10, 12, 14],
    "expt_dp": [0, 4, 8, 12],
    "mp": [0, 1, 16, 17],
    "tp_ep_pp": [0, 1, 2, 3, 16, 17, 18, 19],
    "tp": [0, 1],
    "expt_tp": [0, 1],
    "pp": [0, 16],
    "cp": [0, 4],
    "ep": [0, 2],
    "embd": [0, 16],
    "intra_dist_opt": list(range(32)),
}


def test_every_role_is_found_along_the_axes_of_a_mesh() -> None:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
    with fake_world(32):
        mesh = init_device_mesh("cpu", (2, 1, 2, 2, 2, 2), mesh_dim_names=names)
        made = ProcessGroups.from_mesh(mesh)
        assert {role: dist.get_process_group_ranks(getattr(made, role)) for role in made.roles} == OF_MESH
        roles = roles_of(made, sharded=True)
        assert (roles.dense.num_replicas, roles.expert.num_replicas) == (8, 4)
        submesh = ProcessGroups.from_mesh(mesh["tp"])  # understood through the mesh that it was sliced from
        assert dist.get_process_group_ranks(submesh.dp_cp) == OF_MESH["dp_cp"]


def test_only_the_first_and_last_stage_share_a_tied_embedding() -> None:
    for rank, expected in ((0, [0, 2]), (1, None), (2, [0, 2])):
        with fake_world(3, rank):
            made = ProcessGroups.from_mesh(init_device_mesh("cpu", (3,), mesh_dim_names=("pp",)))
            assert (None if made.embd is None else dist.get_process_group_ranks(made.embd)) == expected


BAD_MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "have no names": lambda: init_device_mesh("cpu", (4,)),
    "mesh axis 'data' is unknown; allowed are dp, ": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("data",)),
    "has 2 of the world's 4 ranks": lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
}


@pytest.mark.parametrize("message", BAD_MESHES)
def test_a_mesh_that_does_not_say_who_is_where_is_refused(message: str) -> None:
    with fake_world(4), pytest.raises(ProcessGroupError, match=message):
        ProcessGroups.from_mesh(BAD_MESHES[message]())


def test_what_is_no_mesh_on_one_rank_is_an_error_on_every_rank() -> None:
    def rank_main(comm: Comm) -> None:
        mesh: Any = "dp" if comm.rank == 1 else None
        with pytest.raises(ValueError, match="both pg_collection and mesh were given"):
            find_roles([], over(comm), mesh=mesh, sharded=False)

    run_threads(2, rank_main)


def parallel_state() -> ModuleType:
    """Megatron-Core's module of initialised groups, as far as it is read: TP 2, CP 2, DP 2 of one instance, no EP."""
    state: Any = ModuleType(process_groups.PARALLEL_STATE)
    dp, dp_cp, one, tp, cp = (dist.new_group(of) for of in ([0, 4], [0, 2, 4, 6], [0], [0, 1], [0, 2]))
    of_role = {"context_parallel": cp, "expert_data_parallel": dp_cp, "pipeline_model_parallel": one}
    of_tp = (
        "tensor_model_parallel",
        "model_parallel",
        "expert_tensor_parallel",
        "expert_tensor_model_pipeline_parallel",
    )
    for role, group in {**of_role, **dict.fromkeys(of_tp, tp)}.items():
        setattr(state, f"get_{role}_group", lambda check_initialized=True, group=group: group)
    state.model_parallel_is_initialized = lambda: True
    state.get_intra_distributed_optimizer_instance_group = lambda: dist.group.WORLD
    state.get_data_parallel_group = lambda with_context_parallel=False, partial_data_parallel=False: (
        dp_cp if with_context_parallel else dp
    )
    return state


def test_the_groups_of_megatron_cores_parallel_state_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8):
        assert not process_groups.megatron_is_initialized()
        monkeypatch.setitem(sys.modules, process_groups.PARALLEL_STATE, parallel_state())
        assert process_groups.megatron_is_initialized()
        roles = roles_of(process_groups.groups_of_parallel_state(), sharded=True)
        assert ranks(roles.dense.dp) == ranks(roles.expert.dp) == [0, 2, 4, 6]
        assert ranks(roles.dense.tp) == ranks(roles.expert.tp) == [0, 1]
        assert isinstance(roles.dense.inter, Alone)
        assert ranks(roles.totals) == list(range(8))


def test_a_part_of_a_group_keeps_its_backend_and_timeout() -> None:
    """One of a group that gives up after seconds waited half an hour for a lost peer."""
    with world_of_one():
        group = dist.new_group([0], timeout=timedelta(seconds=33), backend="cpu:gloo")
        part = group_of(TorchComm(group).part([0]))
        assert part is not None
        backend: Any = part._get_backend(torch.device("cpu"))
        assert (backend.options._timeout, dist.get_backend_config(part)) == (timedelta(seconds=33), "cpu:gloo")


def test_only_memory_of_torchs_allocator_may_be_freed() -> None:
    class Registered(Alone):
        def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return zeros(numel, dtype=dtype, device=device)

    class RegisteredComm(TorchComm):
        allocate = Registered.allocate

    with world_of_one() as group:
        pooled = TorchComm(group, allocate=Registered().allocate)
        others = [pooled, Registered(), RegisteredComm(group), RegisteredComm(group).part([0])]
        comms = [Alone(), TorchComm(group), TorchComm(group).part([0]), *others]
        assert [comm.allocate is zeros for comm in comms] == [True] * 3 + [False] * 4
