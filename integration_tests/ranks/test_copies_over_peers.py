"""Copies whose gradients need a sum over other ranks than replicas stay equal: summed, or the step is refused. Threads.

Steps succeeded without `finalize_model_grads`, and copies drifted 0.6 apart.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_stack import finalize_model_grads, get_optimizer

MARKS = (
    "sequence_parallel",
    "average_gradients_across_tp_domain",
    "shared_embedding",
    "shared_position_embedding",
    "pipeline_parallel",
)
OVER_TP = MARKS[:2]
CONFIGS = {
    "replicated": {},
    "flat": {"use_distributed_optimizer": True},
}
STEPS = 3


class Net(nn.Module):
    """A copied parameter, one that some ranks do not use, and others."""

    def __init__(self, mark: str, peer: int):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in {"before": (65,), "copy": (40, 3), "seldom": (33,), "after": (7,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        for param in (self.copy, self.seldom):
            setattr(param, mark, True)
            if mark not in OVER_TP:
                param.shared = peer > 0  # so that the norm counts one copy

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(name) * grad).sum() for name, grad in grads.items()]).sum()


def grads_of(step: int, dp: int, peer: int, micro: int) -> dict[str, Tensor]:
    """Sums of these 64ths are exact. Peers have equal gradients of what is not marked; few ranks use `seldom`."""
    found = {}
    for number, (name, param) in enumerate(Net("sequence_parallel", 0).named_parameters()):
        seed = 1000 * step + 100 * number + 10 * dp + (peer if name in ("copy", "seldom") else 0) + 5 * micro
        is_used = name != "seldom" or (step == 1 and (dp, peer) == (0, 1))
        if is_used:
            numbers = torch.randint(-64, 65, param.shape, generator=torch.Generator().manual_seed(seed))
            found[name] = numbers.float() / 64
    return found


class Place(NamedTuple):
    """One rank of dp x 2 ranks: a data-parallel replica, and one of two peers."""

    world: Comm
    dp: Comm
    peer: Comm

    def roles(self, mark: str, *, knows_stages: bool = True) -> Roles:
        axes = Axes(dp=self.dp, tp=self.peer if mark in OVER_TP else Alone())
        role = {
            "shared_embedding": "embedding",
            "shared_position_embedding": "positions",
            "pipeline_parallel": "pp",
        }
        known: dict[str, Any] = {role[mark]: self.peer} if mark in role and knows_stages else {}
        return Roles(dense=axes, expert=axes, everyone=self.world, **known)


def on_all(rank_main: Callable[[Place], Any], *, dp: int = 2) -> list[Any]:
    rows, columns = [World(dp) for _ in range(2)], [World(2) for _ in range(dp)]

    def start(comm: ThreadComm) -> Any:
        at, peer = divmod(comm.rank, 2)
        return rank_main(Place(comm, ThreadComm(rows[peer], at), ThreadComm(columns[at], peer)))

    return run_threads(2 * dp, start)


def config(mark: str, **changes: Any) -> OptimizerConfig:
    """Stages are not clipped: what is not marked is on both, and would count twice."""
    return OptimizerConfig(lr=0.05, weight_decay=0.1, clip_grad=0.5 if mark in OVER_TP else 0.0, **changes)


def truth(mark: str, *, dp: int, unused: bool) -> tuple[dict[str, Tensor], list[float]]:
    """One process that has the mean over replicas of the sums (or means) over peers.

    With `unused`, a parameter that no rank used has no gradient; in a wrapper's buffer it has zeros.
    """
    net = Net(mark, 0)
    optimizer = get_optimizer(config(mark), [net], {}, pg_collection=Roles(dense=ALONE, expert=ALONE, everyone=Alone()))
    norms = []
    for step in range(STEPS):
        for at in range(dp):
            for micro in range(2):
                for peer in range(2):
                    for name, grad in grads_of(step, at, peer, micro).items():
                        param = net.get_parameter(name)
                        is_mean = name not in ("copy", "seldom") or mark == "average_gradients_across_tp_domain"
                        param.grad = (0 if param.grad is None else param.grad) + grad / (dp * (2 if is_mean else 1))
        if not unused and net.seldom.grad is None:
            net.seldom.grad = torch.zeros_like(net.seldom)
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters()}, norms


ALONE = Axes(dp=Alone(), tp=Alone())


def check(mark: str, ranks: list[tuple[dict[str, Tensor], list[float]]], *, dp: int, unused: bool = False) -> None:
    """All copies are equal bit by bit, and those of one process except for the order of sums in the norm."""
    weights, norms = truth(mark, dp=dp, unused=unused)
    for of_rank, _ in ranks:
        for name, weight in weights.items():
            assert torch.equal(of_rank[name], ranks[0][0][name]), name
            torch.testing.assert_close(of_rank[name], weight, rtol=1e-5, atol=1e-6)
    if mark in OVER_TP:
        for _, of_rank in ranks:
            torch.testing.assert_close(of_rank, norms, rtol=1e-6, atol=0)


def trained(
    place: Place,
    mark: str,
    model: nn.Module,
    *,
    finalize: Callable[[list[nn.Module]], None] = lambda chunks: None,
    **changes: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms after steps of two microbatches each."""
    optimizer = get_optimizer(config(mark, **changes), [model], {}, pg_collection=place.roles(mark))
    norms = []
    for step in range(STEPS):
        for micro in range(2):
            with model.no_sync() if isinstance(model, DistributedDataParallel) and micro == 0 else nullcontext():
                model(grads_of(step, place.dp.rank, place.peer.rank, micro)).backward()
        finalize([model])
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    net = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: param.detach().clone() for name, param in net.named_parameters()}, norms


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("spread", CONFIGS)
@pytest.mark.parametrize("mark", MARKS)
def test_the_step_completes_the_gradients_of_plain_modules(mark: str, spread: str, dp: int) -> None:
    """Also of a parameter that only one rank uses, in one step: decay and momentum then apply on all or none."""
    ranks = on_all(
        lambda place: trained(place, mark, Net(mark, place.peer.rank), **CONFIGS[spread]),
        dp=dp,
    )
    check(mark, ranks, dp=dp, unused=True)


