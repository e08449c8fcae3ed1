"""The table of files to touch in `docs/architecture.md`: in a copy of the sources, additions to these alone run."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
RULE = '''"""Signed descent: p <- p - lr sign(g)."""
from opt_kernels.formulas import Formula, Number, sign

def scalars(*, lr: float, weight_decay: float) -> dict[str, float]:
    return {"lr": lr, "decay": 1 - lr * weight_decay}

def update(p, g, *, lr, decay):
    return p * decay - lr * sign(g)

NUMBERS = (Number("lr", 1e-3), Number("weight_decay", 0.0))
SIGNED = Formula(name="signed", title="Signed", states=(), numbers=NUMBERS, scalars=scalars, update=update)
'''
CAUTIOUS = "@dataclass(frozen=True, slots=True)\nclass CautiousUpdate(Hook):"
HALF = "@dataclass(frozen=True, slots=True)\nclass HalfDecay(Hook):\n    decays: ClassVar[bool] = True\n\n\n"
HALF_PARTS = """    from opt_kernels.hooks.values import HalfDecay
    if isinstance(hook, HalfDecay):
        return _Parts("1 - 0.5 * lr * weight_decay", kept="hook_p * hook_scalar")
"""
LAYOUT = '''"""Flat shards in the order of the forward."""
from opt_distributed.layout import flat_layout

def forward_layout(params, **sizes):
    return flat_layout(list(reversed(list(params))), **sizes)
'''
KIND = """    from opt_config import FlatShards
    from opt_distributed.layout.forward import forward_layout

    if isinstance(sharding, FlatShards):
        return LayoutKind(name="forward order", plan=forward_layout, is_sharded=True, cuts=True)
"""
LAST_KIND = "    return FLAT\n"
WIRES = "    return PlainSum("
WIRE = """
from opt_distributed.buffers.wires import PlainSum

NUM_USED = []

class Counted(PlainSum):
    def stages(self, full, shard):
        NUM_USED.append(1)
        yield from super().stages(full, shard)
"""
SENT = """    if num_shards == 1:
        from opt_distributed.buffers.counted import Counted

        return Counted(axes, to_shards=False)
"""
FIELD = "    grad_norm_skip_threshold: float = math.inf\n"
MAX = "max_norm=config.clip_grad"
# For each addition its files, the text that is replaced (none: a new file), and the new text.
ADDITIONS: dict[str, dict[str, tuple[str, str]]] = {
    "an elementwise rule": {
        "opt_kernels/formulas/signed.py": ("", RULE),
        "opt_kernels/formulas/registry.py": ('    "sgd",\n', '    "sgd",\n    "signed",\n'),
    },
    "a hook around updates": {
        "opt_kernels/hooks/values.py": (CAUTIOUS, HALF + CAUTIOUS),
        "opt_kernels/hooks/compose.py": ("    match hook:\n", HALF_PARTS + "    match hook:\n"),
    },
    "a layout": {
        "opt_distributed/layout/forward.py": ("", LAYOUT),
        "opt_distributed/buffers/planner.py": (LAST_KIND, KIND + LAST_KIND),
    },
    "another way to send gradients": {
        "opt_distributed/buffers/counted.py": ("", WIRE),
        "opt_distributed/buffers/wires.py": (WIRES, SENT + WIRES),
    },
    "a field of the configuration": {
        "opt_config/optimizer_config.py": (FIELD, "    clip_factor: float = 1.0\n" + FIELD),
        "opt_stack/building/parts.py": (MAX, f"{MAX} * config.clip_factor"),
    },
}
PROGRAM = """
import torch
from parity import Net, grads_of, norms_while_training, roles_over
from opt_distributed import run_threads
from opt_distributed.buffers import counted
from opt_distributed.comm import Alone
from opt_kernels.hooks.values import HalfDecay
from opt_stack import OptimizerConfig, get_optimizer

SHAPES = {"embedding": (9, 4), "qkv": (12, 5), "bias": (33,)}

def train(comm, hooks=(), **fields):
    net, config = Net(torch.float32, SHAPES), OptimizerConfig(lr=1e-2, **{"weight_decay": 0.1, **fields})
    optimizer = get_optimizer(config, [net], {}, pg_collection=roles_over(comm), hooks=hooks)
    norms_while_training(net, optimizer, range(3), comm, SHAPES)
    return torch.cat([p.detach().view(-1) for p in net.parameters()]), str(optimizer.plan)

def same(size, *, like=None, **fields):
    (weights, plan), *_ = run_threads(size, lambda comm: train(comm, **fields))
    torch.testing.assert_close(weights, train(Alone(), **(fields if like is None else like))[0])
    return plan

assert "forward order" in same(2, use_distributed_optimizer=True)
assert same(2) and len(counted.NUM_USED) == 6  # three steps on two ranks
assert "signed updates 3 parameters" in same(2, optimizer="signed", use_distributed_optimizer=True)
same(1, hooks=(HalfDecay(),), like={"weight_decay": 0.05})
same(1, clip_grad=0.5, clip_factor=0.25, like={"clip_grad": 0.125})
"""


def files_of(addition: str) -> list[str]:
    """The files that the table names for an addition: patterns, with * for a word in capitals."""
    rows = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in rows if row.startswith(f"| {addition} |")]
    named = re.findall(r"`([\w./]+)`", row.split("|")[2])
    named += ["opt_stack/building/parts.py"] if "the module that reads it" in row else []
    return [re.sub(r"\b[A-Z]+\b", "*", name) for name in named]


def test_the_files_that_the_table_names_are_enough(tmp_path: Path) -> None:
    for source in ROOT.glob("packages/*/src/*"):
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for addition, edits in ADDITIONS.items():
        for file, (old, new) in edits.items():
            assert any(fnmatch(file, f"*{name}") for name in files_of(addition)), f"{addition}: {file} is not named"
            path = tmp_path / file
            text = path.read_text() if old else ""
            assert text.count(old) == 1 or not old, f"{file} has changed; correct the edit in this test"
            path.write_text(text.replace(old, new) if old else new)
    paths = f"{tmp_path}:{ROOT / 'integration_tests/testing'}"
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPT_KERNELS_CPP": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
