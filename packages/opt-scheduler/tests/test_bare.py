"""What needs an optional package says so; `nox -s bare` runs all tests where torch is not installed."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "matplotlib", "keras"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import opt_scheduler; opt_scheduler.as_lr_scheduler", "opt_scheduler.as_lr_scheduler needs torch, which is"),
        ("import opt_scheduler; opt_scheduler.as_keras_callback", "needs keras, which is not installed: pip install"),
        (
            "from opt_scheduler.__main__ import main; "
            "sys.exit(main(['plot', '--max-lr', '1', '--lr-decay-steps', '9', '--png', 'never.png']))",
            "a PNG needs matplotlib",
        ),
    ],
    ids=["torch", "keras", "matplotlib"],
)
def test_what_needs_an_optional_package_says_so(code: str, message: str) -> None:
    result = run(BLOCKED + code)
    assert result.returncode != 0
    assert message in result.stderr
