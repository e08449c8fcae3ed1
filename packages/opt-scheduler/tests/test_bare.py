"""The package is independent: it imports only the standard library, unless the adapter is used."""

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


def test_importing_it_brings_in_the_standard_library_only() -> None:
    # What was there before counts out: an environment may load modules of its own at start.
    result = run(
        "import sys; before = set(sys.modules); import opt_scheduler;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - {'opt_scheduler'};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_a_scheduler_steps_where_torch_cannot_be_imported() -> None:
    result = run(
        BLOCKED
        + """
from types import SimpleNamespace
from opt_scheduler import OptimizerParamScheduler
optimizer = SimpleNamespace(param_groups=[{"params": []}])
scheduler = OptimizerParamScheduler(optimizer, 0.0, 1.0, 0.0, 2, 4, "linear", 0.0, 0.0, 4, "constant")
scheduler.step(3)
print(optimizer.param_groups[0]["lr"])
"""
    )
    assert result.stdout.strip() == "0.5", result.stderr


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
