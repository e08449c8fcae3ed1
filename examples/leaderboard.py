"""Which rule should I use? A small GPT, trained by each rule with two learning rates and the same effort of tuning.

Every rule has a learning rate for hidden matrices and another for all other parameters, which matrix rules update with
AdamW. The grid is the same for all rules: five rates, a factor of 3 apart, around the usual one, in both directions.
Its 25 pairs are halved three times: trained for 1/32, the better half for 1/16, and so on to 1/4 of the full length.
The best pair is then trained in full with three seeds, and the first four rules with five. All runs have about 20
tokens a parameter (in full), the same batches, warmup, linear decay and weight decay. Finished runs are kept as lines
of DIR/RULE.jsonl and not repeated, so an interrupted leaderboard continues where it stopped.

    python examples/leaderboard.py --jobs 2          # tune and train: about a quarter of an hour a rule
    python examples/leaderboard.py --times           # time the updates, on a quiet machine
    python examples/leaderboard.py --report FOLDER   # leaderboard.{json,md,svg}
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from char_gpt import CONTEXT, CharGPT, batch_at, measured_on, stdlib_text
from leaderboard_table import draw, table

from opt_kernels import optim
from opt_scheduler import linear, warmup

STEPS = 3600
BATCH = 16
WARMUP = 0.1  # fraction of the steps
DECAY = 0.1
MODEL = {"dim": 96, "depth": 3, "num_heads": 4}
FACTOR = 3.0
EXPONENTS = (-2, -1, 0, 1, 2)
HALVINGS = 3
SEEDS = 3
SEEDS_OF_FIRST = 5
FIRST = 4
BETAS = (0.9, 0.95)
BASELINE = "AdamW"
LENGTH = "length of the run"  # an option with this value is given the number of steps
DEFAULT_DIR = Path(__file__).parents[1] / "kernels" / "results" / "leaderboard"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A drop-in optimizer with the options that its paper recommends, and its usual learning rates."""

    name: str
    optimizer: str  # of opt_kernels.optim
    lr: float  # of hidden matrices: the middle of the grid
    rest_lr: float = 9e-3  # of the other parameters
    options: dict[str, Any] = field(default_factory=dict)
    matrices: bool = False  # a matrix rule: the other parameters use Adam
    is_scheduled: bool = True  # False: a constant learning rate

    def build(self, model: torch.nn.Module, rates: tuple[float, float], steps: int) -> torch.optim.Optimizer:
        hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
        ids = set(map(id, hidden))
        rest = [p for p in model.parameters() if id(p) not in ids]
        groups: list[dict[str, Any]] = [{"params": hidden, "lr": rates[0]}, {"params": rest, "lr": rates[1]}]
        options: dict[str, Any] = {"weight_decay": DECAY}
        if self.matrices:
            groups[1] |= {"use_matrix_rule": False}
            options["scalar_optimizer"] = "adam"
        for name, value in self.options.items():
            if value == LENGTH:
                value = round(steps * WARMUP) if name == "warmup_steps" else steps
            options[name] = getattr(torch, value) if name.endswith("_dtype") else value
        return getattr(optim, self.optimizer)(groups, lr=rates[0], **options)

    @property
    def file_name(self) -> str:
        return re.sub(r"\W+", "_", self.name).lower() + ".jsonl"


def adam_like(name: str, optimizer: str, **options: Any) -> Contender:
    return Contender(name=name, optimizer=optimizer, lr=3e-3, options=options)


def matrix_rule(name: str, optimizer: str, lr: float = 9e-3, **options: Any) -> Contender:
    return Contender(name=name, optimizer=optimizer, lr=lr, options=options, matrices=True)


