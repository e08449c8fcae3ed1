"""Copies whose gradients need a sum over other ranks than replicas stay equal: summed, or the step is refused. Threads.

Steps succeeded without `finalize_model_grads`, and copies drifted 0.6 apart.
"""

from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_grid import Place, run_grid
from parity import roles_over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import finalize_model_grads, get_optimizer

ROLES = {"shared_embedding": "embd", "shared_position_embedding": "pos_embd", "pipeline_parallel": "pp"}
OVER_TP = ("sequence_parallel", "average_gradients_across_tp_domain")
MARKS = (*OVER_TP, *ROLES)
FLAT = {"use_distributed_optimizer": True}
SPREADS: dict[str, dict[str, Any]] = {"replicated": {}, "flat": FLAT}
WRAPPED = {**SPREADS, "overlap": {**FLAT, "overlap_grad_reduce": True, "overlap_param_gather": True}}
STEPS = 3
DP = 2
DECAY = 0.5
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 1.0, "sgd_momentum": 0.0, "clip_grad": 0.0}


class Net(nn.Module):
    """A copied parameter, one that some ranks do not use, and others. Stages may hold them in another order."""

    def __init__(self, mark: str, peer: int):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"before": (65,), "copy": (40, 3), "seldom": (33,), "after": (7,)}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for name in reversed(values) if peer and mark not in OVER_TP else values:
            self.register_parameter(name, nn.Parameter(values[name]))
        for param in (self.copy, self.seldom):
            setattr(param, mark, True)
            if mark not in OVER_TP:
                param.shared = peer > 0  # so that the norm counts one copy

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(name) * grad).sum() for name, grad in grads.items()]).sum()


def grads_of(step: int, dp: int, peer: int, micro: int = 0) -> dict[str, Tensor]:
    """Sums of these 64ths are exact. Peers have equal gradients of what is not marked; few ranks use `seldom`."""
    found = {}
    for number, (name, param) in enumerate(Net("sequence_parallel", 0).named_parameters()):
        seed = 1000 * step + 100 * number + 10 * dp + (peer if name in ("copy", "seldom") else 0) + 5 * micro
        if name != "seldom" or (step == 1 and (dp, peer) == (0, 1)):
            numbers = torch.randint(-64, 65, param.shape, generator=torch.Generator().manual_seed(seed))
            found[name] = numbers.float() / 64
    return found


def check(mark: str, ranks: list[tuple[dict[str, Tensor], list[float]]], *, unused: bool) -> None:
    """Compare with SGD in float64, whose gradients are means over replicas of sums (or means) over peers.

    With `unused`, a parameter that no rank used has no gradient; in a wrapper's buffer it has zeros.
    """
    weights = {name: p.detach().double() for name, p in Net(mark, 0).named_parameters()}
    norms = []
    for step in range(STEPS):
        sums: dict[str, Any] = {} if unused else dict.fromkeys(weights, 0.0)
        for at, micro, peer in ((at, micro, peer) for at in range(DP) for micro in range(2) for peer in range(2)):
            for name, grad in grads_of(step, at, peer, micro).items():
                is_mean = name not in ("copy", "seldom") or mark == "average_gradients_across_tp_domain"
                sums[name] = sums.get(name, 0) + grad.double() / (DP * (2 if is_mean else 1))
        norms.append(sum(float(torch.as_tensor(grad).square().sum()) for grad in sums.values()) ** 0.5)
        weights |= {name: weights[name] * (1 - DECAY) - grad for name, grad in sums.items()}
    for of_rank, norms_of_rank in ranks:
        for name, weight in weights.items():
            assert torch.equal(of_rank[name], ranks[0][0][name]), name
            torch.testing.assert_close(of_rank[name].double(), weight, rtol=1e-6, atol=1e-6)
        if mark in OVER_TP:  # what is not marked is on both stages, and would count twice
            assert norms_of_rank == pytest.approx(norms, rel=1e-6)


def made(grid: Place, mark: str, *, wrapped: bool = False, chunk: int | None = None, **fields: Any) -> Any:
    """Models, and their optimizer; two neighbours of a grid are tensor-parallel ranks, or stages that hold copies."""
    roles = roles_of(grid, mark)
    nets: list[nn.Module] = [Net(mark, grid.tp.rank) for _ in range(chunk or 1)]
    if wrapped:
        ddp = DistributedDataParallelConfig(**fields)
        nets = [DistributedDataParallel(ddp, net, groups=roles, chunk=number) for number, net in enumerate(nets)]
    config = OptimizerConfig(**SGD, weight_decay=DECAY, **{k: v for k, v in fields.items() if "grad" not in k})
    return nets, get_optimizer(config, nets, {}, pg_collection=roles)


def roles_of(grid: Place, mark: str, *, knows_stages: bool = True) -> Roles:
    axes = Axes(dp=grid.dp, tp=grid.tp if mark in OVER_TP else Alone())
    known = {ROLES[mark]: grid.tp} if mark in ROLES and knows_stages else {}
    return Roles(dense=axes, expert=axes, everyone=grid.world, known_peers=known)


def backward(model: nn.Module, grid: Place, step: int) -> None:
    """Of two microbatches."""
    for micro in range(2):
        with model.no_sync() if isinstance(model, DistributedDataParallel) and micro == 0 else nullcontext():
            model(grads_of(step, grid.dp.rank, grid.tp.rank, micro)).backward()


