"""The wrapped model: gradients are means over the joined batch for any world, layout, overlap; buffers and loads."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from data_parallel_net import CASES, OVERLAP, SHARDED, Config, Net, backward, batch, check_owned, grid, of_axes, over
from recording_comm import RecordingComm
from tiers import NIGHT
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed import GradientError, ReplicaError, run_threads
from opt_distributed.buffers import DistributedDataParallel, default_bucket_size, share_launch_order
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_paramgroups import ParamId

NUMEL = sum(param.numel() for param in Net().parameters())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean over the batch, so that equal parts of a batch have equal weight."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def expected_grads(loss: Callable[[Net], Tensor]) -> dict[str, Tensor]:
    """The gradients of one process on the whole batch."""
    net = Net()
    backward(loss(net))
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("size", [1, 2, 3, 4] if NIGHT else [2, 3])
@pytest.mark.parametrize(("config", "of_optimizer"), CASES.values(), ids=CASES)
def test_owned_gradients_are_the_mean_over_the_joined_batch(
    config: Config, of_optimizer: OptimizerConfig | None, size: int
) -> None:
    """Even worlds add up three microbatches. A gather between iterations changes nothing, also of replicas."""
    num_microbatches = 1 if size % 2 else 3
    whole = [batch(iteration, 2 * size * num_microbatches) for iteration in range(3)]
    expected = [expected_grads(lambda net, x=x: num_microbatches * loss_of(net, x)) for x in whole]  # type: ignore[misc]

    def rank_main(comm: ThreadComm) -> int:
        ddp = DistributedDataParallel(config, Net(), groups=over(comm), optimizer_config=of_optimizer)
        for tokens, grads in zip(whole, expected, strict=True):  # the first iteration learns, the others overlap
            *most, last = tokens.chunk(size)[comm.rank].chunk(num_microbatches)
            with ddp.no_sync():
                for part in most:
                    backward(loss_of(ddp, part))
            backward(loss_of(ddp, last))
            ddp.finish_grad_sync()
            seen = check_owned(ddp, grads)
            ddp.zero_grad_buffer()
            ddp.start_param_sync(force_sync=comm.size == 2)
        return seen

    seen = run_threads(size, rank_main)
    assert seen == [NUMEL] * size if not config.use_distributed_optimizer else sum(seen) == NUMEL


@pytest.mark.parametrize(
    "fields",
    [{}, {"average_in_collective": True}, {"reduce_scatter_with_fp32_accumulation": True}],
    ids=["sums", "averages", "sums in fp32"],
)
def test_forced_all_reduce_gives_all_ranks_whole_gradients(fields: dict[str, bool]) -> None:
    """Reductions are launched in one order, so that the first call may launch those of later chunks."""
    tokens = batch(0, 6)
    expected = expected_grads(partial(loss_of, tokens=tokens))

    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        config = replace(SHARDED, **fields)
        chunks = [DistributedDataParallel(config, Net(), groups=over(recording), chunk=number) for number in range(2)]
        share_launch_order(chunks)
        for everywhere in (False, True, False):
            recording.calls.clear()
            for chunk in chunks:
                chunk.zero_grad_buffer()
                backward(loss_of(chunk, tokens.chunk(3)[comm.rank]))
            for chunk in chunks:
                chunk.finish_grad_sync(force_all_reduce=everywhere)
            kinds = {call.kind for call in recording.calls if call.numel}
            assert ("all_reduce" in kinds) == everywhere
            for chunk in chunks if everywhere else ():
                chunk.scale_gradients(scaling_factor=0.5)
                for name, param in chunk.module.named_parameters():
                    torch.testing.assert_close(main_grad(param), 0.5 * expected[name], rtol=1e-5, atol=1e-7)

    run_threads(3, rank_main)


def test_all_reduce_cannot_be_forced_after_a_reduction_to_shards() -> None:
    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(SHARDED, nn.Linear(4, 4), groups=over(comm))
        ddp.start_grad_sync()
        with pytest.raises(GradientError, match=r"force_all_reduce=True, but bucket 0 .* was reduced to shards"):
            ddp.finish_grad_sync(force_all_reduce=True)
        ddp.finish_grad_sync()
        overlapping = DistributedDataParallel(OVERLAP, nn.Linear(4, 4), groups=over(comm))
        with pytest.raises(ValueError, match="wrap the model with overlap_grad_reduce=False"):
            overlapping.finish_grad_sync(force_all_reduce=True)

    run_threads(2, rank_main)


def test_weights_are_broadcast_over_optimizer_instances_too() -> None:
    config = Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    worlds = grid()

    def rank_main(comm: ThreadComm) -> set[float]:
        groups = of_axes(worlds(comm.rank), comm)
        model = Net()
        nn.utils.vector_to_parameters(torch.full((NUMEL,), float(comm.rank), dtype=torch.float64), model.parameters())
        DistributedDataParallel(config, model, groups=groups).broadcast_params()
        return {value for param in model.parameters() for value in param.flatten().tolist()}

    assert run_threads(4, rank_main) == [{0.0}] * 4


def test_an_instance_without_the_params_is_refused_on_every_rank() -> None:
    across = World(2, timeout_s=20)

    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=Alone(), tp=Alone(), inter=ThreadComm(across, comm.rank))
        ddp = DistributedDataParallel(SHARDED, nn.Identity() if comm.rank else Net(), groups=over(Alone()))
        ddp.roles = Roles(dense=axes, expert=axes, everyone=comm)
        with pytest.raises(ReplicaError, match="is not trained on ranks"):
            ddp.broadcast_params()

    run_threads(2, rank_main)


def test_state_dicts_use_the_models_names_and_load_into_buffers() -> None:
    net = Net()
    saved = {name: value + 1 for name, value in deepcopy(net.state_dict()).items()}
    ddp = DistributedDataParallel(SHARDED, net, groups=over(Alone()), chunk=3)
    assert set(ddp.metas) == {ParamId(3, name) for name, _ in net.named_parameters()}
    before = net.embed.weight.data_ptr()
    assert ddp.to("cpu").double() is ddp  # a conversion that changes nothing
    ddp.load_state_dict(saved)
    assert ddp.state_dict().keys() == saved.keys()
    assert net.embed.weight.data_ptr() == before
    assert torch.equal(net.embed.weight, saved["embed.weight"])
    with pytest.raises(ValueError, match="assign=True would take parameters out of their buffers"):
        ddp.load_state_dict(saved, assign=True)


def test_frozen_parameters_and_empty_chunks_are_left_alone() -> None:
    ddp = DistributedDataParallel(OVERLAP, Net().requires_grad_(False), groups=over(Alone()))
    assert ddp.synced_buffers == ()
    ddp(batch(0, 2))
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()


def buckets_of(config: Config, model: nn.Module) -> list[int]:
    """Elements of the parameters of each bucket of the first buffer. The caller's configuration is not written."""
    before = deepcopy(config)
    ddp = DistributedDataParallel(config, model, groups=over(Alone()))
    assert config == before
    return [bucket.params_numel for bucket in ddp.synced_buffers[0].plan.layout.buckets]


