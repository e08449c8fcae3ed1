"""Save and load: strictness, dtypes, padding, balance, reads, and stock DCP in both directions."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import RankPool, load_as_ranks, save_as_ranks
from states import assert_is_step, state_at, whole_at, whole_tensors
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointKeyError,
    ShardedTensor,
    load,
    read_index,
    save,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.disk.index import Kind

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("rows", "expected"), [(8, [0, 1, 2, 3, 4, 5, 0, 0]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 4, 5])]
)
def test_padding_may_differ_where_that_is_allowed(tmp_path: Path, rows: int, expected: list[int]) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}, tmp_path / "x")
    targets = [torch.full((rows // 2,), 9.0) for _ in range(2)]
    states = [
        {"w": ShardedTensor.from_rank_offsets("w", t, (0, r, 2), allow_shape_mismatch=True)}
        for r, t in enumerate(targets)
    ]
    load_as_ranks(states, tmp_path / "x")
    assert torch.cat(targets).tolist() == expected


@pytest.mark.parametrize(("rows", "columns"), [(9, 14), (3000, 3001)], ids=["small", "streamed"])
def test_blocks_and_views_that_are_not_contiguous_are_saved_and_loaded(tmp_path: Path, rows: int, columns: int) -> None:
    whole, part = torch.randn(rows, columns), slice(columns // 2, columns // 2 + 5)
    save({"w": sharded_like("w", whole), "t": sharded_like("t", whole.t()), "p": whole[:, part]}, tmp_path / "x")
    assert verify_checkpoint(tmp_path / "x") == []
    block, turned, target = torch.zeros(rows, 5), torch.zeros(rows, columns), torch.zeros(rows, columns)
    shard = ShardedTensor("w", block, torch.float32, (rows, 5), (rows, columns), (0, part.start), None)
    report = load({"c": shard, "t": sharded_like("t", turned.t()), "p": target[:, part]}, tmp_path / "x")
    assert torch.equal(block, whole[:, part])
    assert torch.equal(turned, whole)
    assert torch.equal(target[:, part], whole[:, part])
    assert target.count_nonzero() == block.numel()
    assert report.bytes_wanted == 2 * block.nbytes + turned.nbytes


@pytest.mark.parametrize("cut", [(1000, 2500), (0, 7), (123_456, 345_678)])
def test_a_row_contiguous_reshard_reads_only_what_it_needs(tmp_path: Path, cut: tuple[int, int]) -> None:
    whole = torch.randn(1000, 500)
    states = [
        {"w": sharded_like("w", whole).flat(whole.view(-1)[a:b], a, b)} for a, b in ((0, 199_999), (199_999, 500_000))
    ]
    save_as_ranks(states, tmp_path / "x")
    target = torch.zeros(cut[1] - cut[0])
    report = load({"w": sharded_like("w", whole).flat(target, *cut)}, tmp_path / "x", verify="none")
    assert torch.equal(target, whole.view(-1)[slice(*cut)])
    assert report.bytes_read <= 1.05 * report.bytes_wanted


# ----- who writes what


def test_replicated_tensors_are_written_in_equal_shares_by_all_ranks(tmp_path: Path) -> None:
    sizes = [(700, 300), (41, 7), (5,), (1_000_000,), (3, 90_000)]
    states = [
        {str(i): sharded_like(str(i), torch.full(s, float(i)), replica_id=rank) for i, s in enumerate(sizes)}
        for rank in range(4)
    ]
    save_as_ranks(states, tmp_path / "x")
    written = [(tmp_path / "x" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    unique = sum(torch.Size(s).numel() * 4 for s in sizes)
    assert max(written) / (sum(written) / 4) <= 1.10
    items = sum(len(t.chunks) for t in read_index(tmp_path / "x").tensors.values())
    assert sum(written) <= 1.01 * unique + 2048 * items
    loaded = load_as_ranks(states[:1], tmp_path / "x")[0]
    assert all((loaded[str(i)] == i).all() for i in range(len(sizes)))


# ----- stock DCP


def test_stock_dcp_makes_one_file_of_what_we_write(tmp_path: Path) -> None:
    save_as_ranks([state_at(1, rank, 2) for rank in range(2)], tmp_path / "x")
    dcp_to_torch_save(tmp_path / "x", tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=False)["w"], whole_at(1))
    assert json.loads((tmp_path / "x" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_plain_values_of_stock_directories_are_found_by_their_paths(tmp_path: Path) -> None:
    held = {"run": {"step": 7, "lr": 0.5}, "groups": [{"betas": (0.9, 0.95)}, torch.ones(2)], "path": Path("no/plain")}
    dcp_save(held, checkpoint_id=tmp_path / "x")
    wanted = {"run": {"step": None}, "groups": {0: {"betas": None}, 1: sharded_like("groups.1", torch.zeros(2))}}
    report = load(wanted, tmp_path / "x")
    assert report.state["run"] == {"step": 7}
    assert report.state["groups"][0] == {"betas": (0.9, 0.95)}
    assert report.unexpected == ("path", "run.lr")
    with pytest.raises(CheckpointKeyError, match=r"are not in .*: run.epoch"):
        load({"run": {"epoch": None}}, tmp_path / "x")
    with pytest.raises(CheckpointCorruptError, match="cannot be loaded safely"):
        load({"path": None}, tmp_path / "x")


PLACEMENTS = {"0": Shard(0), "1": Shard(1), "2": Replicate()}


def stock_and_ours_both_ways(rank: int, size: int, folder: str) -> None:
    whole, mesh = torch.arange(77.0).view(11, 7), init_device_mesh("cpu", (size,))

    def dtensors(values: torch.Tensor) -> dict[str, DTensor]:
        return {key: distribute_tensor(values, mesh, [placement]) for key, placement in PLACEMENTS.items()}

    def flat(rank: int, *, filled: bool) -> dict[str, ShardedTensor]:
        start, stop = rank * 77 // size, (rank + 1) * 77 // size
        values = whole.view(-1)[start:stop].clone() if filled else torch.zeros(stop - start)
        return {key: sharded_like(key, whole).flat(values.clone(), start, stop) for key in PLACEMENTS}

    def sharded(tensors: dict[str, DTensor]) -> dict[str, ShardedTensor]:
        return {key: sharded_like(str(2 - int(key)), tensor) for key, tensor in tensors.items()}  # placed otherwise

    save(flat(rank, filled=True), f"{folder}/ours")
    dcp_load(target := dtensors(torch.zeros(11, 7)), checkpoint_id=f"{folder}/ours")
    assert all(torch.equal(t.full_tensor(), whole) for t in target.values())
    small = distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])  # some rank has none of it
    dcp_save({**dtensors(whole), "small": small}, checkpoint_id=f"{folder}/stock")
    states = {**flat(size - 1 - rank, filled=False), "small": sharded_like("small", torch.zeros_like(small))}
    report = load(states, f"{folder}/stock")
    assert report.kind is Kind.DCP
    expected = flat(size - 1 - rank, filled=True)
    assert all(torch.equal(report.state[key], expected[key].data) for key in PLACEMENTS)
    assert torch.equal(states["small"].data, small.to_local())
    save({k: sharded_like(k, t) for k, t in dtensors(whole).items()}, f"{folder}/x")
    load(sharded(target := dtensors(torch.zeros(11, 7))), f"{folder}/x")
    assert all(torch.equal(t.full_tensor(), whole) for t in target.values())


def test_dtensors_meet_flat_ranges(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, stock_and_ours_both_ways, str(tmp_path))


def test_metadata_of_megatrons_own_class_is_read_without_the_class(tmp_path: Path) -> None:
    dcp_save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path)
    raw = pickle.dumps(FileSystemReader(tmp_path).read_metadata(), protocol=2)  # which has names as text
    stock = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    assert stock in raw
    (tmp_path / ".metadata").write_bytes(raw.replace(stock, b"cmegatron.core.some.module\nMCoreMetadata\n"))
    assert torch.equal(whole_tensors(tmp_path)["w"], torch.arange(6.0))


def one_group_of_two(rank: int, size: int, path: str) -> None:
    """Ranks 1 and 2 of 3 save as a group, whose rank 0 is not the world's."""
    group = dist.new_group([1, 2])
    if rank:
        save(state_at(3, rank - 1, 2), path, process_group=group)
        assert_is_step(load(state_at(0, rank - 1, 2, filled=False), path, process_group=group).state, 3, rank - 1, 2)


