"""Directories from strangers: reading one runs nothing, changes nothing, stays small, and ends in an error of ours."""

from __future__ import annotations

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

import pytest
import torch
from checkpoint_ranks import save_as_ranks
from states import state_at
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
from opt_checkpoint.disk.foreign import read_pickle

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
        seen, _watched = _watched, None
    assert seen == []


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    dcp_save({"w": torch.arange(12.0).view(3, 4), "n": 5, "l": [torch.zeros(2)]}, checkpoint_id=tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_as_ranks([state_at(1, rank, 2) for rank in range(2)], tmp_path / "ours")
    return tmp_path / "ours"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def test_a_metadata_file_cannot_write_to_a_file_outside(tmp_path: Path, stock: Path) -> None:
    """`_get_layout` is `getattr(torch, name)` in torch; `PyTorchFileWriter` opens a file for writing."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    call = b"ctorch.serialization\n_get_layout\n" + text("torch.PyTorchFileWriter") + b"\x85R"
    (stock / ".metadata").write_bytes(b"\x80\x02" + call + text(str(victim)) + b"\x85R.")
    with nothing_happens():
        with pytest.raises(CheckpointCorruptError):
            read_index(stock)
        assert main(["ls", str(tmp_path)]) == 0
    assert victim.read_text() == "precious"


def test_a_metadata_file_cannot_change_attributes_of_classes(stock: Path) -> None:
    before = dcp.MetadataIndex.__hash__
    state = b"N}" + text("__hash__") + b"cbuiltins\nlist\ns\x86"
    raw = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadataIndex\n" + state + b"b."
    (stock / ".metadata").write_bytes(raw)
    try:
        with nothing_happens(), pytest.raises(CheckpointCorruptError, match="sets the state of a Name"):
            read_index(stock)
        assert dcp.MetadataIndex.__hash__ is before
    finally:
        dcp.MetadataIndex.__hash__ = before


def test_megatrons_gathered_plans_are_passed_over(stock: Path) -> None:
    """Its `.metadata` also holds the save plans of all ranks, which a load does not need."""
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    plain = pickle.loads((stock / ".metadata").read_bytes())
    plain.all_local_plans = [SavePlan([WriteItem(dcp.MetadataIndex("w"), WriteItemType.BYTE_IO)])]
    expected = read_index(stock)
    (stock / ".metadata").write_bytes(pickle.dumps(plain))
    assert read_index(stock) == expected


def test_a_small_pickle_of_an_exponentially_large_value_ends_at_once(stock: Path) -> None:
    doubled = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(200))
    for raw in (b"\x80\x02)" + doubled + b".", b"\x80\x02})" + doubled + b"Ns."):  # as the value; as a key
        (stock / ".metadata").write_bytes(raw)
        with pytest.raises(CheckpointCorruptError):
            read_index(stock)


def deflated(archive: bytes) -> bytes:
    """The same archive of torch, its entries compressed, with 256 MiB of zeros in the pickle's place."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as source,
        zipfile.ZipFile(stream, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=1) as target,
    ):
        for name in source.namelist():
            with target.open(name, "w", force_zip64=True) as entry:
                entry.write(source.read(name))
                if name.endswith("data.pkl"):
                    for _ in range(16):
                        entry.write(bytes(16 << 20))
    return stream.getvalue()


@pytest.mark.parametrize("wanted", ["tensor", "object"])
def test_a_small_archive_of_much_is_refused_without_unpacking_it(stock: Path, wanted: str) -> None:
    (file,) = stock.glob("*.distcp")
    index = read_index(stock)
    place = index.tensors["w"].chunks[0].place if wanted == "tensor" else index.objects["n"]
    bomb = deflated(file.read_bytes()[place.start : place.start + place.nbytes])
    plain = pickle.loads((stock / ".metadata").read_bytes())
    for info in plain.storage_data.values():
        if info.offset == place.start:
            info.offset, info.length = file.stat().st_size, len(bomb)
    file.write_bytes(file.read_bytes() + bomb)
    (stock / ".metadata").write_bytes(pickle.dumps(plain))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state: Any = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4))} if wanted == "tensor" else {"n": None}
    with pytest.raises(CheckpointCorruptError, match="compressed"):
        load(state, stock)
    assert verify_checkpoint(stock)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.parametrize("kind", ["symbolic link", "fifo", "folder"])
@pytest.mark.parametrize("name", ["manifest.bin", "__0_0.distcp"])
def test_what_is_not_a_regular_file_is_refused(ours: Path, tmp_path: Path, kind: str, name: str) -> None:
    (ours / name).rename(tmp_path / "moved")
    if kind == "symbolic link":
        (ours / name).symlink_to(tmp_path / "moved")
    elif kind == "fifo":
        os.mkfifo(ours / name)
    else:
        (ours / name).mkdir()
    with pytest.raises(CheckpointCorruptError, match=r"is not a regular file|is missing"):
        load(state_at(0, 0, 1, filled=False), ours)
    assert verify_checkpoint(ours)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_stock_directories_with_a_fifo_or_link_are_refused(stock: Path, tmp_path: Path, name: str) -> None:
    (stock / name).rename(tmp_path / "moved")
    for make in (lambda p: os.mkfifo(p), lambda p: p.symlink_to(tmp_path / "moved")):
        make(stock / name)
        with pytest.raises(CheckpointCorruptError, match="is not a regular file"):
            load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4))}, stock)
        assert verify_checkpoint(stock)
        (stock / name).unlink()