@pytest.mark.parametrize(
    ("wrapped", "fields"), [(False, SPREADS[s]) for s in SPREADS] + [(True, w) for w in WRAPPED.values()]
)
@pytest.mark.parametrize("mark", MARKS)
def test_grads_of_copies_are_summed_once_or_the_step_is_refused(
    mark: str, wrapped: bool, fields: dict[str, Any]
) -> None:
    """A step completes those of plain modules; `finalize_model_grads` those of a wrapper, also if it is called twice.

    Also of a parameter that only one rank uses, in one step; and again in a step on the same gradients.
    """

    def rank_main(grid: Place) -> tuple[dict[str, Tensor], list[float]]:
        (model,), optimizer = made(grid, mark, wrapped=wrapped, **fields)
        net = model.module if wrapped else model
        norms = []
        for step in range(STEPS):
            backward(model, grid, step)
            before = [param.detach().clone() for param in model.parameters()]
            if wrapped:
                with pytest.raises(RuntimeError, match=rf"is marked {mark}[^$]*call opt_stack\.finalize_model_grads"):
                    optimizer.step() if step else optimizer.prepare_grads()  # it was called for the step before only
                assert all(map(torch.equal, model.parameters(), before))
                for _ in range(2):
                    finalize_model_grads([model])
            norms.append(optimizer.step().grad_norm)
            if wrapped:
                model.finish_param_sync()
            weights = {name: param.detach().clone() for name, param in net.named_parameters()}
            if step == STEPS - 1 and not wrapped:
                assert [optimizer.step().grad_norm for _ in range(2)] == norms[-1:] * 2
            optimizer.zero_grad()
        if wrapped:
            backward(model, grid, 0)
            model.mark_finalized()
            assert optimizer.step().success
        return weights, norms

    check(mark, run_grid(rank_main), unused=not wrapped)


def test_chunks_with_copies_are_finalized_in_one_call() -> None:
    """Two chunks of one stage hold copies of a parameter: their gradients are summed only if both are passed."""

    def rank_main(grid: Place) -> None:
        chunks, optimizer = made(grid, "pipeline_parallel", wrapped=True, chunk=2)
        for calls in ([chunks[:1], chunks[1:]], [chunks]):
            for number, chunk in enumerate(chunks):
                chunk(grads_of(1, grid.dp.rank, grid.tp.rank, number)).backward()
            for call in calls:
                finalize_model_grads(call)
            if len(calls) == 2:
                with pytest.raises(RuntimeError, match="with all 2 chunks"):
                    optimizer.step()
            else:
                assert optimizer.step().success
            optimizer.zero_grad()
        assert torch.equal(chunks[0].module.copy, chunks[1].module.copy)

    run_grid(rank_main)


@pytest.mark.parametrize("mark", ROLES)
def test_a_copy_with_unknown_stages_is_refused_on_every_rank(mark: str) -> None:
    role = {"shared_embedding": "embd", "shared_position_embedding": "pos_embd", "pipeline_parallel": "pp"}[mark]

    def rank_main(grid: Place) -> None:
        roles = roles_of(grid, mark, knows_stages=False)
        net = Net(mark, grid.tp.rank)
        with pytest.raises(ValueError, match=f"is marked {mark}, but the group {role} is not given"):
            get_optimizer(OptimizerConfig(), [net], {}, pg_collection=roles)
        with pytest.raises(ValueError, match=f"is marked {mark}, but the group {role} is not given"):
            finalize_model_grads([DistributedDataParallel(DistributedDataParallelConfig(), net, groups=roles)])

    run_grid(rank_main)


@pytest.mark.parametrize("scales", [False, True], ids=["finalize twice", "scale"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_sum_over_tokens_that_nobody_divides_is_refused(wrapped: str, scales: bool) -> None:
    tokens = 64  # of which each of two replicas has a half

    def rank_main(comm: Comm) -> float:
        ddp = DistributedDataParallelConfig(**WRAPPED[wrapped])
        net = Net("sequence_parallel", 0)
        model = DistributedDataParallel(ddp, net, groups=roles_over(comm), calculate_per_token_loss=True)
        optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], {})
        model(grads_of(0, comm.rank, 0)).backward()
        for finalize in (lambda: None, lambda: finalize_model_grads([model])):  # without a number of tokens
            finalize()
            with pytest.raises(RuntimeError, match=r"call opt_stack\.finalize_model_grads\(model_chunks, num_tokens"):
                optimizer.step()
        if scales:
            model.finish_grad_sync()
            model.scale_gradients(1 / tokens)
        else:
            for _ in range(2):
                finalize_model_grads([model], tokens // 2)
        return optimizer.step().grad_norm

    sums = [grads_of(0, 0, 0)[name] + grads_of(0, 1, 0)[name] for name in grads_of(0, 0, 0)]
    expected = torch.cat([each.flatten() for each in sums]).norm().item() / tokens
    assert run_threads(2, rank_main) == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_norms_of_queries_are_summed_if_marked_partial(wrapped: bool, partial: bool) -> None:
    """Each tensor-parallel rank applies them to its own heads; only the model's config says so."""

    def rank_main(grid: Place) -> list[float]:
        net = nn.Sequential(OrderedDict(q_layernorm=nn.Linear(3, 1, bias=False)))
        nn.init.ones_(net.q_layernorm.weight)
        net.config = SimpleNamespace(qk_layernorm=partial)
        ddp = DistributedDataParallelConfig()
        model = DistributedDataParallel(ddp, net, groups=grid.roles) if wrapped else net
        optimizer = get_optimizer(OptimizerConfig(**SGD, weight_decay=0.0), [model], {}, pg_collection=grid.roles)
        model(torch.full((1, 3), 0.25 * (1 + grid.tp.rank) if partial else 0.5)).sum().backward()
        if wrapped and partial:
            with pytest.raises(RuntimeError, match=r"q_layernorm\.weight' is not complete"):
                optimizer.step()
        if wrapped:
            finalize_model_grads([model])
        optimizer.step()
        return net.q_layernorm.weight.flatten().tolist()

    assert run_grid(rank_main) == [[0.25 if partial else 0.5] * 3] * 4
