"""The README tells the truth: its code runs from top to bottom, and its picture is what the code prints."""

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not README.exists(), reason="the tests were copied without the README")
def test_its_code_runs_and_prints_its_picture(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    (picture,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert capsys.readouterr().out == picture
    assert namespace["lr"](250) == pytest.approx(1.5e-4)
    assert namespace["branch"](4_400) == 0.0
    assert namespace["optimizer"].param_groups[0]["lr"] == namespace["scheduler"].lr_at(256)
