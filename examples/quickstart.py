"""The main job, told in three runs: one that stops half-way, one that resumes it, one that was never interrupted.

The resumed run must go on with the uninterrupted run's losses, and the model must beat a bigram on held-out text.
Writes loss.png and schedule.png beside the logs.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    half = args.steps // 2

    train(args, args.dir, "first", "--stop-at", half)
    train(args, args.dir, "resumed", "--resume")
    train(args, args.dir / "uninterrupted", "whole")

    logs = {name: json.loads((args.dir / f"{name}.json").read_text()) for name in ("first", "resumed")}
    whole = json.loads((args.dir / "uninterrupted" / "whole.json").read_text())
    draw_losses(logs, whole, half, args.dir / "loss.png")
    draw_schedule(whole, args.dir / "schedule.png")
    verdict(logs, whole, half)
    print(f"pictures: {args.dir / 'loss.png'}, {args.dir / 'schedule.png'}")


def train(args: argparse.Namespace, directory: Path, name: str, *options: object) -> None:
    print(f"\n=== {name} ===", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", args.ranks]
    job = [HERE / "train_gpt.py", "--dir", directory, "--name", name, "--steps", args.steps, *options]
    subprocess.run([str(word) for word in (*torchrun, *job)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def verdict(logs: dict, whole: dict, half: int) -> None:
    """Says in numbers what the pictures show, and fails where it is not so."""
    pairs = list(zip(logs["resumed"]["log"], whole["log"][half:], strict=True))
    gap = max(abs(resumed["loss"] - uninterrupted["loss"]) for resumed, uninterrupted in pairs)
    print(f"\nresumed against uninterrupted: {len(pairs)} steps, largest difference of loss {gap:.2e}")
    print(f"held-out, bits per character: bigram {whole['bigram_bits']:.3f}, trained {whole['bits']:.3f}")
    if gap > 1e-6:
        sys.exit("the resumed run left the uninterrupted one's loss curve")
    if whole["bits"] >= whole["bigram_bits"]:
        sys.exit("the model did not beat a bigram")


def draw_losses(logs: dict, whole: dict, half: int, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, log, style in (
        ("never interrupted", whole, {"color": "0.75", "linewidth": 5}),
        ("until it was stopped", logs["first"], {"color": "tab:blue"}),
        ("resumed from the checkpoint", logs["resumed"], {"color": "tab:orange"}),
    ):
        axis.plot(
            [row["step"] for row in log["log"]], [row["loss"] / 0.6931 for row in log["log"]], label=label, **style
        )
    axis.axhline(whole["bigram_bits"], color="black", linestyle=":", label="bigram, held-out")
    axis.axvline(half - 0.5, color="0.5", linewidth=0.8)
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
