"""Rank programs for the tests of the factory; importable, so that spawned processes find them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import refusal
from tiny_model import joined_batch, make_model, weights
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
