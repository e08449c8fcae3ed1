"""Wrapped chunks under an optimizer: fields, groups of ranks, overlaps, several chunks and optimizers."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grids import LateComm
from processes import refusal
from recording_comm import RecordingComm
from stack_models import assert_equal, make_model, over, weights
from torch import Tensor, nn
from wrapped_net import LR, Net, backward, groups_of, inputs, loss_of, sgd, trained_alone, wrap

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer, get_optimizer_based_on_param_groups

SUBSETS = {
    "no parameter of a buffer": ("first.weight", "last.weight"),
    "one parameter of a buffer": ("first.weight",),
    "one of each buffer": ("last.weight", "norm.bias"),
    "the small buffer only": ("norm.weight", "norm.bias"),
}


@pytest.mark.parametrize("names", SUBSETS.values(), ids=SUBSETS.keys())
@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
@pytest.mark.parametrize("frozen", [False, True], ids=["left out of the groups", "frozen after wrapping"])
def test_frozen_params_do_not_block_rank_checks(names: tuple[str, ...], overlap: bool, frozen: bool) -> None:
    """Nothing was gathered when no parameter of some buffer was trained: ranks drifted apart, every step a success."""

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        ddp = wrap(comm, overlap_grad_reduce=overlap, overlap_param_gather=overlap, bucket_size=40)
        for name, param in ddp.module.named_parameters():
            param.requires_grad_(name in names or not frozen)
        groups = groups_of(param for name, param in ddp.module.named_parameters() if name in names)
        optimizer = get_optimizer_based_on_param_groups(
            sgd(overlap_param_gather=overlap), [ddp], groups, pg_collection=over(comm)
        )
        for step in range(3):
            backward(loss_of(ddp, inputs(step).chunk(2)[comm.rank]))
            assert optimizer.step().success
            ddp.zero_grad_buffer()
        return weights(ddp.module)

    for found in run_threads(2, rank_main):
        # Two halves are summed where one process sums once: 2^-24 of gradients near 1, a tenth of it, three times.
        torch.testing.assert_close(found, trained_alone(names, 3), rtol=0, atol=1e-7)


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
def test_two_optimizers_may_share_a_wrapped_chunk(overlap: bool) -> None:
    """Each publishes the buffers that it writes, also where the other one's step is skipped."""

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        ddp = wrap(comm, overlap_param_gather=overlap)
        net: Any = ddp.module
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
        return weights(net)

    net = Net()
    for step in range(4):
        net.zero_grad()
        backward(loss_of(net, inputs(step)))
        for name, param in net.named_parameters():
            if step % 2 or name in ("first.weight", "norm.weight"):
                param.data.add_(param.grad, alpha=-LR)  # type: ignore[arg-type]
    for found in run_threads(2, rank_main):
        torch.testing.assert_close(found, weights(net), rtol=0, atol=1e-7)


def test_a_chunk_that_clears_its_gradients_leaves_none_ready() -> None:
    """Symptom: the half step went on with zeros, and a skipped iteration's norm was that of all later ones."""

    def rank_main(comm: ThreadComm) -> list[float]:
        ddp = wrap(comm)
        optimizer = get_optimizer(sgd(), [ddp], pg_collection=over(comm))
        norms = []
        for step in range(3):
            backward(loss_of(ddp, inputs(step).chunk(2)[comm.rank]))
            norms.append(optimizer.clip_grad_norm_(1.0))
            ddp.zero_grad_buffer()
            with pytest.raises(RuntimeError, match="no gradients are ready"):
                optimizer.step_with_ready_grads()
        return norms

    for norms in run_threads(2, rank_main):
        assert len(set(norms)) == 3


