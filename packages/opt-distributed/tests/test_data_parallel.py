"""The wrapped model: gradients are means over the joined batch for any world, layout, overlap; buffers and loads."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from data_parallel_net import CASES, OVERLAP, SHARDED, Case, Config, Net, batch, over, shard_of
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, default_bucket_size
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_paramgroups import ParamId


def loss_of(model: nn.Module, tokens: Tensor, *, skip: bool = False) -> Tensor:
    """Mean over the batch, so that equal parts of a batch have equal weight."""
    logits = model(tokens[:, :-1], skip)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def expected_grads(loss: Callable[[Net], Tensor]) -> dict[str, Tensor]:
    """The gradients of one process on the whole batch; zeros for parameters without a gradient."""
    net = Net()
    backward(loss(net))
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}


def check_owned(ddp: DistributedDataParallel, expected: dict[str, Tensor]) -> int:
    """Compares what this rank owns; returns how many elements that is."""
    seen = 0
    for buffer in ddp.synced_buffers:
        layout = buffer.plan.layout
        for _, piece in layout.owned(buffer.axes.dp.rank if layout.num_shards > 1 else 0):
            grad = buffer.grad(piece.id, piece.of_param)
            torch.testing.assert_close(
                grad.flatten(), expected[piece.id.name].flatten()[piece.of_param], rtol=1e-11, atol=1e-13
            )
            seen += piece.numel
    return seen


EXACT = {name: case for name, case in CASES.items() if "fp32" not in name}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT.keys())
def test_owned_gradients_are_the_mean_over_the_joined_batch(case: Case, size: int) -> None:
    whole = [batch(iteration, 2 * size) for iteration in range(3)]
    expected = [expected_grads(partial(loss_of, tokens=tokens)) for tokens in whole]

    def rank_main(comm: ThreadComm) -> int:
        ddp = DistributedDataParallel(case.config, Net(), groups=over(comm), optimizer_config=case.optimizer_config)
        for tokens, grads in zip(whole, expected, strict=True):  # the first iteration learns, the others overlap
            backward(loss_of(ddp, tokens.chunk(size)[comm.rank]))
            ddp.finish_grad_sync()
            seen = check_owned(ddp, grads)
            ddp.zero_grad_buffer()
        return seen

    seen = run_threads(size, rank_main)
    numel = sum(param.numel() for param in Net().parameters())
    assert seen == [numel] * size if not case.config.use_distributed_optimizer else sum(seen) == numel


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT.keys())
def test_microbatches_inside_no_sync_add_up_to_one_backward(case: Case) -> None:
    tokens = batch(0, 12)
    expected = expected_grads(lambda net: 3 * loss_of(net, tokens))

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(case.config, Net(), groups=over(comm), optimizer_config=case.optimizer_config)
        for _ in range(2):
            *most, last = tokens.view(3, 2, 2, 6)[:, comm.rank]
            with ddp.no_sync():
                for part in most:
                    backward(loss_of(ddp, part))
            backward(loss_of(ddp, last))
            ddp.finish_grad_sync()
            check_owned(ddp, expected)
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


@pytest.mark.parametrize("case", [CASES["flat, overlap"], CASES["replicated, overlap"]], ids=["flat", "replicated"])
@pytest.mark.parametrize("skips", [(0, 1), (1, 1), (1, 0)], ids=["rank 1 skips", "both skip", "rank 0 skips"])
@pytest.mark.parametrize("first_skips", [True, False], ids=["learned skipping", "learned not skipping"])
def test_a_parameter_that_a_forward_did_not_use_counts_as_zero(
    case: Case, skips: tuple[int, int], first_skips: bool
) -> None:
    tokens = batch(0, 4)

    def joined(net: Net, skipping: Sequence[int]) -> Tensor:
        losses = [loss_of(net, part, skip=bool(skip)) for part, skip in zip(tokens.chunk(2), skipping, strict=True)]
        return torch.stack(losses).mean()

    plans = [skips if first_skips else (0, 0), skips, (0, 0), skips]
    expected = [expected_grads(partial(joined, skipping=plan)) for plan in plans]

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(case.config, Net(), groups=over(comm))
        for plan, grads in zip(plans, expected, strict=True):
            backward(loss_of(ddp, tokens.chunk(2)[comm.rank], skip=bool(plan[comm.rank])))
            ddp.finish_grad_sync()
            check_owned(ddp, grads)
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


def test_two_backward_passes_in_every_iteration_are_learned_in_the_first() -> None:
    tokens = batch(0, 4)
    expected = expected_grads(lambda net: 2 * loss_of(net, tokens))

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(OVERLAP, Net(), groups=over(comm))
        for _ in range(3):
            for _ in range(2):
                backward(loss_of(ddp, tokens.chunk(2)[comm.rank]))
            ddp.finish_grad_sync()
            check_owned(ddp, expected)
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


def test_gradients_per_token_are_summed_and_scaled_by_the_caller() -> None:
    tokens = batch(0, 4)
    expected = expected_grads(lambda net: loss_of(net, tokens))

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(SHARDED, Net(), groups=over(comm), calculate_per_token_loss=True)
        backward(10 * loss_of(ddp, tokens.chunk(2)[comm.rank]))  # 10 tokens in each half
        ddp.finish_grad_sync()
        ddp.scale_gradients(1 / 20)
        check_owned(ddp, expected)

    run_threads(2, rank_main)


def test_instances_shard_inside_and_sum_across() -> None:
    tokens = batch(0, 8)
    expected = expected_grads(lambda net: loss_of(net, tokens))
    rows, columns = [World(2), World(2)], [World(2), World(2)]
    config = replace(OVERLAP, num_distributed_optimizer_instances=2)

    def rank_main(comm: ThreadComm) -> int:
        instance, shard = divmod(comm.rank, 2)
        groups = over(ThreadComm(rows[instance], shard), ThreadComm(columns[shard], instance))
        ddp = DistributedDataParallel(config, Net(), groups=groups)
        for _ in range(2):
            backward(loss_of(ddp, tokens.chunk(4)[comm.rank]))
            ddp.finish_grad_sync()
            seen = check_owned(ddp, expected)
            ddp.zero_grad_buffer()
        return seen

    seen = run_threads(4, rank_main)
    assert seen[0] + seen[1] == seen[2] + seen[3] == sum(param.numel() for param in Net().parameters())


class Moe(nn.Module):
    """A shared layer and one local expert of two; a token's expert is its parity."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(5)
        weights = [torch.randn(6, 6, generator=numbers, dtype=torch.float64) for _ in range(3)]
        self.dense = nn.Parameter(weights[0].clone())
        self.expert = nn.Parameter(weights[1 + expert].clone())
        self.expert.allreduce = False  # type: ignore[attr-defined]

    def forward(self, own: Tensor, routed: Tensor) -> Tensor:
        """Dense output of this rank's rows, and the expert's of those routed here."""
        return (own @ self.dense).square().sum() + (routed @ self.expert).square().sum()


