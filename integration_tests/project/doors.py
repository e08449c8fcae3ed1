"""Which names tests import from inside the packages, past their doors.

    python integration_tests/project/doors.py            every such import, by folder
    python integration_tests/project/doors.py --write    record their number; it may only shrink

A door is `opt_x`, or a module `opt_x.room` with an `__all__`. What a test imports from there survives every
rearrangement inside the package. `inside.json` has the number of other imports for each folder of tests.
"""

import ast
import json
import sys
from collections import defaultdict
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("inside.json")
# Modules whose paths are documented, with all that is below them: Megatron-Core's module paths.
DOCUMENTED = ("opt_stack.megatron", "opt_checkpoint.dist_checkpointing")


def test_folders() -> list[Path]:
    return sorted([*ROOT.glob("packages/*/tests*"), ROOT / "integration_tests", ROOT / "kernels"])


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


def inside(source: str) -> list[str]:
    """The dotted names that a file imports from inside our packages."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            pairs = [tuple(alias.name.rpartition(".")[::2]) for alias in node.names if "." in alias.name]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in pairs:
            is_ours = module.startswith("opt_") and not f"{module}.".startswith(tuple(f"{d}." for d in DOCUMENTED))
            if is_ours and not is_offered(module, name) and not offered(f"{module}.{name}"):
                found.append(f"{module}.{name}")
    return found


def by_folder() -> dict[str, dict[str, list[str]]]:
    """The imports from inside packages, for each file of each folder of tests."""
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for folder in test_folders():
        for file in sorted(folder.rglob("*.py")):
            if names := inside(file.read_text()):
                found[str(folder.relative_to(ROOT))][str(file.relative_to(ROOT))] = names
    return found


def counts() -> dict[str, int]:
    return {folder: sum(map(len, files.values())) for folder, files in by_folder().items()}


def main() -> None:
    if "--write" in sys.argv:
        allowed, now = json.loads(RECORD.read_text()) if RECORD.exists() else {}, counts()
        if grown := [folder for folder, count in now.items() if allowed and count > allowed.get(folder, 0)]:
            sys.exit(f"more imports from inside packages in {', '.join(grown)}: import from a door, or extend one")
        RECORD.write_text(json.dumps(now, indent=1) + "\n")
    for folder, files in by_folder().items():
        for file, names in files.items():
            print(f"{file}: {', '.join(names)}")
        print(f"{folder}: {sum(map(len, files.values()))}")


if __name__ == "__main__":
    main()
