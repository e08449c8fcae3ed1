"""The table and the plot of `leaderboard.py`, from what it writes to leaderboard.json.

`rows` are the rules, best first; `about` is what they have in common.
"""

import math
import statistics
from pathlib import Path
from typing import Any

# The 97.5 % quantile of Student's t by degrees of freedom.
T_QUANTILES = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


def differ(one: list[float], other: list[float]) -> bool:
    """Whether the means of two rules' final losses differ by more than their seeds explain (t-test, 5 %)."""
    freedom = len(one) + len(other) - 2
    squares = sum((x - statistics.mean(losses)) ** 2 for losses in (one, other) for x in losses)
    error = math.sqrt(squares / freedom * (1 / len(one) + 1 / len(other)))
    return abs(statistics.mean(one) - statistics.mean(other)) > T_QUANTILES[freedom] * error


def place(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The places that a rule may have, given what the seeds' deviations allow."""
    others = [other for other in rows if differ(found["finals"], other["finals"])]
    first = 1 + sum(other["bits"] < found["bits"] for other in others)
    last = len(rows) - sum(other["bits"] > found["bits"] for other in others)
    return str(first) if first == last else f"{first}–{last}"


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return the leaderboard in Markdown."""
    baseline = about["baseline"]
    counts = sorted({len(found["finals"]) for found in rows})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])

    def cell(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    lines = [
        f"Held-out bits a character after {about['steps']} steps of {about['batch']} x {about['context']} characters:",
        f"the mean of {seeds} seeds and its standard error. Place: rules whose difference is within what seeds",
        "explain (t-test, 5 %) share places. Learning rates: of hidden matrices, and of all other parameters, which",
        "matrix rules update with AdamW; * at the end of the grid, so a better one may lie outside. Steps: until",
        f"{baseline}'s final {about['target_bits']:.3f} bits are reached. Update: one, on one thread. State: bytes per",
        "parameter. It is one small model on one data set: it cannot say how rules compare on larger models or longer",
        "runs.",
        "",
        f"| rule | place | bits | lr | lr, rest | steps to {baseline}'s | update, ms | state |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        mark = " *" if found["at_the_end_of_the_grid"] else ""
        lines.append(
            f"| {found['rule']}{mark} | {place(found, rows)} | {found['bits']:.3f} ± {found['error']:.3f} | "
            f"{found['rates'][0]:.2g} | {found['rates'][1]:.2g} | {cell(found['steps_to_target'], '.0f')} | "
            f"{cell(found['update_ms'], '.1f')} | {found['state_bytes']:.2f} |"
        )
    if about["not_run"]:
        lines += ["", f"Not run yet: {'; '.join(about['not_run'])}."]
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """Draw the losses over steps, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "leaderboard"  # the same bytes from the same numbers
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for index, found in enumerate(rows):
        steps = [step for step, _ in found["curves"][0]]
        curves = [run for run in found["curves"] if len(run) == len(steps)]
        mean = [statistics.mean(run[i][1] for run in curves) for i in range(len(steps))]
        # A legend can be read up to about ten curves: the first nine rules have a colour, and the baseline is black.
        named = index < 9
        label = f"{found['rule']}  {found['bits']:.3f}"
        if found["rule"] == about["baseline"]:
            axis.plot(steps, mean, label=label, color="black")
        else:
            axis.plot(
                steps,
                mean,
                label=label if named else None,
                color=f"C{index}" if named else "0.8",
                zorder=2 - index / 99,
            )
    axis.axhline(about["target_bits"], color="0.6", linestyle=":", linewidth=1)
    axis.set(xlabel="step", ylabel="held-out bits per character", ylim=(None, about["target_bits"] + 1.0))
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
