"""Reads shared by replicas: each value is read once, arrives bit-equal on every rank, and errors arrive everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import opt_checkpoint.run.shared_reads
from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointKeyError,
    NameRule,
    ShardedTensor,
    load,
    load_optimizer,
    load_safetensors,
    save,
    save_safetensors,
    sharded_like,
    sharded_model,
    sharded_optimizer,
)
from opt_checkpoint.run.shared_reads import _Wanted, batches_of


def values() -> dict[str, Tensor]:
    """Large, small, empty and 0-d tensors of several dtypes."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(700, 500, generator=generator)  # several pieces with checksums of their own
    many = {f"small.{i}": torch.randn(9, i + 1, generator=generator) for i in range(40)}
    others = {"b": large.bfloat16()[:300], "i": torch.arange(5), "none": torch.zeros(0, 3), "s": torch.tensor(2.5)}
    return {"large": large, **many, **others}


def nbytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def replicate(rank: int, size: int, path: str, *, share: bool = True, batch: int | None = None) -> int:
    if batch is not None:
        opt_checkpoint.run.shared_reads._BATCH_BYTES = batch
    wanted = {key: torch.zeros_like(value) for key, value in values().items()}
    report = load({k: sharded_like(k, t, replica_id=rank) for k, t in wanted.items()}, path, share_reads=share)
    for key, value in values().items():
        assert torch.equal(wanted[key], value), key
    assert report.bytes_wanted == nbytes_of(values())
    return report.bytes_read


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save({k: sharded_like(k, t) for k, t in values().items()}, tmp_path / "x")
    return tmp_path / "x"


def small_batches(rank: int, size: int, path: str) -> int:
    try:
        return replicate(rank, size, path, batch=100_000)
    finally:
        opt_checkpoint.run.shared_reads._BATCH_BYTES = 32 << 20


@pytest.mark.parametrize("size", [1, 2, 4])
def test_replicas_read_every_value_once_together(saved: Path, ranks: RankPool, size: int) -> None:
    counts = ranks.run(size, replicate, str(saved))
    total = nbytes_of(values())
    assert sum(counts) <= 1.01 * total + 100_000  # small neighbours are read with what is between them
    assert max(counts) < (total if size == 1 else 0.8 * total) + 100_000
    apart = ranks.run(1, replicate, str(saved))
    assert apart[0] <= 1.01 * total + 100_000


def test_large_values_are_passed_on_in_several_batches(saved: Path, ranks: RankPool) -> None:
    ranks.run(3, small_batches, str(saved))


def read_groups(rank: int, size: int, path: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(600_000.0).view(600, 1000)
    placed = {
        "rows": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]),
        "alone": distribute_tensor(whole, mesh, [Shard(0), Shard(0)]),
    }
    save(placed, path)
    again = {key: torch.zeros_like(value) for key, value in placed.items()}
    report = load(again, path, share_reads=True)
    for key, value in placed.items():
        assert torch.equal(again[key].to_local(), value.to_local()), key
    return report.bytes_wanted, report.bytes_read


def test_tensor_parallel_replicas_share_within_their_groups(tmp_path: Path, ranks: RankPool) -> None:
    for wanted, read in ranks.run(4, read_groups, str(tmp_path / "x")):
        assert wanted == 600_000 * 4 * (1 / 2 + 1 / 2 + 1 / 4)
        assert read < 0.85 * wanted  # half of the first two, all of the third


def differ(rank: int, size: int, path: str) -> int:
    """Rank 1 asks for less, in another dtype, in other boxes, and for one tensor twice; rank 2 for nothing."""
    whole = values()["large"]
    if rank == 2:
        return load({}, path, share_reads=True).bytes_read
    large = torch.zeros(700, 500, dtype=torch.float64 if rank == 1 else torch.float32)
    state: dict[str, Any] = {"large": sharded_like("large", large, replica_id=rank)}
    if rank == 1:
        second, half = torch.zeros(700, 500), torch.zeros(100, 500)
        state["again"] = sharded_like("large", second, replica_id=rank)
        state["half"] = ShardedTensor("large", half, torch.float32, (100, 500), (700, 500), (200, 0), None)
    else:
        state["i"] = sharded_like("i", torch.zeros(5, dtype=torch.int64), replica_id=rank)
    report = load(state, path, share_reads=True)
    assert torch.equal(large, whole.to(large.dtype))
    if rank == 1:
        assert torch.equal(second, whole)
        assert torch.equal(half, whole[200:300])
        assert report.cast == ("large",)
    else:
        assert torch.equal(state["i"].data, torch.arange(5))
    return report.bytes_read


def test_ranks_that_want_other_things_get_them(saved: Path, ranks: RankPool) -> None:
    counts = ranks.run(4, differ, str(saved))
    assert counts[2] == 0
    assert sum(counts) < 2 * 700 * 500 * 4


