"""What the README shows runs, and what the READMEs of packages point to exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readmes_training_loop_trains() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code, namespace)
    assert namespace["success"] is True
    assert namespace["scheduler"].num_steps == 20  # type: ignore[attr-defined]


def test_its_two_commands_name_sessions_that_exist() -> None:
    names = re.findall(r"python -m pip install nox uv && python -m nox -s (\w+)", README)
    assert {*names} == {"quickstart", "tests"}
    assert all(f"def {name}(session" in (ROOT / "noxfile.py").read_text() for name in names)


def test_pages_install_from_the_checkout() -> None:
    """On an index, names of ours could be anybody's."""
    for path in (ROOT / "README.md", ROOT / "docs/install.md", *ROOT.glob("packages/*/README.md")):
        assert re.search(r"^python -m pip install[ \\\n]*\./packages/", path.read_text(), re.MULTILINE), path
        assert "\npip install opt-" not in path.read_text(), path


def test_the_files_that_the_readmes_of_packages_point_to_exist() -> None:
    links = {
        readme.parent / link.partition("#")[0]
        for readme in ROOT.glob("packages/*/README.md")
        for link in re.findall(r"\]\(([^)]+)\)", readme.read_text())
        if "://" not in link
    }
    assert links
    assert [link for link in links if not link.exists()] == []
