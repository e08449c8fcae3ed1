"""Statements are small: none binds two unrelated names, few have many nodes. Names of tests are short."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages", "integration_tests", "kernels", "examples")


LARGE = 60  # nodes of the syntax tree
STILL_LARGE = {"opt-checkpoint": 15, "opt-distributed": 1, "opt-kernels": 12, "opt-stack": 7}
"""By package, the statements of its sources that have more nodes: these numbers only shrink."""


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


def large_statements(source: str) -> list[int]:
    """The lines of statements with more than `LARGE` nodes, without those of the statements inside them."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
    return [node.lineno for node in found if not isinstance(node, definitions) and num_own_nodes(node) > LARGE]


def num_own_nodes(statement: ast.AST) -> int:
    inside = (ast.stmt, ast.ExceptHandler, ast.match_case)
    parts = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, inside)]
    return 1 + sum(map(num_own_nodes, parts))


def all_files() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def test_each_statement_binds_one_name() -> None:
    """Write one assignment a line, or an `if` with a block for each arm."""
    lines = {file: joined_assignments(file.read_text()) for file in all_files()}
    assert not [f"{file.relative_to(ROOT)}:{line}" for file in lines for line in lines[file]]


def test_there_are_no_more_large_statements() -> None:
    """Give names to intermediate values, or write an `if` or a loop in place of nested expressions."""
    counts: dict[str, int] = {}
    for file in (ROOT / "packages").glob("*/src/**/*.py"):
        package = file.relative_to(ROOT / "packages").parts[0]
        counts[package] = counts.get(package, 0) + len(large_statements(file.read_text()))
    assert {package: count for package, count in counts.items() if count} == STILL_LARGE


def test_names_of_tests_have_at_most_60_letters() -> None:
    """Name the symptom in a few words; details belong into the docstring."""
    files = [file for file in all_files() if "src" not in file.parts]
    names = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert not [name for name in names if len(name) > 60]


def test_joined_assignments_are_found() -> None:
    joined = "a, b = 1, 2\nself.x, y = f(), g()\n[a, b] = [1, 2]\na, b = (1, 2) if c else (3, 4)\n"
    others = "a, b = b, a\nx[i], x[j] = x[j], x[i]\na, b = f()\na, b = 1, a + 1\na, *b = 1, 2, 3\n"
    assert joined_assignments(joined + others) == [1, 2, 3, 4]


def test_large_statements_are_found() -> None:
    values = ", ".join(map(str, range(LARGE)))
    assert large_statements(f"x = 1\ny = [{values}]\nif x:\n    z = [{values}]\n") == [2, 4]
