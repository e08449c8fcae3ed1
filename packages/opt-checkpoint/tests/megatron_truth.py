"""What Megatron-Core's optimizer held in memory when it wrote a directory, from the files of `write_megatron.py`."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint import load, sharded_like


def truth_of(folder: Path) -> dict[str, Tensor]:
    """The whole states by stored key, put together from what each rank's optimizer held in memory."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = defaultdict(lambda: torch.zeros(0))
    for file in sorted(folder.glob("truth-*.pt")):
        for row in torch.load(file, weights_only=True):
            for piece in row["pieces"]:
                put(whole, filled, piece, row)
    assert all(bool(mask.all()) for mask in filled.values())
    return whole


def put(whole: dict[str, Tensor], filled: dict[str, Tensor], piece: dict[str, Any], row: dict[str, Any]) -> None:
    block = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"]))
    numel = torch.Size(piece["shape"]).numel()
    for state, values in row["states"].items():
        low = max(row["start"], piece["first"])
        high = min(row["start"] + len(values), piece["first"] + numel)
        if low >= high:
            continue
        key = f"optimizer.state.{state}.{piece['key']}"
        tensor = whole.setdefault(key, torch.zeros(piece["global_shape"]))
        mask = filled.setdefault(key, torch.zeros(piece["global_shape"], dtype=torch.bool))
        part = tensor[block].reshape(-1).clone()
        part_mask = mask[block].reshape(-1).clone()
        part[low - piece["first"] : high - piece["first"]] = values[low - row["start"] : high - row["start"]]
        part_mask[low - piece["first"] : high - piece["first"]] = True
        tensor[block] = part.view(piece["shape"])
        mask[block] = part_mask.view(piece["shape"])


def assert_holds(path: Path, truth: dict[str, Tensor], **options: Any) -> None:
    targets = {key: torch.full_like(value, -1.0) for key, value in truth.items()}
    load({key: sharded_like(key, target) for key, target in targets.items()}, path, **options)
    for key, value in truth.items():
        assert torch.equal(targets[key], value), key