def wrap(place: Place, mark: str, *, chunk: int = 0, **settings: Any) -> DistributedDataParallel:
    per_token = settings.pop("calculate_per_token_loss", False)
    return DistributedDataParallel(
        DistributedDataParallelConfig(**settings),
        Net(mark, place.peer.rank),
        groups=place.roles(mark),
        calculate_per_token_loss=per_token,
        chunk=chunk,
    )


OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
WRAPPED: dict[str, dict[str, Any]] = {**CONFIGS, "overlap": OVERLAP}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("mark", MARKS)
def test_finalize_uses_the_groups_of_the_wrapper_and_sums_once(mark: str, wrapped: str, times: int) -> None:
    def rank_main(place: Place) -> Any:
        model = wrap(place, mark, **WRAPPED[wrapped])
        found = trained(
            place, mark, model, finalize=lambda chunks: [finalize_model_grads(chunks) for _ in range(times)]
        )
        model.finish_param_sync()
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}, found[1]

    check(mark, on_all(rank_main), dp=2)


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("mark", MARKS)
def test_a_step_without_finalize_is_refused_on_every_rank_and_the_next_one_may_follow(mark: str, wrapped: str) -> None:
    def rank_main(place: Place) -> str:
        model = wrap(place, mark, **WRAPPED[wrapped])
        optimizer = get_optimizer(config(mark), [model], {}, pg_collection=place.roles(mark))
        before = [param.detach().clone() for param in model.parameters()]
        model(grads_of(1, place.dp.rank, place.peer.rank, 0)).backward()
        with pytest.raises(RuntimeError, match=r"call opt_stack\.finalize_model_grads") as caught:
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        finalize_model_grads([model])
        assert optimizer.step().success
        optimizer.zero_grad()
        model(grads_of(1, place.dp.rank, place.peer.rank, 0)).backward()
        with pytest.raises(RuntimeError, match=r"call opt_stack\.finalize_model_grads"):
            optimizer.prepare_grads()  # it was called for the iteration before only
        model.mark_finalized()
        assert optimizer.step().success
        return str(caught.value)

    assert all(f"is marked {mark}" in message for message in on_all(rank_main))


