"""The README's programs run, and what it says of the command line is true."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from processes import FSDP2_RUNS, RankError, run_program
from states import whole_tensors

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
    assert codes.pop("convert checkpoint averaged --to safetensors --weights ema") == 2  # this run keeps no averages
    assert set(codes.values()) == {0}


@pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
def test_the_readmes_run_resumes_on_other_ranks_after_a_kill(tmp_path: Path) -> None:
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(PROGRAMS[0])
    # Two ranks that are killed at step 150, while a save of the background may be under way.
    killed = PROGRAMS[0].replace("    step += 1\n", "    step += 1\n    if step == 150:\n        os._exit(9)\n")
    (tmp_path / "killed/train.py").write_text(killed)
    with pytest.raises(RankError, match="exit status 9"):
        run_program(tmp_path / "killed/train.py", ranks=2, folder=tmp_path / "killed")
    assert list((tmp_path / "killed/train-run").glob("step-*"))
    assert not (tmp_path / "killed/train-run/step-000000200").exists()
    (tmp_path / "killed/train.py").write_text(PROGRAMS[0])
    for name in ("killed", "whole"):  # both to the end, in one process
        run_program(tmp_path / name / "train.py", folder=tmp_path / name)
    resumed, whole = (
        whole_tensors(tmp_path / name / "train-run/step-000000200", "model.") for name in ("killed", "whole")
    )
    assert len(whole) == 4
    for key, weight in whole.items():  # averaging two equal gradients is exact
        assert torch.equal(resumed[key], weight), key
