"""The table of fields is complete and correct: each field is read where it says, and shown by the test it names."""

import ast
import dataclasses
from pathlib import Path

import pytest
from project.config_fields import DATA_PARALLEL_FIELDS, OPTIMIZER_FIELDS, FieldUse

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_config.unsupported_fields import UNSUPPORTED_DATA_PARALLEL_FIELDS

REPOSITORY = Path(__file__).parents[2]

TABLES = {"optimizer": OPTIMIZER_FIELDS, "data parallel": DATA_PARALLEL_FIELDS}
USES = {f"{table} {name}": (name, use) for table, uses in TABLES.items() for name, use in uses.items()}


def source_of(module: str) -> str:
    package = module.split(".")[0]
    folder = REPOSITORY / "packages" / package.replace("_", "-") / "src"
    return (folder / Path(*module.split(".")).with_suffix(".py")).read_text()


@pytest.mark.parametrize(
    ("table", "cls"),
    [(OPTIMIZER_FIELDS, OptimizerConfig), (DATA_PARALLEL_FIELDS, DistributedDataParallelConfig)],
    ids=["optimizer", "data parallel"],
)
def test_the_table_holds_every_field_in_order(table, cls):
    names = [field.name for field in dataclasses.fields(cls)]
    unsupported = UNSUPPORTED_DATA_PARALLEL_FIELDS if cls is DistributedDataParallelConfig else {}
    assert list(table) == [name for name in names if name not in unsupported], (
        "add the new field to project/config_fields.py: the module that reads it, and the test that shows its effect"
    )
    assert list(unsupported) == [name for name in names if name in unsupported]


@pytest.mark.parametrize(("name", "use"), USES.values(), ids=USES)
def test_a_field_is_read_where_the_table_says(name: str, use: FieldUse):
    attributes = {node.attr for node in ast.walk(ast.parse(source_of(use.read_in))) if isinstance(node, ast.Attribute)}
    assert name in attributes


@pytest.mark.parametrize(("name", "use"), USES.values(), ids=USES)
def test_a_test_shows_what_a_field_changes(name: str, use: FieldUse):
    file, _, test = use.shown_by.partition("::")
    source = (REPOSITORY / file).read_text()
    assert f"def {test}(" in source
    assert name in source
