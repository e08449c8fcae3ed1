"""The writer's early writeback: the disk starts writing before the file is complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from opt_checkpoint import save, sharded_like, verify_checkpoint
from opt_checkpoint.disk.files import LocalFiles

MB = 1 << 20


class WatchedFiles(LocalFiles):
    """Notes each run of bytes whose writeback was started, and how long its file was then."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        self.sizes: list[int] = []

    def start_writeback(self, fd: int, start: int, nbytes: int) -> None:
        self.runs.append((start, start + nbytes))
        self.sizes.append(os.fstat(fd).st_size)
        super().start_writeback(fd, start, nbytes)


@pytest.mark.parametrize("numels", [[40 * MB // 4], [MB // 4] * 21, [16] * 10], ids=["large", "many", "small"])
def test_writeback_starts_for_all_but_the_last_megabytes_once_while_more_is_written(
    tmp_path: Path, numels: list[int]
) -> None:
    files = WatchedFiles()
    save({f"{i}": sharded_like(f"w{i}", torch.ones(n)) for i, n in enumerate(numels)}, tmp_path / "x", files=files)
    size = (tmp_path / "x" / "__0_0.distcp").stat().st_size
    ends = [0, *(end for _, end in files.runs)]
    assert [start for start, _ in files.runs] == ends[:-1]  # each byte once, in order
    assert all(end <= written for end, written in zip(ends[1:], files.sizes, strict=True))
    assert all(end % (4 * MB) == 0 for end in ends)  # whole pages
    assert 0 <= size - ends[-1] < 4 * MB
    assert verify_checkpoint(tmp_path / "x") == []