@pytest.mark.parametrize("config", [Config(), SHARDED], ids=["replicated", "flat"])
def test_expert_gradients_are_summed_over_their_own_group_and_are_means_over_all_samples(config: Config) -> None:
    # Ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1. Rank r has x[r]; in each pair of ranks, even rows of both
    # go to expert 0 and odd ones to expert 1, as an all-to-all would send them.
    x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    experts = [World(2), World(2)]

    def routed(rank: int) -> Tensor:
        pair = rank // 2 * 2
        return torch.cat([x[pair][rank % 2 :: 2], x[pair + 1][rank % 2 :: 2]])

    def joined(expert: int) -> Tensor:
        weight = Moe(expert).expert
        rows = torch.cat([routed(expert), routed(expert + 2)])
        (grad,) = torch.autograd.grad((rows @ weight).square().sum() / 4, weight)
        return grad

    def rank_main(comm: ThreadComm) -> None:
        expert = comm.rank % 2
        axes = Axes(dp=comm, tp=Alone())
        its = Axes(dp=ThreadComm(experts[expert], comm.rank // 2), tp=Alone())
        ddp = DistributedDataParallel(config, Moe(expert), groups=Roles(dense=axes, expert=its, everyone=comm))
        backward(ddp(x[comm.rank], routed(comm.rank)))
        ddp.finish_grad_sync()
        assert [buffer.plan.is_expert for buffer in ddp.synced_buffers] == [False, True]
        net = Moe(0)
        (dense_grad,) = torch.autograd.grad((x.flatten(0, 1) @ net.dense).square().sum() / 4, net.dense)
        check_owned(ddp, {"dense": dense_grad, "expert": joined(expert)})

    run_threads(4, rank_main)


# --- numbers ------------------------------------------------------------------------------------------


class Dtypes(NamedTuple):
    """How gradients are kept and reduced."""

    config: Config
    kept: torch.dtype


NUMBERS = {
    "bf16": Dtypes(Config(use_distributed_optimizer=True), torch.bfloat16),
    "fp32": Dtypes(Config(use_distributed_optimizer=True, grad_reduce_in_fp32=True), torch.float32),
    "bf16 on the wire, fp32 sums": Dtypes(
        Config(use_distributed_optimizer=True, reduce_scatter_with_fp32_accumulation=True), torch.bfloat16
    ),
}


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
def test_gradients_accumulate_and_travel_in_the_chosen_dtype(numbers: Dtypes) -> None:
    def rank_main(comm: ThreadComm) -> list[int]:
        recording = RecordingComm(comm)
        model = nn.Linear(32, 8, bias=False, dtype=torch.bfloat16)
        ddp = DistributedDataParallel(numbers.config, model, groups=over(recording))
        assert main_grad(next(model.parameters())).dtype is numbers.kept
        backward(ddp(torch.full((1, 32), 2.0**-9 if comm.rank else 1.0, dtype=torch.bfloat16)).sum())
        ddp.finish_grad_sync()
        result = ddp.grad_sync.buckets[0].result
        # The mean of 1 and 2^-9 is 0.5 + 2^-10: it has 10 bits, and so is 0.5 in bf16.
        assert set(result.tolist()) == {0.5 + 2.0**-10 if numbers.kept is torch.float32 else 0.5}
        return [call.num_bytes for call in recording.calls if call.kind in ("reduce_scatter", "all_to_all")]

    assert run_threads(2, rank_main) == [[256 * numbers.kept.itemsize]] * 2


def test_a_model_of_several_dtypes_has_a_buffer_for_each() -> None:
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16), nn.LayerNorm(4))
    ddp = DistributedDataParallel(Config(use_distributed_optimizer=True), model, groups=over(Alone()))
    assert [buffer.plan.name for buffer in ddp.synced_buffers] == [
        "chunk 0, bf16 dense, flat shards, bf16 gradients",
        "chunk 0, fp32 dense, flat shards, fp32 gradients",
    ]


