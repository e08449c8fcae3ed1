"""The fuzz itself: what it expects does not come from the project, and planted faults are noticed."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fuzz.drawing import draw
from fuzz.running import check_seed
from opt_distributed.buffers import SyncedBuffer
from opt_distributed.buffers.param_sync import ParamSync
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.pieces import Main
from opt_distributed.step import Scaler
from opt_stack import build


@pytest.mark.parametrize("module", ["cases", "drawing", "gradients", "mistakes", "oracle"])
def test_what_expects_imports_nothing_of_the_project(module: str) -> None:
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = "\n".join(map(ast.unparse, nodes))
    assert re.findall(r"opt_|(?:fuzz\.|fuzz import )(?!cases|gradients|mistakes)\w+", lines) == []


def without_last_rank(comm: Any, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Any:
    return REDUCE_SCATTER(comm, shard, full * 0 if comm.rank == comm.size - 1 else full, async_op=async_op)


REDUCE_SCATTER, COUNTED = ThreadComm.reduce_scatter_, build._is_counted
# What is broken, and by what.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a reduction that forgets a rank": (ThreadComm, "reduce_scatter_", without_last_rank),
    "norms and zeros without experts": (
        build,
        "_is_counted",
        lambda draft, buffer, id: not buffer.is_expert and COUNTED(draft, buffer, id),
    ),
    "parameters that nobody waits for": (ParamSync, "wait_for", lambda self, ids: None),
    "a loss scale that never changes": (Scaler, "update", lambda self, found_inf, *, unless=None: None),
    "mains that are not restored": (Main, "set_", lambda self, value: None),
    "parameters that are not gathered": (SyncedBuffer, "publish_", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads = [seed for seed in range(120) if not draw(seed).setup.processes]
    monkeypatch.setattr(*FAULTS[fault])
    assert any(check_seed(seed) for seed in in_threads)
