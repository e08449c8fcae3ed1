"""Hostile files: reading one runs nothing, changes nothing, stays small, and ends in an error of ours."""

import io
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import save_as_ranks
from failing_calls import damaged
from states import state_at
from tiers import NIGHT
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import save as dcp_save

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load,
    read_common,
    read_index,
    verify_checkpoint,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.disk.data_file import crc32
from opt_checkpoint.disk.foreign import read_pickle
from opt_checkpoint.disk.manifest import decode_columns, encode_columns

pytestmark = pytest.mark.filterwarnings("ignore")
_watched: list[str] | None = None
_EVENTS = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.remove", "os.rename", "socket.connect")


def _watch(event: str, arguments: Any) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if _watched is not None and (event in _EVENTS or writes):
        _watched.append(f"{event} {arguments}")


sys.addaudithook(_watch)


@contextmanager
def nothing_happens() -> Iterator[None]:
    """In this block no class is looked up for a pickle, no program started, and no file written."""
    global _watched
    _watched = []
    try:
        yield
    finally:
        seen = _watched
        _watched = None
    assert seen == []


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    dcp_save({"w": torch.arange(12.0).view(3, 4), "n": 5, "l": [torch.zeros(2)]}, checkpoint_id=tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_as_ranks([state_at(1, rank, 2) for rank in range(2)], tmp_path / "ours")
    return tmp_path / "ours"


def wanted_w(numel: tuple[int, ...] = (3, 4)) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full(numel, 7.0))}


# ----- pickles


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


@pytest.mark.parametrize("lie", ["the tensor", "a chunk"])
def test_stock_chunks_that_do_not_fit_their_tensor_are_refused(stock: Path, lie: str) -> None:
    plain = pickle.loads((stock / ".metadata").read_bytes())
    described = plain.state_dict_metadata["w"]
    if lie == "the tensor":
        described.size = torch.Size([n + 1 for n in described.size])
    else:
        described.chunks[0].offsets = torch.Size([1] * len(described.size))
    (stock / ".metadata").write_bytes(pickle.dumps(plain))
    with pytest.raises(CheckpointCorruptError, match=r"chunks? .*of w "):
        read_index(stock)


def test_a_small_pickle_of_an_exponential_value_ends_at_once(stock: Path) -> None:
    doubled = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(200))
    for raw in (b"\x80\x02)" + doubled + b".", b"\x80\x02})" + doubled + b"Ns."):  # as the value; as a key
        (stock / ".metadata").write_bytes(raw)
        with pytest.raises(CheckpointCorruptError):
            read_index(stock)


class Call:
    """Its pickle calls a function."""

    def __init__(self, function: Callable[..., Any], argument: str) -> None:
        self.function = function
        self.argument = argument

    def __reduce__(self) -> Any:
        return self.function, (self.argument,), {"a": 1}


def forge(path: Path, lie: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the checksum of the changed bytes."""
    manifest = path / "manifest.bin"
    header, columns = decode_columns(manifest.read_bytes(), "manifest")
    lie(header, columns)
    manifest.write_bytes(encode_columns(header, columns))


def test_a_hostile_object_is_refused(tmp_path: Path, ours: Path) -> None:
    stream = io.BytesIO()
    torch.save([Call(os.system, f"touch {tmp_path}/ran")], stream)
    raw = stream.getvalue()
    file = ours / "__0_0.distcp"
    place = [file.name, file.stat().st_size, len(raw), crc32(raw)]
    file.write_bytes(file.read_bytes() + raw)

    def lie(header: dict[str, Any], columns: dict[str, Any]) -> None:
        header["objects"] = [[key, *place] for key in ("rng/shard_0_1", "common_state/shard_0_1")]
        others = [row for row in header["files"] if row[0] != file.name]
        header["files"] = [[file.name, file.stat().st_size, crc32(file.read_bytes())], *others]

    forge(ours, lie)
    for read in (
        lambda: read_common(read_index(ours)),
        lambda: load({"r": ShardedObject("rng", None, (1,), (0,))}, ours),
    ):
        with pytest.raises(CheckpointCorruptError, match="cannot be loaded safely"):
            read()
    assert not (tmp_path / "ran").exists()


def test_a_stock_directory_of_safetensors_is_refused_by_name(stock: Path) -> None:
    (file,) = stock.glob("*.distcp")
    header = b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    file.write_bytes((len(header).to_bytes(8, "little") + header).ljust(file.stat().st_size, b"\0"))
    with pytest.raises(CheckpointCorruptError, match=r"written with SerializationFormat\.SAFETENSORS"):
        read_index(stock)


# ----- archives, links, FIFOs


def deflated(archive: bytes) -> bytes:
    """The same archive of torch, its entries compressed, with 256 MiB of zeros after the pickle."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as source,
        zipfile.ZipFile(stream, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=1) as target,
    ):
        for name in source.namelist():
            with target.open(name, "w", force_zip64=True) as entry:
                entry.write(source.read(name))
                for _ in range(16 if name.endswith("data.pkl") else 0):
                    entry.write(bytes(16 << 20))
    return stream.getvalue()