def test_chunks_with_copies_are_finalized_in_one_call() -> None:
    """Two chunks of one stage hold copies of a parameter: their gradients are summed only if both are passed."""

    def rank_main(place: Place) -> None:
        mark = "pipeline_parallel"
        chunks = [wrap(place, mark, chunk=number) for number in range(2)]
        optimizer = get_optimizer(config(mark), chunks, {}, pg_collection=place.roles(mark))
        for is_apart in (True, False):
            for number, chunk in enumerate(chunks):
                chunk(grads_of(1, place.dp.rank, place.peer.rank, number)).backward()
            if is_apart:
                for chunk in chunks:
                    finalize_model_grads([chunk])
                with pytest.raises(RuntimeError, match="with all 2 chunks"):
                    optimizer.step()
            else:
                finalize_model_grads(chunks)
                assert optimizer.step().success
            optimizer.zero_grad()
        assert torch.equal(chunks[0].module.copy, chunks[1].module.copy)

    on_all(rank_main)


def test_plain_chunks_of_one_process_with_copies_stay_equal() -> None:
    chunks = [Net("pipeline_parallel", 0) for _ in range(2)]
    optimizer = get_optimizer(config("pipeline_parallel"), chunks, {})
    for number, chunk in enumerate(chunks):
        chunk(grads_of(1, 1, number, 0)).backward()
    optimizer.step()
    assert torch.equal(chunks[0].copy, chunks[1].copy)
    assert torch.equal(chunks[0].seldom, chunks[1].seldom)


def test_a_step_may_be_repeated_on_the_same_gradients() -> None:
    """The sum is written beside `param.grad`, so that a second step does not sum sums."""

    def rank_main(place: Place) -> list[float]:
        net = Net("sequence_parallel", place.peer.rank)
        optimizer = get_optimizer(
            config("sequence_parallel"), [net], {}, pg_collection=place.roles("sequence_parallel")
        )
        net(grads_of(1, place.dp.rank, place.peer.rank, 0)).backward()
        return [optimizer.step().grad_norm for _ in range(3)]

    for norms in on_all(rank_main):
        assert norms == norms[:1] * 3


@pytest.mark.parametrize("mark", MARKS[2:])
def test_a_copy_whose_stages_are_unknown_is_refused_on_every_rank(mark: str) -> None:
    role = {"shared_embedding": "embd", "shared_position_embedding": "pos_embd", "pipeline_parallel": "pp"}[mark]

    def rank_main(place: Place) -> None:
        roles = place.roles(mark, knows_stages=False)
        with pytest.raises(ValueError, match=f"is marked {mark}, but the group {role} is not given"):
            get_optimizer(config(mark), [Net(mark, place.peer.rank)], {}, pg_collection=roles)
        wrapped = DistributedDataParallel(DistributedDataParallelConfig(), Net(mark, place.peer.rank), groups=roles)
        with pytest.raises(ValueError, match=f"is marked {mark}, but the group {role} is not given"):
            finalize_model_grads([wrapped])

    on_all(rank_main)


def scaled(chunk: DistributedDataParallel, num_tokens: int) -> None:
    chunk.finish_grad_sync()
    chunk.scale_gradients(1 / num_tokens)


