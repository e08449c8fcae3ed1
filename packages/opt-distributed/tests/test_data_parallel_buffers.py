"""Buffers of `DistributedDataParallel`: dtypes, sizes and cuts of buckets, state dicts, values that owners write."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from data_parallel_net import CASES, OVERLAP, SHARDED, Config, Net, batch, over
from torch import nn

from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.planner import default_bucket_size
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.threads import ThreadComm, World, run_threads
from opt_paramgroups import ParamId


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
                buffer.memory.param_shard(index, comm.rank).mul_(1.5)
            buffer.publish_()
        assert torch.equal(ddp(tokens), expected)
        torch.testing.assert_close(ddp.state_dict(), changed.state_dict(), rtol=0, atol=0)

    run_threads(3, rank_main)


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_broadcasting_parameters_gives_every_rank_the_first_ranks(instances: int, sharded: bool) -> None:
    rows, columns = [World(2), World(2)], [World(2), World(2)]
    config = Config(use_distributed_optimizer=True, num_distributed_optimizer_instances=instances)
    if not sharded:
        config = Config()

    def rank_main(comm: ThreadComm) -> None:
        instance, shard = divmod(comm.rank, 2)
        across = ThreadComm(columns[shard], instance) if instances == 2 else None
        groups = over(ThreadComm(rows[instance], shard), across) if sharded else over(comm)
        model = nn.Linear(5, 3)
        for param in model.parameters():
            param.data.fill_(float(comm.rank))
        DistributedDataParallel(config, model, groups=groups).broadcast_params()
        assert all(bool((param == 0).all()) for param in model.parameters())

    run_threads(2 * instances, rank_main)


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
