"""`nox -s tests -- --changed` runs the tests that may notice a change."""

import naming
from naming import files_naming

ROOT = naming.Path(__file__).parents[2]


def test_a_change_runs_the_tests_that_name_it_in_its_package_and_in_those_that_depend_on_it() -> None:
    found = files_naming(ROOT, ["packages/opt-paramgroups/src/opt_paramgroups/mup.py"])
    assert "packages/opt-paramgroups/tests/test_mup.py" in found
    below = ("packages/opt-config/", "packages/opt-scheduler/", "packages/opt-kernels/", "packages/opt-checkpoint/")
    assert not [test for test in found if test.startswith(below)]
    assert len(found) < 10


def test_a_changed_test_runs_and_a_page_runs_none() -> None:
    assert files_naming(ROOT, ["packages/opt-config/tests/test_files.py", "README.md"]) == [
        "packages/opt-config/tests/test_files.py"
    ]


def test_a_lower_package_reaches_everything_above() -> None:
    assert "packages/opt-stack/" in naming.reachable(ROOT, "packages/opt-config/src/opt_config/validate.py")
    assert "packages/opt-kernels/" not in naming.reachable(ROOT, "packages/opt-config/src/opt_config/validate.py")