WAYS: dict[str, Callable[[DistributedDataParallel, int], Any]] = {
    "finalize": lambda chunk, tokens: finalize_model_grads([chunk], tokens // 2),  # each of two replicas has a half
    "finalize twice": lambda chunk, tokens: [finalize_model_grads([chunk], tokens // 2) for _ in range(2)],
    "scale": scaled,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_sum_over_tokens_that_nobody_divides_is_refused(wrapped: str, way: str) -> None:
    tokens = 64

    def rank_main(comm: ThreadComm) -> tuple[float, float]:
        axes = Axes(dp=comm, tp=Alone())
        place = Place(comm, comm, Alone())
        model = DistributedDataParallel(
            DistributedDataParallelConfig(**WRAPPED[wrapped]),
            Net("sequence_parallel", 0),
            groups=Roles(dense=axes, expert=axes, everyone=comm),
            calculate_per_token_loss=True,
        )
        optimizer = get_optimizer(config("sequence_parallel"), [model], {})
        model(grads_of(0, place.dp.rank, 0, 0)).backward()
        for finalize in (lambda: None, lambda: finalize_model_grads([model])):  # without a number of tokens
            finalize()
            with pytest.raises(RuntimeError, match=r"call opt_stack\.finalize_model_grads\(model_chunks, num_tokens"):
                optimizer.step()
        WAYS[way](model, tokens)
        sums = [sum(grads_of(0, at, 0, 0)[name] for at in range(2)) for name in grads_of(0, 0, 0, 0)]
        return optimizer.step().grad_norm, torch.cat([each.flatten() for each in sums]).norm().item() / tokens

    for norm, expected in run_threads(2, rank_main):
        assert norm == pytest.approx(expected, rel=1e-6)


class QkNorm(nn.Module):
    """A norm of queries, which each tensor-parallel rank applies to its own heads; only the model's config says so."""

    def __init__(self, *, partial: bool):
        super().__init__()
        self.config = SimpleNamespace(qk_layernorm=partial)
        self.q_layernorm = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.q_layernorm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_layernorm(x).sum()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_norms_of_queries_and_keys_are_summed_if_the_model_says_that_they_are_partial(
    wrapped: bool, partial: bool
) -> None:
    def rank_main(place: Place) -> list[float]:
        net, roles = QkNorm(partial=partial), place.roles("sequence_parallel")
        model = DistributedDataParallel(DistributedDataParallelConfig(), net, groups=roles) if wrapped else net
        settings = OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
        optimizer = get_optimizer(settings, [model], {}, pg_collection=roles)
        model(torch.full((1, 3), 0.25 * (1 + place.peer.rank) if partial else 0.5)).backward()
        if wrapped and partial:
            with pytest.raises(RuntimeError, match=r"q_layernorm\.weight' is not complete"):
                optimizer.step()
        if wrapped:
            finalize_model_grads([model])
        optimizer.step()
        return net.q_layernorm.weight.flatten().tolist()

    assert on_all(rank_main) == [[0.25 if partial else 0.5] * 3] * 4


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("mark", MARKS[2:])
def test_stages_may_hold_copies_in_another_order(mark: str, wrapped: bool) -> None:
    """The dtypes of other parameters, and the order of modules, decide on the order of buffers."""
    shapes = {"large": (24, 4), "small": (5, 2)}

    def rank_main(place: Place) -> list[list[float]]:
        net, names = nn.Module(), list(shapes)[:: 1 if place.peer.rank else -1]
        for name in names:
            param = nn.Parameter(torch.zeros(shapes[name]))
            setattr(param, mark, True)
            param.shared = place.peer.rank > 0
            net.register_parameter(name, param)
        roles = place.roles(mark)
        model = DistributedDataParallel(DistributedDataParallelConfig(), net, groups=roles) if wrapped else net
        settings = OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
        optimizer = get_optimizer(settings, [model], {}, pg_collection=roles)
        sum(param.sum() * (1 + number) for number, param in enumerate(map(net.get_parameter, shapes))).backward()
        if wrapped:
            finalize_model_grads([model])
        optimizer.step()
        return [net.get_parameter(name).unique().tolist() for name in shapes]

    assert on_all(rank_main, dp=1) == [[[-2.0], [-4.0]]] * 2
