"""Tests and packages import from the doors of other packages, so that a rearrangement inside one breaks no other.

    python integration_tests/project/test_doors.py            every import from inside a package, by folder of tests
    python integration_tests/project/test_doors.py --write    record their number; it may only shrink

A door is `opt_x`, or a module `opt_x.room` with an `__all__`. `inside.json` has the number of other imports for each
folder of tests, without those that `EXCEPTIONS` allows.
"""

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("inside.json")
DOCUMENTED = r"opt_stack\.megatron|opt_checkpoint\.dist_checkpointing"
# Patterns of names that tests may import from inside a package, and why.
EXCEPTIONS = {
    DOCUMENTED: "Megatron-Core's module paths, which are documented",
    r"opt_stack\.adapters": "adapters are imported by their paths, which the page on adapters gives",
    r"opt_\w+\.__main__\.main": "a command line is called as a function; a process for each call takes seconds",
    r"opt_distributed\.comm\.threads": "groups of some ranks that are threads; run_threads makes one group of all",
    r"opt_distributed\.comm\.collectives\.(Pending|Sizes|DONE|zeros)": "what a double of a Comm takes and returns",
    r"opt_distributed\.comm\.device\.([A-Z]\w+|device_of)": "what doubles of devices replace",
    r"opt_kernels\.backends\.cpp\.compiler\.usable": "whether there is a compiler decides what is skipped",
    r"opt_checkpoint\.disk\.manifest\.(de|en)code_columns": "tests of damage write a manifest with other content",
    r"opt_config\.\w+\.UNSUPPORTED_DATA_PARALLEL_FIELDS": "the table of fields that only accept their default",
}


@cache
def offered(module: str) -> frozenset[str]:
    """The names that a door offers; empty if the module is no door."""
    if module.count(".") > 1:
        return frozenset()
    try:
        door = import_module(module)
        names = getattr(door, "__all__", None) or import_module(f"{module}.public").__all__
    except ImportError:
        return frozenset()
    return frozenset(names) | {"__version__"}


def is_offered(module: str, name: str) -> bool:
    """Whether a door offers a name; the top of a package also offers names that it imports at their first use."""
    is_late = "." not in module and find_spec(f"{module}.{name}") is None
    return name in offered(module) or is_late


def inside(source: str, exceptions: Iterable[str] = EXCEPTIONS) -> list[str]:
    """The dotted names that a file imports from inside our packages."""
    found = []
    excepted = re.compile(rf"({'|'.join(exceptions)})(\..*)?")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            pairs = [tuple(alias.name.rpartition(".")[::2]) for alias in node.names if "." in alias.name]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in pairs:
            full = f"{module}.{name}"
            if module.startswith("opt_") and not (
                is_offered(module, name) or offered(full) or excepted.fullmatch(full)
            ):
                found.append(full)
    return found


def by_folder() -> dict[str, dict[str, list[str]]]:
    """The imports from inside packages, for each file of each folder of tests."""
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for folder in sorted([*ROOT.glob("packages/*/tests*"), ROOT / "integration_tests", ROOT / "kernels"]):
        for file in sorted(folder.rglob("*.py")):
            if names := inside(file.read_text()):
                found[str(folder.relative_to(ROOT))][str(file.relative_to(ROOT))] = names
    return found


def counts() -> dict[str, int]:
    return {folder: sum(map(len, files.values())) for folder, files in by_folder().items()}


def test_imports_past_the_doors_become_no_more() -> None:
    allowed = json.loads(RECORD.read_text())
    # A file that was cut in two imports the same names twice: hence a fiftieth more.
    grown = {folder: count for folder, count in counts().items() if count > allowed.get(folder, 0) * 1.02 + 1}
    assert grown == {}, "import from a door of the package; `python integration_tests/project/test_doors.py` lists all"


def test_packages_and_readmes_use_doors_of_other_packages() -> None:
    """Export the names in the `__init__.py` of a folder of their package, or use another one."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        package = path.relative_to(ROOT).parts[3]
        found[path] = [name for name in inside(path.read_text(), [DOCUMENTED]) if name.split(".")[0] != package]
    for path in [ROOT / "README.md", *ROOT.glob("packages/*/README.md")]:
        programs = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        found[path] = [name for program in programs for name in inside(program, [DOCUMENTED])]
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {}


if __name__ == "__main__":
    for files in by_folder().values():
        for file, names in files.items():
            print(f"{file}: {', '.join(names)}")
    print(counts())
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps(counts(), indent=1) + "\n")
