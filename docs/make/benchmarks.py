"""The benchmarks page: for each file of recorded results what was measured, when, where, and the figures."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = [
    *sorted(ROOT.glob("kernels/results/*.json")),
    *sorted(ROOT.glob("packages/*/benchmarks/results/*.json"), key=lambda path: path.stem),
]


class About(NamedTuple):
    """The heading of a section, and what a reader must know to read its table."""

    title: str
    text: str


ABOUT = {
    "trainer-losses": About(
        "Losses inside trainers",
        "A small network trained for 60 steps with `torch.optim.AdamW` and with ours: the largest relative difference "
        "of the losses. One rounding unit of fp32 is 6e-8.",
    ),
    "bench_elementwise": About(
        "Elementwise updates on a CPU",
        "One step of all parameters against the same step with `torch.optim` and its usual companions. *Reference "
        "sequence* is Megatron-Core's: unscale to fp32, clip, fused AdamW on fp32 main parameters, copy to bf16. The "
        "lower bound for Lion is one copy of the parameters.",
    ),
    "bench_host": About(
        "Host time of a step",
        "Python and dispatch time of a step over 290 tensors, without the work on the device: what a GPU waits for if "
        "its own work is shorter.",
    ),
    "bench_muon": About(
        "Muon and Newton-Schulz on a CPU",
        "The orthogonalisation of a stack of equal matrices, and the whole Muon step, against the plain five-step "
        "iteration and `torch.optim.Muon`.",
    ),
    "io-2-cpus-isal": About(
        "Saving and loading checkpoints",
        "Eight chunks of 64 MB, format 2. A ratio compares with `torch.distributed.checkpoint` (*stock DCP*) or with "
        "the disk alone, and above 1 means that ours is faster. The numbers in parentheses are the goals of the test.",
    ),
    "planning-2-cpus-isal": About(
        "Planning a save over 4,096 ranks",
        "Half a million chunks. A first save plans on rank 0; a later save of the same layout reuses the plan. Times "
        "are those of rank 0 in seconds, without the network.",
    ),
}


def write(folder: Path) -> None:
    """Write `benchmarks.md`, a section for every file of results."""
    (folder / "benchmarks.md").write_text("\n".join(line for path in RESULTS for line in _of_file(path)))


def _of_file(path: Path) -> Iterator[str]:
    result = json.loads(path.read_text())
    where = path.relative_to(ROOT)
    if "benchmarks" in result:
        for name, part in result["benchmarks"].items():
            machine = {"processor": result.get("processor", ""), **_known(part), **_known(part.get("machine", {}))}
            yield from _section(name, result["date"], machine, where, _ratios(part.get("figures", [])))
    elif "machine" in result and "figures" in result:
        machine = {**result["machine"], **({"load": result["load"]} if "load" in result else {})}
        yield from _section(path.stem, result["date"], machine, where, _figures(result["figures"]))


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value and isinstance(value, str | int | float)}


def _section(name: str, date: str, machine: dict[str, Any], where: Path, table: list[str]) -> Iterator[str]:
    about = ABOUT.get(name, About(name, ""))
    on = ", ".join(f"{key} {value}" for key, value in _known(machine).items())
    yield from (f"## {about.title}\n", f"{about.text}\n", *table, "", f"Recorded on {date}: {on}. Source: `{where}`.\n")


def _ratios(figures: list[dict[str, Any]]) -> list[str]:
    rows = ["| ours / theirs | ratio | ours, ms | theirs, ms |", "|---|---|---|---|"]
    for row in figures:
        times = [_number(row[key]) if isinstance(row.get(key), float) else "" for key in ("ours_ms", "peer_ms")]
        rows += [f"| {row['name']} | {row['ratio']:.2f} | {times[0]} | {times[1]} |"] if "ratio" in row else []
    return rows


def _figures(figures: dict[str, float] | list[dict[str, float]]) -> list[str]:
    tables = figures if isinstance(figures, list) else [figures]
    rows = ["| figure | value |", "|---|---|"]
    for table in tables:
        rows += [f"| {name} | {_number(value)} |" for name, value in table.items() if isinstance(value, int | float)]
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
