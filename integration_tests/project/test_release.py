"""What is published: one version, siblings pinned exactly, links that an index can follow; and where tests run."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in ROOT.glob("packages/opt-*"))

sys.path.insert(0, str(ROOT / "release"))

import stage  # noqa: E402  (of release, which is only now on the path)


def project_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


def declared(package: str) -> set[str]:
    """The sibling packages that `package` depends on directly."""
    lines = project_of(ROOT / "packages" / package)["dependencies"]
    return {re.split(r"[>=<]", line)[0] for line in lines if line.startswith("opt-")}


def test_a_tag_needs_the_common_version_and_full_changelogs(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", stage.version())
    with pytest.raises(SystemExit, match=r"the tag is v9\.9\.9, but the packages have version"):
        stage.stage(tmp_path / "staged", tag="v9.9.9")
    package = tmp_path / "packages" / "opt-a"
    files = {
        "pyproject.toml": "",
        "src/opt_a/__init__.py": '__version__ = "1.2.3"\n',
        "changelog.d/7.fixed.md": "A NaN is refused.",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    with pytest.raises(SystemExit, match=r"packages/opt-a/changelog\.d/7\.fixed\.md.*nox -s changelog -- 1\.2\.3"):
        stage.stage(tmp_path / "staged", tag="v1.2.3", root=tmp_path)


def test_staged_packages_pin_their_siblings_and_link_their_page(tmp_path: Path) -> None:
    stage.stage(tmp_path / "staged", url="https://example.org/o/r")
    for package in PACKAGES:
        project = project_of(tmp_path / "staged" / package)
        ours = [line for line in project["dependencies"] if line.startswith("opt-")]
        assert sorted(ours) == sorted(f"{name}=={stage.version()}" for name in declared(package))
        assert project["urls"]["Homepage"] == "https://example.org/o/r"
        readme = (tmp_path / "staged" / package / "README.md").read_text()
        images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
        assert all(f"/raw/v{stage.version()}/packages/{package}/" in image for image in images)
        assert [link for link in re.findall(r"\]\(([^)\s]+)\)", readme) if not link.startswith(("http", "#"))] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_commands_of_a_package_exist(package: str) -> None:
    for target in project_of(ROOT / "packages" / package).get("scripts", {}).values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_installs_all_siblings_that_are_needed(package: str) -> None:
    """From the checkout: pip would take what is missing from an index, where the name could be anybody's."""
    needed = {package}
    while more := set().union(*map(declared, needed)) - needed:
        needed |= more
    readme = (ROOT / "packages" / package / "README.md").read_text()
    (command,) = re.findall(r"^python -m pip install((?:[ \\\n]*\./packages/\S+)+)", readme, re.MULTILINE)
    assert {*re.findall(r"\./packages/(\S+)", command)} in (needed, {"opt-*"})


# --- sessions and workflows -------------------------------------------------------------------------------------------

NOXFILE = (ROOT / "noxfile.py").read_text()


def assigned(name: str) -> Any:
    """The value that the noxfile assigns to this name."""
    found = [node for node in ast.parse(NOXFILE).body if isinstance(node, ast.Assign)]
    (value,) = [node.value for node in found if ast.unparse(node.targets[0]) == name]
    return eval(ast.unparse(value))


def test_every_folder_of_tests_runs_at_night() -> None:
    """In a part, or by name in a session with another environment."""
    patterns = ("packages/*/tests*/**/test_*.py", "kernels/**/test_*.py", "integration_tests/**/test_*.py")
    files = [file.relative_to(ROOT) for pattern in patterns for file in ROOT.glob(pattern)]
    folders = tuple(f"{folder}/" for part in assigned("PARTS").values() for folder in part)
    assert len(files) > 100
    assert [f for f in files if not str(f).startswith(folders) and str(f.parent) not in NOXFILE] == []


def test_workflows_run_every_session_that_tests() -> None:
    yaml = pytest.importorskip("yaml")
    sessions = set(re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)\(", NOXFILE, re.MULTILINE))
    named: set[str] = set()
    for path in ROOT.glob(".github/workflows/*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            values = matrix.get("session", [])
            if "python" in matrix:  # torch 2.13.0 is what the other sessions run on
                assert matrix["python"] == assigned("PYTHONS")
                assert matrix["torch"] == [torch for torch in assigned("TORCHES") if torch != "2.13.0"]
            runs = "\n".join(step.get("run", "") for step in job.get("steps", ()))
            named |= {session.partition("(")[0] for session in values} | {*re.findall(r'nox -s "?([a-z]\w*)', runs)}
            if path.stem == "nightly":
                assert values == [*(f"whole({part})" for part in assigned("PARTS")), *assigned("OTHER_NIGHTLY")]
    assert named <= sessions
    # Everything runs in a workflow but figures, parts of other sessions, and what a maintainer does.
    assert sessions - named == {"bench", "leaderboard", "numbers", "quickstart", "changelog", "nightly"}
