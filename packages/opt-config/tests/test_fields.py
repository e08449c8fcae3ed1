"""The table of fields: complete, true, and printed into the docs."""

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
from opt_config.fields import fields_page

PACKAGE = Path(__file__).parents[1]
REPOSITORY = PACKAGE.parents[1]

# Read by nobody until SOAP is in the factory's list and the resolved configuration is written out.
AWAITED = frozenset({"soap_shampoo_beta", "soap_precondition_frequency", "soap_use_kl_shampoo", "config_logger_dir"})

ALL = {**DATA_PARALLEL_FIELDS, **OPTIMIZER_FIELDS}
OFF_DEFAULT: dict[str, object] = {
    "fp8_recipe": "mxfp8",
    "optimizer_offload_fraction": 0.5,
    "pin_cpu_grads": False,
    "pin_cpu_params": False,
}


def source_of(module: str) -> Path:
    package = module.split(".")[0]
    return REPOSITORY / "packages" / package.replace("_", "-") / "src" / Path(*module.split(".")).with_suffix(".py")


@pytest.mark.parametrize(
    ("table", "cls"),
    [(OPTIMIZER_FIELDS, OptimizerConfig), (DATA_PARALLEL_FIELDS, DistributedDataParallelConfig)],
    ids=["optimizer", "data parallel"],
)
def test_the_table_holds_every_field_in_order(table, cls):
    assert list(table) == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("name", [name for name, use in ALL.items() if use.built and name not in AWAITED])
def test_a_field_is_read_where_the_table_says(name: str):
    assert name in source_of(ALL[name].read_in).read_text()


@pytest.mark.parametrize("name", [name for name, use in ALL.items() if use.shown_by])
def test_the_test_that_shows_a_field_exists(name: str):
    file, _, test = ALL[name].shown_by.partition("::")
    assert f"def {test}(" in (REPOSITORY / file).read_text()


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