DECOUPLED = {"betas": BETAS, "decoupled_weight_decay": True}
CONTENDERS = [
    adam_like(BASELINE, "AdamW", betas=BETAS),
    matrix_rule("Muon", "Muon", adjust_lr_fn="match_rms_adamw", betas=BETAS),
    matrix_rule("Muon+", "Muon", adjust_lr_fn="match_rms_adamw", betas=BETAS, post_norm="cols_rows"),
    matrix_rule("MuonEq", "Muon", adjust_lr_fn="match_rms_adamw", betas=BETAS, pre_norm="rows"),
    matrix_rule("PolarGrad", "Muon", betas=BETAS, nuclear_scale=True, lr=0.1),
    matrix_rule("Muown", "Muown", betas=BETAS, extra_scale_factor=0.2),
    matrix_rule("Scion", "Scion", lr=3e-4, betas=BETAS, extra_scale_factor=50.0, weight_decay=1.0),
    matrix_rule("NorMuon", "AdaptiveMuon", moment2_method="normuon", extra_scale_factor=0.2, nesterov=True),
    matrix_rule("NAMO", "NAMO", extra_scale_factor=0.2, nesterov=True),
    matrix_rule("MuonH", "MuonH", lr=3e-2, betas=BETAS, weight_decay=0.0),
    Contender(name="Lion", optimizer="Lion", lr=1e-3, rest_lr=1e-3),
    Contender(
        name="schedule-free AdamW",
        optimizer="AdamWScheduleFree",
        lr=3e-3,
        options={"betas": BETAS, "warmup_steps": LENGTH},
        is_scheduled=False,
    ),
    adam_like("NAdam", "NAdam", **DECOUPLED),
    adam_like("AdamW, 8-bit", "AdamW", betas=BETAS, exp_avg_dtype="int8", exp_avg_sq_dtype="uint8"),
    adam_like("AdEMAMix", "AdEMAMix", betas=(*BETAS, 0.99), alpha_steps=LENGTH, beta3_steps=LENGTH),
    adam_like("MARS-AdamW", "MARSAdamW"),
    adam_like("LaProp", "LaProp", betas=BETAS),
    adam_like("RAdam", "RAdam", **DECOUPLED),
    adam_like("Adan", "Adan"),
    Contender(name="Signum", optimizer="Signum", lr=1e-3, rest_lr=1e-3),
    Contender(name="SGD, Nesterov", optimizer="SGD", lr=0.1, rest_lr=0.1, options={"momentum": 0.9, "nesterov": True}),
    matrix_rule("SOAP", "SOAP"),
    matrix_rule("SOAP, Megatron-Core's order", "SOAP", order="megatron"),
    matrix_rule("SOAP, plain factors", "SOAP", use_kl_shampoo=False),
    matrix_rule("SOAP-Muon", "SOAPMuon", lr=2.7e-2),
]


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run of a contender: its learning rates, number of steps and seed."""

    contender: Contender
    rates: tuple[float, float]
    steps: int
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that a result depends on, as JSON has it."""
        settings = asdict(self) | {"batch": BATCH, "warmup": WARMUP, "decay": DECAY, "model": MODEL, "text": text_id()}
        return json.loads(json.dumps(settings))


@cache
def text_id() -> int:
    """A checksum of the text, which is another one on another version of Python."""
    return zlib.crc32(stdlib_text().numpy().tobytes())


