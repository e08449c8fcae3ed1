"""Which tests name a source file: its module, or a function or class at its top. Needs the standard library only."""

import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path


def changed_files(root: Path, base: str = "main") -> list[str]:
    """The files that differ from where this branch left `base`, uncommitted and new ones too."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.split()

    (start,) = git("merge-base", "HEAD", base)
    return sorted({*git("diff", "--name-only", start), *git("ls-files", "--others", "--exclude-standard")})


def default_tests(root: Path) -> list[str]:
    """The files of the default tests, those of packages first."""
    folders = ("packages/*/tests", "kernels/tests", "integration_tests")
    return [str(path.relative_to(root)) for folder in folders for path in sorted(root.glob(f"{folder}/**/test_*.py"))]


def names_of(path: Path) -> set[str]:
    """The module, and the public functions and classes at its top."""
    found = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {path.parent.name if path.stem == "__init__" else path.stem, *(n for n in found if not n.startswith("_"))}


def named_in(path: Path) -> set[str]:
    """The names that a test imports, takes as an attribute, or writes as a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                found |= {alias.name.rpartition(".")[2] for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                found |= {module.rpartition(".")[2], *(alias.name for alias in node.names)}
            case ast.Attribute(attr=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


def files_naming(root: Path, changed: Iterable[str]) -> list[str]:
    """The test files that changed, and those that name a changed module of a package or one that tests share."""
    existing = {file for file in changed if file.endswith(".py") and (root / file).exists()}
    tests = default_tests(root)
    shared = [file for file in existing.difference(tests) if file.startswith(("packages/", "integration_tests/"))]
    names = {name for file in shared for name in names_of(root / file)}
    return [test for test in tests if test in existing or names & named_in(root / test)]