def test_a_group_without_the_worlds_rank_zero_saves_and_loads(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, one_group_of_two, str(tmp_path / "x"))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert verify_checkpoint(tmp_path / "x") == []


@pytest.mark.parametrize("numel", [6, 300_000], ids=["small", "large"])
def test_conjugate_and_negated_views_are_saved_and_loaded_by_the_values_they_show(tmp_path: Path, numel: int) -> None:
    whole = torch.complex(torch.randn(numel), torch.randn(numel))
    both = whole.view(2, -1).conj().t()
    views = {
        "conj": whole.conj(),
        "part": whole[1:].conj(),
        "neg": whole.conj().imag,
        "both": both,
        "t": both.conj().imag,
    }
    save({k: sharded_like(k, v) for k, v in views.items()}, tmp_path / "sharded")
    save(views, tmp_path / "plain")
    dcp_save(views, checkpoint_id=tmp_path / "stock")
    for name in ("sharded", "plain", "stock"):
        assert verify_checkpoint(tmp_path / name) == []
        target, stock = ({k: torch.zeros(v.shape, dtype=v.dtype) for k, v in views.items()} for _ in range(2))
        lazy = {"conj": torch.zeros_like(whole).conj(), "neg": torch.zeros_like(whole).conj().imag}
        load({k: sharded_like(k, v) for k, v in target.items()}, tmp_path / name)
        load({k: sharded_like(k, v) for k, v in lazy.items()}, tmp_path / name)
        dcp_load(stock, checkpoint_id=tmp_path / name)
        for key, value in views.items():
            assert all(torch.equal(found[key], value) for found in (target, stock, lazy) if key in found), (name, key)


def test_dtypes_that_are_only_stored_are_saved_and_loaded(tmp_path: Path) -> None:
    for name in ("float8_e8m0fnu", "float4_e2m1fn_x2", "complex32"):
        dtype = getattr(torch, name, None)
        if dtype is None:  # of a newer torch
            continue
        bits, path = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8), tmp_path / name
        halves = [ShardedTensor.from_rank_offsets("w", bits.view(dtype)[3 * r : 3 * r + 3], (0, r, 2)) for r in (0, 1)]
        save_as_ranks([{"w": half} for half in halves], path)
        assert verify_checkpoint(path) == []
        target = torch.zeros_like(bits)
        load({"w": sharded_like("w", target.view(dtype))}, path)
        assert torch.equal(target, bits), name
