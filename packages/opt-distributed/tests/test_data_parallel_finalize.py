"""finalize_model_grads: gradients of a model cut over ranks and stages become those of the whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.recording import RecordingComm
from opt_distributed.comm.threads import ThreadComm, World, run_threads
from opt_distributed.finalize import Peers, finalize_model_grads

CONFIGS = {
    "replicated": DistributedDataParallelConfig(),
    "flat": DistributedDataParallelConfig(use_distributed_optimizer=True),
}


def over(dp: Comm) -> Roles:
    axes = Axes(dp=dp, mp=Alone(), tp=Alone())
    return Roles(dense=axes, expert=axes, everyone=dp)


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
        finalize_model_grads([ddp], pg_collection=Peers(tensor=ThreadComm(columns[dp], tp)))
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


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_stages_sum_the_gradients_of_the_tied_embedding(config: DistributedDataParallelConfig) -> None:
    rows, columns = [World(2), World(2)], [World(2), World(2)]  # of data-parallel ranks, of stages

    def rank_main(comm: ThreadComm) -> tuple[dict[str, set[float]], int]:
        stage, dp = divmod(comm.rank, 2)
        ddp = DistributedDataParallel(
            config, Stage(*[(7, 300), (129, 1)][stage]), groups=over(ThreadComm(rows[stage], dp))
        )
        embedding = RecordingComm(ThreadComm(columns[dp], stage))
        backward(ddp(10.0**comm.rank))
        finalize_model_grads([ddp], pg_collection=Peers(embedding=embedding))
        return owned_values(ddp), sum(call.numel for call in embedding.calls)

    found = run_threads(4, rank_main)
    means = [(1 + 10) / 2, (100 + 1000) / 2]
    for rank, (values, numel) in enumerate(found):
        assert values.get("embedding", {sum(means)}) == {sum(means)}
        assert values.get("after", {means[rank // 2]}) == {means[rank // 2]}
        assert numel == (128 if rank % 2 == 0 else 72) or config is CONFIGS["replicated"]


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
        finalize_model_grads([ddp], tokens, pg_collection=Peers(stages=ThreadComm(columns[dp], stage)))
        assert tokens.item() in (3, 5, 999)
        return owned_values(ddp)

    for values in run_threads(4, rank_main):
        assert all(of_name == {(12.0 + 24.0) / 8} for of_name in values.values())


def test_a_batch_without_tokens_divides_by_one() -> None:
    ddp = DistributedDataParallel(CONFIGS["flat"], Stage(3, 3), groups=over(Alone()), calculate_per_token_loss=True)
    backward(ddp(0.0))
    finalize_model_grads([ddp], torch.tensor(0))
    assert all(of_name == {0.0} for of_name in owned_values(ddp).values())


REFUSALS: dict[str, tuple[Callable[[], None], str]] = {
    "a plain module": (lambda: finalize_model_grads([nn.Linear(2, 2)]), "model chunk 0 is a Linear; wrap it"),  # type: ignore[list-item]
    "tokens of means": (
        lambda: finalize_model_grads(
            [DistributedDataParallel(CONFIGS["flat"], nn.Linear(2, 2), groups=over(Alone()))], torch.tensor(1)
        ),
        "takes means; wrap it with calculate_per_token_loss=True",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_would_be_wrong_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
