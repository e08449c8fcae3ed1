"""Prepares the packages for publication: a copy of each whose siblings are pinned exactly and whose links are absolute.

    python release/stage.py FOLDER [--tag v0.1.0] [--url https://host/owner/repository]
    python release/stage.py --set 0.2.0      # write a new version into the seven packages of this checkout

All packages have one version. In a checkout they accept a range of their siblings' versions; what is published accepts
the same version only. Without a URL the READMEs keep their relative links, and there are no project URLs.
"""

import argparse
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
SIBLING = re.compile(r'"(opt-[a-z]+)>=[\d.]+,<[\d.]+"')
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?!https?://|#|mailto:)(?P<path>[^)\s]+)\)")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "dist", "build", ".*cache")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--tag", help="must be v and the packages' version")
    parser.add_argument("--url", default="", help="the repository's page, for project URLs and links in READMEs")
    parser.add_argument("--set", metavar="VERSION", dest="new_version")
    options = parser.parse_args(arguments)
    if options.new_version:
        set_version(options.new_version)
    elif options.folder:
        stage(options.folder, tag=options.tag, url=options.url)
    else:
        parser.error("give a folder, or --set VERSION")


def packages(root: Path = ROOT) -> list[Path]:
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))


def fragments(root: Path = ROOT) -> list[str]:
    """Changes that `nox -s changelog` has not moved into a changelog, as paths."""
    return sorted(str(path.relative_to(root)) for path in root.glob("packages/*/changelog.d/*.md"))


def init_of(package: Path) -> Path:
    return package / "src" / package.name.replace("-", "_") / "__init__.py"


def version(root: Path = ROOT) -> str:
    """The one version of all packages. Exits with the versions where they differ."""
    found = {package.name: VERSION.findall(init_of(package).read_text()) for package in packages(root)}
    versions = {version for versions in found.values() for version in versions}
    if len(versions) != 1 or not all(found.values()):
        sys.exit(f"the packages have different versions: {found}; run `python release/stage.py --set VERSION`")
    return versions.pop()


def set_version(new: str) -> None:
    """Write `new` into every package, and the range of siblings that goes with it."""
    major, minor = map(int, new.split(".")[:2])
    for package in packages():
        init = init_of(package)
        project = package / "pyproject.toml"
        init.write_text(VERSION.sub(f'__version__ = "{new}"', init.read_text()))
        siblings = rf'"\1>={major}.{minor},<{major}.{minor + 1}"'
        project.write_text(SIBLING.sub(siblings, project.read_text()))


def stage(folder: Path, *, tag: str | None = None, url: str = "", root: Path = ROOT) -> None:
    """Copy every package into `folder`, ready to be built.

    Exits where `tag` is not the packages' version, or changes for a tag are still outside the changelogs.
    """
    of_all = version(root)
    if tag is not None and tag != f"v{of_all}":
        sys.exit(f"the tag is {tag}, but the packages have version {of_all}: the tag must be v{of_all}")
    if tag is not None and (left := fragments(root)):
        sys.exit(
            f"not in the changelogs yet: {', '.join(left)}; run `python -m nox -s changelog -- {of_all}` and commit"
        )
    shutil.rmtree(folder, ignore_errors=True)
    for package in packages(root):
        copy = folder / package.name
        shutil.copytree(package, copy, ignore=NOT_SHIPPED)
        project = copy / "pyproject.toml"
        readme = copy / "README.md"
        project.write_text(pinned(project.read_text(), of_all, url=url, name=package.name))
        if url:
            readme.write_text(with_absolute_links(readme.read_text(), url, f"v{of_all}/packages/{package.name}"))


def pinned(project: str, of_all: str, *, url: str = "", name: str = "") -> str:
    """A pyproject.toml whose siblings are of exactly this version, without the workspace they came from."""
    text = SIBLING.sub(rf'"\1=={of_all}"', project)
    text = re.sub(r"\n\[tool\.uv\.sources\]\n(?:(?!\[).*\n)*", "\n", text)
    if url:
        text += (
            f'\n[project.urls]\nHomepage = "{url}"\nIssues = "{url}/issues"\n'
            f'Changelog = "{url}/blob/v{of_all}/packages/{name}/CHANGELOG.md"\n'
        )
    tomllib.loads(text)
    return text


def with_absolute_links(readme: str, url: str, folder: str) -> str:
    """Links to files of the repository as links to its page: an index shows a README without them."""

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found["image"] else "blob"
        return f"{found['image']}{found['text']}({url}/{kind}/{folder}/{found['path']})"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    main()
