"""Optimizers over wrapped chunks: frozen parameters, two optimizers, two chunks, experts that a rank lacks."""

import pytest
import torch
from recording_comm import RecordingComm
from torch import Tensor, nn
from wrapped_net import LR, Net, backward, groups_of, inputs, loss_of, over, sgd, trained_alone

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_stack import DistributedDataParallel, get_optimizer, get_optimizer_based_on_param_groups

SUBSETS = {
    "no parameter of a buffer": ("first.weight", "last.weight"),
    "one parameter of a buffer": ("first.weight",),
    "one of each buffer": ("last.weight", "norm.bias"),
    "the small buffer only": ("norm.weight", "norm.bias"),
}


@pytest.mark.parametrize("names", SUBSETS.values(), ids=SUBSETS.keys())
@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
@pytest.mark.parametrize("frozen", [False, True], ids=["left out of the groups", "frozen after wrapping"])
def test_parameters_that_are_not_trained_keep_no_rank_from_seeing_the_others(
    names: tuple[str, ...], overlap: bool, frozen: bool
) -> None:
    """Nothing was gathered when no parameter of some buffer was trained: ranks drifted apart, every step a success."""

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        net = Net()
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap, bucket_size=40
        )
        ddp = DistributedDataParallel(config, net, groups=over(comm))
        for name, param in net.named_parameters():
            param.requires_grad_(name in names or not frozen)
        groups = groups_of(param for name, param in net.named_parameters() if name in names)
        optimizer = get_optimizer_based_on_param_groups(
            sgd(overlap_param_gather=overlap), [ddp], groups, pg_collection=over(comm)
        )
        for step in range(3):
            backward(loss_of(ddp, inputs(step).chunk(2)[comm.rank]))
            assert optimizer.step().success
            ddp.zero_grad_buffer()
        return {name: param.detach().clone() for name, param in net.named_parameters()}

    expected = trained_alone(names, 3)
    for found in run_threads(2, rank_main):
        # Two halves are summed where one process sums once: 2^-24 of gradients near 1, a tenth of it, three times.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
def test_two_optimizers_may_share_a_wrapped_chunk(overlap: bool) -> None:
    """Each publishes the buffers that it writes, also where the other one's step is skipped."""

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        net = Net()
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=overlap)
        ddp = DistributedDataParallel(config, net, groups=over(comm))
        optimizers = [
            get_optimizer_based_on_param_groups(
                sgd(overlap_param_gather=overlap), [ddp], groups_of(params), pg_collection=over(comm)
            )
            for params in ([net.first.weight, net.norm.weight], [net.last.weight, net.norm.bias])
        ]
        for step in range(4):
            backward(loss_of(ddp, inputs(step).chunk(2)[comm.rank]))
            assert optimizers[0].step().success
            if step % 2:
                assert optimizers[1].step().success
            ddp.zero_grad_buffer()
        return {name: param.detach().clone() for name, param in net.named_parameters()}

    net = Net()
    for step in range(4):
        names = ("first.weight", "norm.weight") if step % 2 == 0 else tuple(dict(net.named_parameters()))
        net.zero_grad()
        backward(loss_of(net, inputs(step)))
        for name, param in net.named_parameters():
            if name in names:
                assert param.grad is not None
                param.data.add_(param.grad, alpha=-LR)
    for found in run_threads(2, rank_main):
        torch.testing.assert_close(found, dict(net.named_parameters()), rtol=0, atol=1e-7)


