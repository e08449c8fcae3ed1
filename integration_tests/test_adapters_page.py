"""The page on adapters: the diff it shows is in the code it runs."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text()


def test_the_added_lines_of_the_diff_are_in_the_code_that_runs() -> None:
    section = PAGE[PAGE.index("## nanoGPT") :]
    added = re.findall(r"^    \+(.*)$", section, re.MULTILINE)
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(added) == 11
    assert set(added) <= set(code.splitlines())
