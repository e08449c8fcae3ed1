"""Every promise of a README has a test that pins it; `docs/promises.md` names it and says when it runs."""

import promises

README = """# X

## What you can rely on

- **Nothing is lost.** Not even [once](there).
- **Everything** is
  found.

## Limits

- None.
"""
HEAD = "## R\n\n| promise | test | runs |\n|---|---|---|\n"
HERE = "integration_tests/project/test_promises.py::test_the_table_has_every_promise_and_names_tests_that_exist"


def found(*rows: str) -> list[str]:
    return list(promises.problems(HEAD + "".join(f"| {row} |\n" for row in rows), {"R": README}))


def test_the_table_has_every_promise_and_names_tests_that_exist() -> None:
    assert promises.found_problems() == []


def test_a_wrong_row_and_a_missing_one_are_named() -> None:
    good = f"Everything is found. | `{HERE}` | default"
    assert found(f"Nothing is lost. | `{HERE}` | default", good) == []
    assert found(good) == ["R promises without a row: Nothing is lost. Not even once."]
    assert found(f"Nothing is lost. | `{HERE}` | nightly", good) == [f"{HERE} runs in the default tier, not nightly"]
    assert found(f"Nothing is lost. | `{HERE}_x` | default", good) == [f"no test {HERE}_x"]
    assert found(f"Nothing is lost. | `{HERE}` | default", good, f"All is well. | `{HERE}` | default") == [
        "R does not say: All is well."
    ]