def overlapping() -> bytes:
    """An archive whose directory lists the same bytes again and again."""
    stream = io.BytesIO()
    torch.save("x" * 9999, stream)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/last", b"")  # so that its directory is written again
        archive.filelist *= 9
    return stream.getvalue()


@pytest.mark.parametrize("wanted", ["tensor", "object", "object of overlapping entries"])
def test_a_small_archive_of_much_is_refused_without_unpacking_it(stock: Path, wanted: str) -> None:
    (file,) = stock.glob("*.distcp")
    index = read_index(stock)
    place = index.tensors["w"].chunks[0].place if wanted == "tensor" else index.objects["n"]
    whole = file.read_bytes()
    bomb = overlapping() if "overlapping" in wanted else deflated(whole[place.start : place.start + place.nbytes])
    plain = pickle.loads((stock / ".metadata").read_bytes())
    for info in plain.storage_data.values():
        if info.offset == place.start:
            info.offset = len(whole)
            info.length = len(bomb)
    file.write_bytes(whole + bomb)
    (stock / ".metadata").write_bytes(pickle.dumps(plain))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointCorruptError, match="is compressed"):
        load(wanted_w() if wanted == "tensor" else {"n": None}, stock)
    assert verify_checkpoint(stock)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.parametrize("name", ["manifest.bin", "__0_0.distcp", ".metadata", "stock __0_0.distcp"])
def test_what_is_not_a_regular_file_is_refused(ours: Path, stock: Path, tmp_path: Path, name: str) -> None:
    is_ours = name in ("manifest.bin", "__0_0.distcp")
    moved = tmp_path / "moved"
    if is_ours:
        path = ours
        wanted = state_at(0, 0, 1, filled=False)
    else:
        path = stock
        wanted = wanted_w()
    file = path / name.split()[-1]
    file.rename(moved)
    makes = [lambda: file.symlink_to(moved), lambda: os.mkfifo(file), file.mkdir]
    for make in makes if is_ours else makes[:2]:
        make()
        with pytest.raises(CheckpointCorruptError, match=r"is not a regular file|is missing"):
            load(wanted, path)
        assert verify_checkpoint(path)
        file.rmdir() if file.is_dir() else file.unlink()


# ----- manifests that lie


def column(name: str, position: Any, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], columns: dict[str, Any]) -> None:
        columns[name] = columns[name].copy()
        columns[name][position] = value

    return change


def rename_file(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], columns: dict[str, Any]) -> None:
        header["files"] = [[name if old.endswith(".distcp") else old, *rest] for old, *rest in header["files"]]

    return change


def entry(*path: str | int, to: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], columns: dict[str, Any]) -> None:
        *above, last = path
        part: Any = header
        for key in above:
            part = part[key]
        part[last] = to

    return change


def without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], columns: dict[str, Any]) -> None:
        del (header if name in header else columns)[name]

    return change


def one_checksum_less(header: dict[str, Any], columns: dict[str, Any]) -> None:
    columns["sums"] = columns["sums"][1:]


