"""Save and load: dtypes, padding, balance, reads, what cannot be stored, and stock DCP in both directions."""

import json
import os
import pickle
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import load_as_ranks, run_ranks, save_as_ranks
from states import assert_is_step, state_at, whole_at, whole_tensors
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from opt_checkpoint import (
    AsyncSaver,
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointKeyError,
    CheckpointMismatchError,
    CheckpointValueError,
    ShardedObject,
    ShardedTensor,
    TieredCheckpointManager,
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


def test_a_key_that_reads_like_a_path_is_not_the_value_there(tmp_path: Path) -> None:
    """Symptom: the tensor of this key was loaded in place of the plain value, without a word."""
    step = lambda: sharded_like("step", torch.tensor([3.0]))
    save({"weights": {"w": step()}, "step": 100}, tmp_path / "x")
    assert load({"step": None}, tmp_path / "x").state == {"step": 100}
    assert load({"weights": {"w": step()}, "step": 0}, tmp_path / "x").state["step"] == 100
    save({"a.b": torch.tensor(7.0), "a": {"b": 5}}, tmp_path / "y")
    assert load({"a.b": torch.tensor(0.0), "a": {"b": 0}}, tmp_path / "y").state == {"a.b": 7.0, "a": {"b": 5}}
    save({"m.x": torch.tensor(7.0), "m": {"x": [1, torch.tensor(2.0)]}}, tmp_path / "z")
    assert load({"m": None}, tmp_path / "z").state == {"m": {"x": [1, 2.0]}}


@pytest.mark.parametrize("sizes", [[8], [8, 9], [1 << 17], [1 << 17, 8]], ids=str)
def test_a_load_counts_as_a_write_of_each_tensor(tmp_path: Path, sizes: list[int]) -> None:
    """Of a tensor alone, or of more than 256 KiB, it did not, so that main values could overwrite loaded weights."""
    save({str(size): torch.ones(size) for size in sizes}, tmp_path / "x")
    targets = {str(size): torch.zeros(size) for size in sizes}
    before = [tensor._version for tensor in targets.values()]
    load(targets, tmp_path / "x")
    assert all(tensor._version > count for tensor, count in zip(targets.values(), before))


@pytest.mark.parametrize(("rows", "columns"), [(9, 14), (3000, 3001)], ids=["small", "streamed"])
def test_noncontiguous_blocks_and_views_are_saved_and_loaded(tmp_path: Path, rows: int, columns: int) -> None:
    whole = torch.randn(rows, columns)
    part = slice(columns // 2, columns // 2 + 5)
    odd = torch.ones(rows * columns + 1, dtype=torch.uint8)  # bytes, of which checksums are combined
    state = {"w": sharded_like("w", whole), "t": sharded_like("t", whole.t()), "p": whole[:, part], "odd": odd}
    save(state, tmp_path / "x")
    assert verify_checkpoint(tmp_path / "x") == []
    block = torch.zeros(rows, 5)
    turned = torch.zeros(rows, columns)
    target = torch.zeros(rows, columns)
    shard = ShardedTensor("w", block, torch.float32, (rows, 5), (rows, columns), (0, part.start), None)
    report = load({"c": shard, "t": sharded_like("t", turned.t()), "p": target[:, part]}, tmp_path / "x")
    assert torch.equal(block, whole[:, part])
    assert torch.equal(turned, whole)
    assert torch.equal(target[:, part], whole[:, part])
    assert target.count_nonzero() == block.numel()
    assert report.bytes_wanted == 2 * block.nbytes + turned.nbytes


# ----- who writes what


def test_replicated_tensors_are_written_in_equal_shares_by_ranks(tmp_path: Path) -> None:
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


def test_plain_values_of_stock_directories_are_found_by_path(tmp_path: Path) -> None:
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
    whole = torch.arange(77.0).view(11, 7)
    mesh = init_device_mesh("cpu", (size,))

    def dtensors(values: torch.Tensor) -> dict[str, DTensor]:
        return {key: distribute_tensor(values, mesh, [placement]) for key, placement in PLACEMENTS.items()}

    def flat(rank: int, *, filled: bool) -> dict[str, ShardedTensor]:
        start = rank * 77 // size
        stop = (rank + 1) * 77 // size
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


def test_dtensors_meet_flat_ranges(tmp_path: Path) -> None:
    run_ranks(3, stock_and_ours_both_ways, str(tmp_path))


def test_metadata_of_megatrons_class_is_read_without_the_class(tmp_path: Path) -> None:
    dcp_save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path)
    raw = pickle.dumps(FileSystemReader(tmp_path).read_metadata(), protocol=2)  # which has names as text
    stock = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    assert stock in raw
    (tmp_path / ".metadata").write_bytes(raw.replace(stock, b"cmegatron.core.some.module\nMCoreMetadata\n"))
    assert torch.equal(whole_tensors(tmp_path)["w"], torch.arange(6.0))


def test_enums_pickled_by_pythons_3_11_2_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that stock DCP wrote under Debian 12's Python were refused: "names builtins.getattr"."""
    by_name = lambda member, protocol: (getattr, (type(member), member.name))
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    dcp_save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert torch.equal(whole_tensors(tmp_path)["w"], torch.arange(6.0))


def one_group_of_two(rank: int, size: int, path: str) -> None:
    """Ranks 1 and 2 of 3 save as a group, whose rank 0 is not the world's."""
    group = dist.new_group([1, 2])
    if rank:
        save(state_at(3, rank - 1, 2), path, process_group=group)
        assert_is_step(load(state_at(0, rank - 1, 2, filled=False), path, process_group=group).state, 3, rank - 1, 2)


def test_a_group_without_the_worlds_rank_zero_saves_and_loads(tmp_path: Path) -> None:
    run_ranks(3, one_group_of_two, str(tmp_path / "x"))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert verify_checkpoint(tmp_path / "x") == []


@pytest.mark.parametrize("numel", [6, 300_000], ids=["small", "large"])
def test_conjugate_and_negated_views_are_saved_by_their_values(tmp_path: Path, numel: int) -> None:
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
        bits = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8)
        path = tmp_path / name
        halves = [ShardedTensor.from_rank_offsets("w", bits.view(dtype)[3 * r : 3 * r + 3], (0, r, 2)) for r in (0, 1)]
        save_as_ranks([{"w": half} for half in halves], path)
        assert verify_checkpoint(path) == []
        target = torch.zeros_like(bits)
        load({"w": sharded_like("w", target.view(dtype))}, path)
        assert torch.equal(target, bits), name


