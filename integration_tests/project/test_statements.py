"""Statements are small: no two unrelated names are bound by one, in any file. Names of tests are short."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages", "integration_tests", "kernels", "examples")
UNNAMED = ROOT / "packages/opt-kernels/tests"  # whose names are still to be shortened


def joined_assignments(source: str) -> list[int]:
    """The lines of `a, b = x, y` where y does not read a: two statements would do the same."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign) and is_joined(node)]


def is_joined(node: ast.Assign) -> bool:
    value = node.value.body if isinstance(node.value, ast.IfExp) else node.value
    match node.targets[0], value:
        case ast.Tuple(elts=targets) | ast.List(elts=targets), ast.Tuple(elts=values) | ast.List(elts=values):
            if len(targets) != len(values):
                return False
        case _:
            return False
    for at, target in enumerate(targets):
        later = ast.Tuple(elts=values[at + 1 :], ctx=ast.Load())
        if ast.unparse(target) in {ast.unparse(node) for node in ast.walk(later) if isinstance(node, ast.expr)}:
            return False
    return True


def all_files() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def test_each_statement_binds_one_name() -> None:
    """Write one assignment a line, or an `if` with a block for each arm."""
    lines = {file: joined_assignments(file.read_text()) for file in all_files()}
    assert not [f"{file.relative_to(ROOT)}:{line}" for file in lines for line in lines[file]]


def test_names_of_tests_have_at_most_60_letters() -> None:
    """Name the symptom in a few words; details belong into the docstring."""
    files = [file for file in all_files() if "src" not in file.parts and UNNAMED not in file.parents]
    names = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert not [name for name in names if len(name) > 60]


def test_joined_assignments_are_found() -> None:
    joined = "a, b = 1, 2\nself.x, y = f(), g()\n[a, b] = [1, 2]\na, b = (1, 2) if c else (3, 4)\n"
    others = "a, b = b, a\nx[i], x[j] = x[j], x[i]\na, b = f()\na, b = 1, a + 1\na, *b = 1, 2, 3\n"
    assert joined_assignments(joined + others) == [1, 2, 3, 4]
