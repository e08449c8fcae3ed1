"""Checkpoints of format 1, whose manifest was JSON, made from those of today's format."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from opt_checkpoint import read_index
from opt_checkpoint.disk.dtype_names import dtype_name
from opt_checkpoint.disk.index import ByteRange


def row(path: Path, place: ByteRange) -> list[Any]:
    values = (path / place.file).read_bytes()[place.start : place.start + place.nbytes]
    return [place.file, place.start, place.nbytes, zlib.crc32(values)]


def to_old_format(path: Path) -> Path:
    """Replace the manifest of a checkpoint by one of format 1."""
    index = read_index(path)
    tensors = {
        key: {
            "shape": t.shape,
            "dtype": dtype_name(t.dtype),
            "chunks": [[c.box.offsets, c.box.sizes, *row(path, c.place)] for c in t.chunks],
        }
        for key, t in index.tensors.items()
    }
    content = {
        "format": 1,
        "save_id": index.save_id,
        **index.details,
        "files": {name: {"size": f.size, "crc32": f.crc} for name, f in index.files.items()},
        "objects": {key: row(path, place) for key, place in index.objects.items()},
        "tensors": tensors,
    }
    (path / "manifest.bin").unlink()
    rewrite(path, content)
    return path


def manifest_body(path: Path) -> bytes:
    return (path / "manifest.json").read_bytes().rpartition(b"\n#crc32=")[0]


def rewrite(path: Path, content: Any) -> None:
    """A manifest with a right checksum: what a forger, not an accident, would leave."""
    body = json.dumps(content).encode()
    (path / "manifest.json").write_bytes(body + f"\n#crc32={zlib.crc32(body):08x}\n".encode())
