"""Every field and default on Megatron-Core's page of OptimizerConfig, if that page is available, is ours too."""

import ast
import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch

from opt_config import OptimizerConfig

REPOSITORY = Path(__file__).parents[3]
PLACES = (
    *map(Path, filter(None, [os.environ.get("OPT_SPEC_DIR")])),
    REPOSITORY.parent / "shared/spec",
    REPOSITORY / "shared/spec",
)
PAGE = next((path for place in PLACES if (path := place / "core.optimizer_config.txt").exists()), None)

# The page renders these as None; its text says torch.float32 and 2**32. A multi-line string is the empty one.
RENDERED_NONE: dict[str, object] = {
    **dict.fromkeys(
        ("params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), torch.float32
    ),
    "initial_loss_scale": 2**32,
}


def fields_of(page: str) -> dict[str, object]:
    """Names and defaults of the page's OptimizerConfig, in order."""
    body = page.split("class core.optimizer.optimizer_config.OptimizerConfig#")[1].split("__post_init__()#")[0]
    found: dict[str, object] = {}
    for name, rest, default in re.findall(r"^(\w+): ([^\n]+)#\n\n([^\n]*)", body, flags=re.MULTILINE):
        if "<Multiline-String>" in rest:
            found[name] = ""
        else:
            found[name] = ast.literal_eval(default.replace("‘", "'").replace("’", "'"))
    return found | {name: value for name, value in RENDERED_NONE.items() if found.get(name, 0) is None}


def test_the_reader_reads_such_a_page():
    page = (
        "class core.optimizer.optimizer_config.OptimizerConfig#\n\nlr: Optional[float]#\n\nNone\n\nRate.\n\n"
        "optimizer: str#\n\n‘adam’\n\nconfig_logger_dir: str = <Multiline-String>#\n\nWhen\n\n__post_init__()#\n"
    )
    assert fields_of(page) == {"lr": None, "optimizer": "adam", "config_logger_dir": ""}


@pytest.mark.skipif(PAGE is None, reason="Megatron-Core's page is not beside the repository; set OPT_SPEC_DIR")
def test_every_name_and_default_of_the_page_is_ours():
    assert PAGE is not None
    ours = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    theirs = fields_of(PAGE.read_text())
    assert len(theirs) == 62
    assert theirs["muon_tp_mode"] == "blockwise"  # "duplicated" since 21 August 2026, after this page
    assert {name: ours.get(name, "missing") for name in theirs} == theirs | {"muon_tp_mode": "duplicated"}
    own = {"soap_order", "soap_max_precond_dim", "soap_one_sided", "soap_split_qkv", "optimizer_options"}
    own |= {"muon_weight_decay_method", "adaptive_muon_lines"}
    assert set(ours) - set(theirs) == {"muon_use_syrk", "grad_norm_skip_threshold"} | own
