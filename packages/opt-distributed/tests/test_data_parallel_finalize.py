"""finalize_model_grads: gradients of a model cut over ranks and stages become those of the whole."""

from collections.abc import Callable

import pytest
import torch
from data_parallel_net import over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_distributed.finalize import finalize_model_grads

CONFIGS = {
    "replicated": DistributedDataParallelConfig(),
    "flat": DistributedDataParallelConfig(use_distributed_optimizer=True),
}


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


class Scales(nn.Module):
    """Three vectors whose gradients are the sums of their inputs' rows."""

    def __init__(self, **attributes: str) -> None:
        super().__init__()
        self.partial = nn.Parameter(torch.ones(100, dtype=torch.float64))
        self.equal = nn.Parameter(torch.ones(30, dtype=torch.float64))
        self.own = nn.Parameter(torch.ones(70, dtype=torch.float64))
        self.partial.sequence_parallel = True  # type: ignore[attr-defined]
        self.equal.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        self.equal.sequence_parallel = True  # type: ignore[attr-defined]  # what is both is averaged

    def forward(self, value: float) -> Tensor:
        return value * (self.partial.sum() + self.equal.sum() + self.own.sum())


def owned_values(ddp: DistributedDataParallel) -> dict[str, set[float]]:
    """The distinct values of this rank's gradients, by name."""
    found: dict[str, set[float]] = {}
    for buffer in ddp.synced_buffers:
        for piece in buffer.owned():
            grad = buffer.grad(piece.id, piece.of_param)
            found.setdefault(piece.id.name, set()).update(grad.flatten().tolist())
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tensor_parallel_ranks_sum_partial_gradients_and_average_equal_ones(
    config: DistributedDataParallelConfig,
) -> None:
    rows, columns = [World(2), World(2)], [World(2), World(2)]  # of data-parallel, of tensor-parallel ranks

    def rank_main(comm: ThreadComm) -> dict[str, set[float]]:
        tp, dp = divmod(comm.rank, 2)
        ddp = DistributedDataParallel(config, Scales(), groups=over(ThreadComm(rows[tp], dp)))
        backward(ddp(10.0**comm.rank))
        finalize_model_grads([ddp], pg_collection={"tp": ThreadComm(columns[dp], tp)})
        return owned_values(ddp)

    found = run_threads(4, rank_main)
    own = [(1 + 10) / 2, (100 + 1000) / 2]  # the means over the data-parallel ranks, on each tensor-parallel rank
    for tp in range(2):
        joined: dict[str, set[float]] = {}
        for values in found[2 * tp : 2 * tp + 2]:
            for name, of_name in values.items():
                joined.setdefault(name, set()).update(of_name)
        assert joined == {"partial": {sum(own)}, "equal": {sum(own) / 2}, "own": {own[tp]}}


class Stage(nn.Module):
    """A stage with its copy of the tied embedding, among parameters that differ from stage to stage."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(sizes[0], dtype=torch.float64))
        self.embedding = nn.Parameter(torch.ones(40, 5, dtype=torch.float64))
        self.embedding.shared_embedding = True  # type: ignore[attr-defined]
        self.after = nn.Parameter(torch.ones(sizes[1], dtype=torch.float64))

    def forward(self, value: float) -> Tensor:
        return value * (self.before.sum() + self.embedding.sum() + self.after.sum())


class Router(nn.Module):
    """What a balancing router is known by, and a weight of its own."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("expert_bias", torch.tensor([0.5, 0.0, -0.5, 0.0]))
        self.register_buffer("local_tokens_per_expert", tokens)


