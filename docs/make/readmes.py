"""The READMEs of the packages as pages: links to other pages stay links, links to files go to the repository."""

import os
import re
import shutil
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?://|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def repository() -> str:
    """The repository's page, as in a release: OPT_STACK_URL, or that of GitHub's CI; empty where neither is known."""
    server, name = (os.environ.get(f"GITHUB_{key}", "") for key in ("SERVER_URL", "REPOSITORY"))
    return os.environ.get("OPT_STACK_URL") or (f"{server}/{name}" if name else "")


def write(folder: Path) -> None:
    """Write `PACKAGE.md` for each package, the pictures that its README shows, and `../contributing.md`."""
    pages = {readme: folder / f"{readme.parent.name}.md" for readme in sorted(ROOT.glob("packages/*/README.md"))}
    for source, page in {**pages, ROOT / "CONTRIBUTING.md": folder.parent / "contributing.md"}.items():
        page.write_text(LINK.sub(partial(_link, package=source.parent, folder=folder), source.read_text()))


def _link(found: re.Match[str], package: Path, folder: Path) -> str:
    target = (package / found["path"]).resolve()
    if found["image"]:
        name = f"{package.name}-{target.name}"
        shutil.copy(target, folder / name)
        return f"![{found['text']}]({name})"
    if target.name == "README.md" and target.parent.parent == ROOT / "packages":
        return f"[{found['text']}]({target.parent.name}.md)"
    if target.suffix == ".md" and (ROOT / "docs") in target.parents:
        return f"[{found['text']}](/{target.relative_to(ROOT / 'docs')})"
    url = repository()
    return f"[{found['text']}]({url}/blob/main/{target.relative_to(ROOT)})" if url else found["text"]
