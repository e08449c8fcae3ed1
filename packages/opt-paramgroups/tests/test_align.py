"""All ranks have the same groups: ranks as threads with different parameters, and failures that reach every rank."""

import threading
from concurrent.futures import ThreadPoolExecutor

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
STAGES = {
    1: (Model,),
    2: (Model, Experts),
    4: (lambda: nn.Embedding(3, 2), nn.Identity, Experts, lambda: nn.ModuleDict({"block": Block(4), "model": Model()})),
}


def run(models, overrides, config=CONFIG):
    """The groups of each rank, or its error; ranks are threads. `overrides` may be a function of the rank."""
    size = len(models)
    values = [None] * size
    calls = [0] * size
    barrier = threading.Barrier(size, timeout=30)

    def outcome(rank):
        def gather(value):
            calls[rank] += 1
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        try:
            given = overrides(rank) if callable(overrides) else overrides
            return get_param_groups([models[rank]], config, given, gather=gather)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(outcome, range(size)))
    assert calls == [1] * size
    return found


def identity(group):
    """A group without the entries that differ between ranks."""
    return {entry: value for entry, value in group.items() if entry not in ("params", "param_ids")}


@pytest.mark.parametrize("size", STAGES)
def test_ranks_with_different_parameters_get_identical_groups(size):
    models = [stage() for stage in STAGES[size]]
    groups = run(models, OVERRIDES)
    described = [[identity(group) for group in local] for local in groups]
    assert all(each == described[0] for each in described)
    assert len(described[0]) >= 4
    for model, local in zip(models, groups, strict=True):
        assert sum(len(group["params"]) for group in local) == len(list(model.parameters()))


def test_the_names_do_not_depend_on_who_holds_what():
    one = run([Model(), Experts()], OVERRIDES)
    two = run([Experts(), Model()], OVERRIDES)
    assert list(map(identity, one[0])) == list(map(identity, two[0]))


def test_a_pattern_needs_a_match_on_one_rank_only():
    groups = run([Model(), Experts()], {ParamKey(name="experts.*"): {"max_lr": 1.0}})
    assert [len(group["params"]) for group in groups[0] if group["name"] == "experts.* (experts)"] == [0]


def test_norms_of_queries_and_keys_are_needed_on_one_rank_only():
    """A stage of a pipeline without attention is no error, but a whole model without is, on every rank."""
    config = OptimizerConfig(lr=1.0, apply_wd_to_qk_layernorm=True)
    for models, are_built in (([Model(), Experts()], True), ([Experts(), Experts()], False)):
        found = run(models, None, config)
        assert [isinstance(groups, list) for groups in found] == [are_built] * 2
        assert are_built or {str(error) for error in found if "has no effect" in str(error)} == {str(found[0])}


def test_a_parameter_frozen_on_one_rank_is_refused_on_none():
    frozen = Experts().requires_grad_(False)
    assert run([nn.Identity(), frozen], {ParamKey(name="router.weight"): {"max_lr": 1.0}}) == [[], []]


def raising(error):
    def answer(*arguments):
        raise error

    return answer


BROKEN = ParamKey(with_name_predicate=ParamWithNamePredicate("broken", raising(RuntimeError("my predicate is wrong"))))
SILENT = ParamKey(predicate=ParamPredicate("silent", raising(AssertionError())))
CONTRADICTION = (
    "parameter 'experts.0.bias': key '*.bias' sets 'wd_mult' to 0.0, key 'experts.*' to 0.5; set it in "
    "one of them only, or let them match different parameters"
)
DIFFERENT = "the same keys make different groups; give every rank the same overrides, and different predicates"
BIAS = ParamKey(name="*.bias")
ROUTER = ParamKey(name="router.weight")
UNKNOWN = "config_overrides[*.bias]: wd_mul=0.0: unknown"
ONE_BROKEN = ["rank 1: my predicate is wrong", "my predicate is wrong"]
FAILING = {
    "a pattern that no rank matches": (
        [Experts(), Experts()], {ParamKey(name="nowhere"): {"max_lr": 1.0}},
        ["config_overrides[nowhere]: matches no parameter."] * 2,
    ),
    "a misspelt entry of one rank": (
        [Experts(), Experts()], lambda rank: {BIAS: {["wd_mult", "wd_mul"][rank]: 0.0}},
        [f"rank 1: {UNKNOWN}", UNKNOWN],
    ),
    "a contradiction on one rank": (
        [Model(), Experts(), nn.Identity()], {BIAS: {"wd_mult": 0.0}, ParamKey(name="experts.*"): {"wd_mult": 0.5}},
        [f"rank 1: {CONTRADICTION}", CONTRADICTION, f"rank 1: {CONTRADICTION}"],
    ),
    "an error of the caller": ([nn.Identity(), Experts()], {BROKEN: {"wd_mult": 0.0}}, ONE_BROKEN),
    "an error without words": (
        [nn.Identity(), Experts()], {SILENT: {"wd_mult": 0.0}}, ["rank 1: AssertionError()", ""],
    ),
    "different overrides": (
        [Experts(), Experts()], lambda rank: {BIAS: {"wd_mult": float(rank)}},
        [f"config_overrides: '*.bias': {DIFFERENT}"] * 2,
    ),
    "different overrides, merged on one rank": (
        [Experts(), Experts()],
        lambda rank: {ROUTER: {"max_lr": 1.0}, ParamKey(name="router.bias"): {"max_lr": 1.0 + rank}},
        [f"config_overrides: 'router.bias': {DIFFERENT}"] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("models", "overrides", "messages"), FAILING.values(), ids=FAILING)
def test_an_error_of_one_rank_is_raised_on_all(models, overrides, messages):
    errors = run(models, overrides)
    assert [type(error) for error in errors[:1]] == [ConfigError]
    assert [str(error)[: len(message)] for error, message in zip(errors, messages, strict=True)] == messages
