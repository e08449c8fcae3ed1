"""Which rule should I use? A small GPT, trained by each rule with the same budget and the same effort of tuning.

Every rule is trained with three learning rates, a factor of 3 apart, around its usual one. As long as the best one is
the smallest or the largest, another rate is tried beyond it, up to five in all. The best rate is then trained with two
more seeds. All runs have the same batches, warmup and linear decay, and a weight decay of 0.1. Finished runs are kept
in DIR and not repeated, so an interrupted leaderboard continues where it stopped.

    python examples/leaderboard.py --dir runs/leaderboard --jobs 2          # tune and train: minutes a rule
    python examples/leaderboard.py --dir runs/leaderboard --times           # time the updates, on a quiet machine
    python examples/leaderboard.py --dir runs/leaderboard --report FOLDER   # leaderboard.{json,md,svg}
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from char_gpt import CONTEXT, CharGPT, batch_at, stdlib_text

from opt_kernels import optim
from opt_scheduler import linear, warmup


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A drop-in optimizer with the options that its paper recommends, and the first learning rate of its tuning."""

    name: str
    optimizer: str  # of opt_kernels.optim
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    matrices: bool = False  # takes the model; non-matrix parameters use Adam
    is_scheduled: bool = True  # False: a constant learning rate

    def build(self, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        kind = getattr(optim, self.optimizer)
        if self.matrices:
            return kind(model, lr=lr, **{"weight_decay": DECAY, "scalar_optimizer": "adam", **self.options})
        return kind(model.parameters(), lr=lr, **{"weight_decay": DECAY, **self.options})


STEPS, BATCH, WARMUP, DECAY = 200, 16, 20, 0.1
MODEL = {"dim": 96, "depth": 3, "num_heads": 4}
FACTOR, MOST_RATES, SEEDS = 3.0, 5, (0, 1, 2)
EVAL_EVERY = 10
BETAS = (0.9, 0.95)
BASELINE = "AdamW"

CONTENDERS = [
    Contender(name=BASELINE, optimizer="AdamW", lr=3e-3, options={"betas": BETAS}),
    Contender(name="SGD, Nesterov", optimizer="SGD", lr=0.3, options={"momentum": 0.9, "nesterov": True}),
    Contender(name="Lion", optimizer="Lion", lr=5e-4),
    Contender(name="Signum", optimizer="Signum", lr=5e-4),
    Contender(name="NAdam", optimizer="NAdam", lr=3e-3, options={"betas": BETAS, "decoupled_weight_decay": True}),
    Contender(name="RAdam", optimizer="RAdam", lr=3e-3, options={"betas": BETAS, "decoupled_weight_decay": True}),
    Contender(name="LaProp", optimizer="LaProp", lr=1e-3, options={"betas": BETAS}),
    Contender(name="Adan", optimizer="Adan", lr=3e-3),
    Contender(
        name="AdEMAMix",
        optimizer="AdEMAMix",
        lr=3e-3,
        options={"betas": (*BETAS, 0.99), "alpha_steps": STEPS, "beta3_steps": STEPS},
    ),
    Contender(name="MARS-AdamW", optimizer="MARSAdamW", lr=3e-3),
    Contender(
        name="schedule-free AdamW",
        optimizer="AdamWScheduleFree",
        lr=3e-3,
        options={"betas": BETAS, "warmup_steps": WARMUP},
        is_scheduled=False,
    ),
    Contender(
        name="AdamW, 8-bit",
        optimizer="AdamW",
        lr=3e-3,
        options={"betas": BETAS, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8"},
    ),
    Contender(
        name="Muon",
        optimizer="Muon",
        lr=3e-3,
        options={"adjust_lr_fn": "match_rms_adamw", "betas": BETAS},
        matrices=True,
    ),
    Contender(
        name="NorMuon",
        optimizer="AdaptiveMuon",
        lr=3e-3,
        options={"moment2_method": "normuon", "extra_scale_factor": 0.2, "nesterov": True},
        matrices=True,
    ),
    Contender(name="SOAP", optimizer="SOAP", lr=3e-3, matrices=True),
    Contender(
        name="SOAP, Megatron-Core's order", optimizer="SOAP", lr=3e-3, options={"order": "megatron"}, matrices=True
    ),
    Contender(name="SOAP, plain factors", optimizer="SOAP", lr=3e-3, options={"use_kl_shampoo": False}, matrices=True),
    Contender(name="SOAP-Muon", optimizer="SOAPMuon", lr=3e-3, matrices=True),
    Contender(
        name="MuonH",
        optimizer="MuonH",
        lr=1e-2,
        options={"betas": BETAS, "weight_decay": 0.0},
        matrices=True,
    ),
    Contender(
        name="NAMO",
        optimizer="NAMO",
        lr=3e-3,
        options={"extra_scale_factor": 0.2, "nesterov": True},
        matrices=True,
    ),
]


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run: a contender, a learning rate and a seed. Its results are stored under a hash of these
    fields."""

    contender: Contender
    lr: float
    seed: int

    def key(self) -> str:
        settings = [asdict(self.contender), self.lr, self.seed, STEPS, BATCH, WARMUP, DECAY, MODEL, EVAL_EVERY]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def setup(run: Run) -> tuple[CharGPT, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    model = CharGPT(**MODEL)
    options = {
        name: getattr(torch, value) if name.endswith("_dtype") else value
        for name, value in run.contender.options.items()
    }
    return model, Contender(**{**vars(run.contender), "options": options}).build(model, run.lr)


def train(run: Run, directory: Path) -> None:
    """Train, and write the held-out losses (nats per character) by step. A non-finite loss ends the run."""
    model, optimizer = setup(run)
    text = stdlib_text()
    train_text, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    checks = batch_at(0, held_out, size=32, context=CONTEXT)
    schedule = warmup(linear(run.lr, run.lr / 20, steps=STEPS - WARMUP), steps=WARMUP)
    curve: list[tuple[int, float]] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step + 1) if run.contender.is_scheduled else run.lr
        loss = model(batch_at(step + STEPS * run.seed, train_text, size=BATCH, context=CONTEXT))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % EVAL_EVERY == 0:
            curve.append((step + 1, held_out_loss(model, optimizer, checks)))
            if not math.isfinite(curve[-1][1]):
                break
    found = {
        "name": run.contender.name,
        "lr": run.lr,
        "seed": run.seed,
        "curve": curve,
        "state_bytes": state_bytes(model, optimizer),
    }
    path = directory / f"{run.key()}.json"
    path.with_suffix(".tmp").write_text(json.dumps(found))
    path.with_suffix(".tmp").rename(path)
    print(
        f"{run.contender.name:>24}  lr {run.lr:<9.3g} seed {run.seed}  {curve[-1][1] / math.log(2):.3f} bits",
        flush=True,
    )


def held_out_loss(model: CharGPT, optimizer: torch.optim.Optimizer, checks: torch.Tensor) -> float:
    """Switch to the evaluation weights; a schedule-free optimizer trains different ones."""
    for_evaluation, for_training = getattr(optimizer, "eval", None), getattr(optimizer, "train", None)
    if for_evaluation:
        for_evaluation()
    with torch.no_grad():
        loss = model(checks).item()
    if for_training:
        for_training()
    return loss


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of optimizer state per parameter."""
    stored = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    return stored / sum(param.numel() for param in model.parameters())


# --- tuning -----------------------------------------------------------------------------------------------------------


def result(run: Run, directory: Path) -> dict | None:
    path = directory / f"{run.key()}.json"
    return json.loads(path.read_text()) if path.exists() else None


def final(found: dict) -> float:
    loss = found["curve"][-1][1]
    return loss if math.isfinite(loss) else math.inf


def next_runs(contender: Contender, directory: Path) -> list[Run]:
    """The remaining runs; empty when the contender is done."""
    rates = {exponent: Run(contender, contender.lr * FACTOR**exponent, 0) for exponent in (-1, 0, 1)}
    while True:
        found = {exponent: result(run, directory) for exponent, run in rates.items()}
        missing = [rates[exponent] for exponent, value in found.items() if value is None]
        if missing:
            return missing
        best = min(rates, key=lambda exponent: final(found[exponent]))
        if len(rates) == MOST_RATES or best not in (min(rates), max(rates)):
            break
        beyond = best + (1 if best == max(rates) else -1)
        rates[beyond] = Run(contender, contender.lr * FACTOR**beyond, 0)
    more = [Run(contender, rates[best].lr, seed) for seed in SEEDS]
    return [run for run in more if result(run, directory) is None]


def tuned(contender: Contender, directory: Path) -> list[dict]:
    """The runs of all seeds at the best learning rate; empty for an unfinished contender."""
    runs = [result(Run(contender, contender.lr * FACTOR**exponent, 0), directory) for exponent in range(-4, 5)]
    tried = [run for run in runs if run]
    if not tried or next_runs(contender, directory):
        return []
    best = min(tried, key=final)
    return [found for seed in SEEDS if (found := result(Run(contender, best["lr"], seed), directory))]


def work(args: tuple[Contender, Path]) -> None:
    contender, directory = args
    while runs := next_runs(contender, directory):
        for run in runs:
            train(run, directory)


# --- times and report -------------------------------------------------------------------------------------------------


def update_seconds(contender: Contender) -> float:
    """The median time in seconds of one update of the model, on one thread."""
    model, optimizer = setup(Run(contender, contender.lr, 0))
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    times = []
    for _ in range(12):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def row(contender: Contender, directory: Path, target: float) -> dict | None:
    runs = tuned(contender, directory)
    if not runs:
        return None
    finals = [final(run) / math.log(2) for run in runs]
    reached = [next((step for step, loss in run["curve"] if loss <= target), None) for run in runs]
    times = directory / "times.json"
    seconds = json.loads(times.read_text()) if times.exists() else {}
    return {
        "rule": contender.name,
        "options": contender.options,
        "lr": runs[0]["lr"],
        "bits": statistics.mean(finals),
        "spread": max(finals) - min(finals),
        "steps_to_target": None if None in reached else statistics.mean(reached),
        "update_ms": 1e3 * seconds[contender.name] if contender.name in seconds else None,
        "state_bytes": runs[0]["state_bytes"],
        "curves": [run["curve"] for run in runs],
    }


def report(directory: Path, folder: Path) -> None:
    """Write leaderboard.json, .md and .svg to `folder`: the finished contenders, best first."""
    baseline = next(contender for contender in CONTENDERS if contender.name == BASELINE)
    of_baseline = tuned(baseline, directory)
    if not of_baseline:
        sys.exit(f"{BASELINE} is not done: its final loss is the target of the others")
    target = statistics.mean(final(run) for run in of_baseline)
    rows = [found for contender in CONTENDERS if (found := row(contender, directory, target))]
    rows.sort(key=lambda found: found["bits"])
    settings = {"steps": STEPS, "batch": BATCH, "warmup": WARMUP, "weight_decay": DECAY, "model": MODEL, "seeds": SEEDS}
    about = {"torch": torch.__version__, "target_bits": target / math.log(2), **settings}
    (folder / "leaderboard.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    (folder / "leaderboard.md").write_text(table(rows, target))
    draw(rows, target, folder / "leaderboard.svg")


def table(rows: list[dict], target: float) -> str:
    def cell(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    lines = [
        f"Held-out bits per character after {STEPS} steps of {BATCH} x {CONTEXT} characters: the mean of {len(SEEDS)} "
        f"seeds, and the largest minus the smallest. Steps until {BASELINE}'s final {target / math.log(2):.3f} bits "
        "are reached. Milliseconds of one update on one thread. Bytes of state per parameter. Matrix rules (NorMuon, "
        "Muon, SOAP, NAMO, ...) train embeddings and vectors with AdamW at the rate of their row; "
        f"{BASELINE} has one rate for all.",
        "",
        f"| rule | lr | bits | spread | steps to {BASELINE}'s | update, ms | state, bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        lines.append(
            f"| {found['rule']} | {found['lr']:.2g} | {found['bits']:.3f} | {found['spread']:.3f} | "
            f"{cell(found['steps_to_target'], '.0f')} | {cell(found['update_ms'], '.1f')} | "
            f"{found['state_bytes']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], target: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "leaderboard"  # the same bytes from the same numbers
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
    colours = plt.get_cmap("tab20")
    for index, found in enumerate(rows):
        steps = [step for step, _ in found["curves"][0]]
        mean = [statistics.mean(run[i][1] for run in found["curves"]) / math.log(2) for i in range(len(steps))]
        axis.plot(steps, mean, label=f"{found['rule']}  {found['bits']:.3f}", color=colours(index % 20))
    axis.axhline(target / math.log(2), color="0.6", linestyle=":", linewidth=1)
    axis.set(xlabel="step", ylabel="held-out bits per character", ylim=(None, 5.0))
    axis.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/leaderboard"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="rules that are run at the same time")
    parser.add_argument("--only", nargs="*", help="rules by name; all by default")
    parser.add_argument("--times", action="store_true", help="time the updates instead of training")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write the table instead of training")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    unknown = {*(args.only or [])} - {contender.name for contender in CONTENDERS}
    if unknown:
        parser.error(f"--only {sorted(unknown)}: allowed are {[contender.name for contender in CONTENDERS]}")
    chosen = [contender for contender in CONTENDERS if not args.only or contender.name in args.only]
    if args.report:
        report(args.dir, args.report)
    elif args.times:
        seconds = {contender.name: update_seconds(contender) for contender in chosen}
        (args.dir / "times.json").write_text(json.dumps(seconds))
    else:
        with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
            pool.map(work, [(contender, args.dir) for contender in chosen], chunksize=1)


if __name__ == "__main__":
    main()
