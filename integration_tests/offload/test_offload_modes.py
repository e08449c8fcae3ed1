"""Offload with block-coded moments, several instances, and a gather of the first chunk during the other updates.

Each on a CPU and on a device that runs its work later: the bits of the step without offload.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from offloaded import ALL, HALF, small_parts
from on_device import NUM_ORDERS, SHAPES, LaunchedRule, launched
from parity import Net, grads_of, roles_over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_kernels.rules import Adam
from opt_stack import Registry, RuleEntry, get_optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__, small_parts.__name__)

STEPS, BAD_STEP = 3, 1
BLOCK_CODED = RuleEntry(
    name="adam_8bit",
    summary="",
    make=lambda config: Adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8),
    hyper=lambda config: {"betas": (0.9, 0.95), "eps": 1e-8},
)


class Mode(NamedTuple):
    ranks: int
    fields: dict[str, Any]
    num_chunks: int = 1
    wraps: bool = False


SHARDED = {"use_distributed_optimizer": True}
GATHERS = {**SHARDED, "overlap_param_gather": True}
MODES = {
    "8-bit blocks": Mode(2, {"optimizer": "adam_8bit"}),
    "8-bit blocks, sharded": Mode(2, {"optimizer": "adam_8bit", **SHARDED}),
    "8-bit blocks, wrapped": Mode(2, {"optimizer": "adam_8bit", **GATHERS}, wraps=True),
    "two chunks": Mode(2, GATHERS, num_chunks=2, wraps=True),
    "first chunk gathered early": Mode(
        2, {**GATHERS, "overlap_param_gather_with_optimizer_step": True}, num_chunks=2, wraps=True
    ),
    "instances": Mode(4, SHARDED),
    "instances, wrapped": Mode(4, GATHERS, wraps=True),
}
OFFLOADS = {"half": HALF, "all": ALL}


def roles_of(comm: Comm, over: Callable[[tuple[int, ...]], Comm]) -> Roles:
    """Two shards; of four ranks, in two instances."""
    if comm.size == 2:
        return roles_over(comm)
    instance, shard = divmod(comm.rank, 2)
    axes = Axes(dp=over((2 * instance, 2 * instance + 1)), tp=Alone(), inter=over((shard, shard + 2)))
    return Roles(dense=axes, expert=axes, everyone=comm)


def wrap(net: nn.Module, roles: Roles, chunk: int, *, overlaps: bool) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=overlaps,
        grad_reduce_in_fp32=True,
        num_distributed_optimizer_instances=roles.dense.inter.size,
        bucket_size=200,
    )
    return DistributedDataParallel(config, net, groups=roles, chunk=chunk)


def train(roles: Roles, mode: Mode, offload: dict[str, Any], *, launches: bool) -> list[Tensor]:
    nets = [Net(torch.bfloat16, SHAPES) for _ in range(mode.num_chunks)]
    overlaps = mode.fields.get("overlap_param_gather", False)
    chunks = [wrap(net, roles, index, overlaps=overlaps) if mode.wraps else net for index, net in enumerate(nets)]
    config = OptimizerConfig(lr=0.02, bf16=True, clip_grad=0.0, weight_decay=0.1, **mode.fields, **offload)
    rules = Registry().with_rule(BLOCK_CODED)
    optimizer = get_optimizer(config, chunks, {}, pg_collection=roles, rules=rules)
    for unit in optimizer.stepper.units if launches else ():
        if unit.host is None:
            unit.rule = LaunchedRule(unit.rule)
    for step in range(STEPS):
        for index, chunk in enumerate(chunks):
            grads = grads_of(step + index, roles.everyone.rank, roles.everyone.size, SHAPES)
            if step == BAD_STEP and roles.everyone.rank == 1 and index == 0:
                grads["first"][2, 3] = torch.inf
            chunk(grads).backward()
        assert bool(optimizer.step().success) is (step != BAD_STEP)
        for chunk in chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.zero_grad_buffer()
        optimizer.zero_grad()
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_param_sync()
    return [param.detach().clone() for net in nets for param in net.parameters()]


def on_cpu(mode: Mode, offload: dict[str, Any]) -> list[list[Tensor]]:
    pairs = {ranks: World(2).comms() for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        roles = roles_of(comm, lambda ranks: pairs[ranks][ranks.index(comm.rank)])
        return train(roles, mode, offload, launches=False)

    return run_threads(mode.ranks, rank_main)


def on_device(one: DeferredRank, mode: Mode, offload: dict[str, Any]) -> list[Tensor]:
    return train(roles_of(one.comm, one.comm_over), mode, offload, launches=True)


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other))


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", MODES)
def test_the_bits_are_those_without_offload(name: str, offload: str) -> None:
    """One of the steps overflows."""
    expected = on_cpu(MODES[name], {})
    assert same(on_cpu(MODES[name], OFFLOADS[offload]), expected)
    program = partial(on_device, mode=MODES[name], offload=OFFLOADS[offload])
    for seed in range(NUM_ORDERS):
        assert same(run_deferred(MODES[name].ranks, program, seed=seed), expected), f"seed {seed}"
