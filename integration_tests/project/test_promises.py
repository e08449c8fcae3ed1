"""The table `docs/promises.md`: what READMEs promise, the test that pins it, and when that test runs.

A row quotes the README, without its marks of emphasis and code, and names a test: `path/test_x.py::test_name`. Every
list item of a README's section on what can be relied on needs a row that quotes a part of it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "promises.md"
SECTIONS = r"^## (?:What you can rely on|What it promises|Guarantees)\n(.*?)(?=^## |\Z)"
READMES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("packages/*/README.md")))]


class Row(NamedTuple):
    """A promise of a README."""

    readme: str
    sentence: str
    test: str
    runs: str  # "default" or "nightly"


def plain(text: str) -> str:
    """A text without emphasis, code marks, links' targets and line breaks."""
    return " ".join(re.sub(r"\]\([^)]*\)|[*`\[\]]", "", text).split())


def rows(table: str) -> Iterator[Row]:
    """The rows of the table; the heading above a row is the path of its README."""
    readme = ""
    for line in table.splitlines():
        if line.startswith("## "):
            readme = line.removeprefix("## ").strip()
        elif line.startswith("| ") and not line.startswith(("| promise", "|---")):
            sentence, test, runs = (cell.strip() for cell in line.strip("| ").split(" | "))
            yield Row(readme, plain(sentence), test.strip("`"), runs)


def promised(readme: str) -> list[str]:
    """The list items of a README's sections on what can be relied on."""
    sections = re.findall(SECTIONS, readme, re.MULTILINE | re.DOTALL)
    return [
        plain(item) for text in sections for item in re.findall(r"^- (.*?)(?=^- |^\S|\Z)", text + "\n\n", re.M | re.S)
    ]


def when(file: Path, test: str) -> str | None:
    """In which tier a test runs; None if there is none of this name."""
    body = ast.parse(file.read_text()).body if file.is_file() else []
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == test]
    if not found:
        return None
    of_file = [node for node in body if isinstance(node, ast.Assign)]
    marks = "\n".join(map(ast.unparse, (*of_file, *found[0].decorator_list)))
    elsewhere = {"trainers", "tests_megatron", "tests_s3", "tests_trainers"} & {*file.parts}
    return "nightly" if elsewhere or "mark.nightly" in marks else "default"


def problems(table: str, readmes: dict[str, str]) -> Iterator[str]:
    """What is wrong with the table."""
    quoted: dict[str, list[str]] = {name: [] for name in readmes}
    for row in rows(table):
        file, _, test = row.test.partition("::")
        if row.readme not in readmes:
            yield f"{row.readme} is not a README"
            continue
        quoted[row.readme].append(row.sentence)
        if row.sentence not in plain(readmes[row.readme]):
            yield f"{row.readme} does not say: {row.sentence}"
        if (tier := when(ROOT / file, test)) is None:
            yield f"no test {row.test}"
        elif tier != row.runs:
            yield f"{row.test} runs in the {tier} tier, not {row.runs}"
    for name, readme in readmes.items():
        for item in promised(readme):
            if not any(sentence in item for sentence in quoted[name]):
                yield f"{name} promises without a row: {item}"


def test_the_table_has_every_promise_and_names_tests_that_exist() -> None:
    readmes = {name: (ROOT / name).read_text() for name in READMES}
    assert list(problems(TABLE.read_text(), readmes)) == []
    assert len(list(problems("", readmes))) > 30  # without rows
