"""What `qk_clip` refuses, on every rank, and when it writes nothing."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from qk_model import DIM, GROUPS, HEADS, LOGITS, Model, build, layers_of, roles_of

from opt_config import ConfigError
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.threads import ThreadComm, World, run_threads
from opt_stack import Optimizer, QKClip
from opt_stack.qk_clip import Attention, separate_qk


@pytest.mark.parametrize("given", [[100.0, -5.0, 0.0, 3.0], [math.nan, 1.0, 1.0, 1.0], [math.inf, 1.0, 1.0, 1.0]])
def test_nothing_is_written_without_a_finite_logit_above_the_threshold(given: Sequence[float]) -> None:
    model = Model()
    _, optimizer = build(model, roles_of(Alone()))
    versions = [param._version for param in model.parameters()]
    largest = QKClip(optimizer, layers_of(model))([torch.tensor(given)] * 3)
    assert largest == (given[0] if given[0] == 100.0 else math.inf), "a NaN may not be dropped by a maximum over ranks"
    assert [param._version for param in model.parameters()] == versions


def test_an_infinite_logit_leaves_its_layer_alone_where_another_is_clipped() -> None:
    model = Model()
    _, optimizer = build(model, roles_of(Alone()))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    QKClip(optimizer, layers_of(model))([torch.full((HEADS,), math.inf), LOGITS, torch.zeros(HEADS)])
    stayed = {name for name, param in model.named_parameters() if torch.equal(param, before[name])}
    assert stayed == before.keys() - {"query", "key", "key_bias"}


def of(model: Any, **numbers: int) -> list[Attention]:
    given = {"num_heads": HEADS, "num_query_groups": GROUPS, "head_dim": DIM} | numbers
    return [separate_qk(model.query, model.key, **given)]


REFUSED: dict[str, tuple[Callable[[Any, Optimizer], object], str]] = {
    "threshold": (lambda m, o: QKClip(o, [], threshold=0.0), "threshold=0.0; it must be above 0"),
    "alpha": (lambda m, o: QKClip(o, [], alpha=1.5), "alpha=1.5; the query's share"),
    "groups": (lambda m, o: QKClip(o, of(m, num_query_groups=3)), "4 heads do not divide into 3 query groups"),
    "rows": (lambda m, o: QKClip(o, of(m, head_dim=4)), r"'query' has shape \(12, 5\), but 2 query groups of 8 rows"),
    "frozen": (lambda m, o: QKClip(o, of(Model())), r"does not train a parameter of shape \(12, 5\)"),
    "twice": (lambda m, o: QKClip(o, [*of(m), *of(m)]), "'query' is in layers twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused_on_every_rank(name: str) -> None:
    make, message = REFUSED[name]

    def rank_main(comm: ThreadComm) -> None:
        model = Model()
        _, optimizer = build(model, roles_of(comm))
        with pytest.raises(ConfigError, match=message):
            make(model, optimizer)

    run_threads(2, rank_main)


def test_replicas_with_other_layers_are_refused_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> None:
        model = Model()
        _, optimizer = build(model, roles_of(comm))
        with pytest.raises(ConfigError, match="ranks differ in threshold, alpha or layers"):
            QKClip(optimizer, layers_of(model)[: 2 + comm.rank])

    run_threads(2, rank_main)


def test_a_rule_that_evaluates_other_weights_is_refused() -> None:
    model = Model()
    _, optimizer = build(model, roles_of(Alone()), optimizer="schedule_free", sgd_momentum=0.9)
    with pytest.raises(ConfigError, match="is updated by schedule_free, which keeps other weights in its state"):
        QKClip(optimizer, layers_of(model))


WRONG: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "too many heads": (lambda: [torch.zeros(HEADS + 1)], "pass one number for each of its 4 heads"),
    "two dims": (lambda: [torch.zeros(HEADS, 1)], "pass one number for each of its 4 heads"),
    "no dim": (lambda: [torch.zeros(())], "pass one number for each of its 4 heads"),
    "no layer": (list, "has 0 entries; pass one for each of 1 layers"),
    "no tensor": (lambda: [[1.0] * HEADS], "max_logits of a layer is a list; pass a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_logits_that_do_not_fit_on_one_rank_are_refused_on_all_and_clip_nothing(name: str) -> None:
    """Two replicas of one stage, and a stage without layers."""
    given, message = WRONG[name]
    stages = [World(2).comms(), World(1).comms()]

    def rank_main(comm: ThreadComm) -> str:
        model = Model()
        _, optimizer = build(model, roles_of(stages[comm.rank // 2][comm.rank % 2], everyone=comm))
        clip = QKClip(optimizer, of(model) if comm.rank < 2 else [])
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(ValueError) as caught:
            clip([[LOGITS], given(), []][comm.rank])
        assert all(map(torch.equal, before, model.parameters()))
        if comm.rank < 2:
            assert clip([LOGITS]) == 400.0
            assert not torch.equal(before[3], model.query)
        else:
            assert clip([]) == 400.0
        return str(caught.value)

    found = run_threads(3, rank_main)
    assert message in found[1]
    assert all("max_logits do not fit the layers of QKClip on another rank" in found[rank] for rank in (0, 2))
