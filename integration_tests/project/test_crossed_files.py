"""Count the source files that building an optimizer runs through. The number may only shrink.

python integration_tests/project/test_crossed_files.py prints the files with their functions.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch._dynamo  # noqa: F401  (building imports it, and a profile of that takes 15 s)
from torch import nn

from opt_stack import OptimizerConfig, get_optimizer

MOST = 59


def crossed() -> dict[str, set[str]]:
    """The functions that run while the optimizer of a model of two layers is built, by file, without unnamed ones."""
    found: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = {"packages", "src"} <= {*Path(code.co_filename).parts}
        if event == "call" and is_ours and not code.co_name.startswith("<"):
            found[code.co_filename].add(code.co_qualname)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = OptimizerConfig(optimizer="muon", lr=1e-3)
    sys.setprofile(note)
    get_optimizer(config, [model])
    sys.setprofile(None)
    return found


def test_building_an_optimizer_crosses_no_more_files() -> None:
    # A process of its own: modules and caches of other tests change what is crossed.
    files = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True).stdout
    assert 10 < len(files.splitlines()) <= MOST, f"join small files; these are crossed:\n{files}"


if __name__ == "__main__":
    for file, functions in sorted(crossed().items()):
        print(f"{file.rpartition('/packages/')[2]}: {', '.join(sorted(functions))}")
