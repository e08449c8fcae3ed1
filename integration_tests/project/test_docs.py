"""The documentation: its code runs and prints what it says. `nox -s docs` builds it, without a warning."""

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from processes import run_program

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "make"))

import blocks  # noqa: E402  (of docs/make, which is only now on the path)

PAGES = sorted(path for path in DOCS.rglob("*.md") if "generated" not in path.parts)
WITH_CODE = [page for page in PAGES if {block.language for block in blocks.blocks(page.read_text())} & blocks.RUN]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    blocks.run(page, tmp_path)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch runs FSDP2 on GPUs only")
def test_the_program_for_fsdp2_trains_on_two_ranks() -> None:
    assert "muon updates" in run_program(DOCS / "migrate" / "from_torchtitan.py", ranks=2)


def test_the_program_for_the_trainer_trains() -> None:
    pytest.importorskip("transformers")  # with accelerate: `nox -s trainers` installs both
    assert "trained 5 steps" in run_program(DOCS / "migrate" / "from_hf_trainer.py")


def test_every_program_of_a_guide_is_run_by_its_page_or_here() -> None:
    for program in DOCS.glob("migrate/*.py"):
        page = program.with_name(program.name.removeprefix("from_")).with_suffix(".md").read_text()
        assert f"{{literalinclude}} {program.name}" in page
        assert f"$ python {program.name}" in page or program.name in Path(__file__).read_text()


def test_every_block_is_run_or_only_shown_for_a_reason() -> None:
    known = blocks.RUN | blocks.WRITTEN | blocks.NOT_RUN
    assert [p for p in PAGES if {block.language for block in blocks.blocks(p.read_text())} - known] == []


def source_text() -> str:
    """The sources of the packages, with the parts of each string joined."""
    texts = (path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    return "\n".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in texts)


def test_messages_quoted_in_troubleshooting_are_in_the_source() -> None:
    """Headings that quote a message: code with blanks before a definition."""
    lines = (DOCS / "troubleshooting.md").read_text().splitlines()
    source = source_text()
    terms = [line for line, below in itertools.pairwise(lines) if below.startswith(": ")]
    messages = [quote for term in terms for quote in re.findall(r"`([^`]+ [^`]+)`", term)]
    assert len(messages) > 12
    assert [message for message in messages if message not in source] == []