class Results:
    """The finished runs of one contender, one line of JSON each."""

    def __init__(self, contender: Contender, directory: Path):
        self.path = directory / contender.file_name
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self._found = [json.loads(line) for line in lines]

    def of(self, run: Run) -> dict[str, Any] | None:
        settings = run.settings
        return next((found for found in self._found if found["run"] == settings), None)

    def add(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        found = {"run": run.settings, **result, **measured_on()}
        with self.path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        self._found.append(found)
        return found


def setup(run: Run) -> tuple[CharGPT, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    model = CharGPT(**MODEL)
    return model, run.contender.build(model, run.rates, run.steps)


def train(run: Run) -> dict[str, Any]:
    """Train. Return the held-out losses (bits per character) by step; a non-finite loss ends the run."""
    model, optimizer = setup(run)
    text = stdlib_text()
    train_text = text[: -len(text) // 10]
    held_out = text[-len(text) // 10 :]
    checks = batch_at(0, held_out, size=64, context=CONTEXT)
    first = max(round(run.steps * WARMUP), 1)
    schedule = warmup(linear(1.0, 0.05, steps=run.steps - first), steps=first)
    every = max(STEPS // 90, 1) if run.steps == STEPS else run.steps
    curve: list[tuple[int, float]] = []
    for step in range(run.steps):
        for group, rate in zip(optimizer.param_groups, run.rates, strict=True):
            group["lr"] = rate * schedule(step + 1) if run.contender.is_scheduled else rate
        loss = model(batch_at(step + STEPS * run.seed, train_text, size=BATCH, context=CONTEXT))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0 or not loss.isfinite():
            curve.append((step + 1, round(held_out_bits(model, optimizer, checks), 5)))
            if not math.isfinite(curve[-1][1]):
                break
    print(f"{run.contender.name:>28}  {run.rates[0]:.2g} {run.rates[1]:.2g}  {run.steps:5} steps  {curve[-1][1]:.4f}")
    sys.stdout.flush()
    return {"curve": curve, "state_bytes": state_bytes(model, optimizer)}


def held_out_bits(model: CharGPT, optimizer: torch.optim.Optimizer, checks: torch.Tensor) -> float:
    """The held-out loss with the weights for evaluation; a schedule-free optimizer trains different ones."""
    for_evaluation = getattr(optimizer, "eval", None)
    for_training = getattr(optimizer, "train", None)
    if for_evaluation:
        for_evaluation()
    with torch.no_grad():
        loss = model(checks).item()
    if for_training:
        for_training()
    return loss / math.log(2)


def state_bytes(model: CharGPT, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of optimizer state per parameter."""
    stored = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    return stored / sum(param.numel() for param in model.parameters())


# --- tuning -----------------------------------------------------------------------------------------------------------


def final(found: dict[str, Any]) -> float:
    bits = found["curve"][-1][1]
    return bits if math.isfinite(bits) else math.inf


def grid(contender: Contender) -> list[tuple[float, float]]:
    """The pairs of learning rates that are tried: for hidden matrices and for the rest."""
    return [
        (contender.lr * FACTOR**of_matrices, contender.rest_lr * FACTOR**of_rest)
        for of_matrices in EXPONENTS
        for of_rest in EXPONENTS
    ]


def halved(contender: Contender, results: Results) -> Iterator[Run]:
    """The runs of tuning, each to be finished before the next is asked for. The best pair is `best_rates`."""
    pairs = grid(contender)
    for halving in range(HALVINGS, -1, -1):
        runs = [Run(contender, pair, max(STEPS // (4 << halving), 1), seed=0) for pair in pairs]
        yield from runs
        scored = sorted(runs, key=lambda run: final(results.of(run) or {"curve": [(0, math.inf)]}))
        pairs = [run.rates for run in scored[: max(len(runs) // 2, 1)]]


def best_rates(contender: Contender, results: Results) -> tuple[float, float] | None:
    """The best pair after tuning; None if runs are missing."""
    runs = []
    for run in halved(contender, results):
        if results.of(run) is None:
            return None
        runs.append(run)
    last = [run for run in runs if run.steps == max(STEPS // 4, 1)]
    return min(last, key=lambda run: final(results.of(run) or {})).rates


def full_runs(contender: Contender, results: Results, num_seeds: int) -> list[dict[str, Any]]:
    """The full runs of the best pair, of at most `num_seeds` seeds, that are finished."""
    rates = best_rates(contender, results)
    runs = [] if rates is None else [Run(contender, rates, STEPS, seed) for seed in range(num_seeds)]
    return [found for run in runs if (found := results.of(run))]


def work(args: tuple[Contender, Path, int]) -> None:
    """Finish the missing runs of a contender."""
    contender, directory, num_seeds = args
    results = Results(contender, directory)
    for run in halved(contender, results):
        if results.of(run) is None:
            results.add(run, train(run))
    rates = best_rates(contender, results)
    assert rates is not None
    for seed in range(num_seeds):
        run = Run(contender, rates, STEPS, seed)
        if results.of(run) is None:
            results.add(run, train(run))


def first_four(directory: Path) -> list[Contender]:
    """The finished contenders with the lowest mean loss over the seeds that all have."""
    runs = {contender.name: full_runs(contender, Results(contender, directory), SEEDS) for contender in CONTENDERS}
    finished = [contender for contender in CONTENDERS if len(runs[contender.name]) == SEEDS]
    return sorted(finished, key=lambda contender: statistics.mean(map(final, runs[contender.name])))[:FIRST]


# --- times and report -------------------------------------------------------------------------------------------------


def update_seconds(contender: Contender) -> float:
    """The median time in seconds of one update of the model, on one thread."""
    model, optimizer = setup(Run(contender, (contender.lr, contender.rest_lr), STEPS, seed=0))
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    times = []
    for _ in range(12):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def row(contender: Contender, directory: Path, target: float) -> dict[str, Any] | None:
    """A line of the table; None if the contender is not finished."""
    results = Results(contender, directory)
    runs = full_runs(contender, results, SEEDS_OF_FIRST)
    if len(runs) < SEEDS:
        return None
    bits = [final(run) for run in runs]
    reached = [next((step for step, loss in run["curve"] if loss <= target), None) for run in runs]
    times = directory / "times.json"
    seconds = json.loads(times.read_text())["seconds"] if times.exists() else {}
    rates = runs[0]["run"]["rates"]
    limits = [(grid(contender)[0][i], grid(contender)[-1][i]) for i in (0, 1)]
    return {
        "rule": contender.name,
        "options": contender.options,
        "rates": rates,
        "at_the_end_of_the_grid": any(rate in ends for rate, ends in zip(rates, limits, strict=True)),
        "finals": bits,
        "bits": statistics.mean(bits),
        "error": statistics.stdev(bits) / math.sqrt(len(bits)),
        "steps_to_target": None if None in reached else statistics.mean(reached),
        "update_ms": 1e3 * seconds[contender.name] if contender.name in seconds else None,
        "state_bytes": runs[0]["state_bytes"],
        "finished": max(run["date"] for run in runs),
        "machine": runs[-1]["machine"],
        "curves": [run["curve"] for run in runs],
    }


def report(directory: Path, folder: Path) -> None:
    """Write leaderboard.json, .md and .svg to `folder`: the finished contenders, best first."""
    baseline = next(contender for contender in CONTENDERS if contender.name == BASELINE)
    of_baseline = full_runs(baseline, Results(baseline, directory), SEEDS_OF_FIRST)
    if len(of_baseline) < SEEDS:
        sys.exit(f"{BASELINE} is not done: its final loss is the target of the others")
    target = statistics.mean(map(final, of_baseline))
    rows = [found for contender in CONTENDERS if (found := row(contender, directory, target))]
    rows.sort(key=lambda found: found["bits"])
    settings = {"steps": STEPS, "batch": BATCH, "context": CONTEXT, "warmup": WARMUP, "weight_decay": DECAY}
    compared = {"model": MODEL, "baseline": BASELINE, "target_bits": target}
    finished = {found["rule"] for found in rows}
    left_out = [contender.name for contender in CONTENDERS if contender.name not in finished]
    about = {"torch": torch.__version__, **settings, **compared, "not_run": left_out}
    (folder / "leaderboard.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    (folder / "leaderboard.md").write_text(table(rows, about))
    draw(rows, about, folder / "leaderboard.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="of finished runs")
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
        times = {**measured_on(), "seconds": seconds}
        (args.dir / "times.json").write_text(json.dumps(times, indent=1) + "\n")
    else:
        with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
            pool.map(work, [(contender, args.dir, SEEDS) for contender in chosen], chunksize=1)
            first = first_four(args.dir)
            pool.map(work, [(contender, args.dir, SEEDS_OF_FIRST) for contender in first], chunksize=1)


if __name__ == "__main__":
    main()
