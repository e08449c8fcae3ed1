"""Every field of a configuration is explained, a package reads it, and a test outside of opt-config sets it."""

import dataclasses
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_config.data_parallel_config import UNSUPPORTED_DATA_PARALLEL_FIELDS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "make"))

from fields import fields_of  # noqa: E402  (of docs/make, which is only now on the path)

READERS = [path for path in ROOT.glob("packages/*/src/*/**/*.py") if path.parent.name != "opt_config"]
READERS.append(ROOT / "packages/opt-config/src/opt_config/optimizer_config.py")
TESTS = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("integration_tests/**/*.py")]


def words(paths: Iterable[Path], pattern: str) -> set[str]:
    return {word for path in paths for word in re.findall(pattern, path.read_text())}


def test_every_field_is_explained_and_read_and_a_test_sets_it() -> None:
    configs: list[Any] = [OptimizerConfig, DistributedDataParallelConfig]
    names = {field.name for config in configs for field in dataclasses.fields(config)}
    names -= UNSUPPORTED_DATA_PARALLEL_FIELDS.keys()
    assert names - {field.name for config in configs for field in fields_of(config)} == set()
    assert names - words(READERS, r"\.(\w+)") == set()
    tests = [path for path in TESTS if path != Path(__file__) and "opt-config" not in path.parts]
    assert names - words(tests, r"\w+(?==)|(?<=\")\w+(?=\")") == set(), (
        "write a test that shows the effect of the field"
    )
