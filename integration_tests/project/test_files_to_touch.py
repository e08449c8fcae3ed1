"""The table of files to touch in `docs/architecture.md`: in a copy of the sources, additions to these alone run."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Edit(NamedTuple):
    """A change of one source file: `new` in place of `old`; a new file if `old` is empty."""

    file: str
    old: str
    new: str


RULE = '''"""Signed descent: p <- p - lr sign(g)."""
from opt_kernels.formulas import Formula, Number, sign

def scalars(*, lr: float, weight_decay: float) -> dict[str, float]:
    return {"lr": lr, "decay": 1 - lr * weight_decay}

def update(p, g, *, lr, decay):
    return p * decay - lr * sign(g)

NUMBERS = (Number("lr", 1e-3), Number("weight_decay", 0.0))
SIGNED = Formula(name="signed", title="Signed", states=(), numbers=NUMBERS, scalars=scalars, update=update)
'''
LAYOUT = '''"""Flat shards in the order of the forward."""
from opt_distributed.layout import flat_layout

def forward_layout(params, **sizes):
    return flat_layout(list(reversed(list(params))), **sizes)
'''
WIRE = """
from opt_distributed.buffers.wires import SumEverywhere

NUM_USED = []

class Counted(SumEverywhere):
    def stages(self, full, shard):
        NUM_USED.append(1)
        yield from super().stages(full, shard)
"""
CAUTIOUS = "@dataclass(frozen=True, slots=True)\nclass CautiousUpdate(Hook):"
HALF = "@dataclass(frozen=True, slots=True)\nclass HalfDecay(Hook):\n    decays: ClassVar[bool] = True\n\n\n"
HALF_PARTS = """    from opt_kernels.hooks.values import HalfDecay
    match hook:
        case HalfDecay():
            return _Parts("1 - 0.5 * lr * weight_decay", kept="hook_p * hook_scalar")
"""
KIND = """from opt_config import FlatShards
from opt_distributed.layout.forward import forward_layout

FORWARD = LayoutKind(
    name="forward order", plan=forward_layout, is_sharded=True, cuts=True,
    applies=lambda sharding, meta, needs_whole: isinstance(sharding, FlatShards),
)
LAYOUTS = (AS_IT_CAME, REPLICATED, FORWARD, """
SENT = "    from opt_distributed.buffers.counted import Counted\n\n    return Counted(axes.dp, axes.inter)\n"
WIRES, FIELD = "    return SumEverywhere(", "    grad_norm_skip_threshold: float = math.inf\n"
ADDITIONS = {
    "an elementwise rule": (
        Edit("opt_kernels/formulas/signed.py", "", RULE),
        Edit("opt_kernels/formulas/registry.py", '    "adam", "sgd",', '    "adam", "sgd", "signed",'),
    ),
    "a hook around updates": (
        Edit("opt_kernels/hooks/values.py", CAUTIOUS, HALF + CAUTIOUS),
        Edit("opt_kernels/hooks/compose.py", "    match hook:\n", HALF_PARTS),
    ),
    "a layout": (
        Edit("opt_distributed/layout/forward.py", "", LAYOUT),
        Edit("opt_distributed/buffers/planner.py", "LAYOUTS = (AS_IT_CAME, REPLICATED, ", KIND),
    ),
    "another way to send gradients": (
        Edit("opt_distributed/buffers/counted.py", "", WIRE),
        Edit("opt_distributed/buffers/wires.py", WIRES, SENT + WIRES),
    ),
    "a field of the configuration": (
        Edit("opt_config/optimizer_config.py", FIELD, "    clip_factor: float = 1.0\n" + FIELD),
        Edit("opt_stack/build.py", "max_norm=config.clip_grad", "max_norm=config.clip_grad * config.clip_factor"),
    ),
}
PROGRAM = """
import torch
from opt_distributed import run_threads
from opt_distributed.buffers import counted
from opt_distributed.comm import Axes, Roles
from opt_distributed.comm.collectives import Alone
from opt_kernels.hooks.values import HalfDecay
from opt_stack import OptimizerConfig, get_optimizer

def train(comm, hooks=(), **fields):
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
    for param in model.parameters():
        param.data = torch.linspace(-1, 1, param.numel()).view(param.shape)
    axes = Axes(dp=comm, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=comm)
    config = OptimizerConfig(lr=1e-2, **{"weight_decay": 0.1, **fields})
    optimizer = get_optimizer(config, [model], {}, pg_collection=roles, hooks=hooks)
    for step in range(3):
        model(torch.full((2, 9), 1.0 + step)).square().mean().backward()
        assert optimizer.step().success
        optimizer.zero_grad()
    return torch.cat([p.detach().view(-1) for p in model.parameters()]), str(optimizer.plan)

def same(size, *, like=None, **fields):
    (weights, plan), *_ = run_threads(size, lambda comm: train(comm, **fields))
    torch.testing.assert_close(weights, train(Alone(), **(fields if like is None else like))[0])
    return plan

assert "forward order" in same(2, use_distributed_optimizer=True)
assert same(2) and len(counted.NUM_USED) == 6  # three steps on two ranks
assert "signed updates 4 parameters" in same(2, optimizer="signed", use_distributed_optimizer=True)
half = {"weight_decay": 0.05}
same(1, hooks=(HalfDecay(),), like=half)
same(1, clip_grad=0.5, clip_factor=0.25, like={"clip_grad": 0.125})
"""


def files_of(addition: str) -> list[str]:
    """The files that the table names for an addition: patterns, with * for a word in capitals."""
    rows = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in rows if row.startswith(f"| {addition} |")]
    named = re.findall(r"`([\w./]+)`", row.split("|")[2])
    named += ["opt_stack/build.py"] if "the module that reads it" in row else []
    return [re.sub(r"\b[A-Z]+\b", "*", name) for name in named]


def test_the_files_that_the_table_names_are_enough(tmp_path: Path) -> None:
    for source in ROOT.glob("packages/*/src/*"):
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for addition, edits in ADDITIONS.items():
        named = files_of(addition)
        for file, old, new in edits:
            assert any(fnmatch(file, f"*{name}") for name in named), f"{addition}: {file} is not among {named}"
            path = tmp_path / file
            text = path.read_text() if old else ""
            assert text.count(old) == 1 or not old, f"{file} has changed; correct the edit in this test"
            path.write_text(text.replace(old, new) if old else new)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "OPT_KERNELS_CPP": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