# --- parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flat", "flat, overlap", "whole, overlap"])
def test_what_each_owner_writes_is_what_every_forward_sees(name: str) -> None:
    case = CASES[name]
    tokens = batch(0, 2)
    changed = Net()
    for param in changed.parameters():
        param.data.mul_(1.5)
    expected = changed(tokens)

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(case.config, Net(), groups=over(comm), optimizer_config=case.optimizer_config)
        for buffer in ddp.synced_buffers:
            for index in range(len(buffer.plan.layout.buckets)):
                shard_of(buffer.memory, index, comm.rank).mul_(1.5)
            buffer.publish_()
        assert torch.equal(ddp(tokens), expected)
        torch.testing.assert_close(ddp.state_dict(), changed.state_dict(), rtol=0, atol=0)

    run_threads(3, rank_main)


def test_weights_are_broadcast_over_optimizer_instances_too() -> None:
    rows, columns = [World(2), World(2)], [World(2), World(2)]
    config = Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)

    def rank_main(comm: ThreadComm) -> None:
        instance, shard = divmod(comm.rank, 2)
        groups = over(ThreadComm(rows[instance], shard), ThreadComm(columns[shard], instance))
        model = nn.Linear(5, 3)
        for param in model.parameters():
            param.data.fill_(float(comm.rank))
        DistributedDataParallel(config, model, groups=groups).broadcast_params()
        assert all(bool((param == 0).all()) for param in model.parameters())

    run_threads(4, rank_main)


