"""Runs the code blocks of a Markdown page, as a reader would: from top to bottom, in one folder.

- ```python blocks are one program: each sees what those before it defined. A ```text block directly after one is what
  it prints; without such a block it may print anything. One whose first line is a comment with a file's name is
  written to that file, for a command to run.
- ```console blocks are commands of python, torchrun, optckpt and optsched after `$ `, with what they print on stdout
  below them. They are forked from a process that has imported torch: starting an interpreter for each takes longer than
  they run. `examples/` is the repository's.
- ```toml and ```ini blocks whose first line is a comment with a file's name are written to that file.
- ```sh blocks are instructions that a page cannot run for its reader: installing, sessions of nox, a trainer that is
  not installed. `test_docs.py` lists what may stand in them.
"""

import contextlib
import io
import linecache
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
FENCED = re.compile(r"^(`{3,}|:{3,})([^\n]*)\n(.*?)^\1 *$", re.DOTALL | re.MULTILINE)
RUN = {"python", "console"}
WRITTEN = {"toml", "ini"}
NOT_RUN = {"sh", "text", ""}


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its content, the line of the page it begins on."""

    language: str
    code: str
    line: int
    prints: str | None = None  # of a python block: the text block directly after it


def blocks(page: str) -> list[Block]:
    """The blocks of code of a page, those inside of directives such as tabs and admonitions too."""
    found = list(_blocks(page, 0))
    joined: list[Block] = []
    for block in found:
        before = joined[-1] if joined else None
        if block.language == "text" and before and before.language == "python" and _adjacent(page, before, block):
            joined[-1] = Block("python", before.code, before.line, prints=block.code)
        else:
            joined.append(block)
    return joined


def _blocks(text: str, first_line: int) -> Iterator[Block]:
    for match in FENCED.finditer(text):
        line = first_line + text[: match.start()].count("\n") + 1
        language = match[2].strip()
        if language.startswith("{"):
            yield from _blocks(match[3], line)
        else:
            yield Block(language, match[3], line)


def _adjacent(page: str, first: Block, second: Block) -> bool:
    end = first.line + first.code.count("\n") + 1
    return not "".join(page.splitlines()[end : second.line - 1]).strip()


def run(page: Path, folder: Path) -> None:
    """Run every block of `page` with `folder` as the current directory, which also has the programs next to the page.

    Raises AssertionError, with the line of the page, where a block prints something else or cannot be run at all.
    """
    scope: dict[str, object] = {"__name__": "__main__"}
    for program in page.parent.glob("from_*.py"):
        shutil.copy(program, folder)
    with contextlib.chdir(folder):
        for block in blocks(page.read_text()):
            where = f"{page.name}:{block.line}"
            if block.language == "python":
                _run_python(block, scope, where)
            elif block.language == "console":
                _run_console(block, where)
            elif block.language in WRITTEN and (name := re.match(r"# ([\w.]+)\n", block.code)):
                Path(name[1]).write_text(block.code)
            else:
                assert block.language in NOT_RUN, f"{where}: a {block.language} block is not run"


def _run_python(block: Block, scope: dict[str, object], where: str) -> None:
    if name := re.match(r"# ([\w]+\.py)\n", block.code):
        Path(name[1]).write_text(block.code)  # a program that a later command runs
        return
    out = io.StringIO()
    source = "\n" * block.line + block.code
    linecache.cache[where] = (len(source), None, source.splitlines(True), where)  # for inspect.getsource
    with contextlib.redirect_stdout(out):
        exec(compile(source, where, "exec"), scope)
    if block.prints is not None:
        _compare(out.getvalue(), block.prints, where)


def _run_console(block: Block, where: str) -> None:
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.code, re.MULTILINE):
        printed = _printed_by(command, where)
        if expected.strip():
            _compare(printed, expected, where)


COMMANDS = {"optckpt": "opt_checkpoint", "optsched": "opt_scheduler"}  # installed commands, and their modules


def _printed_by(command: str, where: str) -> str:
    command = re.sub(r"(?<= )examples/", f"{EXAMPLES}/", command)
    if launched := re.fullmatch(r"torchrun --standalone --nproc-per-node (\d+) (\S+)((?: \S+)*)", command):
        ranks, program, arguments = launched.groups()
        return run_program(program, *arguments.split(), ranks=int(ranks), folder=Path.cwd())
    python, *words = command.split()
    if python in COMMANDS:
        return run_program("-m", COMMANDS[python], *words, ranks=0, folder=Path.cwd())
    assert python == "python", f"{where}: {command}: only python, torchrun, {' and '.join(COMMANDS)} are run"
    return run_program(*words, ranks=0, folder=Path.cwd())


def _compare(printed: str, expected: str, where: str) -> None:
    """Raise AssertionError where they differ. In `expected`, `...` stands for any text and `~1.5` for any number."""
    pattern = re.escape("\n".join(line.rstrip() for line in expected.strip().splitlines()))
    pattern = pattern.replace(re.escape("..."), ".*")
    pattern = re.sub(r"\\~[\d.\\]+\d", r"[-\\d.e]+", pattern)
    actual = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    assert re.fullmatch(pattern, actual, re.DOTALL), f"{where} prints\n{actual}\nand not\n{expected}"
