"""The README's programs run, and what it says of the command line is true."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opt_checkpoint import load, read_index, sharded_like
from opt_checkpoint.__main__ import main

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.needs_extra
def test_the_readmes_programs_run_and_its_commands_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(PROGRAMS) == 7
    for program in PROGRAMS:
        if "memory://" in program and importlib.util.find_spec("obstore") is None:
            continue  # tests/test_object_stores.py needs the extra too
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    commands = re.findall(r"^optckpt (.*)$", README, re.MULTILINE)
    assert len(commands) == 10
    codes = {command: main(shlex.split(command)) for command in commands}
    assert codes.pop("diff run/step-000000004 run/step-000000005") == 1
    assert set(codes.values()) == {0}


def start_train(folder: Path, world: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """The README's first program as one process; with torchrun's variables in `world`, as a rank."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in world.items()}}
    return subprocess.Popen([sys.executable, folder / "train.py"], cwd=folder, env=env)


def weights_at_the_end(folder: Path) -> dict[str, torch.Tensor]:
    index = read_index(folder / "train-run" / "step-000000200")
    weights = {key: torch.zeros(t.shape) for key, t in index.tensors.items() if key.startswith("model.")}
    load({key: sharded_like(key, weight) for key, weight in weights.items()}, index.path)
    return weights


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch runs FSDP2 on GPUs only")
def test_the_readmes_run_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path: Path) -> None:
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(PROGRAMS[0])
    # Two ranks that cannot end, killed after their first checkpoints; the kill may come in the middle of a save.
    waiting = PROGRAMS[0].replace("    step += 1\n", "    step += 1\n    if step == 150:\n        time.sleep(600)\n")
    (tmp_path / "killed/train.py").write_text(f"import time\n{waiting}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the ranks', as torchrun's agent
    world = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    ranks = [start_train(tmp_path / "killed", world | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(2)]
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed/train-run/step-000000040").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
        rank.wait(30)
    assert (tmp_path / "killed/train-run/step-000000040").exists()
    assert not (tmp_path / "killed/train-run/step-000000200").exists()
    (tmp_path / "killed/train.py").write_text(PROGRAMS[0])
    for name in ("killed", "whole"):  # both to the end, in one process
        assert start_train(tmp_path / name, {}).wait(120) == 0
    resumed, whole = (weights_at_the_end(tmp_path / name) for name in ("killed", "whole"))
    assert len(whole) == 4
    for key, weight in whole.items():  # averaging two equal gradients is exact
        assert torch.equal(resumed[key], weight), key


def test_the_package_imports_only_torch_and_numpy() -> None:
    """In a fresh interpreter, none of the sibling packages is imported along."""
    code = "import sys, opt_checkpoint; print([m for m in sys.modules if m.startswith('opt_') and '.' not in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "['opt_checkpoint']"


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "src").rglob("*.py")), ids=lambda p: p.stem)
def test_a_source_file_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert lines[0].startswith('"""')