def files_as_starts(header: dict[str, Any], columns: dict[str, Any]) -> None:
    columns["start"] = columns["file"]


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a path upwards": rename_file("../secret"),
    "an absolute path": rename_file("/etc/passwd"),
    "a folder": rename_file("sub/secret"),
    "two dots": rename_file(".."),
    "an empty name": rename_file(""),
    "a negative size of a file": entry("files", 0, 1, to=-1),
    "a size beyond 63 bits": entry("files", 0, 1, to=1 << 63),
    "a start beyond the file": column("start", -1, 1 << 50),
    "a negative start": column("start", -1, -8),
    "a huge start": column("start", -1, (1 << 63) - 1),
    "a file that is not listed": column("file", -1, 99),
    "a chunk outside the tensor": column("offsets", (-1, 0), 5),
    "a huge chunk": column("sizes", (-1, slice(None)), 1 << 40),
    "an empty chunk": column("sizes", (-1, 0), 0),
    "rows that no chunk has": column("sizes", (-1, 0), 5),
    "a huge shape": column("shape", (-1, slice(None)), 1 << 61),
    "a negative shape": column("shape", (-1, 0), -12),
    "more axes than there are": column("ndim", -1, 7),
    "an axis less": column("ndim", -1, 1),
    "an unknown dtype": entry("dtypes", to=["os.system"]),
    "a dtype that is not listed": column("dtype", -1, 9),
    "no dtypes": entry("dtypes", to=[]),
    "a chunk too many": column("chunks", -1, 2),
    "chunks of nobody": column("chunks", -1, 0),
    "a checksum too few": one_checksum_less,
    "a key too long": column("key_bytes", 0, 1 << 30),
    "a key that is not text": column("keys", 0, 0xFF),
    "no column of keys": without("keys"),
    "a column of another dtype": files_as_starts,
    "no files": without("files"),
    "an object beyond the file": entry("objects", 0, 2, to=1 << 50),
}


def test_false_manifests_are_refused_before_any_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tmp_path / "ours"
    save_as_ranks([state_at(1, 0, 1)], ours)
    (tmp_path / "secret").write_bytes((ours / "__0_0.distcp").read_bytes())
    manifest = (ours / "manifest.bin").read_bytes()
    opened = list[str]()
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or os_open(path, *a, **k))
    for name, lie in LIES.items():
        (ours / "manifest.bin").write_bytes(manifest)
        forge(ours, lie)
        opened.clear()
        wanted = state_at(0, 0, 1, filled=False)
        with suppress(CheckpointCorruptError):
            load(wanted, ours, verify="none")
            raise AssertionError(name)
        assert set(opened) == {str(ours / "manifest.bin")}, name  # twice: it may have been removed
        assert (wanted["w"].data == -1).all(), name


@pytest.mark.parametrize("rows", [(0, 6), (3, 6)], ids=["all", "the second half"])
def test_rows_that_are_stored_nowhere_are_not_loaded(tmp_path: Path, rows: tuple[int, int]) -> None:
    """The second chunk is moved onto the first: the volumes still add up."""
    halves = [{"w": ShardedTensor.from_rank_offsets("w", torch.full((3, 2), float(r)), (0, r, 2))} for r in (0, 1)]
    save_as_ranks(halves, tmp_path / "x")
    forge(tmp_path / "x", column("offsets", ..., 0))
    part = torch.full((rows[1] - rows[0], 2), -1.0)
    shard = ShardedTensor("w", part, torch.float32, tuple(part.shape), (6, 2), (rows[0], 0), None)
    with pytest.raises(CheckpointCorruptError, match=r"chunks .* of w overlap"):
        load({"w": shard}, tmp_path / "x")
    assert (part == -1).all()


