"""fp8 experts under expert and tensor parallelism: values and norms of one process that holds everything. Threads."""

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_experts import (
    EP,
    GRIDS,
    SPREADS,
    Place,
    Resumed,
    Trained,
    built,
    dim_of,
    grads_alone,
    groups_of,
    own_grads,
    place_alone,
    place_on,
    resume,
    resume_everywhere,
    stepped,
    train,
    whole_grads,
)
from fp8_training import fp8_params, stored
from processes import Job, run_jobs
from torch import Tensor
from tp_model import comms_of, cut

from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.quantized import RECIPES

BY_PART = ("delayed", "tensorwise")  # recipes that give each tensor-parallel part a scale of its own
plain_or_wrapped = pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])


def grid(rank_main: Callable[[Place], Any], name: str) -> list[Any]:
    """Each rank's result on four threads."""
    comms = [comms_of(groups) for groups in groups_of(name)]

    def start(comm: ThreadComm) -> Any:
        return rank_main(place_on(name, comm, *[of_ranks[comm.rank] for of_ranks in comms]))

    return run_threads(4, start)


@cache
def trained_alone(recipe: str, num_replicas: int, **options: Any) -> Trained:
    return train(recipe, place_alone(), lambda step: grads_alone(step, num_replicas), **options)


def assert_same(found: Trained, alone: Trained, recipe: str, *, atol: float) -> None:
    weights, whole = ({n: h.weight + 0 for n, h in one.net.named_children()} for one in (found, alone))
    assert_parts_of(found.net.place, weights, whole, recipe, atol=atol)
    assert found.norms == pytest.approx(alone.norms, rel=1e-6)


def assert_parts_of(
    place: Place, weights: dict[str, Tensor], whole: dict[str, Tensor], recipe: str, *, atol: float
) -> None:
    """Parts have the values of the whole, within two codes if they have scales of their own; a step moves ten codes."""
    for name, weight in weights.items():
        tp = (place.roles.expert if name[-1].isdigit() else place.roles.dense).tp
        want = cut(whole[name], tp.rank, tp.size, dim=dim_of(name))
        is_scaled_alone = recipe in BY_PART and weight.dim() == 2 and tp.size > 1
        far = {"rtol": 1 / 8, "atol": 2e-3} if is_scaled_alone else {"rtol": 0.0, "atol": atol}
        torch.testing.assert_close(weight, want, **far)


LAYOUTS = [(recipe, "flat", wrapped) for recipe in RECIPES for wrapped in (False, True)]
LAYOUTS += [(recipe, spread, False) for recipe in ("delayed", "mxfp8") for spread in ("replicated", "whole")]


@pytest.mark.parametrize(("recipe", "spread", "wrapped"), LAYOUTS)
@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_of_experts_has_the_values_of_one_process(
    name: str, recipe: str, spread: str, wrapped: bool
) -> None:
    options = SPREADS[spread]
    rule = {key: value for key, value in options.items() if key.startswith(("optimizer", "muon"))}
    alone = trained_alone(recipe, EP * GRIDS[name][1], **rule)
    for found in grid(lambda place: train(recipe, place, own_grads(place), wrapped=wrapped, **options), name):
        # Muon sums its products in another order, so that a few values round to the next code.
        assert_same(found, alone, recipe, atol=2**-4 if spread == "whole" else 0.0)


def test_experts_gathered_through_the_gradients_have_the_codes_of_one_process() -> None:
    options = {"use_distributed_optimizer": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
    alone = trained_alone("mxfp8", 2 * EP, wrapped=True, **options)  # quantised from bf16 values, too
    for found in grid(lambda place: train("mxfp8", place, own_grads(place), wrapped=True, **options), "two replicas"):
        assert_same(found, alone, "mxfp8", atol=0.0)


@plain_or_wrapped
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_under_two_instances_have_the_codes_of_one_process(recipe: str, wrapped: bool) -> None:
    """Dense shards over the two ranks of an instance; each expert has one shard, and a replica in each instance."""
    alone = trained_alone(recipe, 4)
    dp, inter = comms_of([[0, 1], [2, 3]]), comms_of([[0, 2], [1, 3]])

    def rank_main(comm: ThreadComm) -> Trained:
        rank = comm.rank
        dense = Axes(dp=dp[rank], tp=Alone(), inter=inter[rank])
        expert = Axes(dp=Alone(), tp=Alone(), inter=inter[rank])
        place = Place(Alone(), Roles(dense=dense, expert=expert, everyone=comm), (rank % EP,), rank, 4)
        return train(recipe, place, own_grads(place), wrapped=wrapped, use_distributed_optimizer=True)

    for found in run_threads(4, rank_main):
        assert_same(found, alone, recipe, atol=0.0)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_an_overflow_in_one_expert_changes_no_byte_on_any_rank(recipe: str, name: str) -> None:
    def rank_main(place: Place) -> tuple[bool, bool]:
        net, chunk, optimizer = built(recipe, place, wrapped=True, use_distributed_optimizer=True)
        stepped(net, chunk, optimizer, own_grads(place), range(1))
        before = stored(net)
        grads = net.here(whole_grads(1, place.replica))
        if place.experts == (1,) and place.replica == 1:
            grads["down1"][0, 0] = torch.inf
        chunk(grads).backward()
        success = bool(optimizer.step().success)
        chunk.finish_param_sync()
        return success, stored(net).equals(before)

    assert grid(rank_main, name) == [(False, True)] * 4


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Resumed]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    job = Job(resume_everywhere, (str(folder), [*RECIPES], ["replicated", "flat"]))
    return folder, run_jobs(4, {"experts": job})["experts"]


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("spread", ["replicated", "flat"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_experts_continues_on_every_grid(
    recipe: str, spread: str, name: str, resumed: tuple[Path, list[dict[str, Resumed]]]
) -> None:
    """Saved on TP 2; every grid continues as one process that loads the same files."""
    folder, by_rank = resumed
    grads = partial(grads_alone, num_replicas=EP * GRIDS[name][1])
    alone = resume(place_alone(), recipe, f"{folder}/{recipe} {spread}", None, grads, **SPREADS[spread])
    places = grid(lambda place: place, name)
    for place, ranks in zip(places, by_rank, strict=True):
        found = ranks[f"{recipe} {spread} {name}"]
        assert_parts_of(place, found.weights, alone.weights, recipe, atol=0.0)
        assert found.norms == pytest.approx(alone.norms, rel=1e-6)


@pytest.mark.parametrize("spread", ["replicated", "flat"])
def test_experts_in_fp8_on_some_ranks_only_load_without_waiting_for_the_others(spread: str) -> None:
    """Ranks whose experts are not in fp8 have nothing to quantise after a load."""

    def rank_main(place: Place) -> bool:
        chosen = ("up1", "down1")
        net, chunk, optimizer = built("blockwise", place, **SPREADS[spread], in_fp8=lambda name: name in chosen)
        stepped(net, chunk, optimizer, own_grads(place), range(2))
        before, kept = stored(net), copy.deepcopy(optimizer.state_dict())
        stepped(net, chunk, optimizer, own_grads(place), range(2, 3))
        optimizer.load_state_dict(kept)
        assert len(fp8_params(net)) == (2 if place.experts == (1,) else 0)
        return all(map(torch.equal, sum(stored(net).fp8, ()), sum(before.fp8, ())))

    assert grid(rank_main, "two replicas") == [True] * 4
