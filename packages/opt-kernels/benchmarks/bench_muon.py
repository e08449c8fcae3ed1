"""CPU benchmarks of Muon's orthogonalisation against the plain iteration: `python bench_muon.py --json out.json`.

Every figure is a ratio: ours and its peer are measured alternately in one process, and the median of the ratios of
pairs is printed. Load on the machine then adds noise to a figure but no bias. The singular values of both results are
printed too.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from opt_kernels.matrices import CoefficientType
from opt_kernels.matrices.coefficients import Schedule, schedule
from opt_kernels.matrices.orthogonalization import cut, newton_schulz
from opt_kernels.optim import Muon

GOAL = 1 / 1.5
SHAPES = {"8 of 512x2048": (8, 512, 2048), "4 of 1024x4096": (4, 1024, 4096)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One comparison: medians over pairs of alternating measurements, and the singular values of both results."""

    name: str
    goal: float  # the largest acceptable ratio
    ratio: float  # ours / peer
    ours_ms: float
    peer_ms: float
    num_pairs: int
    ours_singular_values: tuple[float, float] | None  # smallest and largest
    peer_singular_values: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two implementations of the same work, which return the orthogonalised matrices."""

    ours: Callable[[], list[Tensor]]
    peer: Callable[[], list[Tensor]]


def plain(x: Tensor, steps: Schedule, dtype: torch.dtype) -> Tensor:
    """The iteration as it is published, for one matrix (m, n), m <= n."""
    x = (x / (x.norm() + 1e-7)).to(dtype)
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def orthogonalisation(precision: str, shape: tuple[int, int, int]) -> Comparison:
    """Five quintic steps. Both process one matrix at a time, which is faster for both at these sizes."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).unbind()
    steps = schedule(CoefficientType.QUINTIC, num_steps=5)
    dtype = DTYPES[precision]
    segments = cut(steps, rows=shape[1], cols=shape[2], dtype=dtype, symmetric=True)
    return Comparison(
        ours=lambda: [newton_schulz(matrix[None], segments=segments, dtype=dtype)[0] for matrix in matrices],
        peer=lambda: [plain(matrix, steps, dtype) for matrix in matrices],
    )


def whole_step(shape: tuple[int, int, int]) -> Comparison:
    """Compare a whole step (momentum, five bf16 steps, decay and update) with torch's Muon with the same options."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)

    def parameters() -> list[Tensor]:
        params = [torch.nn.Parameter(value.clone()) for value in values]
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        return list(params)

    ours = Muon(parameters(), lr=1e-3)
    peer = torch.optim.Muon(parameters(), lr=1e-3)
    return Comparison(ours=lambda: _nothing(ours.step), peer=lambda: _nothing(peer.step))


def _nothing(step: Callable[[], object]) -> list[Tensor]:
    """Run `step`, which returns no matrices."""
    step()
    return []


def comparisons() -> dict[str, Callable[[], Comparison]]:
    """Yield all comparisons by name; each is built when it is needed."""
    found: dict[str, Callable[[], Comparison]] = {}
    for label, shape in SHAPES.items():
        for precision in DTYPES:
            name = f"{precision} Newton-Schulz, {label} / plain five steps"
            found[name] = partial(orthogonalisation, precision, shape)
        # New in torch 2.9.
        if "Muon" in torch.optim.__all__:
            found[f"bf16 Muon step, {label} / torch.optim.Muon"] = partial(whole_step, shape)
    return found


def milliseconds(step: Callable[[], object]) -> float:
    """Time of one call in milliseconds."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def singular_values(made: list[Tensor]) -> tuple[float, float] | None:
    """The smallest and the largest singular value of the first matrix; empty without matrices."""
    if not made:
        return None
    values = torch.linalg.svdvals(made[0].double())
    return float(values.min()), float(values.max())


def compare(name: str, *, num_pairs: int) -> Figure:
    """Measure ours and the peer alternately, after a warm-up of each."""
    comparison = comparisons()[name]()
    ours_made = comparison.ours()
    peer_made = comparison.peer()
    pairs = [(milliseconds(comparison.ours), milliseconds(comparison.peer)) for _ in range(num_pairs)]
    return Figure(
        name=name,
        goal=GOAL,
        ratio=statistics.median(a / b for a, b in pairs),
        ours_ms=statistics.median(a for a, _ in pairs),
        peer_ms=statistics.median(b for _, b in pairs),
        num_pairs=num_pairs,
        ours_singular_values=singular_values(ours_made),
        peer_singular_values=singular_values(peer_made),
    )


def main() -> None:
    """Print a line per figure, and write them as JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--pairs", type=int, default=11, help="pairs per figure (default: 11)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--only", default="", help="only the figures whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = [compare(name, num_pairs=arguments.pairs) for name in comparisons() if arguments.only in name]
    for f in figures:
        print(f"{f.ratio:6.3f}  (goal {f.goal:.2f})  {f.ours_ms:8.2f} ms / {f.peer_ms:8.2f} ms  {f.name}")
        for side, values in (("ours", f.ours_singular_values), ("peer", f.peer_singular_values)):
            if values is not None:
                print(f"        singular values of {side}: {values[0]:.3f} to {values[1]:.3f}")
    if arguments.json:
        machine = {"processor": platform.processor(), "threads": arguments.threads, "torch": torch.__version__}
        record = {"machine": machine, "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
