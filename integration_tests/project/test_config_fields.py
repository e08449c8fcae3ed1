"""Every field of a configuration is explained, a package reads it, and a test outside of opt-config sets it."""

import ast
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_config.data_parallel_config import UNSUPPORTED_DATA_PARALLEL_FIELDS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "make"))

from fields import fields_of  # noqa: E402  (of docs/make, which is only now on the path)

READERS = [path for path in ROOT.glob("packages/*/src/*/**/*.py") if path.parent.name != "opt_config"]
READERS.append(ROOT / "packages/opt-config/src/opt_config/optimizer_config.py")
TESTS = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("integration_tests/**/*.py")]


def named(paths: list[Path], *kinds: type[ast.AST]) -> set[str]:
    """Attributes that are read, keywords that are given, and strings, as far as they are among `kinds`."""
    found = set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                found |= {name} if isinstance(node, kinds) else set()
    return found


@pytest.mark.parametrize("config", [OptimizerConfig, DistributedDataParallelConfig])
def test_every_field_is_explained_and_read_and_a_test_sets_it(config: Any) -> None:
    fields = {field.name for field in dataclasses.fields(config)} - UNSUPPORTED_DATA_PARALLEL_FIELDS.keys()
    assert fields - {field.name for field in fields_of(config)} == set()
    assert fields - named(READERS, ast.Attribute) == set()
    tests = [path for path in TESTS if path != Path(__file__) and "opt-config" not in path.parts]
    assert fields - named(tests, ast.keyword, ast.Constant) == set(), "write a test that shows the effect of the field"