def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    bits = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(CheckpointValueError, match=r"w has dtype torch\.bits8, which cannot be stored"):
        save({"w": bits}, tmp_path / "x")


def test_values_of_float4_are_not_converted(tmp_path: Path) -> None:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("of a newer torch")
    save({"w": torch.zeros(4, dtype=torch.uint8).view(dtype)}, tmp_path / "x")
    with pytest.raises(CheckpointMismatchError, match=r"w is stored as torch\.float4_e2m1fn_x2, asked for as torch\.f"):
        load({"w": torch.zeros(4)}, tmp_path / "x")


def test_a_file_url_is_synced_like_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or fsync(fd))
    save({"w": torch.ones(3)}, tmp_path / "path")
    by_path = len(synced)
    save({"w": torch.ones(3)}, f"file://{tmp_path}/a%20url")
    assert len(synced) == 2 * by_path > 0
    assert {p.name for p in (tmp_path / "a url").iterdir()} == {p.name for p in (tmp_path / "path").iterdir()}
    assert torch.equal(load({"w": None}, f"file://localhost{tmp_path}/path").state["w"], torch.ones(3))
    monkeypatch.chdir(tmp_path)
    with TieredCheckpointManager(f"file://{tmp_path}/local%20tier", "durable", durable_every=2) as manager:
        manager.save(1, {"w": torch.ones(3)})
    assert {path.name for path in tmp_path.iterdir()} == {"a url", "path", "local tier", "durable"}
    for url in ("file://host/run", "file://run", "file:///run?x=1", "file:///run#x"):
        with pytest.raises(CheckpointingException, match=r"names a host|has a query or fragment"):
            save({"w": torch.ones(3)}, url)


def test_one_element_of_a_larger_tensor_is_stored_and_loaded(tmp_path: Path) -> None:
    """Its stride is that of the larger tensor, though it counts as contiguous."""
    values = torch.arange(6.0).view(3, 2)
    target = torch.zeros(3, 2)
    save({"w": values[1:2, 1], "v": values[2:, 1:].t(), "m": [values[:1, 1]]}, tmp_path / "x")
    load({"w": target[1:2, 1], "v": target[2:, 1:].t()}, tmp_path / "x")
    assert target.tolist() == [[0, 0], [0, 3], [0, 5]]
    assert load({"m": None}, tmp_path / "x").state["m"][0].tolist() == [1]