def test_chunks_are_named_beside_those_that_they_overlap(tmp_path: Path) -> None:
    """Each second chunk is moved onto the one before it."""
    quarters = [{"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, r, 4))} for r in range(4)]
    save_as_ranks(quarters, tmp_path / "x")
    forge(tmp_path / "x", column("offsets", (..., 0), np.array([0, 0, 4, 4])))
    with pytest.raises(CheckpointCorruptError, match=r"chunks (.*) and \1 of w overlap"):
        load({"w": torch.zeros(8)}, tmp_path / "x")


def test_a_directory_without_its_manifest_is_not_taken_for_stock(ours: Path) -> None:
    (ours / "manifest.bin").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"written by opt-checkpoint, but its manifest\.bin is gone"):
        load({}, ours)


# ----- fuzz


NAMES = (
    *(f"ctorch.distributed.checkpoint.metadata\n{name}\n" for name in ("Metadata", "MetadataIndex")),
    *("ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n", "ctorch\nSize\n", "ctorch\nfloat32\n"),
    *("ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n", "ctorch.serialization\n_get_layout\n"),
    *("ccollections\nOrderedDict\n", "cbuiltins\nset\n", "cos\nsystem\n", "cbuiltins\neval\n"),
)
WORDS = ("state_dict_metadata", "storage_data", "fqn", "w", "offset", "__class__", "__reduce__", "torch.load", "id")
ACTS = b"()]}R\x81b\x85\x86\x87tueasN\x88\x890 1\x8f\x90\x91\x93\x92Q"


def random_pickle(rng: random.Random) -> bytes:
    """Random opcodes with arguments of the right form, so that many run for a while before they fail."""
    parts = [b"\x80\x02"]
    for _ in range(rng.randrange(1, 60)):
        arguments = (
            lambda: rng.choice(NAMES).encode(),
            lambda: text(rng.choice(WORDS)),
            lambda: b"K" + rng.randbytes(1),
            lambda: rng.choice((b"q", b"h")) + bytes([rng.randrange(3)]),
            *(lambda: bytes([rng.choice(ACTS)]),) * 2,
        )
        parts.append(rng.choice(arguments)())
    return b"".join(parts) + b"."


def read_all(path: Path) -> None:
    """Everything a reader may do with a directory."""
    index = read_index(path)
    read_common(index)
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(t.shape, dtype=t.dtype))
        for key, t in index.tensors.items()
        if t.nbytes < 1 << 20
    }
    load({**state, "rng": ShardedObject("rng", None, (1,), (0,)), "n": None}, path, strict="ignore_all")


def assert_only_our_errors(path: Path, seed: int) -> None:
    for attempt in (read_all, lambda p: [str(f) for f in verify_checkpoint(p)], lambda p: main(["ls", str(p.parent)])):
        try:
            attempt(path)
        except CheckpointingException:
            pass
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {path}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("source", ["stock", "ours", "ours, below a checksum that is right"])
def test_every_damage_to_any_file_ends_in_an_error_of_ours(
    source: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    good: Path = request.getfixturevalue(source.partition(",")[0])
    victim = tmp_path / "folder" / "victim"
    is_forged = "checksum" in source
    names = ["manifest.bin"] if is_forged else sorted(path.name for path in good.iterdir())
    shutil.copytree(good, victim)
    for seed in range(4000 if NIGHT else 80):
        rng = random.Random(seed)
        name = names[0] if rng.random() < 0.5 else rng.choice(names)
        raw = (good / name).read_bytes()
        changed = damaged(raw[:-4], rng) if is_forged else damaged(raw, rng)
        checksum = zlib.crc32(changed).to_bytes(4, "little") if is_forged else b""
        (victim / name).write_bytes(changed + checksum)
        assert_only_our_errors(victim, seed)
        (victim / name).write_bytes(raw)
        capsys.readouterr()


def test_random_pickles_are_values_or_errors_of_ours() -> None:
    for seed in range(10_000 if NIGHT else 500):
        raw = random_pickle(random.Random(seed))
        with nothing_happens(), suppress(CheckpointCorruptError):
            read_pickle(raw, "fuzz", lambda name: name.module != "os")


def test_calls_anywhere_in_a_metadata_file_are_not_run(stock: Path) -> None:
    plain = pickle.loads((stock / ".metadata").read_bytes())
    for seed in range(1000 if NIGHT else 60):
        rng = random.Random(seed)
        field = rng.choice(list(plain.__dict__))
        call = Call(rng.choice((os.system, eval, torch.load, getattr, setattr, open, pickle.loads)), "true")
        forged = dcp.Metadata(**{**plain.__dict__, field: rng.choice((call, {"w": call}, [call]))})
        (stock / ".metadata").write_bytes(pickle.dumps(forged, protocol=rng.choice((2, 3, 4, 5))))
        with nothing_happens(), pytest.raises(CheckpointCorruptError, match="which no checkpoint needs"):
            read_index(stock)
