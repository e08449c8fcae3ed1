"""Draws `gallery.svg`, one panel for every curve, combinator and recipe; needs opt-scheduler[plot].

python packages/opt-scheduler/docs/gallery.py
"""

import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

import opt_scheduler

PICTURE = Path(__file__).with_name("gallery.svg")
STEPS = 120
COLUMNS = 4
# Readable on white and on a dark page: each has a contrast of at least 3.7 with #ffffff and with #0d1117.
TEXT = "#787878"
CURVE = "#4c74d9"

# The caption of a panel is the expression that draws it, so they cannot disagree.
EXPRESSIONS = {
    "constant": "constant(0.8)",
    "linear": "linear(1.0, 0.1, steps=100)",
    "cosine": "cosine(1.0, 0.1, steps=100)",
    "minus_sqrt": "minus_sqrt(1.0, 0.0, steps=100)",
    "shifted_exponential": "shifted_exponential(1.0, 0.0, steps=100)",
    "exponential": "exponential(1.0, 0.01, steps=100)",
    "polynomial": "polynomial(1.0, 0.0, steps=100, power=2)",
    "ramp": 'ramp(1.0, 0.0, steps=100, shape="minus_square")',
    "inverse_sqrt": "warmup(inverse_sqrt(1.0, timescale=20), steps=20)",
    "power": "power(1.0, exponent=-1.0, timescale=20)",
    "piecewise_linear": "piecewise_linear((0, 0.2), (30, 1.0), (60, 0.5), (100, 0.0))",
    "piecewise_constant": "piecewise_constant([1.0, 0.5, 0.2], at=[40, 80])",
    "step_decay": "step_decay(1.0, factor=0.6, every=20, times=5)",
    "warmup": "warmup(cosine(1.0, 0.1, steps=90), steps=10)",
    "wsd": "wsd(1.0, warmup_steps=10, stable_steps=60, decay_steps=30)",
    "one_cycle": "one_cycle(1.0, up_steps=30, down_steps=70)",
    "cyclic": "cyclic(0.1, 1.0, up_steps=10, down_steps=20)",
    "repeat": "repeat(cosine(1.0, 0.0, steps=30), times=4)",
    "restarts": "restarts(cosine(1.0, 0.0, steps=15), t_mult=2, decay=0.8)",
    "join": "join(constant(0.4, steps=50), linear(1.0, 0.2, steps=50))",
    "cooldown": "cooldown(cosine(1.0, 0.5, steps=200), at=70, steps=30)",
    "cut": "cut(linear(1.0, 0.0, steps=100), 60)",
    "clip": "clip(cosine(1.0, 0.0, steps=100), low=0.2, high=0.8)",
    "scale": "scale(cosine(1.0, 0.1, steps=100), 0.5)",
    "shift": "shift(linear(1.0, 0.0, steps=80), 20)",
    "stretch": "stretch(linear(1.0, 0.0, steps=50), 2)",
    "rescale": "rescale(linear(1.0, 0.0, steps=100), old_batch=1, new_batch=3, done=40)",
    "extend": "extend(cosine(1.0, 0.1, steps=60), at=30, steps=100)",
    "extend_wsd": "extend(wsd(1.0, steps=60, warmup_steps=10, decay_steps=20), at=30, steps=100)",
    "WarmupDecayLR": 'get_schedule("WarmupDecayLR", warmup_max_lr=1.0, total_num_steps=100, warmup_num_steps=30)',
    "get_schedule": 'get_schedule("cosine_restarts", peak=1.0, steps=100, warmup_steps=10, cycles=3, decay=0.7)',
    "sum": "linear(0.5, 0.0, steps=100) + cyclic(0.0, 0.4, up_steps=5, down_steps=10)",
    "product": "cosine(1.0, 0.1, steps=100) * step_decay(1.0, factor=0.5, every=40, times=2)",
    "operators": "0.9 - cosine(1.0, 0.0, steps=100) * 0.8",
    "as_schedule": "as_schedule(lambda step: 1 / (1 + step / 20))",
}


def draw(path: Path) -> None:
    """Write the picture to `path`. The bytes depend on the version of matplotlib only."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "opt-scheduler", "font.size": 8, "font.family": "sans-serif"}
    coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colours = dict.fromkeys(coloured, TEXT)
    with matplotlib.rc_context(matplotlib.rcParamsDefault | settings | colours):
        rows = -(-len(EXPRESSIONS) // COLUMNS)
        figure = Figure(figsize=(3 * COLUMNS, 2.0 * rows), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.12)
        axes = figure.subplots(rows, COLUMNS, sharex=True, sharey=True)
        for axis, (name, expression) in zip(axes.flat, EXPRESSIONS.items(), strict=False):
            schedule = opt_scheduler.as_schedule(eval(expression, vars(opt_scheduler).copy()))
            steps = [i / 4 for i in range(4 * STEPS + 1)]
            axis.plot(steps, schedule.values(steps), color=CURVE, linewidth=1.6)
            axis.set_title(name, fontsize=10, fontweight="bold")
            axis.set_xlabel(textwrap.fill(expression, 46), fontsize=6.5, family="monospace", labelpad=4)
            axis.set(xlim=(0, STEPS), ylim=(-0.03, 1.06), xticks=[0, 50, 100], yticks=[0, 0.5, 1], facecolor="none")
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=7, labelbottom=True)
        creator = f"docs/gallery.py, matplotlib {matplotlib.__version__}"
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": creator})


if __name__ == "__main__":
    draw(PICTURE)
