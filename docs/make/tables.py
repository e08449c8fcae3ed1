"""Tables of the site that are computed or recorded: bytes per parameter, modes, the leaderboard."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from modes import REFUSALS
from torch import nn

from opt_config import OptimizerConfig
from opt_config.foreign import WORDS_BY_LIBRARY
from opt_distributed.buffers import WorldSizes
from opt_stack import Registry
from opt_stack.factory import make_design, read_groups
from opt_stack.planning.design import Request

ROOT = Path(__file__).parents[2]
RANKS = 8
AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
FP16 = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
FP8 = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}


class Mode(NamedTuple):
    """A row of the memory table: its name, and the fields of its configuration."""

    name: str
    fields: dict[str, Any]


MODES = [
    Mode("fp32, Adam", {}),
    Mode("fp32, Adam, bf16 moments", {"use_precision_aware_optimizer": True, **BF16}),
    Mode("bf16, Adam, fp32 main parameters (the usual way)", {"bf16": True}),
    Mode("bf16, Adam, fp16 main parameters", {**AWARE, "main_params_dtype": torch.float16}),
    Mode("bf16, Adam, 16-bit remainders", AWARE),
    Mode("bf16, Adam, 16-bit remainders, bf16 moments", {**AWARE, **BF16}),
    Mode("bf16, Adam, 16-bit remainders, scaled fp16 moments", {**AWARE, **FP16}),
    Mode("bf16, Adam, 16-bit remainders, fp8 moments", {**AWARE, **FP8}),
    Mode("bf16, Adam, 8-bit remainders, fp8 moments", {**AWARE, "main_params_dtype": torch.int8, **FP8}),
    Mode("bf16, Lion, 16-bit remainders", {**AWARE, "optimizer": "lion"}),
    Mode("bf16, SGD with momentum, fp32 main parameters", {"bf16": True, "optimizer": "sgd"}),
    Mode("bf16, AdEMAMix, fp32 main parameters", {"bf16": True, "optimizer": "ademamix"}),
    Mode("bf16, Muon, fp32 main parameters", {"bf16": True, "optimizer": "muon"}),
    Mode("bf16, AdaptiveMuon, fp32 main parameters", {"bf16": True, "optimizer": "adaptive_muon"}),
    Mode("bf16, SOAP, fp32 main parameters", {"bf16": True, "optimizer": "soap"}),
]


def write(folder: Path) -> None:
    """Write the tables of memory, refused modes, the leaderboard and the number formats."""
    (folder / "memory.md").write_text(memory_table())
    (folder / "foreign_words.md").write_text(foreign_words())
    (folder / "leaderboard.md").write_text(recorded(folder, "leaderboard", "Loss over steps of the rules in the table"))
    (folder / "numbers.md").write_text(recorded(folder, "numbers", "Bytes and loss of every number format"))
    (folder / "refused_modes.md").write_text(refused_modes())


def bytes_per_parameter(fields: dict[str, Any], ranks: int) -> float:
    """Bytes of optimizer state on rank 0 for each parameter of a model of matrices, as the plan counts them."""
    matrix_rule = fields.get("optimizer") in ("muon", "adaptive_muon", "soap")
    sharding = "use_layer_wise_distributed_optimizer" if matrix_rule else "use_distributed_optimizer"
    config = OptimizerConfig(lr=1e-3, **fields, **({sharding: True} if ranks > 1 else {}))
    shape = (1024, 1024)
    dtype = config.precision.params
    model = nn.ParameterDict(
        {f"w{i}": nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for i in range(RANKS)}
    )
    rules = Registry()
    sizes = WorldSizes(dense=ranks, expert=ranks)
    request = Request(config=config, chunks=(model,), registry=rules)
    plan = make_design(request, *read_groups(request), sizes).plan
    return plan.state_bytes(0) / (RANKS * 1024 * 1024)


def foreign_words() -> str:
    """The tables of other libraries' words that configurations answer."""
    lines = []
    for library, table in WORDS_BY_LIBRARY.items():
        lines += [f"### {library}", "", "| word there | here |", "|---|---|"]
        for words, answer in table.items():
            shown = ", ".join(f"`{word}`" for word in words.split())
            lines.append(f"| {shown} | {answer} |")
        lines.append("")
    return "\n".join(lines)


def memory_table() -> str:
    lines = [f"| mode | one rank | sharded over {RANKS} ranks |", "|---|---|---|"]
    for mode in MODES:
        alone, sharded = (bytes_per_parameter(mode.fields, ranks) for ranks in (1, RANKS))
        lines.append(f"| {mode.name} | {alone:.4g} | {sharded:.3g} |")
    return "\n".join(lines) + "\n"


def recorded(folder: Path, name: str, alt: str, results: Path = ROOT / "kernels" / "results") -> str:
    """The table and the plot that the nox session `name` recorded, or a sentence if it has recorded none."""
    table, plot = (results / f"{name}.{kind}" for kind in ("md", "svg"))
    if not table.exists():
        return f"No full run has been recorded yet. `nox -s {name}` makes one.\n"
    text = table.read_text()
    if plot.exists():
        light = plot.read_text()
        for theme, drawing in (("light", light), ("dark", darkened(light))):
            (folder / f"{name}-{theme}.svg").write_text(drawing)
            text += f"\n```{{image}} /generated/{name}-{theme}.svg\n:class: only-{theme}\n:alt: {alt}\n```\n"
    return text


def darkened(svg: str) -> str:
    """A drawing of matplotlib for a dark page: light lines and text on a dark ground. Hues stay."""
    svg = re.sub(r"(stroke|fill): #000000", r"\1: #cfd0d0", svg)
    svg = re.sub(r"(stroke|fill): #ffffff", r"\1: #131416", svg)
    return svg.replace("<svg ", '<svg fill="#cfd0d0" ', 1)  # text without a colour of its own


def refused_modes() -> str:
    """Which values of two options do not go together: the table by which the tests of all modes expect a refusal."""
    lines = ["| this | does not go with |", "|---|---|"]
    for refusal in REFUSALS:
        lines.append("| " + " | ".join(f"{axis}: {'; '.join(values)}" for axis, values in refusal.when.items()) + " |")
    return "\n".join(lines) + "\n"
