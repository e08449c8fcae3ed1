"""Which formats should I use? Trains a small GPT by AdamW with its weights, main values and moments in every format.

All runs have the same initial weights, batches and learning rates. fp32 is run with two more seeds, to show the
differences due to chance. Finished runs are kept in DIR and not repeated.

    python examples/which_numbers.py --dir runs/numbers                   # train: about a minute a mode
    python examples/which_numbers.py --dir runs/numbers --report FOLDER   # numbers.{json,md,svg}
"""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from char_gpt import CONTEXT, CharGPT, batch_at, measured_on, stdlib_text

from opt_config import OptimizerConfig
from opt_kernels.quantized import RECIPES, quantize_linears_, quantized
from opt_scheduler import linear, warmup
from opt_stack import get_optimizer

STEPS = 120
BATCH = 8
WARMUP = 12
LR = 3e-3
MODEL = {"dim": 64, "depth": 2, "num_heads": 4}
EVAL_EVERY = 10
SEEDS = (0, 1, 2)  # the first one for every mode, all of them for fp32
BASELINE = "fp32"

BF16 = torch.bfloat16
FP16 = torch.float16
SCALED_FP8 = torch.uint8


def aware(**fields: Any) -> dict[str, Any]:
    return {"bf16": True, "use_precision_aware_optimizer": True, **fields}


def moments(dtype: torch.dtype) -> dict[str, Any]:
    return aware(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)


BLOCKS_OF_8_BITS = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
MODES: Mapping[str, Mapping[str, Any]] = {  # fields of OptimizerConfig
    BASELINE: {},
    "bf16, fp32 mains": {"bf16": True},
    "bf16, 16-bit remainders": aware(),
    "bf16, scaled fp16 mains": aware(main_params_dtype=FP16),
    "bf16, 24-bit mains": aware(main_params_dtype=torch.int8),
    "bf16, bf16 gradients": aware(main_grads_dtype=BF16),
    "fp16, loss scaling": {"fp16": True, "initial_loss_scale": 2.0**12},
    "bf16, remainders, bf16 moments": moments(BF16),
    "bf16, remainders, scaled fp16 moments": moments(FP16),
    "bf16, remainders, scaled fp8 moments": moments(SCALED_FP8),
    "bf16, remainders, 8-bit moments": aware(optimizer_options=BLOCKS_OF_8_BITS),
    "bf16, 24-bit mains, 8-bit moments": aware(main_params_dtype=torch.int8, optimizer_options=BLOCKS_OF_8_BITS),
    **{f"fp8 ({recipe}), fp32 mains": {"bf16": True, "fp8_recipe": recipe} for recipe in RECIPES},
}


