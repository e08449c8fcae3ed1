"""Writes the golden checkpoints of this folder. Run once per format version or torch version, never over an old one.

    python packages/opt-checkpoint/tests/golden/make_golden.py NAME

Makes `NAME-ours` (three ranks, every kind of content) and `NAME-stock` (stock DCP of the torch installed).
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint_ranks import save_as_ranks
from torch import Tensor
from torch.distributed.checkpoint import save as dcp_save

from opt_checkpoint import PerParam, ShardedObject, ShardedTensor, make_sharded_state

HERE = Path(__file__).parent
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
)


def golden_values() -> dict[str, Tensor]:
    """Known values: bit patterns counted up."""
    values = {}
    for number, dtype in enumerate(DTYPES):
        raw = (torch.arange(6 * 4 * dtype.itemsize) * 7 + number).to(torch.uint8)
        values[f"t{number}"] = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(6, 4)
    return values


def golden_state(rank: int, size: int) -> dict[str, Any]:
    """Flat shards of all tensors; a step, scales, an object and common values."""
    state: dict[str, Any] = {}
    for key, value in golden_values().items():
        start = 24 * rank // size
        stop = 24 * (rank + 1) // size
        whole = ShardedTensor(key, None, value.dtype, (6, 4), (6, 4), (0, 0), None)
        state[key] = whole.flat(value.reshape(-1)[start:stop].clone(), start, stop)
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 8), (0, rank, size))
    scales = torch.arange(6.0 * size).view(3 * size, 2)[3 * rank : 3 * rank + 3].clone()
    state["scale"] = ShardedTensor.from_rank_offsets("optimizer.state.scale.w", scales, (0, rank, size))
    state["step"] = make_sharded_state(param, 12.0, "step", PerParam())
    state["rng"] = ShardedObject("rng", {"rank": rank}, (size,), (rank,))
    state["common"] = {"lr": 0.125, "betas": (0.9, 0.95), "names": ["a", "b"], 3: None}
    return state


def main() -> None:
    """Write both."""
    name = sys.argv[1]
    save_as_ranks([golden_state(rank, 3) for rank in range(3)], HERE / f"{name}-ours")
    dcp_save({"nested": golden_values(), "number": 5}, checkpoint_id=HERE / f"{name}-stock")


if __name__ == "__main__":
    main()