BAD = {
    "an object": ({"x": object()}, {}, r"x is a object that could not be loaded again without running its pickle"),
    "a function": ({"x": lambda: 0}, {}, r"x is a function that could not be loaded again"),
    "an array": ({"rng": {"np": np.zeros(2)}}, {}, r"rng\.np is a ndarray .* it needs numpy"),
    "a numpy number": ({"step": np.int64(5)}, {}, r"step is a int64 .*int\(x\)"),
    "a numpy number in a list": ({"l": {"s": [1, np.float64(2)]}}, {}, r"l\.s is a list"),
    "a numpy detail": ({"a": 1}, {"details": {"step": np.int64(5)}}, r"details\['step'\] is .*int64"),
    "a detail of the manifest": (
        {"a": 1},
        {"details": {"copies": 2}},
        r"details\['copies'\]: the manifest has an entry",
    ),
    "a detail that is NaN": ({"a": 1}, {"details": {"loss": float("nan")}}, r"details\['loss'\] is nan"),
    "a sparse tensor": ({"x": torch.eye(3).to_sparse()}, {}, r"x has layout torch\.sparse_coo.*to_dense"),
    "a sparse tensor in a list": ({"l": [1, (torch.eye(3).to_sparse(),)]}, {}, r"l\.1\.0 has layout torch\.sparse_coo"),
    "an object under the name of plain values": (
        {"lr": 1, "x": ShardedObject("common_state", 5, (1,), (0,))},
        {},
        r"stored as common_state/shard_0_1, as the plain values are",
    ),
    "a sparse tensor in compressed rows": ({"x": torch.eye(3).to_sparse_csr()}, {}, r"x has layout torch\.sparse_csr"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path, case: str) -> None:
    state, options, message = BAD[case]
    with pytest.raises(CheckpointingException, match=message):
        save(state, tmp_path / "x", **options)
    assert list(tmp_path.iterdir()) == []


def test_plain_values_under_names_of_objects_hide_nothing(tmp_path: Path) -> None:
    """The common values, or the object, could not be found again."""
    held = {"common_state/shard_0_1": 5, "x/shard_0_1": 6, "lr": 0.5}
    save({**held, "x": ShardedObject("x", {"v": 1}, (1,), (0,))}, tmp_path / "x")
    wanted = {**dict.fromkeys(held), "x": ShardedObject("x", None, (1,), (0,))}
    assert load(wanted, tmp_path / "x").state == {**held, "x": {"v": 1}}


def test_an_expanded_target_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save({"w": torch.ones(3, 2), "v": torch.ones(4)}, tmp_path / "x")
    other = torch.zeros(4)
    for expanded in (torch.zeros(2).expand(3, 2), torch.zeros(3, 1).expand(3, 2)):
        with pytest.raises(CheckpointMismatchError, match=r"w: the target of shape \[3, 2\] is expanded .*contiguous"):
            load({"v": other, "w": expanded}, tmp_path / "x")
        assert (other == 0).all()
    save({"w": torch.ones(2).expand(3, 2)}, tmp_path / "y")  # it may be saved
    assert load({"w": None}, tmp_path / "y").state["w"].tolist() == [[1, 1]] * 3


def test_files_are_append_only_and_torch_reads_large_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(700_001)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda *a: pytest.fail("a written byte is changed"))
        save({"w": values, "turned": values[:700_000].view(700, 1000).t()}, tmp_path / "x")
    target = {"w": torch.zeros_like(values), "turned": torch.zeros(1000, 700)}
    dcp_load(target, checkpoint_id=tmp_path / "x")
    assert torch.equal(target["w"], values)
    assert torch.equal(target["turned"], values[:700_000].view(700, 1000).t())
    assert verify_checkpoint(tmp_path / "x") == []
    (tmp_path / "x" / "manifest.bin").unlink()  # what remains is read as any stock directory is
    for file in (tmp_path / "x").glob("*.distcp"):
        file.write_bytes(b"another program's file".ljust(64) + file.read_bytes()[64:])
    assert verify_checkpoint(tmp_path / "x") == []
    again = torch.zeros_like(values)
    load({"w": again}, tmp_path / "x")
    assert torch.equal(again, values)


def test_saves_and_loads_may_be_in_and_out_of_inference_mode(tmp_path: Path) -> None:
    """Trainers save after a validation in inference mode. The next asynchronous save could not write the snapshot's
    memory, and a load into tensors made in that mode failed."""
    values = torch.arange(5.0)
    with closing(AsyncSaver()) as saver:
        with torch.inference_mode():
            saver.save({"w": values}, tmp_path / "inside")
            target = torch.zeros(5)
        saver.save({"w": values + 1}, tmp_path / "outside")
    with torch.inference_mode():
        load({"w": target}, tmp_path / "inside")
    assert torch.equal(target, values)
    load({"w": target}, tmp_path / "outside")
    assert torch.equal(target, values + 1)
