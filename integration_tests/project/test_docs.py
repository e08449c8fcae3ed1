"""The documentation: its code runs and prints what it says. `nox -s docs` builds it, without a warning."""

import itertools
import re
import subprocess
import sys
import zipfile
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


EVERY_PAGE = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *ROOT.glob("packages/*/README.md")]
FSDP2_RUNS = hasattr(torch.cpu.Stream, "record_event")
ON_GPUS_ONLY = pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[ON_GPUS_ONLY] * (page.stem == "torchtitan")) for page in WITH_CODE],
)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    if page.stem == "megatron_core":  # which converts a directory of the reader's
        with zipfile.ZipFile(ROOT / "packages/opt-checkpoint/tests/golden/megatron-0.16.1.zip") as golden:
            golden.extractall(tmp_path)
        (tmp_path / "fully_reshardable").rename(tmp_path / "iter_0000300")
    blocks.run(page, tmp_path)


# What a page may tell its reader without a test that runs it: to install, to run a session of nox or the tests, and to
# start the program that needs the HF Trainer, which `nox -s trainers` runs.
NOT_RUN = (
    r"python -m pip install( -e)? (\S+ ?)+", r"(python -m pip install nox uv && )?python -m nox -\w( \w+)*",
    r"python -m pytest packages/\S+( -k \w+)?", r"python from_hf_trainer.py",
)  # fmt: skip


def shell_commands(page: Path) -> list[str]:
    """The commands of sh blocks, without comments, continued lines joined."""
    code = "\n".join(block.code for block in blocks.blocks(page.read_text()) if block.language == "sh")
    lines = re.sub(r"\\\n *", "", code).splitlines()
    return [command for line in lines if (command := re.sub(r"\s+#.*", "", line).strip())]


def test_commands_that_only_are_shown_install_or_run_nox() -> None:
    shown = {command: page for page in EVERY_PAGE for command in shell_commands(page)}
    others = [command for command in shown if not any(re.fullmatch(pattern, command) for pattern in NOT_RUN)]
    sed = shell_commands(DOCS / "migrate" / "megatron_core.md")
    assert others == sed  # which the next test runs
    installed = re.findall(r"(?<= )\./packages/(\S+)", " ".join(shown))
    assert len(installed) > 10
    assert [path for path in installed if not [*ROOT.glob(f"packages/{path}/pyproject.toml")]] == []
    assert [path for path in re.findall(r"-m pytest (\S+)", " ".join(shown)) if not (ROOT / path).exists()] == []


def test_the_command_for_megatrons_script_changes_its_imports(tmp_path: Path) -> None:
    script = tmp_path / "megatron/training/training.py"
    models = tmp_path / "megatron/training/models/dist_utils.py"
    models.parent.mkdir(parents=True)
    script.write_text(
        "from megatron.core.optimizer import get_megatron_optimizer\n"
        "from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler\n"
        "from megatron.core.utils import log_single_rank\n"
    )
    models.write_text("from megatron.core.distributed import DistributedDataParallel\n")
    command = "\n".join(shell_commands(DOCS / "migrate" / "megatron_core.md"))
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True)
    kept = "from megatron.core.utils import log_single_rank"
    changed = "\n".join(line for path in (script, models) for line in path.read_text().splitlines() if line != kept)
    names = {"__name__": "changed"}
    exec(changed, names)
    assert kept in script.read_text()
    assert {"get_megatron_optimizer", "OptimizerParamScheduler", "DistributedDataParallel"} <= {*names}


def test_the_program_for_the_trainer_trains() -> None:
    pytest.importorskip("transformers")  # with accelerate: `nox -s trainers` installs both
    assert "trained 5 steps" in run_program(DOCS / "migrate" / "from_hf_trainer.py")


def test_every_program_of_a_guide_is_run_by_its_page_or_here() -> None:
    for program in DOCS.glob("migrate/*.py"):
        page = program.with_name(program.name.removeprefix("from_")).with_suffix(".md").read_text()
        assert f"{{literalinclude}} {program.name}" in page
        assert re.search(rf"^\$ .*{program.name}", page, re.MULTILINE) or program.name in Path(__file__).read_text()


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
