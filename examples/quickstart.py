"""A small training job in five runs: one that stops half-way, three that resume it, and one without an interruption.

The run that resumes on the same number of ranks must reproduce the losses of the uninterrupted run to the last bit. The
runs that resume on one and on three ranks, for a few steps, may differ by rounding, because bf16 sums are computed in
another order. The model must also beat a bigram on held-out text. Writes loss.png and schedule.png next to the logs.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import time
from pathlib import Path

import matplotlib
import train_gpt
from torch.multiprocessing import start_processes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
DIR = Path("runs/quickstart")
STEPS = 150
OTHER_WORLDS = (1, 3)  # ranks that also resume the checkpoint, for a few steps
FEW = 6
NEAR = 0.02  # nats: how far losses may be apart that differ in the order of summation
MARK = ".quickstart"  # the file that marks a folder of this program, which it may delete
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def main() -> None:
    args = parse()
    began = time.perf_counter()
    preload()
    if args.resume:
        go_on(args)
        return
    clear(args.dir)
    half = args.steps // 2
    runs = 3 + len(OTHER_WORLDS)

    heading(f"1 of {runs}: train on {counted(args.ranks)}, stop and save after {half} of {args.steps} steps")
    first = train(args, "first", "--stop-at", half)
    for number, ranks in enumerate(OTHER_WORLDS, 2):
        heading(f"{number} of {runs}: resume on {counted(ranks)}, for {FEW} steps")
        copy = args.dir / f"on_{ranks}"
        shutil.copytree(args.dir / "checkpoints", copy / "checkpoints")
        until = min(half + FEW, args.steps)
        train(args, "resumed", "--resume", half, "--stop-at", until, directory=copy, ranks=ranks)
    heading(f"{runs - 1} of {runs}: resume on {counted(args.ranks)}, to the end")
    resumed = train(args, "resumed", "--resume", half)
    heading(f"{runs} of {runs}: the same training without an interruption")
    whole = train(args, "whole", "--brief", directory=args.dir / "uninterrupted")

    draw_losses(first, resumed, whole, args.dir / "loss.png")
    draw_schedule(whole, args.dir / "schedule.png")
    heading(f"done in {time.perf_counter() - began:.0f} seconds")
    print(table(whole, args.ranks))
    print(f"\npictures: {args.dir / 'loss.png'}, {args.dir / 'schedule.png'}")
    is_equal = has_resumed(counted(args.ranks), resumed, whole, allowed=0.0)
    is_near = [
        has_resumed(counted(n), read(args.dir / f"on_{n}", "resumed"), whole, allowed=NEAR) for n in OTHER_WORLDS
    ]
    if not (is_equal and all(is_near)):
        sys.exit("a resumed run left the uninterrupted one's loss curve")
    if whole["bits"] >= whole["bigram_bits"]:
        sys.exit("the model did not beat a bigram")
    print(f"\nWhat to try next:{suggestions(args.dir)}")


def go_on(args: argparse.Namespace) -> None:
    """Continue from the newest checkpoint of the last quickstart, with the same rule."""
    if not (args.dir / "resumed.json").exists():
        sys.exit(f"{args.dir} has no finished run to resume: run once without --resume")
    before = read(args.dir, "resumed")
    done = before["log"][-1]["step"] + 1
    # The schedule has ended and stays at its last value.
    args.rule = before["rule"]
    args.steps = before["steps"]
    heading(f"resume after step {done} on {counted(args.ranks)}, for {args.more} steps at the least learning rate")
    train(args, "resumed", "--resume", "--stop-at", done + args.more)


def preload() -> None:
    """Have a server import torch and the packages once, from which every rank is forked."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    multiprocessing.set_forkserver_preload(["train_gpt"])  # not every Python preloads "__main__", the default


def train(args: argparse.Namespace, name: str, *options: object, directory: Path | None = None, ranks: int = 0) -> dict:
    """Run train_gpt.py once; return its log."""
    where = directory or args.dir
    size = ranks or args.ranks
    words = ["--dir", where, "--name", name, "--rule", args.rule, "--steps", args.steps, "--batch", args.batch]
    words += options
    start_processes(run_rank, (size, free_port(), [str(word) for word in words]), nprocs=size, start_method=START)
    return read(where, name)


