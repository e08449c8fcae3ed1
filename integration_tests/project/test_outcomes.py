"""A test that no session runs is reported: skipped everywhere, or deselected where its file can be imported."""

from outcomes import never_ran

EXTRA, AT_NIGHT = "extra is not installed", "Skipped: runs every night: nox -s nightly"


def test_what_no_run_selects_is_named_with_the_reason_of_its_skip() -> None:
    alone = {
        "ran": ["a.py::plain"],
        "skipped": {"a.py::marked": EXTRA, "a.py::forgotten": EXTRA, "b.py": EXTRA, "a.py::slow": AT_NIGHT},
        "deselected": [],
    }
    with_extra = {"ran": ["a.py::marked", "b.py::marked"], "skipped": {}, "deselected": ["a.py::plain", "b.py::other"]}
    found = never_ran([alone])
    assert found == dict.fromkeys(("a.py::marked", "a.py::forgotten", "b.py"), EXTRA)
    assert never_ran([alone, with_extra]) == dict.fromkeys(("a.py::forgotten", "b.py::other"), EXTRA)
