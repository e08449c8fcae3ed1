"""Fields of wrapped chunks that the optimizer judges: refusals in a sentence, and steps that they stop."""

from typing import Any

import pytest
import torch
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import grad_checks
from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}


def build(
    comm: Comm, wrapper: dict[str, Any], *, num_chunks: int = 1, dtype: torch.dtype = torch.float32, **fields: Any
) -> tuple[list[DistributedDataParallel], Optimizer]:
    axes = Axes(dp=comm, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=comm)
    chunks = [
        DistributedDataParallel(
            DistributedDataParallelConfig(**wrapper), nn.Linear(4, 4, dtype=dtype), groups=roles, chunk=number
        )
        for number in range(num_chunks)
    ]
    for chunk in chunks:
        for param in chunk.module.parameters():
            param.data.fill_(0.5)
    return chunks, get_optimizer(OptimizerConfig(lr=0.1, **fields), chunks, {}, pg_collection=roles)


def test_large_gradients_are_not_compared_under_a_dynamic_loss_scale() -> None:
    wrapper = {"check_for_large_grads": True}
    with pytest.raises(ConfigError, match=r"check_for_large_grads=True, .* but the loss scale is dynamic"):
        build(Alone(), wrapper, dtype=torch.float16, fp16=True)
    build(Alone(), wrapper, dtype=torch.float16, fp16=True, loss_scale=8.0)


def test_gathers_start_in_the_step_or_when_the_schedule_requests_them() -> None:
    fields = {**SHARDED, "overlap_param_gather_with_optimizer_step": True}
    with pytest.raises(ConfigError, match=r"align_param_gather=True, which starts them from .* to False"):
        build(Alone(), {**SHARDED, "align_param_gather": True}, num_chunks=2, **fields)


def test_a_pattern_that_matches_nothing_anywhere_is_refused_on_every_rank() -> None:
    """One that matches in one of two chunks is not."""

    def rank_main(comm: ThreadComm) -> str:
        build(comm, {"param_name_patterns_for_fp32_local_accumulation": ("bia?", "all")})
        with pytest.raises(ConfigError) as caught:
            build(comm, {"param_name_patterns_for_fp32_local_accumulation": ("*.wieght", "all")})
        return str(caught.value)

    for message in run_threads(2, rank_main):
        assert message.startswith("param_name_patterns_for_fp32_local_accumulation: '*.wieght' matches no parameter")


def test_a_step_from_large_gradients_changes_nothing_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_checks, "NUM_ITERATIONS", 1)

    def rank_main(comm: ThreadComm) -> None:
        (chunk,), optimizer = build(comm, {"check_for_large_grads": True})
        for value in (1.0, 20.0 if comm.rank == 1 else 1.0, 1.0):
            chunk(torch.full((1, 4), value)).sum().backward()
            before = [param.detach().clone() for param in chunk.module.parameters()]
            if value == 20.0 or (comm.rank == 0 and optimizer.stepper.num_begun == 1):
                with pytest.raises(UnusableGradientError, match="unexpectedly large"):
                    optimizer.step()
                assert all(map(torch.equal, before, chunk.module.parameters()))
            else:
                assert optimizer.step().success
                assert not any(map(torch.equal, before, chunk.module.parameters()))
            optimizer.zero_grad()

    run_threads(2, rank_main)


def test_aligned_gathers_train_what_gathers_in_the_step_train() -> None:
    def train(comm: Comm, **fields: bool) -> list[torch.Tensor]:
        chunks, optimizer = build(
            comm,
            {"use_distributed_optimizer": True, **fields},
            num_chunks=2,
            use_distributed_optimizer=True,
            overlap_param_gather=fields.get("overlap_param_gather", False),
        )
        for step in range(3):
            chunks[1](chunks[0](torch.full((2, 4), 1.0 + step + comm.rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if fields and step == 1 and comm.rank == 0:
                chunks[1].start_param_sync()
        return [param.detach().clone() for chunk in chunks for param in chunk.module.parameters()]

    expected = run_threads(2, train)
    found = run_threads(2, lambda comm: train(comm, overlap_param_gather=True, align_param_gather=True))
    assert all(map(torch.equal, expected[0], found[0]))
    assert all(map(torch.equal, expected[0], found[1]))