# ---- fuzz


def damage(raw: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, removed, added or moved."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.choice((1, 1, 4, 64))]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
        elif kind == 3:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + rng.randrange(64)]
        elif at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


NAMES = (
    "ctorch.distributed.checkpoint.metadata\nMetadata\n",
    "ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
    "ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n",
    "ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
    "ctorch\nSize\n",
    "ctorch\nfloat32\n",
    "ctorch.serialization\n_get_layout\n",
    "ccollections\nOrderedDict\n",
    "cbuiltins\nset\n",
    "cos\nsystem\n",
    "cbuiltins\neval\n",
)
WORDS = ("state_dict_metadata", "storage_data", "fqn", "w", "offset", "__class__", "__reduce__", "torch.load", "id")
ACTS = b"()]}R\x81b\x85\x86\x87tueasN\x88\x890 1\x8f\x90\x91\x93\x92Q"


def random_pickle(rng: random.Random) -> bytes:
    """Random opcodes with arguments of the right form, so that many run for a while before they fail."""
    parts = [b"\x80\x02"]
    for _ in range(rng.randrange(1, 60)):
        kind = rng.randrange(6)
        if kind == 0:
            parts.append(rng.choice(NAMES).encode())
        elif kind == 1:
            parts.append(text(rng.choice(WORDS)))
        elif kind == 2:
            parts.append(b"K" + rng.randbytes(1))
        elif kind == 3:
            parts.append(rng.choice((b"q", b"h")) + bytes([rng.randrange(3)]))
        else:
            parts.append(bytes([rng.choice(ACTS)]))
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
    state["rng"] = ShardedObject("rng", None, (1,), (0,))
    load({**state, "n": None}, path, strict="ignore_all")


def assert_only_our_errors(path: Path, seed: int) -> None:
    for attempt in (read_all, lambda p: [str(f) for f in verify_checkpoint(p)], lambda p: main(["ls", str(p.parent)])):
        try:
            attempt(path)
        except CheckpointingException:
            pass
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {path}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("source", ["stock", "ours"])
def test_every_damage_to_any_file_ends_in_an_error_of_ours(
    source: str, tmp_path: Path, full: bool, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    good: Path = request.getfixturevalue(source)
    victim = tmp_path / "folder" / "victim"
    names = sorted(p.name for p in good.iterdir())
    shutil.copytree(good, victim)
    for seed in range(4000 if full else 150):
        rng = random.Random(seed)
        name = names[0] if rng.random() < 0.5 else rng.choice(names)
        (victim / name).write_bytes(damage((good / name).read_bytes(), rng))
        assert_only_our_errors(victim, seed)
        (victim / name).write_bytes((good / name).read_bytes())
        capsys.readouterr()


def test_forged_manifests_end_in_an_error_of_ours(ours: Path, full: bool) -> None:
    """Damage below a checksum that is right."""
    body = (ours / "manifest.bin").read_bytes()[:-4]
    for seed in range(3000 if full else 120):
        changed = damage(body, random.Random(seed))
        (ours / "manifest.bin").write_bytes(changed + zlib.crc32(changed).to_bytes(4, "little"))
        assert_only_our_errors(ours, seed)


def test_random_pickles_are_values_or_errors_of_ours(full: bool) -> None:
    for seed in range(10_000 if full else 500):
        raw = random_pickle(random.Random(seed))
        with nothing_happens(), suppress(CheckpointCorruptError):
            read_pickle(raw, "fuzz", lambda name: name.module != "os")


CALLS: tuple[Callable[..., Any], ...] = (os.system, eval, torch.load, getattr, setattr, open, pickle.loads)


class Call:
    def __init__(self, rng: random.Random) -> None:
        self.function = rng.choice(CALLS)

    def __reduce__(self) -> Any:
        return self.function, ("true",), {"a": 1}


def test_calls_anywhere_in_a_metadata_file_are_not_run(stock: Path, full: bool) -> None:
    plain = pickle.loads((stock / ".metadata").read_bytes())
    for seed in range(1000 if full else 60):
        rng = random.Random(seed)
        field = rng.choice(("planner_data", "storage_meta", "version", "storage_data", "state_dict_metadata"))
        forged = dcp.Metadata(**{**plain.__dict__, field: rng.choice((Call(rng), {"w": Call(rng)}, [Call(rng)]))})
        (stock / ".metadata").write_bytes(pickle.dumps(forged, protocol=rng.choice((2, 3, 4, 5))))
        with nothing_happens(), pytest.raises(CheckpointCorruptError, match="which no checkpoint needs"):
            read_index(stock)