def test_buckets_have_the_requested_size_or_number() -> None:
    """Experts do not change how dense buckets are cut: replicas of dense parameters may hold different experts."""
    assert [default_bucket_size(ranks) for ranks in (1, 40, 64)] == [40_000_000, 40_000_000, 64_000_000]
    assert buckets_of(replace(SHARDED, bucket_size=50), Net()) == [NUMEL]
    assert len(buckets_of(OVERLAP, Net())) >= 4
    for experts in (0, 1, 4):
        net = nn.ModuleList(nn.Linear(64, 2, bias=False) for _ in range(6 + experts))
        for module in net[6:]:
            module.weight.allreduce = False
        config = replace(OVERLAP, bucket_size=None)
        config.num_buckets = 2
        assert buckets_of(config, net) == [384, 384]


def test_cuts_fall_on_the_blocks_of_block_quantised_states() -> None:
    def rank_main(comm: ThreadComm) -> list[int]:
        model = nn.ModuleList(nn.Linear(100, 7) for _ in range(4))
        ddp = DistributedDataParallel(SHARDED, model, groups=over(comm))
        return [piece.of_param.start for piece in ddp.synced_buffers[0].owned()]

    starts = [start for of_rank in run_threads(3, rank_main) for start in of_rank]
    assert {start % 128 for start in starts} == {0}
    assert any(starts)


def test_a_model_wrapped_in_inference_mode_takes_gradients() -> None:
    """Its buffers could not be written outside of that mode."""
    tokens = batch(0, 2)
    expected = expected_grads(lambda net: loss_of(net, tokens))
    net = Net()
    with torch.inference_mode():
        ddp = DistributedDataParallel(SHARDED, net, groups=over(Alone()))
    backward(loss_of(ddp, tokens))
    ddp.finish_grad_sync()
    check_owned(ddp, expected)