def run_rank(rank: int, size: int, port: int, argv: list[str]) -> None:
    """Run one rank, as torchrun does on one machine."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train_gpt.main(argv)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clear(directory: Path) -> None:
    """Empty the folder of an earlier quickstart. Raises for any other folder that is not empty."""
    if directory.exists() and any(directory.iterdir()) and not (directory / MARK).exists():
        sys.exit(f"--dir {directory} is neither empty nor a folder of an earlier quickstart, which would be deleted")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / MARK).touch()


def read(directory: Path, name: str) -> dict:
    return json.loads((directory / f"{name}.json").read_text())


def has_resumed(who: str, resumed: dict, whole: dict, *, allowed: float) -> bool:
    """Print the largest difference between the losses of both runs, and return whether it is small enough."""
    losses = {row["step"]: row["loss"] for row in whole["log"]}
    gap = max(abs(row["loss"] - losses[row["step"]]) for row in resumed["log"])
    print(f"resumed on {who}: {len(resumed['log'])} steps, largest difference of loss {gap:.2e} (allowed: {allowed})")
    return gap <= allowed


# --- the report -------------------------------------------------------------------------------------------------------


def counted(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def heading(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


def table(whole: dict, ranks: int) -> str:
    """Losses and times of the uninterrupted run, and its memory next to that of torch's AdamW without sharding."""
    last = statistics.mean(row["loss"] for row in whole["log"][-10:])
    held = whole["bytes"]
    count = whole["num_parameters"]
    torchs = {"weights": 4 * count, "gradients": 4 * count, "state": 8 * count}
    lines = [
        f"rule                          {whole['rule']}, products in {whole['compute']}",
        f"training loss, last 10 steps  {last:.3f} nats a character",
        f"held-out bits per character   {whole['bits']:.3f}   (untrained {whole['begun_bits']:.3f}, a bigram "
        f"{whole['bigram_bits']:.3f})",
        f"seconds per step              {statistics.median(whole['seconds']):.3f}   (median)",
        "",
        f"{'bytes, ' + counted(ranks):<28} {'this run, bf16':>14} {'torch AdamW, fp32':>19}",
    ]
    for name, (here, there) in {
        "weights": (held["weights"], torchs["weights"]),
        "gradients": (held["gradients"], torchs["gradients"]),
        "main values and moments": (held["state"], torchs["state"]),
        "sum": (sum(held.values()), sum(torchs.values())),
    }.items():
        lines.append(f"{name:<28} {here:>14,} {there:>19,}")
    lines += [
        "On each rank. This run: weights and gradients are measured; main values and moments are what the plan says of",
        f"the fullest rank. torch AdamW: computed, 4 + 4 + 8 bytes for each of {count:,} parameters.",
    ]
    return "\n".join(lines)


def suggestions(directory: Path) -> str:
    """Commands to run next, for the way in which this run was started."""
    program = "python -m nox -s quickstart --" if os.environ.get("NOX_CURRENT_SESSION") else f"python {sys.argv[0]}"
    where = "" if directory == DIR else f" --dir {directory}"
    commands = {
        "--rule muon": "the same with Muon: each matrix is updated by one rank",
        "--ranks 4": "the same on four ranks",
        "--resume --ranks 3": "train on from the last checkpoint, on three ranks",
    }
    return "".join(f"\n  {program} {options + where:<20}  # {what}" for options, what in commands.items())


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=DIR, help="emptied first, except with --resume")
    parser.add_argument("--rule", choices=train_gpt.RULES, default="adam")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=24, help="sequences in a step, over all ranks")
    parser.add_argument("--resume", action="store_true", help="go on from the last quickstart's checkpoint instead")
    parser.add_argument("--more", type=int, default=40, metavar="STEPS", help="how many steps --resume adds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
