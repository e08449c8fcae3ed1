"""Figures on pages are those of the committed results, rounded as the page shows them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = "kernels/results/cpu-amd-epyc-2-threads.json"
IO = "packages/opt-checkpoint/benchmarks/results/io-2-cpus-isal.json"
PLANNING = "packages/opt-checkpoint/benchmarks/results/planning-2-cpus-isal.json"
TRAINERS = "packages/opt-stack/benchmarks/results/trainer-losses.json"
NUMBERS = "kernels/results/numbers.json"


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def ratios() -> dict[str, float]:
    figures = read(KERNELS)["benchmarks"]["bench_elementwise"]["figures"]
    return {figure["name"]: figure["ratio"] for figure in figures}


def claims() -> Iterator[tuple[str, str, list[float]]]:
    """A page, a pattern with a group for each figure, and the recorded values."""
    measured = ratios()
    bf16 = measured["bf16 AdamW, fp32 mains / reference sequence"]
    yield "README.md", r"\[([\d.]+), two threads\]", [bf16]
    yield "packages/opt-kernels/README.md", r"float32 mains / cast.*\| ([\d.]+) \|", [bf16]
    rows = {
        r"float32 AdamW with clipping .*\| ([\d.]+) \|": ["fp32 AdamW with clipping / clip_grad_norm_ + fused AdamW"],
        r"remainders and bf16 moments .*\| ([\d.]+) \|": ["bf16 AdamW, remainders, bf16 moments / reference sequence"],
        r"e5m2 moments / .*\| ([\d.]+), ([\d.]+), ([\d.]+) \|": [
            f"fp32 AdamW, {moments} moments / fused AdamW" for moments in ("fp16", "e4m3", "e5m2")
        ],
        r"with 8-bit moments / the same \| ([\d.]+) \|": ["fp32 AdamW, 8-bit moments / fused AdamW"],
        r"copying the parameters once \| ([\d.]+) \|": ["fp32 Lion / one copy of the parameters"],
    }
    for pattern, names in rows.items():
        yield "packages/opt-kernels/README.md", pattern, [measured[name] for name in names]
    io = {name.partition(" (")[0]: median(values) for name, values in read(IO)["figures"].items()}
    checkpoint = "packages/opt-checkpoint/README.md"
    yield checkpoint, r"save ([\d.]+) times as fast", [io["save / stock DCP"]]
    loads = [io["load / stock DCP, cached"], io["load / stock DCP, cold"]]
    yield checkpoint, r"load\s+([\d.]+) times warm[^,]*, ([\d.]+) cold", loads
    yield checkpoint, r"blocks for ([\d.]+) of a copy", [io["background save blocks / plain copy"]]
    largest = read(PLANNING)["figures"][-1]
    saves = [largest["chunks"], largest["first save: rank 0, all s"]]
    yield checkpoint, r"saves ([\d,]+)\s+chunks in ([\d.]+) s", saves
    losses = read(TRAINERS)["figures"]
    trainers = [
        max(value for name, value in losses.items() if name.startswith(some))
        for some in (("accelerate", "lightning"), "transformers")
    ]
    for page in ("README.md", "docs/index.md"):
        yield page, r"relative ([\de-]+) at most[^(]*?([\d.]+e-\d)", trainers
    board = {row["rule"]: row for row in read("kernels/results/leaderboard.json")["rows"]}
    updates = [board["Muon"]["update_ms"], board["AdamW"]["update_ms"]]
    yield "README.md", r"an update takes (\d+) ms,\s+AdamW's ([\d.]+) ms", updates
    sizes = [row["state_bytes"] for row in read(NUMBERS)["rows"]]
    narrow = [size for size in sizes if size < 8]
    yield "README.md", r"\*\*(\d) to (\d) bytes\*\*", [min(narrow), max(narrow)]


@pytest.mark.parametrize(("page", "pattern", "recorded"), list(claims()))
def test_a_figure_on_a_page_is_the_recorded_one(page: str, pattern: str, recorded: list[float]) -> None:
    (shown,) = re.findall(pattern, (ROOT / page).read_text())
    for text, value in zip([shown] if isinstance(shown, str) else shown, recorded, strict=True):
        number = text.replace(",", "")
        digits = len(number.partition("e")[0].replace(".", "").strip("0"))
        assert float(f"{value:.{digits - 1}e}") == pytest.approx(float(number), rel=1e-9), (page, text, value)


def test_muon_reaches_adamws_loss_after_two_thirds_of_the_steps() -> None:
    results = read("kernels/results/leaderboard.json")
    reached = {row["rule"]: row["steps_to_target"] for row in results["rows"]}["Muon"]
    assert reached / results["about"]["steps"] == pytest.approx(2 / 3, abs=0.02)
    assert "Two thirds of the steps" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", [KERNELS, IO, PLANNING, TRAINERS, NUMBERS])
def test_results_name_their_date_and_machine(path: str) -> None:
    result = read(path)
    result = result.get("about", result)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result.get("processor") or result["machine"]


def test_each_row_of_the_leaderboard_names_its_date_and_machine() -> None:
    for row in read("kernels/results/leaderboard.json")["rows"]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["finished"]), row["rule"]
        assert row["machine"], row["rule"]
