"""All ranks have the same groups: ranks as threads with different parameters, and failures that reach every rank."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from models import Block, Experts, Model
from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate
from opt_paramgroups import get_param_groups

CONFIG = OptimizerConfig(lr=1e-2)
OVERRIDES = {
    ParamKey(name="*.bias"): {"wd_mult": 0.0},
    ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 1e-3},
    ParamKey(name="*.q_layernorm.*"): {"max_lr": 1e-4, "eps": 1e-6},
}

# What a pipeline of that many ranks may hold: a rank without parameters is one of them.
STAGES: dict[int, tuple[Callable[[], nn.Module], ...]] = {
    1: (Model,),
    2: (Model, Experts),
    4: (lambda: nn.Embedding(3, 2), nn.Identity, Experts, lambda: nn.ModuleDict({"block": Block(4), "model": Model()})),
}


class Ranks:
    """A gather for a number of threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.calls = [0] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def gather_of(self, rank: int) -> Callable[[Any], Sequence[Any]]:
        def gather(value: Any) -> list[Any]:
            self.calls[rank] += 1
            self.values[rank] = value
            self.barrier.wait()
            gathered = list(self.values)
            self.barrier.wait()
            return gathered

        return gather

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The results of all ranks, where an exception counts as a result."""

        def outcome(rank: int) -> Any:
            try:
                return work(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(outcome, range(self.size)))


def identity(group: dict[str, Any]) -> dict[str, Any]:
    """A group without the entries that differ between ranks."""
    return {entry: value for entry, value in group.items() if entry not in ("params", "param_ids")}


@pytest.mark.parametrize("size", STAGES)
def test_ranks_with_different_parameters_end_with_identical_groups(size):
    ranks = Ranks(size)
    models = [stage() for stage in STAGES[size]]
    groups = ranks.run(lambda rank: get_param_groups([models[rank]], CONFIG, OVERRIDES, gather=ranks.gather_of(rank)))
    described = [[identity(group) for group in local] for local in groups]
    assert all(each == described[0] for each in described)
    assert len(described[0]) >= 4
    assert ranks.calls == [1] * size
    for model, local in zip(models, groups, strict=True):
        assert sum(len(group["params"]) for group in local) == len(list(model.parameters()))


def test_the_names_do_not_depend_on_who_holds_what():
    forth, back = Ranks(2), Ranks(2)
    models = [Model(), Experts()]
    one = forth.run(lambda rank: get_param_groups([models[rank]], CONFIG, OVERRIDES, gather=forth.gather_of(rank)))
    two = back.run(lambda rank: get_param_groups([models[1 - rank]], CONFIG, OVERRIDES, gather=back.gather_of(rank)))
    assert list(map(identity, one[0])) == list(map(identity, two[0]))


def test_a_pattern_needs_a_match_on_one_rank_only():
    ranks = Ranks(2)
    overrides = {ParamKey(name="experts.*"): {"max_lr": 1.0}}
    models = [Model(), Experts()]
    groups = ranks.run(lambda rank: get_param_groups([models[rank]], CONFIG, overrides, gather=ranks.gather_of(rank)))
    assert [len(group["params"]) for group in groups[0] if group["name"] == "experts.* (experts)"] == [0]


def test_a_pattern_that_no_rank_matches_is_an_error_on_all():
    ranks = Ranks(2)
    overrides = {ParamKey(name="nowhere"): {"max_lr": 1.0}}
    errors = ranks.run(lambda rank: get_param_groups([Experts()], CONFIG, overrides, gather=ranks.gather_of(rank)))
    assert [str(error).startswith("config_overrides[nowhere]: matches no parameter.") for error in errors] == [True] * 2


def test_a_parameter_frozen_on_one_rank_gives_all_ranks_the_same_answer():
    ranks = Ranks(2)
    frozen = Experts().requires_grad_(False)
    overrides = {ParamKey(name="router.weight"): {"max_lr": 1.0}}
    models = [nn.Identity(), frozen]
    groups = ranks.run(lambda rank: get_param_groups([models[rank]], CONFIG, overrides, gather=ranks.gather_of(rank)))
    assert groups == [[], []]


def test_a_misspelt_entry_of_one_rank_is_every_ranks_error():
    ranks = Ranks(2)
    entries = ["wd_mult", "wd_mul"]
    errors = ranks.run(
        lambda rank: get_param_groups(
            [Experts()], CONFIG, {ParamKey(name="*.bias"): {entries[rank]: 0.0}}, gather=ranks.gather_of(rank)
        )
    )
    assert all("config_overrides[*.bias]: wd_mul=0.0: unknown entry" in str(error) for error in errors)


def test_one_ranks_contradiction_is_every_ranks_error():
    ranks = Ranks(3)
    overrides = {ParamKey(name="*.bias"): {"wd_mult": 0.0}, ParamKey(name="experts.*"): {"wd_mult": 0.5}}
    models = [Model(), Experts(), nn.Identity()]
    errors = ranks.run(lambda rank: get_param_groups([models[rank]], CONFIG, overrides, gather=ranks.gather_of(rank)))
    contradiction = (
        "parameter 'experts.0.bias': key '*.bias' sets 'wd_mult' to 0.0, key 'experts.*' to 0.5; set it in "
        "one of them only, or let them match different parameters"
    )
    assert [str(error) for error in errors] == [f"rank 1: {contradiction}", contradiction, f"rank 1: {contradiction}"]


def test_an_error_of_ones_own_reaches_every_rank():
    def answer(param: nn.Parameter, name: str) -> bool:
        raise RuntimeError("my predicate is wrong")

    ranks = Ranks(2)
    overrides = {ParamKey(with_name_predicate=ParamWithNamePredicate("broken", answer)): {"wd_mult": 0.0}}
    models = [nn.Identity(), Experts()]
    errors = ranks.run(lambda rank: get_param_groups([models[rank]], CONFIG, overrides, gather=ranks.gather_of(rank)))
    assert [type(error) for error in errors] == [ConfigError, RuntimeError]
    assert [str(error) for error in errors] == ["rank 1: my predicate is wrong", "my predicate is wrong"]


def test_an_error_without_words_reaches_every_rank_too():
    def answer(param: nn.Parameter) -> bool:
        raise AssertionError

    ranks = Ranks(2)
    overrides = {ParamKey(predicate=ParamPredicate("broken", answer)): {"wd_mult": 0.0}}
    models = [nn.Identity(), Experts()]
    errors = ranks.run(lambda rank: get_param_groups([models[rank]], CONFIG, overrides, gather=ranks.gather_of(rank)))
    assert [str(error) for error in errors] == ["rank 1: AssertionError()", ""]


def test_ranks_that_were_given_different_overrides_all_refuse():
    ranks = Ranks(2)
    errors = ranks.run(
        lambda rank: get_param_groups(
            [Experts()], CONFIG, {ParamKey(name="*.bias"): {"wd_mult": float(rank)}}, gather=ranks.gather_of(rank)
        )
    )
    assert [str(error) for error in errors] == [
        "config_overrides: '*.bias': the same keys make different groups; give every rank the same overrides, and "
        "different predicates different names"
    ] * 2


def test_different_overrides_are_seen_where_groups_happen_to_merge_on_one_rank():
    ranks = Ranks(2)
    errors = ranks.run(
        lambda rank: get_param_groups(
            [Experts()],
            CONFIG,
            {ParamKey(name="router.weight"): {"max_lr": 1.0}, ParamKey(name="router.bias"): {"max_lr": 1.0 + rank}},
            gather=ranks.gather_of(rank),
        )
    )
    assert ["'router.bias': the same keys make different groups" in str(error) for error in errors] == [True, True]
