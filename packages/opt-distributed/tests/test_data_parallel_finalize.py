"""finalize_model_grads: gradients of a model cut over ranks and stages become those of the whole."""

from collections.abc import Callable

import pytest
import torch
from data_parallel_net import SHARDED, Config, backward, grid, of_axes, over
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Comm
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.finalize import finalize_model_grads

configs = pytest.mark.parametrize("config", [Config(), SHARDED], ids=["replicated", "flat"])
Grads = dict[str, set[float]]


def owned_values(ddp: DistributedDataParallel) -> Grads:
    """The distinct values of this rank's gradients, by name."""
    found: Grads = {}
    for buffer in ddp.synced_buffers:
        for piece in buffer.owned():
            values = buffer.grad(piece.id, piece.of_param).flatten().tolist()
            found.setdefault(piece.id.name, set()).update(values)
    return found


def on_grid(rank_main: Callable[[int, int, Comm, Comm], Grads]) -> list[Grads]:
    """Runs `rank_main(peer, dp rank, dp, peers)` on two data-parallel groups of two ranks, peers of each other."""
    worlds = grid()

    def start(comm: ThreadComm) -> Grads:
        axes = worlds(comm.rank)
        return rank_main(*divmod(comm.rank, 2), axes.dp, axes.inter)

    return run_threads(4, start)


def test_grads_marked_partial_and_equal_are_averaged_once() -> None:
    def rank_main(tp: int, dp: int, replicas: Comm, peers: Comm) -> Grads:
        model = nn.ParameterDict({"both": torch.ones(200).double()})
        model.both.sequence_parallel = model.both.average_gradients_across_tp_domain = True
        ddp = DistributedDataParallel(SHARDED, model, groups=over(replicas))
        backward((1.0 + 2 * tp) * model.both.sum())
        for _ in range(2):
            finalize_model_grads([ddp], pg_collection={"tp": peers})
        return owned_values(ddp)

    assert all(values == {"both": {2.0}} for values in on_grid(rank_main))


@configs
def test_gradients_are_divided_by_the_last_stages_token_count(config: Config) -> None:
    def rank_main(stage: int, dp: int, replicas: Comm, peers: Comm) -> Grads:
        model = nn.ParameterDict({"a": torch.ones(3).double(), "b": torch.ones(200).double()})
        ddp = DistributedDataParallel(config, model, groups=over(replicas), calculate_per_token_loss=True)
        backward(12.0 * (1 + dp) * (model.a.sum() + model.b.sum()))
        tokens = torch.tensor([3.0 + 2.0 * dp if stage == 1 else 999.0])  # the first stage knows nothing
        finalize_model_grads([ddp], tokens, pg_collection={"pp": peers})
        assert tokens.item() in (3, 5, 999)
        return owned_values(ddp)

    for values in on_grid(rank_main):
        assert all(of_name == {(12.0 + 24.0) / 8} for of_name in values.values())


def test_tokens_of_all_optimizer_instances_are_counted() -> None:
    """Two instances of two shards: gradients are sums over all four ranks, so the tokens must be, too. They may be
    numbers, and groups the third argument. A batch without tokens divides by one."""
    config = Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    worlds = grid()

    def rank_main(comm: ThreadComm) -> list[set[float]]:
        model = nn.Linear(200, 1, bias=False)
        groups = of_axes(worlds(comm.rank), comm)
        ddp = DistributedDataParallel(config, model, groups=groups, calculate_per_token_loss=True)
        found = []
        for tokens in ([1, 2, 2, 3], [0, 0, 0, 0]):
            ddp.zero_grad_buffer()
            backward(ddp(torch.full((1, 200), 2.0**comm.rank)).sum())
            finalize_model_grads([ddp], tokens[comm.rank], {})
            found += owned_values(ddp).values()
        return found

    for found in run_threads(4, rank_main):
        assert found == [{15 / 8}, {15.0}]


class Router(nn.Module):
    """The attributes by which a balancing router is known, and a weight."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("expert_bias", torch.tensor([0.5, 0.0, -0.5, 0.0]))
        self.register_buffer("local_tokens_per_expert", tokens)


def test_router_biases_follow_the_tokens_of_all_routing_ranks() -> None:
    """Expert 1 has the mean, though no rank alone says so; a router without a bias stays as it is."""
    tokens = torch.tensor([[[9, 1, 0, 2], [0, 4, 0, 0]], [[0, 0, 0, 2], [0, 1, 0, 5]]])  # by tp, by dp; sums 9 6 0 9

    def rank_main(tp: int, dp: int, replicas: Comm, peers: Comm) -> Grads:
        without = Router(tokens[tp, dp].clone())
        without.expert_bias = None
        routers = nn.ModuleList([Router(tokens[tp, dp].clone()), without, Router(tokens[tp, dp].double())])
        ddp = DistributedDataParallel(SHARDED, routers, groups=over(replicas))
        finalize_model_grads([ddp], pg_collection={"tp": peers}, router_bias_update_rate=0.25)
        assert without.local_tokens_per_expert.equal(tokens[tp, dp])
        assert not any(routers[i].local_tokens_per_expert.any() for i in (0, 2))
        finalize_model_grads([ddp], pg_collection={"tp": peers}, router_bias_update_rate=0.25)  # no tokens: no change
        assert routers[0].expert_bias.tolist() == routers[2].expert_bias.tolist() == [0.25, 0.0, -0.25, -0.25]
        return {}

    on_grid(rank_main)


def test_router_rates_that_differ_by_rank_are_refused_on_all() -> None:
    """Biases of the same routers drifted apart in silence."""

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(SHARDED, Router(torch.ones(4)), groups=over(comm))
        with pytest.raises(ValueError, match=r"router_bias_update_rate is \[0\.25, 0\.5\] on ranks that share routers"):
            finalize_model_grads([ddp], router_bias_update_rate=0.5 if comm.rank == 1 else 0.25)

    run_threads(3, rank_main)


REFUSALS: dict[str, Callable[[], None]] = {
    "model chunk 0 is a Linear; wrap it": lambda: finalize_model_grads([nn.Linear(2, 2)]),  # type: ignore[list-item]
    "averages gradients; wrap it with calculate_per_token_loss=True": lambda: finalize_model_grads(
        [DistributedDataParallel(SHARDED, nn.Linear(2, 2), groups=over(Alone()))], torch.tensor(1)
    ),
    "router_bias_update_rate=-0.1; pass a rate above 0": lambda: finalize_model_grads([], router_bias_update_rate=-0.1),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_would_be_wrong_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSALS[message]()