def test_router_biases_follow_the_tokens_of_all_ranks_that_route_with_them() -> None:
    """Expert 1 has the mean, though no rank alone says so; a router without a bias stays as it is."""
    tokens = torch.tensor([[[9, 1, 0, 2], [0, 4, 0, 0]], [[0, 0, 0, 2], [0, 1, 0, 5]]])  # by tp, by dp; sums 9 6 0 9
    rows, columns = [World(2), World(2)], [World(2), World(2)]

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        tp, dp = divmod(comm.rank, 2)
        without = Router(tokens[tp, dp].clone())
        without.expert_bias = None
        routers = nn.ModuleList([Router(tokens[tp, dp].clone()), without, Router(tokens[tp, dp].double())])
        ddp = DistributedDataParallel(CONFIGS["flat"], routers, groups=over(ThreadComm(rows[tp], dp)))
        peers = {"tp": ThreadComm(columns[dp], tp)}
        finalize_model_grads([ddp], pg_collection=peers, router_bias_update_rate=0.25)
        assert without.local_tokens_per_expert.equal(tokens[tp, dp])
        assert not any(routers[i].local_tokens_per_expert.any() for i in (0, 2))
        finalize_model_grads([ddp], pg_collection=peers, router_bias_update_rate=0.25)  # no tokens: no change
        return [routers[0].expert_bias, routers[2].expert_bias]

    for biases in run_threads(4, rank_main):
        for bias in biases:
            assert bias.tolist() == [0.25, 0.0, -0.25, -0.25]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_gradients_are_divided_by_the_tokens_of_all_replicas_as_the_last_stage_counts_them(
    config: DistributedDataParallelConfig,
) -> None:
    rows, columns = [World(2), World(2)], [World(2), World(2)]

    def rank_main(comm: ThreadComm) -> dict[str, set[float]]:
        stage, dp = divmod(comm.rank, 2)
        groups = over(ThreadComm(rows[stage], dp))
        ddp = DistributedDataParallel(config, Stage(3, 3), groups=groups, calculate_per_token_loss=True)
        backward(ddp(12.0 * (1 + dp)))
        tokens = torch.tensor([3.0 + 2.0 * dp if stage == 1 else 999.0])  # the first stage knows nothing
        finalize_model_grads([ddp], tokens, pg_collection={"pp": ThreadComm(columns[dp], stage)})
        assert tokens.item() in (3, 5, 999)
        return owned_values(ddp)

    for values in run_threads(4, rank_main):
        assert all(of_name == {(12.0 + 24.0) / 8} for of_name in values.values())


def test_tokens_of_all_optimizer_instances_are_counted() -> None:
    """Two instances of two shards: gradients are sums over all four ranks, so the tokens must be, too."""
    rows, columns = [World(2), World(2)], [World(2), World(2)]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)

    def rank_main(comm: ThreadComm) -> dict[str, set[float]]:
        instance, shard = divmod(comm.rank, 2)
        axes = Axes(dp=ThreadComm(rows[instance], shard), tp=Alone(), inter=ThreadComm(columns[shard], instance))
        groups = Roles(dense=axes, expert=axes, everyone=comm)
        ddp = DistributedDataParallel(config, Stage(3, 3), groups=groups, calculate_per_token_loss=True)
        backward(ddp(2.0**comm.rank))
        finalize_model_grads([ddp], [1, 2, 2, 3][comm.rank])
        return owned_values(ddp)

    for values in run_threads(4, rank_main):
        assert all(of_name == {(1.0 + 2.0 + 4.0 + 8.0) / (1 + 2 + 2 + 3)} for of_name in values.values())


def test_tokens_may_be_a_number_and_groups_come_third() -> None:
    ddp = DistributedDataParallel(CONFIGS["flat"], Stage(3, 3), groups=over(Alone()), calculate_per_token_loss=True)
    ddp(torch.ones(2, 3)).sum().backward()
    ddp.start_grad_sync()
    before = [param.main_grad.clone() for param in ddp.parameters()]
    finalize_model_grads([ddp], 4, {})
    assert all(torch.equal(param.main_grad, grad / 4) for param, grad in zip(ddp.parameters(), before))
    assert any(grad.any() for grad in before)


def test_a_batch_without_tokens_divides_by_one() -> None:
    ddp = DistributedDataParallel(CONFIGS["flat"], Stage(3, 3), groups=over(Alone()), calculate_per_token_loss=True)
    backward(ddp(0.0))
    finalize_model_grads([ddp], torch.tensor(0))
    assert all(of_name == {0.0} for of_name in owned_values(ddp).values())


def test_rates_of_routers_that_differ_between_ranks_are_refused_on_every_rank() -> None:
    """Biases of the same routers drifted apart in silence."""

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(CONFIGS["flat"], Router(torch.ones(4)), groups=over(comm))
        with pytest.raises(ValueError, match=r"router_bias_update_rate is \[0\.25, 0\.5\] on ranks that share routers"):
            finalize_model_grads([ddp], router_bias_update_rate=0.5 if comm.rank == 1 else 0.25)

    run_threads(3, rank_main)


REFUSALS: dict[str, tuple[Callable[[], None], str]] = {
    "a plain module": (lambda: finalize_model_grads([nn.Linear(2, 2)]), "model chunk 0 is a Linear; wrap it"),  # type: ignore[list-item]
    "tokens of means": (
        lambda: finalize_model_grads(
            [DistributedDataParallel(CONFIGS["flat"], nn.Linear(2, 2), groups=over(Alone()))], torch.tensor(1)
        ),
        "averages gradients; wrap it with calculate_per_token_loss=True",
    ),
    "biases that flee the balance": (
        lambda: finalize_model_grads([], router_bias_update_rate=-0.1),
        "router_bias_update_rate=-0.1; pass a rate above 0",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_would_be_wrong_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
