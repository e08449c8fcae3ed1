"""What cannot be built: every case a ConfigError that names the field, its value, what is allowed and what to do.

What a configuration refuses by itself is tested in opt-config, what an override may not set in opt-paramgroups.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stack_models import make_model
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_stack import DistributedDataParallel, ProcessGroups, get_optimizer, get_optimizer_based_on_param_groups

BIAS = ParamKey(name="*.bias")
FIRST = ParamKey(name="0.*")


def build(*, model: Any = None, overrides: Any = None, pg: Any = None, **changes: Any) -> Any:
    chunks = [make_model()] if model is None else model()
    return get_optimizer(OptimizerConfig(**{"lr": 1e-2, **changes}), chunks, overrides, pg_collection=pg)


def frozen() -> list[nn.Module]:
    return [make_model().requires_grad_(False)]


def with_holes() -> list[nn.Module]:
    model = make_model()
    model[0].weight = nn.Parameter(torch.zeros(*model[0].weight.shape, 2)[..., 0])
    return [model]


def wrapped(dtype: torch.dtype = torch.float32, num_chunks: int = 1, **changes: Any) -> Callable[[], list[nn.Module]]:
    config = DistributedDataParallelConfig(**changes)
    return lambda: [DistributedDataParallel(config, make_model(dtype), chunk=n) for n in range(num_chunks)]


BF16 = torch.bfloat16
AWARE = {"use_precision_aware_optimizer": True}
GATHERS = {"use_distributed_optimizer": True, "overlap_param_gather": True}
SOAP, SOAP_MUON = ({"optimizer": rule, "decoupled_weight_decay": False} for rule in ("soap", "soap_muon"))
PG = ProcessGroups(dp=None, mp=None, tp_ep_pp=None)
ZERO1 = {"pg": ProcessGroups(dp=None, mp=None, tp_ep_pp=None, expt_dp=None), "use_distributed_optimizer": True}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "parameters without values": ({"model": lambda: [make_model().to("meta")]}, "'0.weight' is on the meta device"),
    "foreign optimizer": ({"optimizer": "adamw_bnb_8bit"}, 'soap_muon; set optimizer="adam" and optimizer_options={'),
    "unknown optimizer": ({"optimizer": "adma"}, "optimizer='adma' is unknown; allowed are adam, sgd, lion, "),
    "coupled decay of SOAP": (SOAP, "decoupled_weight_decay=False: optimizer='soap' supports only decoupled decay"),
    "and of SOAP-Muon": (SOAP_MUON, "decoupled_weight_decay=False: optimizer='soap_muon' supports only decoupled"),
    "first chunk early without a second": (
        {"overlap_param_gather_with_optimizer_step": True, "model": wrapped(**GATHERS), **GATHERS},
        "overlap_param_gather_with_optimizer_step=True gathers the first model chunk while the others are stepped",
    ),
    "first chunk early, and gathers that are aligned": (
        {
            "overlap_param_gather_with_optimizer_step": True,
            "model": wrapped(num_chunks=2, align_param_gather=True, **GATHERS),
            **GATHERS,
        },
        "wrapped with align_param_gather=True, which starts them from the pipeline's schedule; set one of the two to F",
    ),
    "large gradients under a dynamic loss scale": (
        {"model": wrapped(torch.float16, check_for_large_grads=True), "fp16": True},
        "check_for_large_grads=True, which compares gradients of different iterations, but the loss scale is dynamic",
    ),
    "gradients in bf16 that the wrapper reduces in fp32": (
        {"model": wrapped(BF16, grad_reduce_in_fp32=True), "bf16": True, "main_grads_dtype": BF16, **AWARE},
        "but model chunk 0 was wrapped with grad_reduce_in_fp32=True",
    ),
    "overlap of a plain chunk": (GATHERS, "overlap_param_gather=True, but model chunk 0 is a plain Sequential"),
    "a wrapper that shards otherwise": (
        {"model": wrapped(), "use_distributed_optimizer": True},
        "OptimizerConfig has use_distributed_optimizer=True, but model chunk 0 was wrapped with use_distributed_optimi",
    ),
    "bf16 model": (
        {"model": lambda: [make_model(torch.bfloat16)]},
        "parameter '0.weight' (and 3 more) is torch.bfloat16; fp16=False and bf16=False allow torch.float32: set bf16",
    ),
    "fp16 model": (
        {"model": lambda: [make_model(torch.float16)], "bf16": True},
        "is torch.float16; fp16=False and bf16=True allow torch.bfloat16, torch.float32: set fp16=True",
    ),
    "float64 model": ({"model": lambda: [make_model(torch.float64)]}, "is torch.float64; fp16=False and bf16=False"),
    "a barrier of no timer": (
        {"barrier_with_L1_time": True},
        "barrier_with_L1_time=True has no effect without timers; set timers, or leave it",
    ),
    "nothing to train": ({"model": frozen}, "model_chunks hold no trainable parameter on any rank; at least one needs"),
    "overrides that conflict": (
        {"overrides": {BIAS: {"wd_mult": 0.0}, FIRST: {"wd_mult": 1.0}}},
        "parameter '0.bias': key '*.bias' sets 'wd_mult' to 0.0, key '0.*' to 1.0",
    ),
    "groups without a role": ({"pg": PG}, "pg_collection lacks expt_dp (replicas of the experts): needed always"),
    "sharded without its role": (ZERO1, "pg_collection lacks intra_dist_opt (all ranks of one optimizer instance)"),
    "a parameter with holes": ({"model": with_holes}, "'0.weight' of shape (7, 5) and strides (10, 2) has holes"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_built_is_refused(case: str) -> None:
    """Large gradients may be refused under a constant loss scale."""
    changes, message = CASES[case]
    if "large" in case:
        build(loss_scale=8.0, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**changes)


def test_a_step_without_a_learning_rate_says_where_to_set_it() -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(), [model], {})
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(ValueError, match="lr of group 'default' is None: set lr in the configuration, or attach a sch"):
        optimizer.step()


# --- groups of one's own ----------------------------------------------------------------------------------------------

MODEL = make_model()
WEIGHT = MODEL[0].weight
BIAS_PARAM = MODEL[0].bias
STRANGER = nn.Parameter(torch.zeros(3))
FROZEN = nn.Parameter(torch.zeros(3), requires_grad=False)
TWICE = [{"params": [WEIGHT], "name": "a"}, {"params": [BIAS_PARAM], "name": "a"}]
GROUPS: dict[str, tuple[list[Any], str]] = {
    "no dict": ([WEIGHT], "param_groups[0] is Parameter; must be a dict with 'params'"),
    "no params": ([{"lr": 1.0}], "param_groups[0] is dict; must be a dict with 'params'"),
    "a stranger": ([{"params": [STRANGER]}], "group 'group 0' has a parameter of shape (3,): it is not a trainable"),
    "a frozen one": ([{"params": [FROZEN], "name": "last"}], "group 'last' has a parameter of shape (3,), which is fr"),
    "no tensor": ([{"params": ["0.weight"]}], "group 'group 0' has a parameter '0.weight': it is not a trainable"),
    "one in two groups": ([{"params": [WEIGHT]}] * 2, "'0.weight' is in group 'group 0' and in 'group 1'"),
    "one name twice": (TWICE, "param_groups: two groups have name='a'; names must be unique"),
    "nothing": ([], "model_chunks hold no trainable parameter on any rank; at least one needs requires_grad=True"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_that_do_not_fit_the_model_are_refused(case: str) -> None:
    groups, message = GROUPS[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        get_optimizer_based_on_param_groups(OptimizerConfig(lr=1e-2), [MODEL], groups)


def test_wrong_types_and_late_fields_are_refused_in_a_sentence() -> None:
    """An AttributeError of the internals did not say what to pass."""
    model = make_model()
    config = OptimizerConfig(lr=1e-2)
    wrapper = DistributedDataParallelConfig()
    config.adam_beta1 = 2.0
    wrapper.bucket_size = -1
    build_any: Any = get_optimizer
    calls: list[tuple[Any, str]] = [
        (lambda: build_any({"lr": 0.1}, [model]), "config is a dict; pass opt_stack.OptimizerConfig"),
        (lambda: build_any([model], OptimizerConfig(lr=0.1)), "config is a list; pass .* as the first argument"),
        (lambda: build_any(OptimizerConfig(lr=0.1), model.parameters()), "model_chunks holds a Parameter; pass the"),
        (lambda: build_any(OptimizerConfig(lr=0.1), [model], [1]), "must map ParamKeys"),
        (lambda: build_any(config, [model]), r"adam_beta1=2\.0: must be in \[0, 1\)"),
        (lambda: DistributedDataParallel(wrapper, model), "bucket_size=-1"),
    ]
    for call, message in calls:
        with pytest.raises(ConfigError, match=message):
            call()


def test_megatron_bridge_fields_without_a_counterpart_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real installs are tested at night; here a class stands for Megatron-Core's configuration."""
    theirs = make_dataclass("OptimizerConfig", [("lr", float, 0.1), ("of_theirs", int, 0)])
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer", SimpleNamespace(OptimizerConfig=theirs))
    monkeypatch.setitem(sys.modules, name := "opt_stack.adapters.megatron_bridge", None)  # what was there comes back
    del sys.modules[name]
    config = import_module(name).StackOptimizerConfig
    assert config(lr=0.5, stack={"min_lr": 0.25}).to_stack().min_lr == 0.25
    with pytest.raises(ConfigError, match="of_theirs=3"):
        config(of_theirs=3).to_stack()
