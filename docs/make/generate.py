"""Writes every page, table and picture of the site that is made from code, into one folder that git ignores."""

import shutil
from pathlib import Path

import api
import benchmarks
import fields
import gallery
import pictures
import readmes
import tables


def write_all(folder: Path) -> None:
    """Replace `folder` by newly generated content. Files that did not change keep their time, for Sphinx's cache."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    (new / "api").mkdir(parents=True)
    (new / "pictures").mkdir()
    (new / "readmes").mkdir()
    api.write(new / "api")
    tables.write(new)
    benchmarks.write(new)
    fields.write(new)
    gallery.write(new)
    pictures.write(new / "pictures")
    readmes.write(new / "readmes")
    _replace(folder, new)


def _replace(folder: Path, new: Path) -> None:
    wanted = {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder) not in wanted:
            path.unlink()
    for name in wanted:
        old = folder / name
        content = (new / name).read_bytes()
        if not old.exists() or old.read_bytes() != content:
            old.parent.mkdir(parents=True, exist_ok=True)
            old.write_bytes(content)
    shutil.rmtree(new)