@pytest.mark.parametrize("skipping_step", [0, 1], ids=["in the first step", "in a later step"])
def test_two_chunks_overlap_and_train_what_one_process_trains(skipping_step: int) -> None:
    """Where a rank skips a layer of one chunk, the other chunk's reductions went first on this rank only."""

    def skips(step: int, rank: int) -> bool:
        return step == skipping_step and rank == 1

    def rank_main(comm: ThreadComm) -> tuple[dict[str, Tensor], int]:
        recording = RecordingComm(comm)
        nets = [Net(), Net()]
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1
        )
        chunks = [
            DistributedDataParallel(config, net, groups=over(recording), chunk=number)
            for number, net in enumerate(nets)
        ]
        optimizer = get_optimizer(sgd(overlap_param_gather=True), chunks, {}, pg_collection=over(recording))
        in_backward = 0
        for step in range(4):
            hidden = chunks[0](inputs(step).chunk(2)[comm.rank])
            recording.calls.clear()
            backward(
                nets[1].last(hidden).square().mean() if skips(step, comm.rank) else chunks[1](hidden).square().mean()
            )
            in_backward = len(recording.of("reduce_scatter"))
            assert optimizer.step().success
            for chunk in chunks:
                chunk.zero_grad_buffer()
        trained = nn.ModuleList(nets).named_parameters()
        return {name: param.detach().clone() for name, param in trained}, in_backward

    alone = nn.ModuleList([Net(), Net()])
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
    for step in range(4):
        losses = []
        for rank in range(2):
            hidden = alone[0](inputs(step).chunk(2)[rank])
            output = alone[1].last(hidden) if skips(step, rank) else alone[1](hidden)
            losses.append(output.square().mean())
        alone.zero_grad()
        backward(torch.stack(losses).mean())
        optimizer.step()
    for found, in_backward in run_threads(2, rank_main):
        torch.testing.assert_close(found, dict(alone.named_parameters()), rtol=0, atol=1e-6)
        # Of 8 buckets, those of the layers that were skipped when the order was learned are left to the step.
        assert in_backward == (8 if skipping_step else 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_expert_that_one_rank_lacks_does_not_change_the_order_of_gathers(overlap: bool) -> None:
    """The first chunk of rank 0 has an expert of its own, which is stepped last; dense gathers must not wait for it."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    optimizer_config = OptimizerConfig(
        optimizer="sgd",
        sgd_momentum=0.0,
        lr=LR,
        weight_decay=0.0,
        use_distributed_optimizer=True,
        overlap_param_gather=overlap,
    )

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        chunks = [nn.ParameterDict({"dense": torch.full((4,), float(number))}) for number in range(2)]
        if comm.rank == 0:
            chunks[0]["expert"] = nn.Parameter(torch.zeros(4))
            chunks[0]["expert"].allreduce = False  # type: ignore[attr-defined]
        roles = Roles(dense=Axes(dp=comm, tp=Alone()), expert=Axes(dp=Alone(), tp=Alone()), everyone=comm)
        models = [DistributedDataParallel(config, net, groups=roles, chunk=n) for n, net in enumerate(chunks)]
        optimizer = get_optimizer(optimizer_config, models, {}, pg_collection=roles)
        for _ in range(2):
            for model in models:
                backward(torch.stack([param.sum() for param in model.module.parameters()]).sum())
            optimizer.step()
            optimizer.zero_grad()
        for model in models:
            model.finish_param_sync()
        return [chunk["dense"].detach().clone() for chunk in chunks]

    norm = (8 * 1.0**2 + 4 * 0.5**2) ** 0.5  # dense gradients are ones; the expert's, over two replicas, halves
    clipped = 1.0 / (norm + 1e-6)
    for dense in run_threads(2, rank_main):
        for number, weight in enumerate(dense):
            torch.testing.assert_close(weight, torch.full((4,), number - 2 * LR * clipped), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fields", [{}, {"overlap_param_gather": True}], ids=["gather in the step", "before use"])
def test_fields_of_the_wrapper_need_not_be_repeated(fields: dict[str, bool]) -> None:
    shared = {"use_distributed_optimizer": True, **fields}

    def rank_main(comm: ThreadComm, repeated: dict[str, bool]) -> tuple[dict[str, Tensor], bool]:
        net = Net()
        chunk = DistributedDataParallel(DistributedDataParallelConfig(**shared), net, groups=over(comm))
        config = OptimizerConfig(lr=LR, **repeated)
        optimizer = get_optimizer(config, [chunk], {})
        assert {name: getattr(optimizer.config, name) for name in shared} == shared
        assert not any(getattr(config, name) for name in shared) or repeated == shared
        for step in range(2):
            backward(loss_of(chunk, inputs(step + comm.rank)))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in chunk.state_dict().items()}, optimizer.has_rank_local_state

    once = run_threads(2, lambda comm: rank_main(comm, {}))
    twice = run_threads(2, lambda comm: rank_main(comm, shared))
    for (weights, is_sharded), (expected, _) in zip(once, twice, strict=True):
        assert is_sharded
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
