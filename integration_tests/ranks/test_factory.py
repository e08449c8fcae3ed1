"""The factory on several ranks: one verdict for all, ranks without parameters, files written once, identical groups."""

import json
import math
from pathlib import Path

import pytest
import torch
from factory_ranks import REFUSED, Asked, ask_everything, with_empty_ranks
from processes import run_processes
from tiny_model import make_model, weights
from training import train_here

from opt_config import OptimizerConfig

# --- ranks without parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "empty", "config", "dtype", "bad_step"),
    [
        pytest.param(
            2,
            (1,),
            OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.3, log_num_zeros_in_grad=True),
            torch.float32,
            -1,
            id="one-of-two",
        ),
        pytest.param(
            3,
            (0,),
            OptimizerConfig(lr=1e-2, fp16=True, initial_loss_scale=64.0, hysteresis=1, use_distributed_optimizer=True),
            torch.float16,
            2,
            id="first-of-three-sharded-overflow",
        ),
    ],
)
def test_a_rank_that_trains_nothing_has_the_result_of_those_that_do(
    size: int, empty: tuple[int, ...], config: OptimizerConfig, dtype: torch.dtype, bad_step: int
) -> None:
    ran = run_processes(size, with_empty_ranks, config, dtype, empty, bad_step)
    assert [rank.is_stub for rank in ran] == [rank in empty for rank in range(size)]
    for rank in ran[1:]:
        assert str(rank.results) == str(ran[0].results)  # as text: an infinite norm equals itself, a NaN too
        assert rank.scales == ran[0].scales
    successes = [result[0] for result in ran[0].results]
    assert successes == [step != bad_step for step in range(5)]
    start = weights(make_model(dtype))
    training = [ran[rank].weights for rank in range(size) if rank not in empty]
    for name, weight in start.items():
        assert all(torch.equal(ran[rank].weights[name], weight) for rank in empty)
        assert all(torch.equal(other[name], training[0][name]) for other in training)
    if bad_step < 0:
        want = train_here(config, steps=5, dtype=dtype)
        torch.testing.assert_close([result[1] for result in ran[0].results], want.norms, rtol=1e-5, atol=0)
        # The same sums in one process; Adam divides rounding noise of tiny gradients by its own size.
        torch.testing.assert_close(training[0], want.weights, rtol=1e-4, atol=2e-5)
    else:
        assert not math.isfinite(ran[0].results[bad_step][1])
        assert ran[0].scales == [64.0, 64.0, 32.0, 32.0, 32.0]


# --- one world, many questions ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("factory")


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[Asked]:
    """The results of two ranks."""
    return run_processes(2, ask_everything, str(folder))


UNKNOWN = (
    "optimizer='adma' is unknown; allowed are adam, sgd, lion, adan, ademamix, laprop, mars, nadam, radam, "
    "schedule_free, signum, muon, adaptive_muon, soap, soap_muon; did you mean 'adam' or 'adan'?"
)
ROLE = (
    "pg_collection lacks mp (tensor and pipeline ranks that hold one copy of the dense model): needed always; set a "
    "role to None if it has only one rank"
)
STRANGER = (
    "group 'group 1' has a parameter of shape (3,): it is not a trainable parameter of model_chunks; leave it out"
)
NOTHING = "model_chunks hold no trainable parameter on any rank; at least one needs requires_grad=True"
DIFFERENT = (
    "data-parallel ranks [1] have another plan than rank 0: config, overrides and model must be equal on all ranks "
    "that share parameters; head.bias is trained on rank 0 only"
)
CONFLICT = (
    "parameter 'head.bias': key '*.bias' sets 'wd_mult' to 0.0, key 'head.*' to 1.0; set it in one of them only, or "
    "let them match different parameters"
)
NARROW = (
    "parameter 'embedding.weight' (and 8 more) is torch.float16; fp16=False and bf16=False allow torch.float32: set "
    "fp16=True"
)
TOLD = {
    "unknown optimizer on one rank": (f"rank 1 refused: ConfigError: {UNKNOWN}", UNKNOWN),
    "nothing to train anywhere": (NOTHING, NOTHING),
    "another model on one rank": (DIFFERENT, DIFFERENT),
    "conflict on one rank": (f"rank 1: {CONFLICT}", CONFLICT),
    "a role missing on one rank": (f"rank 1 refused: ProcessGroupError: {ROLE}", ROLE),
    "a stranger in the groups of one rank": (f"rank 1 refused: ConfigError: {STRANGER}", STRANGER),
    "a 16-bit model on one rank": (f"rank 1 refused: ConfigError: {NARROW}", NARROW),
    "good after all": ("built", "built"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_cannot_build_no_rank_builds(asked: list[Asked], case: str) -> None:
    assert tuple(rank.refused[case] for rank in asked) == TOLD[case]


def test_ranks_with_other_parameters_have_the_same_groups_and_one_norm(asked: list[Asked]) -> None:
    first, second = (rank.stage for rank in asked)
    assert first.group_names == second.group_names == ["default", "*.bias|<1-D>"]
    assert (first.num_params, second.num_params) == ([1, 1], [1, 0])
    assert first.norm == second.norm
    # Sums of squares in fp32 here, in fp64 there.
    assert first.norm == pytest.approx(math.hypot(first.own_norm, second.own_norm), rel=1e-6)


def test_rank_0_writes_the_files_of_all(asked: list[Asked], folder: Path) -> None:
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["optimizer_config.json", "optimizer_plan.json"]
    # Both stages call their first parameter `weight`, and both have it in the default group.
    assert json.loads((folder / "map.json").read_text())["group_of"] == {"weight": 0, "bias": 1}
    assert (folder / "map" / ".metadata").exists()


def test_what_rank_0_cannot_write_fails_on_all_ranks(asked: list[Asked]) -> None:
    first, second = (rank.unwritable for rank in asked)
    assert first.startswith("NotADirectoryError: ")
    assert second.startswith("ValueError: rank 0 refused: NotADirectoryError: ")


def test_ready_groups_and_process_groups_give_the_factorys_step(asked: list[Asked]) -> None:
    for rank in asked:
        whole, by_groups = rank.twice
        for name, weight in whole.items():
            assert torch.equal(weight, by_groups[name]), name
