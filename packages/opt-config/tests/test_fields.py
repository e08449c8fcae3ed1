"""The table of fields: complete, true, and printed into the docs."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

from opt_config import (
    DATA_PARALLEL_FIELDS,
    OPTIMIZER_FIELDS,
    ConfigError,
    DistributedDataParallelConfig,
    OptimizerConfig,
)
from opt_config.fields import FieldUse, fields_page

PACKAGE = Path(__file__).parents[1]
REPOSITORY = PACKAGE.parents[1]

TABLES = {"optimizer": OPTIMIZER_FIELDS, "data parallel": DATA_PARALLEL_FIELDS}
BUILT = {f"{table} {name}": (name, use) for table, uses in TABLES.items() for name, use in uses.items() if use.built}
OFF_DEFAULT: dict[str, object] = {
    "optimizer_offload_fraction": 0.5,
    "pin_cpu_grads": False,
    "pin_cpu_params": False,
}


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
    assert list(table) == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize(("name", "use"), BUILT.values(), ids=BUILT)
def test_a_field_is_read_where_the_table_says(name: str, use: FieldUse):
    attributes = {node.attr for node in ast.walk(ast.parse(source_of(use.read_in))) if isinstance(node, ast.Attribute)}
    assert name in attributes


@pytest.mark.parametrize(("name", "use"), BUILT.values(), ids=BUILT)
def test_a_test_shows_what_a_field_changes(name: str, use: FieldUse):
    file, _, test = use.shown_by.partition("::")
    source = (REPOSITORY / file).read_text()
    assert f"def {test}(" in source
    assert name in source


@pytest.mark.parametrize("name", [name for name, use in OPTIMIZER_FIELDS.items() if not use.built])
def test_what_is_not_built_is_refused_off_its_default(name: str):
    value = OFF_DEFAULT.get(name, True)
    default = getattr(OptimizerConfig(), name)
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**{name: value})
    assert str(caught.value) == f"OptimizerConfig: {name}={value!r}: is not built yet; leave it at {default!r}"


def test_what_is_not_built_is_accepted_at_its_default():
    config = OptimizerConfig(fp8_recipe=None, optimizer_cpu_offload=False, exp_avg_dtype=torch.float32)
    assert config == OptimizerConfig()


def test_the_page_in_the_docs_is_current():
    page = (PACKAGE / "docs" / "config_fields.md").read_text()
    assert page == fields_page(), "run: python -m opt_config fields > packages/opt-config/docs/config_fields.md"
