"""Process groups of a run: found from meshes and DTensors, or refused on every rank. Gloo processes."""

from typing import Any, NamedTuple

import pytest
import torch
from group_ranks import (
    BUILDS,
    LAYOUTS,
    Trained,
    broadcasts_in_pairs,
    build_all,
    chunks_on_different_devices,
    config,
    device_of_a_rank_without_tensors,
    skip_the_matrices,
    skip_the_matrices_alone,
    train,
    train_alone,
)
from processes import FSDP2_RUNS, Job, run_jobs

RUNS = [name for name in LAYOUTS if FSDP2_RUNS or ("fsdp" not in name and name != "hsdp")]
RULES = {"adam": config(), "muon": config(optimizer="muon", muon_tp_mode="duplicated", muon_fp32_matmul_prec="highest")}


class Four(NamedTuple):
    trained: dict[str, list[Trained]]
    gaps: list[Trained]
    outcomes: list[dict[str, str]]
    broadcast: list[list[int]]
    devices: list[str]
    mixed: list[str]


@pytest.fixture(scope="module")
def four() -> Four:
    jobs = {f"{rule}, {name}": Job(train, (name, made)) for rule, made in RULES.items() for name in RUNS}
    others = {
        "gaps": Job(skip_the_matrices, (config(),)),
        "builds": Job(build_all),
        "broadcast": Job(broadcasts_in_pairs),
        "devices": Job(device_of_a_rank_without_tensors),
        "mixed": Job(chunks_on_different_devices),
    }
    made = run_jobs(4, jobs | others)
    return Four({name: made[name] for name in jobs}, *(made[name] for name in others))


def assert_same(got: Trained, want: Trained, *, atol: float) -> None:
    """Means over ranks are summed in another order than one batch; Adam divides small gradients by their own size."""
    for name, weight in want.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=1e-4, atol=atol)
    torch.testing.assert_close(got.norms, want.norms, rtol=1e-4, atol=0)
    assert got.zeros == want.zeros


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("rule", RULES)
def test_every_layout_of_four_ranks_takes_the_steps_of_one(rule: str, name: str, four: Four) -> None:
    """Replicas that lie outside of a DTensor's mesh are averaged, those inside of it are not averaged twice."""
    want = train_alone(RULES[rule])
    for got in four.trained[f"{rule}, {name}"]:
        assert_same(got, want, atol=1e-4)


def test_a_dtensor_that_one_replica_used_moves_on_both_and_one_that_none_used_keeps_still(four: Four) -> None:
    want = skip_the_matrices_alone(config())
    for got in four.gaps:
        assert_same(got, want, atol=1e-4)


UNKNOWN = "neither process groups nor a mesh were given: which ranks hold its replicas is unknown; pass pg_collection="
OUTCOMES: dict[str, Any] = {
    "tensor parallel": f"'up.weight' is tensor parallel (tensor_model_parallel=True) on rank 0 of 4, and {UNKNOWN}",
    "tensor parallel, wrapped": "'up.weight' is tensor parallel (tensor_model_parallel=True) on rank 0 of 4",
    "an expert on one rank": f"parameter 'up.weight' is an expert (allreduce=False) on rank 1 of 4, and {UNKNOWN}",
    "an expert on one rank, wrapped": f"'up.weight' is an expert (allreduce=False) on rank 1 of 4, and {UNKNOWN}",
    "uninitialized on one rank": "parameter 'weight' is uninitialized",
    "broadcast on one rank": "broadcast_params is False on ranks [0, 2, 3], True on ranks [1]",
    "unknown axis": "mesh axis 'model' is unknown; allowed are dp, dp_replicate, dp_shard, ",
    "both": "both pg_collection and mesh were given; pass one of them",
    "groups on one rank": "different kinds of groups: ['no groups', 'Roles', 'no groups', 'no groups']",
    "a mesh of its own": "is a DTensor on 2 of the world's 4 ranks",
    "tp without its group": "pg_collection lacks tp (tensor-parallel peers of a dense matrix)",
    "megatron's collection of something else": "is a str; pass a torch.distributed.ProcessGroup or None",
    "megatron's collection": "built",
    "tensor parallel, mesh": "built",
    "wrapped with a mesh, optimizer without": "built",
}


@pytest.mark.parametrize("name", BUILDS)
def test_what_cannot_be_known_is_refused_on_every_rank(name: str, four: Four) -> None:
    for outcomes in four.outcomes:
        assert OUTCOMES[name] in outcomes[name]


def test_a_broadcast_inside_a_group_starts_at_the_rank_of_the_group(four: Four) -> None:
    assert four.broadcast == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_rank_without_tensors_follows_the_device_of_the_others(four: Four) -> None:
    assert four.devices == ["cpu"] * 4


def test_models_on_different_kinds_of_device_are_refused_on_every_rank(four: Four) -> None:
    for outcome in four.mixed:
        assert outcome == (
            "model_chunks are on different kinds of device: cpu on ranks [0, 1, 3]; meta on ranks [2]; move all ranks' "
            "models to one kind"
        )
