"""The default run: no test of it sleeps, and its samples hold every pair of values."""

import ast
import itertools
from pathlib import Path

import pytest
from tiers import covering

ROOT = Path(__file__).parents[2]
# What sleeps all the same, and why.
SLEEPS = {
    "packages/opt-checkpoint/tests/faults/test_crashes.py": "kills ranks at random moments, in a test of the night",
    "packages/opt-checkpoint/tests/faults/test_leftovers.py": "waits for a thread that renews a lease, 20 s at most",
    "integration_tests/testing/processes.py": "gives gloo's threads the GIL before a world ends",
}


def sleeps(source: str) -> bool:
    """Whether a file calls `sleep`, except in tests that only run at night."""
    tree = ast.parse(source)
    if any(isinstance(node, ast.Assign) and "mark.nightly" in ast.unparse(node) for node in tree.body):
        return False
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(getattr(function, "attr", getattr(function, "id", "")) == "sleep" for function in called)


def test_no_test_of_the_default_run_sleeps() -> None:
    folders = ("packages/*/tests", "kernels/tests", "integration_tests")
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py") if "trainers" not in str(file)]
    assert {str(file.relative_to(ROOT)) for file in files if sleeps(file.read_text())} == SLEEPS.keys()


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_sample_holds_every_combination_of_values(strength: int) -> None:
    cases = [case for case in itertools.product(range(3), "abcd", (True, False), range(5)) if case[0] != case[3]]

    def combinations(some: list[tuple[object, ...]]) -> set[object]:
        return {chosen for case in some for chosen in itertools.combinations(enumerate(case), strength)}

    chosen = covering(cases, enumerate, strength=strength)
    assert combinations(chosen) == combinations(cases)
    assert len(chosen) <= len(cases) / 2
