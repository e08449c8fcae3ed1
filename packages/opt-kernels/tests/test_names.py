"""One name, one class: a name that two modules give to different things is read wrongly in one of them."""

import ast
from collections import defaultdict
from pathlib import Path

import opt_kernels

SOURCE = Path(opt_kernels.__file__).parent


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.relative_to(SOURCE).as_posix())
    assert not {name: files for name, files in places.items() if len(files) > 1}