@pytest.mark.parametrize("wrapped", [True, False])
def test_ranks_prepare_again_what_one_of_them_wrote(wrapped: bool) -> None:
    def rank_main(comm: ThreadComm) -> tuple[float, float]:
        net: nn.Module = wrap(comm) if wrapped else Net()
        optimizer = get_optimizer(sgd(use_distributed_optimizer=wrapped), [net], pg_collection=over(comm))
        backward(loss_of(net, inputs(0).chunk(2)[comm.rank]))
        first = optimizer.clip_grad_norm_(1.0)
        assert optimizer.clip_grad_norm_(2.0) == first
        for param in net.parameters():
            grad = param.main_grad if wrapped else param.grad
            if comm.rank and grad is not None:
                grad.mul_(3.0)
        return first, optimizer.clip_grad_norm_(1.0)

    for first, second in run_threads(2, rank_main):
        assert second > first


def test_all_chunks_of_an_optimizer_overlap_with_backward() -> None:
    """From the second step on, in one order, which no chunk can know alone."""

    def rank_main(comm: ThreadComm) -> int:
        recording = RecordingComm(comm)
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
        chunks = [DistributedDataParallel(config, Net(), groups=over(recording), chunk=n) for n in range(2)]
        optimizer = get_optimizer(OptimizerConfig(lr=LR), chunks, {}, pg_collection=over(recording))
        for step in range(2):
            recording.calls.clear()
            backward(loss_of(chunks[1], chunks[0](inputs(step))))
            launched = len(recording.of("all_reduce"))
            optimizer.step()
            optimizer.zero_grad()
        return launched

    assert run_threads(2, rank_main) == [8, 8]  # of 8 buckets


@pytest.mark.parametrize("overlap", [False, True])
def test_an_expert_absent_on_one_rank_keeps_the_gather_order(overlap: bool) -> None:
    """The first chunk of rank 0 has an expert of its own, which is stepped last; dense gathers must not wait for it."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        chunks = [nn.ParameterDict({"dense": torch.full((4,), float(number))}) for number in range(2)]
        if comm.rank == 0:
            chunks[0]["expert"] = nn.Parameter(torch.zeros(4))
            chunks[0]["expert"].allreduce = False  # type: ignore[attr-defined]
        roles = Roles(dense=Axes(dp=comm, tp=Alone()), expert=Axes(dp=Alone(), tp=Alone()), everyone=comm)
        models = [DistributedDataParallel(config, net, groups=roles, chunk=n) for n, net in enumerate(chunks)]
        fields = sgd(clip_grad=1.0, overlap_param_gather=overlap)
        optimizer = get_optimizer(fields, models, {}, pg_collection=roles)
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


EXCHANGES: dict[str, Callable[[Optimizer], object]] = {
    "a step": lambda optimizer: optimizer.step(),
    "half a step": lambda optimizer: optimizer.prepare_grads(),
    "a load": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "a reload": lambda optimizer: optimizer.reload_model_params(make_net_state()),
    "statistics": lambda optimizer: optimizer.stats_every(1),
    "a norm group": lambda optimizer: optimizer.has_grad_norm_group(""),
}


def make_net_state() -> dict[str, Tensor]:
    return weights(Net())


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_a_rank_without_a_forward_joins_the_gathers(exchange: Callable[[Optimizer], object]) -> None:
    """After a load it began with another exchange, while the others' forward waited for the gather of bucket 0."""

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        ddp = wrap(comm, overlap_param_gather=True, align_param_gather=True)
        optimizer = get_optimizer(sgd(overlap_param_gather=True), [ddp], {}, pg_collection=over(comm))
        optimizer.load_state_dict(optimizer.state_dict())
        if comm.rank == 0:
            backward(loss_of(ddp, inputs(0)))
        exchange(optimizer)
        return weights(ddp.module)

    assert_equal(*run_threads(2, rank_main))


