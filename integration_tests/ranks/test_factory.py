"""The factory on several ranks: one verdict for all, ranks without parameters, files written once, identical groups."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import refusal, run_processes
from tiny_model import joined_batch, make_model, train_here, weights
from torch import Tensor, nn

from opt_config import OptimizerConfig, ParamKey
from opt_stack import Optimizer, ProcessGroups, get_optimizer, get_optimizer_based_on_param_groups
from opt_stack.megatron import _get_megatron_optimizer_based_on_param_groups, _get_param_groups

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.3)


class Ran(NamedTuple):
    """The results of some steps on one rank."""

    is_stub: bool
    results: list[tuple[Any, ...]]
    scales: list[float]
    weights: dict[str, Tensor]


def with_empty_ranks(config: OptimizerConfig, dtype: torch.dtype, empty: tuple[int, ...], bad_step: int) -> Ran:
    """Steps of a world in which the ranks `empty` train nothing; the others share the joined batch evenly.

    In step `bad_step` the last of those that train has an infinite gradient.
    """
    rank = dist.get_rank()
    training = [r for r in range(dist.get_world_size()) if r not in empty]
    model = make_model(dtype)
    if rank in empty:
        model.requires_grad_(False)
    optimizer = get_optimizer(config, [model])
    results, scales = [], []
    for step in range(5):
        optimizer.zero_grad()
        if rank in training:
            local_batch = joined_batch(step).chunk(len(training))[training.index(rank)]
            optimizer.scale_loss(model(local_batch)).backward()
            if step == bad_step and rank == training[-1]:
                model.head.weight.grad[0, 0] = torch.inf
        results.append(tuple(optimizer.step()))
        scales.append(optimizer.get_loss_scale().item())
    return Ran(optimizer.is_stub_optimizer, results, scales, weights(model))


# --- one world, many questions ----------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """Each rank's error message, for mistakes that only one rank, or only a comparison of ranks, can detect."""
    return {name: refusal(build) for name, build in REFUSED.items()}


def _only_rank_1(yes: Any, no: Any) -> Any:
    return yes if dist.get_rank() == 1 else no


def _renamed() -> OptimizerConfig:
    config = OptimizerConfig(lr=1e-2)
    config.optimizer = _only_rank_1("adma", "adam")  # a field may be set after the checks
    return config


def _one_frozen_layer() -> nn.Module:
    model = make_model()
    model.head.requires_grad_(bool(_only_rank_1(False, True)))
    return model


def _groups(stranger: nn.Parameter | None) -> Any:
    model = make_model()
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if stranger is not None:
        groups.append({"params": [stranger]})
    return get_optimizer_based_on_param_groups(CONFIG, [model], groups)


def _all_roles_but(missing: str | None) -> ProcessGroups:
    return ProcessGroups(**{role: None for role in ("dp", "expt_dp", "mp", "tp_ep_pp") if role != missing})


_VECTORS, _HEAD = ParamKey(name="*.bias"), ParamKey(name="head.*")

REFUSED: dict[str, Callable[[], Any]] = {
    "unknown optimizer on one rank": lambda: get_optimizer(_renamed(), [make_model()]),
    "nothing to train anywhere": lambda: get_optimizer(CONFIG, [make_model().requires_grad_(False)]),
    "another model on one rank": lambda: get_optimizer(CONFIG, [_one_frozen_layer()]),
    "conflict on one rank": lambda: get_optimizer(
        CONFIG, [make_model()], {_VECTORS: {"wd_mult": 0.0}, _HEAD: {"wd_mult": _only_rank_1(1.0, 0.0)}}
    ),
    "a role missing on one rank": lambda: get_optimizer(
        CONFIG, [make_model()], pg_collection=_all_roles_but(_only_rank_1("mp", None))
    ),
    "a stranger in the groups of one rank": lambda: _groups(_only_rank_1(nn.Parameter(torch.zeros(3)), None)),
    "a 16-bit model on one rank": lambda: get_optimizer(
        CONFIG, [make_model(_only_rank_1(torch.float16, torch.float32))]
    ),
    "good after all": lambda: get_optimizer(CONFIG, [make_model()]),
}


class Stage(NamedTuple):
    """One rank's view of a model that is split over pipeline stages."""

    group_names: list[str]
    num_params: list[int]
    norm: float
    own_norm: float


def stages(folder: str) -> Stage:
    """Two pipeline stages with other parameters each: the same groups, one norm; and the files that are written."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layer = nn.Linear(3, 4) if rank == 0 else nn.Linear(4, 2, bias=False)
    groups = ProcessGroups(dp=None, expt_dp=None, mp=dist.group.WORLD, tp_ep_pp=dist.group.WORLD)
    config = OptimizerConfig(lr=1e-2, config_logger_dir=f"{folder}/logs")
    optimizer = get_optimizer(config, [layer], pg_collection=groups, dump_param_to_param_group_map=f"{folder}/map")
    layer(torch.ones(2, layer.in_features)).square().sum().backward()
    own = torch.stack([param.grad.norm() for param in layer.parameters()]).norm().item()
    norm = optimizer.step().grad_norm
    return Stage(
        [group["name"] for group in optimizer.param_groups],
        [len(group["params"]) for group in optimizer.param_groups],
        norm,
        own,
    )


def unwritable(path: str) -> str:
    """Ask for logs in a folder that rank 0 cannot write to."""
    try:
        get_optimizer(OptimizerConfig(lr=1e-2, config_logger_dir=path), [make_model()])
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def by_megatrons_function() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after some steps of the whole factory, and of the function that takes ready groups and process groups."""

    def trained(optimizer_of: Callable[[nn.Module], Optimizer]) -> dict[str, Tensor]:
        model = make_model()
        optimizer = optimizer_of(model)
        for step in range(3):
            optimizer.zero_grad()
            model(joined_batch(step).chunk(dist.get_world_size())[dist.get_rank()]).backward()
            optimizer.step()
        return weights(model)

    config = OptimizerConfig(lr=1e-2, use_distributed_optimizer=True)

    def from_groups(model: nn.Module) -> Optimizer:
        return _get_megatron_optimizer_based_on_param_groups(
            config,
            [model],
            _get_param_groups([model], config, None),
            None,
            None,
            dist.group.WORLD,
            dist.group.WORLD,
            0,
            dist.group.WORLD,
        )

    return trained(lambda model: get_optimizer(config, [model])), trained(from_groups)


class Asked(NamedTuple):
    """All results of one rank."""

    refused: dict[str, str]
    stage: Stage
    unwritable: str
    twice: tuple[dict[str, Tensor], dict[str, Tensor]]


def ask_everything(folder: str) -> Asked:
    """Run all programs in one world, because starting ranks takes most of the time."""
    blocked = Path(folder) / "file"
    if dist.get_rank() == 0:
        blocked.write_text("")
    dist.barrier()
    return Asked(refusals(), stages(folder), unwritable(f"{blocked}/logs"), by_megatrons_function())


# --- tests ---

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
    assert first.group_names == second.group_names == ["default", "*.bias or 1-D"]
    assert (first.num_params, second.num_params) == ([1, 1], [1, 0])
    assert first.norm == second.norm
    # Sums of squares in fp32 here, in fp64 there.
    assert first.norm == pytest.approx(math.hypot(first.own_norm, second.own_norm), rel=1e-6)


def test_rank_0_writes_the_files_of_all(asked: list[Asked], folder: Path) -> None:
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["optimizer_config.json", "optimizer_plan.txt"]
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