def flat_ranges(rank: int, size: int, path: str) -> None:
    data = torch.zeros(1000)
    shard = ShardedTensor("w", data, torch.float32, (50, 40), (50, 40), (0, 0), None, flattened_range=slice(7, 1007))
    load({"w": shard}, path, share_reads=True)
    assert torch.equal(data, torch.arange(2000.0)[7:1007])


def test_flat_ranges_are_shared(tmp_path: Path, ranks: RankPool) -> None:
    save({"w": torch.arange(2000.0).view(50, 40)}, tmp_path / "x")
    ranks.run(2, flat_ranges, str(tmp_path / "x"))


def read_damaged(rank: int, size: int, path: str) -> str:
    wanted = {key: torch.zeros_like(value) for key, value in values().items()}
    with pytest.raises(CheckpointCorruptError, match="the values of large have changed") as error:
        load({k: sharded_like(k, t, replica_id=rank) for k, t in wanted.items()}, path, share_reads=True)
    return str(error.value)


def test_an_error_of_the_rank_that_reads_is_an_error_of_all(saved: Path, ranks: RankPool) -> None:
    (file,) = saved.glob("*.distcp")
    content = bytearray(file.read_bytes())
    position = content.index(values()["large"][400].numpy().tobytes())
    content[position] ^= 1
    file.write_bytes(content)
    messages = ranks.run(3, read_damaged, str(saved))
    assert len(set(messages)) == 1
    assert "failed on 1 rank(s)" in messages[0]


def refuse(rank: int, size: int, path: str) -> list[str]:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"i": torch.zeros(5, dtype=torch.int64)}, {"share_reads": rank == 0}),
        ({"i": torch.zeros(5, dtype=torch.int64)}, {"share_reads": True, "verify": "chunks"}),
        ({"x" if rank else "i": sharded_like("x" if rank else "i", torch.zeros(5))}, {"share_reads": True}),
    ]
    messages = []
    for state, options in cases:
        with pytest.raises((CheckpointingException, ValueError)) as error:
            load(state, path, **options)
        messages.append(f"{type(error.value).__name__} {error.value}")
    assert isinstance(error.value, CheckpointingException)
    return messages


def test_ranks_that_disagree_all_raise(saved: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, refuse, str(saved))
    assert first == second
    for message, part in zip(
        first, ("ranks differ in share_reads", "verify='chunks' reads", "failed on 2"), strict=True
    ):
        assert part in message


def share_in_a_part_of_the_world(rank: int, size: int, path: str) -> None:
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        target = torch.zeros(700, 500)
        load({"large": sharded_like("large", target, replica_id=rank - 1)}, path, share_reads=True, process_group=group)
        assert torch.equal(target, values()["large"])


def test_a_group_within_the_world_shares(saved: Path, ranks: RankPool) -> None:
    ranks.run(3, share_in_a_part_of_the_world, str(saved))


def import_shared(rank: int, size: int, folder: str) -> int:
    target = torch.zeros(400, 300)
    names = [NameRule(ours="w", theirs="v", transposed=True)]
    report = load_safetensors({"w": sharded_like("w", target, replica_id=rank)}, folder, names=names, share_reads=True)
    assert torch.equal(target, torch.arange(120_000.0).view(300, 400).T)
    return report.bytes_read


def test_imports_are_shared_too(tmp_path: Path, ranks: RankPool) -> None:
    save_safetensors({"v": torch.arange(120_000.0).view(300, 400)}, tmp_path / "hf")
    assert sum(ranks.run(2, import_shared, str(tmp_path / "hf"))) == 120_000 * 4


def resume(rank: int, size: int, path: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    load_optimizer(model, optimizer, path, share_reads=True)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], torch.full((200, 300), 0.1))
    load({"model": sharded_model(model)}, path, share_reads=True)


def test_optimizers_are_loaded_by_shared_reads(tmp_path: Path, ranks: RankPool) -> None:
    model = nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, tmp_path / "x")
    ranks.run(2, resume, str(tmp_path / "x"))


def test_reads_are_dealt_out_evenly_and_in_bounded_batches() -> None:
    wanted = [_Wanted(i.to_bytes(16, "big"), 1 << 20) for i in range(200)] + [_Wanted(b"x" * 16, 30 << 20)]
    batches = batches_of((0, 3, 5), wanted)
    assert sorted(w for own in batches.values() for batch in own for w in batch) == sorted(wanted)
    loads = [sum(w.nbytes for batch in own for w in batch) for own in batches.values()]
    assert max(loads) - min(loads) <= 1 << 20
    assert all(sum(w.nbytes for w in batch) <= 32 << 20 for own in batches.values() for batch in own)
    assert batches == batches_of((0, 3, 5), wanted[::-1])


def test_a_missing_key_is_refused_before_reads_are_shared(saved: Path) -> None:
    with pytest.raises(CheckpointKeyError):
        load({"y": sharded_like("y", torch.zeros(5))}, saved, share_reads=True)
