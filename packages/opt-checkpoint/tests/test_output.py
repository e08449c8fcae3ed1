"""The writer's early writeback: the disk starts writing before the file is complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from opt_checkpoint import save, sharded_like, verify_checkpoint

MB = 1 << 20


@pytest.mark.parametrize("numels", [[40 * MB // 4], [MB // 4] * 21, [16] * 10], ids=["large", "many", "small"])
def test_writeback_starts_for_all_but_the_last_megabytes_once_while_more_is_written(
    tmp_path: Path, numels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[int, int, int]] = []
    note = lambda fd, start, nbytes, advice: runs.append((start, start + nbytes, os.fstat(fd).st_size))
    monkeypatch.setattr(os, "posix_fadvise", note)
    save({f"{i}": sharded_like(f"w{i}", torch.ones(n)) for i, n in enumerate(numels)}, tmp_path / "x")
    size = (tmp_path / "x" / "__0_0.distcp").stat().st_size
    ends = [0, *(end for _, end, _ in runs)]
    assert [start for start, _, _ in runs] == ends[:-1]  # each byte once, in order
    assert all(end <= written for _, end, written in runs)
    assert all(end % (4 * MB) == 0 for end in ends)  # whole pages
    assert 0 <= size - ends[-1] < 4 * MB
    assert verify_checkpoint(tmp_path / "x") == []