def train(mode: str, seed: int) -> dict[str, Any]:
    """The held-out losses (nats per character) by step, and the bytes of state per element."""
    torch.manual_seed(seed)
    config = OptimizerConfig(lr=LR, weight_decay=0.1, adam_beta2=0.95, **MODES[mode])
    model = CharGPT(**MODEL).to(config.precision.params)
    if config.fp8_recipe is not None:
        quantize_linears_(model, config.fp8_recipe)
    optimizer = get_optimizer(config, [model])
    text = stdlib_text()
    train_text = text[: -len(text) // 10]
    held_out = text[-len(text) // 10 :]
    checks = batch_at(0, held_out, size=32, context=CONTEXT)
    schedule = warmup(linear(LR, LR / 20, steps=STEPS - WARMUP), steps=WARMUP)
    curve = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step + 1)
        loss = model(batch_at(step + STEPS * seed, train_text, size=BATCH, context=CONTEXT))
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVAL_EVERY == 0:
            with torch.no_grad():
                curve.append((step + 1, model(checks).item()))
    numel = sum(param.numel() for param in model.parameters())
    weights = sum(map(weight_bytes, model.parameters()))
    return {
        "mode": mode,
        "seed": seed,
        "curve": curve,
        "weight_bytes": weights / numel,
        "state_bytes": optimizer.plan.state_bytes() / numel,
    }


def weight_bytes(param: torch.Tensor) -> int:
    fp8 = quantized(param)
    return param.nbytes if fp8 is None else fp8.codes.nbytes + fp8.scales.nbytes


def path_of(directory: Path, mode: str, seed: int) -> Path:
    settings = [mode, {k: str(v) for k, v in MODES[mode].items()}, seed, STEPS, BATCH, WARMUP, LR, MODEL, EVAL_EVERY]
    return directory / f"{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]}.json"


def runs() -> list[tuple[str, int]]:
    return [(mode, seed) for mode in MODES for seed in (SEEDS if mode == BASELINE else SEEDS[:1])]


def train_missing(directory: Path) -> None:
    torch.set_num_threads(1)
    for mode, seed in runs():
        path = path_of(directory, mode, seed)
        if not path.exists():
            found = train(mode, seed)
            path.with_suffix(".tmp").write_text(json.dumps(found))
            path.with_suffix(".tmp").rename(path)
            print(f"{mode:>40}  seed {seed}  {bits(found):.4f} bits", flush=True)


# --- report -----------------------------------------------------------------------------------------------------------


def bits(found: Mapping[str, Any]) -> float:
    """Final bits per character of held-out text."""
    return found["curve"][-1][1] / math.log(2)


def report(directory: Path, folder: Path) -> None:
    """Write numbers.json, .md and .svg to `folder`."""
    found = {(mode, seed): json.loads(path_of(directory, mode, seed).read_text()) for mode, seed in runs()}
    baseline = [bits(found[BASELINE, seed]) for seed in SEEDS]
    spread = max(baseline) - min(baseline)
    rows = [found[mode, SEEDS[0]] for mode in MODES]
    settings = {"steps": STEPS, "batch": BATCH, "lr": LR, "model": MODEL}
    about = {**measured_on(), "torch": torch.__version__, **settings, "spread": spread}
    (folder / "numbers.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    (folder / "numbers.md").write_text(table(rows, baseline[0], spread))
    draw(rows, baseline[0], spread, folder / "numbers.svg")


def table(rows: list[dict[str, Any]], baseline: float, spread: float) -> str:
    lines = [
        f"AdamW, held-out bits per character after {STEPS} steps of {BATCH} x {CONTEXT} characters, and how far they "
        f"are from fp32's; three seeds of fp32 differ by {spread:.3f}. Bytes of a parameter's weights, and of main "
        "values and moments; gradients are not counted.",
        "",
        "| numbers | weights, bytes | state, bytes | bits | from fp32 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['mode']} | {row['weight_bytes']:.2f} | {row['state_bytes']:.2f} | {bits(row):.3f} | "
            f"{bits(row) - baseline:+.3f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], baseline: float, spread: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "numbers"  # the same bytes from the same numbers
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 0.34 * len(rows) + 1), sharey=True, layout="constrained")
    places = range(len(rows))
    left.barh(places, [row["weight_bytes"] for row in rows], color="#4c72b0", label="weights")
    left.barh(
        places,
        [row["state_bytes"] for row in rows],
        left=[row["weight_bytes"] for row in rows],
        color="#dd8452",
        label="main values and moments",
    )
    left.set(xlabel="bytes a parameter, without gradients")
    left.set_yticks(places, [row["mode"] for row in rows])
    left.invert_yaxis()
    left.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    right.axvspan(-spread, spread, color="0.9", label="between seeds of fp32")
    right.plot([bits(row) - baseline for row in rows], places, "o", color="#55a868")
    right.axvline(0, color="0.5", linewidth=1)
    right.set(xlabel="held-out bits per character, from fp32")
    right.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/numbers"))
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write the table instead of training")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.report:
        report(args.dir, args.report)
    else:
        train_missing(args.dir)


if __name__ == "__main__":
    main()
