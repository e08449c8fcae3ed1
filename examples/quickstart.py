"""The main job, told in runs: one that stops half-way, one that resumes it, one that was never interrupted.

The resumed run must go on with the uninterrupted run's losses, to the last digit; resumed on one and on three ranks, it
must come as near as bf16 and another order of summation allow. And the model must beat a bigram on held-out text.
Writes loss.png and schedule.png beside the logs.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


OTHER_WORLDS = (1, 3)  # ranks that also resume the two ranks' checkpoint, for a few steps
FEW = 6
NEAR = 0.02  # nats: losses of bf16 runs that differ in the order of summation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    half = args.steps // 2
    shutil.rmtree(args.dir, ignore_errors=True)

    first = train(args, "first", "--stop-at", half)
    for ranks in OTHER_WORLDS:
        copy = args.dir / f"on_{ranks}"
        shutil.copytree(args.dir / "checkpoints", copy / "checkpoints")
        train(args, "resumed", "--resume", half, "--stop-at", half + FEW, directory=copy, ranks=ranks)
    resumed = train(args, "resumed", "--resume", half)
    whole = train(args, "whole", directory=args.dir / "uninterrupted")

    draw_losses(first, resumed, whole, args.dir / "loss.png")
    draw_schedule(whole, args.dir / "schedule.png")
    print(
        f"\nheld-out, bits per character: {whole['begun_bits']:.3f} before, {whole['bits']:.3f} after; "
        f"a bigram: {whole['bigram_bits']:.3f}"
    )
    print(f"pictures: {args.dir / 'loss.png'}, {args.dir / 'schedule.png'}")
    check_resumed(f"{args.ranks} ranks", resumed, whole, allowed=0.0)
    for ranks in OTHER_WORLDS:
        check_resumed(f"{ranks} rank(s)", read(args.dir / f"on_{ranks}", "resumed"), whole, allowed=NEAR)
    if whole["bits"] >= whole["bigram_bits"]:
        sys.exit("the model did not beat a bigram")


def train(args: argparse.Namespace, name: str, *options: object, directory: Path | None = None, ranks: int = 0) -> dict:
    """One run of train_gpt.py; what it logged."""
    where, size = directory or args.dir, ranks or args.ranks
    print(f"\n=== {name}, on {size} rank(s) ===", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size]
    job = [HERE / "train_gpt.py", "--dir", where, "--name", name, "--steps", args.steps, *options]
    subprocess.run([str(word) for word in (*torchrun, *job)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return read(where, name)


def read(directory: Path, name: str) -> dict:
    return json.loads((directory / f"{name}.json").read_text())


def check_resumed(who: str, resumed: dict, whole: dict, *, allowed: float) -> None:
    """Says how far the resumed run's losses are from the uninterrupted run's, and fails where that is too far."""
    losses = {row["step"]: row["loss"] for row in whole["log"]}
    gap = max(abs(row["loss"] - losses[row["step"]]) for row in resumed["log"])
    print(f"resumed on {who}: {len(resumed['log'])} steps, largest difference of loss {gap:.2e} (allowed: {allowed})")
    if gap > allowed:
        sys.exit("the resumed run left the uninterrupted one's loss curve")


def draw_losses(first: dict, resumed: dict, whole: dict, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, log, style in (
        ("never interrupted", whole, {"color": "0.75", "linewidth": 5}),
        ("until it was stopped", first, {"color": "tab:blue"}),
        ("resumed from the checkpoint", resumed, {"color": "tab:orange"}),
    ):
        axis.plot(
            [row["step"] for row in log["log"]], [row["loss"] / math.log(2) for row in log["log"]], label=label, **style
        )
    axis.axhline(whole["bigram_bits"], color="black", linestyle=":", label="bigram, held-out")
    axis.axvline(resumed["log"][0]["step"] - 0.5, color="0.5", linewidth=0.8)
    axis.plot(len(whole["log"]), whole["bits"], "k*", markersize=12, label=f"held-out: {whole['bits']:.2f}")
    axis.set(xlabel="step", ylabel="loss (bits per character)", title="A character GPT on Python's standard library")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_schedule(whole: dict, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    steps = [row["step"] for row in whole["log"]]
    axis.plot(steps, [row["lr"] for row in whole["log"]], color="tab:blue", label="learning rate")
    axis.set(xlabel="step", ylabel="learning rate", title="Warmup, stable, decay; and the ramp of weight decay")
    right = axis.twinx()
    right.plot(
        steps, [row["weight_decay"] for row in whole["log"]], color="tab:red", linestyle="--", label="weight decay"
    )
    right.set(ylabel="weight decay", ylim=(0, None))
    axis.set_ylim(0, None)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