def test_state_dicts_have_the_models_own_names_and_load_into_the_buffers() -> None:
    net = Net()
    saved = {name: value + 1 for name, value in deepcopy(net.state_dict()).items()}
    ddp = DistributedDataParallel(SHARDED, net, groups=over(Alone()))
    before = net.embed.weight.data_ptr()
    ddp.load_state_dict(saved)
    assert ddp.state_dict().keys() == saved.keys()
    assert net.embed.weight.data_ptr() == before
    assert torch.equal(net.embed.weight, saved["embed.weight"])
    with pytest.raises(ValueError, match="assign=True would take parameters out of their buffers"):
        ddp.load_state_dict(saved, assign=True)


def test_frozen_parameters_and_empty_chunks_are_left_alone() -> None:
    net = Net()
    net.requires_grad_(False)
    ddp = DistributedDataParallel(OVERLAP, net, groups=over(Alone()))
    assert ddp.synced_buffers == ()
    ddp(batch(0, 2))
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()


def test_chunks_number_their_parameters() -> None:
    ddp = DistributedDataParallel(SHARDED, nn.Linear(2, 2), groups=over(Alone()), chunk=3)
    assert set(ddp.metas) == {ParamId(3, "weight"), ParamId(3, "bias")}


# --- the configuration is the caller's ------------------------------------------------------------------


def test_the_callers_configuration_is_not_written() -> None:
    config = Config(overlap_grad_reduce=True, use_distributed_optimizer=True)
    before = deepcopy(config)
    DistributedDataParallel(config, Net(), groups=over(Alone()))
    assert config == before
    assert config.bucket_size is None


@pytest.mark.parametrize(("ranks", "elements"), [(1, 40_000_000), (40, 40_000_000), (64, 64_000_000)])
def test_default_buckets_keep_a_million_elements_for_each_rank(ranks: int, elements: int) -> None:
    assert default_bucket_size(ranks) == elements


def test_without_overlap_a_buffer_is_one_bucket() -> None:
    ddp = DistributedDataParallel(replace(SHARDED, bucket_size=50), Net(), groups=over(Alone()))
    assert [len(buffer.plan.layout.buckets) for buffer in ddp.synced_buffers] == [1]
    ddp = DistributedDataParallel(OVERLAP, Net(), groups=over(Alone()))
    assert len(ddp.synced_buffers[0].plan.layout.buckets) >= 4


def test_a_number_of_buckets_is_a_size_of_buckets() -> None:
    config = replace(OVERLAP, bucket_size=None)
    config.num_buckets = 2
    ddp = DistributedDataParallel(
        config, nn.ModuleList(nn.Linear(64, 2, bias=False) for _ in range(6)), groups=over(Alone())
    )
    assert [bucket.params_numel for bucket in ddp.synced_buffers[0].plan.layout.buckets] == [384, 384]


@pytest.mark.parametrize("experts", [1, 4])
def test_experts_do_not_change_how_dense_buckets_are_cut(experts: int) -> None:
    """Replicas of dense parameters may hold different experts, but must cut shared buffers equally."""
    net = nn.ModuleList(nn.Linear(64, 2, bias=False) for _ in range(6 + experts))
    for module in net[6:]:
        module.weight.allreduce = False
    config = replace(OVERLAP, bucket_size=None)
    config.num_buckets = 2
    ddp = DistributedDataParallel(config, net, groups=over(Alone()))
    dense = ddp.synced_buffers[0].plan.layout.buckets
    assert [bucket.params_numel for bucket in dense] == [384, 384]


def test_cuts_fall_on_the_blocks_of_block_quantised_states() -> None:
    def rank_main(comm: ThreadComm) -> list[int]:
        model = nn.ModuleList(nn.Linear(100, 7) for _ in range(4))
        ddp = DistributedDataParallel(SHARDED, model, groups=over(comm))
        return [piece.of_param.start for piece in ddp.synced_buffers[0].owned()]

    starts = run_threads(3, rank_main)
    assert {start % 128 for of_rank in starts for start in of_rank} == {0}
    assert any(start > 0 for of_rank in starts for start in of_rank)