def test_params_read_from_groups_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters read from `param_groups` after a step were old on every rank except their owner. From a step to the
    next forward, neither schedulers nor `zero_grad` wait."""
    waits: list[bool] = []
    sync_type = type(wrap(Alone()).param_sync)
    wait_for = sync_type.wait_for

    def noted(sync: Any, params: Any) -> None:
        waits.append(True)
        wait_for(sync, params)

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        late: Any = LateComm(comm)
        ddp = wrap(late, overlap_param_gather=True)
        optimizer = get_optimizer(sgd(overlap_param_gather=True), [ddp], {}, pg_collection=over(late))
        schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)]
        schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3))
        for step in range(2):
            backward(loss_of(ddp, inputs(step)))
            comm.gather_objects("all ranks have run their forward")
            waits.clear()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.state_dict()
            assert not waits
            comm.gather_objects("none begins the next forward before")
        assert ddp.param_sync.is_pending
        return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]

    monkeypatch.setattr(sync_type, "wait_for", noted)
    first, second = run_threads(2, rank_main)
    assert len(first) == 4
    assert all(bool(param.isfinite().all()) for param in first)
    assert_equal(first, second)


@pytest.mark.parametrize("fields", [{}, {"overlap_param_gather": True}], ids=["gather in the step", "before use"])
def test_fields_of_the_wrapper_need_not_be_repeated(fields: dict[str, bool]) -> None:
    shared = {"use_distributed_optimizer": True, **fields}

    def rank_main(comm: ThreadComm, repeated: dict[str, bool]) -> dict[str, Tensor]:
        chunk = wrap(comm, **fields)
        optimizer = get_optimizer(OptimizerConfig(lr=LR, **repeated), [chunk], {})
        assert {name: getattr(optimizer.config, name) for name in shared} == shared
        assert optimizer.has_rank_local_state
        for step in range(2):
            backward(loss_of(chunk, inputs(step + comm.rank)))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in chunk.state_dict().items()}

    once = run_threads(2, lambda comm: rank_main(comm, {}))
    assert_equal(once, run_threads(2, lambda comm: rank_main(comm, shared)))


def test_a_pattern_without_any_match_is_refused_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> str:
        def built(pattern: str) -> object:
            fields = {"param_name_patterns_for_fp32_local_accumulation": (pattern, "all")}
            return get_optimizer(sgd(), [wrap(comm, **fields)], {}, pg_collection=over(comm))

        built("norm.bia?")
        return refusal(lambda: built("*.wieght"))

    for message in run_threads(2, rank_main):
        assert message.startswith("param_name_patterns_for_fp32_local_accumulation: '*.wieght' matches no parameter")


def pickled(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("rewrap", [True, False], ids=["wrapped", "plain"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_a_saved_module_is_trained_again(rewrap: bool, sharded: bool) -> None:
    """Its file held the gradient buffer, too, and get_optimizer refused the loaded module."""
    ddp = wrap(Alone(), use_distributed_optimizer=sharded)
    optimizer = get_optimizer(sgd(use_distributed_optimizer=sharded), [ddp], pg_collection=over(Alone()))
    backward(loss_of(ddp, inputs(0)))
    optimizer.step()
    copied = [copy.deepcopy(ddp.module), pickled(ddp.module)]
    assert [param.__dict__ for param in copied[1].parameters()] == [{}, {"allreduce": False}, {"allreduce": False}, {}]
    for module in copied:
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        chunk = DistributedDataParallel(config, module, groups=over(Alone())) if rewrap else module
        of_copy = get_optimizer(sgd(use_distributed_optimizer=sharded), [chunk], pg_collection=over(Alone()))
        backward(loss_of(chunk, inputs(1)))
        assert of_copy.step().success
    ddp.zero_grad_buffer()
    backward(loss_of(ddp, inputs(1)))
    assert optimizer.step().success
    for module in copied:
        assert_equal(weights(module), weights(ddp.module))


def test_the_plan_has_the_buffers_of_a_wrapped_chunk() -> None:
    """Matrices are whole only if the wrapper knows the optimizer's configuration."""
    config = OptimizerConfig(optimizer="muon", lr=1e-2, use_layer_wise_distributed_optimizer=True)
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunk = DistributedDataParallel(sharded, make_model(), optimizer_config=config)
    plan = get_optimizer(config, [chunk]).plan
    assert all(ours is buffer.plan for ours, buffer in zip(plan.buffers, chunk.synced_buffers, strict=True))
    assert [buffer.kind.name for buffer in plan.buffers] == ["whole parameters", "flat shards"]
    with pytest.raises(ConfigError, match="pass optimizer_config=config to DistributedDataParallel"):
        get_optimizer(config, [DistributedDataParallel(sharded, make_model())])
