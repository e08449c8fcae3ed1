"""Settings that no parameter can feel are refused, and overrides that bring weight decay back are reported."""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from processes import FSDP2_RUNS, refusal, world_of_one
from stack_models import backward, make_model, over
from torch import nn
from torch.distributed.fsdp import fully_shard

from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_distributed import Alone, run_threads
from opt_distributed.comm.threads import ThreadComm
from opt_paramgroups import get_standard_config_overrides
from opt_paramgroups.overrides import ConfigOverrides
from opt_stack import get_optimizer

MATRIX = ParamKey(name="0.weight")
PRECISIONS: Mapping[str, dict[str, Any]] = {"bf16": {"bf16": True}, "params_dtype": {"params_dtype": torch.bfloat16}}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_that_no_parameter_has_is_refused(name: str) -> None:
    config = OptimizerConfig(lr=1e-3, **PRECISIONS[name])
    with pytest.raises(ConfigError, match=rf"^OptimizerConfig: {name}=.* has no effect: .* are torch.float32; convert"):
        get_optimizer(config, [make_model()])
    mixed = make_model()
    mixed[0].to(config.precision.params)  # some parameters feel it
    get_optimizer(config, [mixed])


def test_fp16_scales_the_loss_of_a_model_in_fp32() -> None:
    """As under autocast, with the gradients of `torch.amp`'s fp16 products."""
    optimizer = get_optimizer(OptimizerConfig(lr=1e-3, fp16=True, initial_loss_scale=2.0**10), [make_model()])
    assert optimizer.scale_loss(torch.ones(())) == 2.0**10


def test_a_precision_of_frozen_parameters_is_the_models() -> None:
    adapted = make_model(torch.bfloat16).requires_grad_(False)
    adapted.append(nn.Linear(3, 3))  # in fp32, as adapters are
    get_optimizer(OptimizerConfig(lr=1e-3, bf16=True), [adapted])


@pytest.mark.parametrize("last", [torch.bfloat16, torch.float32], ids=str)
def test_ranks_agree_on_whether_a_precision_has_an_effect(last: torch.dtype) -> None:
    """A rank without a bf16 parameter, such as a pipeline stage, is accepted if another rank has some."""

    def rank_main(comm: ThreadComm) -> str:
        model = make_model(last if comm.rank else torch.float32)
        roles = over(Alone(), everyone=comm)
        return refusal(lambda: get_optimizer(OptimizerConfig(lr=1e-3, bf16=True), [model], pg_collection=roles))

    first, second = run_threads(2, rank_main)
    assert first == second
    assert (first == "built") == (last is torch.bfloat16)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["use_distributed_optimizer", "use_layer_wise_distributed_optimizer"])
def test_sharding_of_dtensors_alone_is_refused(name: str) -> None:
    config = OptimizerConfig(lr=1e-3, **{name: True})
    model = make_model()
    fully_shard(model)
    with pytest.raises(ConfigError, match=rf"^OptimizerConfig: {name}=True: has no effect: .*DTensors \(fully_shard"):
        get_optimizer(config, [model])
    mixed = nn.Sequential(make_model(), nn.Linear(3, 3))
    fully_shard(mixed[0])
    get_optimizer(config, [mixed])  # the state of the last layer is sharded


@pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
@pytest.mark.usefixtures("one_rank")
def test_a_model_sharded_after_the_build_is_refused_by_name() -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-3), [model])
    fully_shard(model)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="after the optimizer was built, as by fully_shard, "):
        optimizer.step()


# --- overrides in place of the standard ones --------------------------------------------------------------------------

WARNED = "biases and vectors have weight decay now: '0.bias', '2.bias'. To keep them without decay, pass {**opt_paramg"
MUON = {"optimizer": "muon"}
CASES: Mapping[str, tuple[dict[str, Any], Any, bool]] = {  # fields, overrides, whether a warning is due
    "a rate for one matrix": ({}, {MATRIX: {"max_lr": 1e-4}}, True),
    "a rate for one matrix of muon": (MUON, {MATRIX: {"max_lr": 1e-4}}, True),
    "a configuration": ({}, {MATRIX: OptimizerConfig(lr=1e-4)}, True),
    "with the standard ones": ({}, {**get_standard_config_overrides(OptimizerConfig()), MATRIX: {"eps": 1e-6}}, False),
    "no decay at all": ({"weight_decay": 0.0}, {MATRIX: {"max_lr": 1e-4}}, False),
    "the standard ones": ({}, None, False),
    "no overrides, on purpose": ({}, {}, False),
    "decay on purpose": ({}, {ParamKey(name="*.bias"): {"wd_mult": 1.0}}, False),
    "another way to exempt them": ({}, {ParamKey(name="*.bias"): {"wd_mult": 0.0}}, False),
}


@pytest.mark.parametrize(("fields", "overrides", "is_warned"), CASES.values(), ids=CASES)
def test_decay_that_overrides_bring_back_is_named_once(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any], overrides: ConfigOverrides | None, is_warned: bool
) -> None:
    """`{ParamKey(name="0.weight"): {"max_lr": 1e-4}}` gave biases and norms weight decay without a word."""
    with caplog.at_level(logging.WARNING, logger="opt_stack"):
        optimizer = get_optimizer(OptimizerConfig(lr=1e-3, **fields), [make_model()], overrides)
    assert [WARNED in record.getMessage() for record in caplog.records] == [True] * is_warned
    decayed = [str(id) for group in optimizer.param_groups if group["weight_decay"] for id in group["param_ids"]]
    assert not is_warned or {"0.bias", "2.bias"} <= {*decayed}  # the meaning is still Megatron-Core's


def test_query_and_key_norms_to_decay_are_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleDict({"q_layernorm": nn.LayerNorm(3), "norm": nn.LayerNorm(3), "out": nn.Linear(3, 3)})
    config = OptimizerConfig(lr=1e-3, apply_wd_to_qk_layernorm=True)
    get_optimizer(config, [model], {ParamKey(name="out.weight"): {"max_lr": 1e-4}})
    assert re.findall(r"'([\w.]+)'", caplog.text) == ["norm.weight", "norm.bias", "out.bias"]


def test_a_decoupled_rate_needs_the_overrides_that_apply_it() -> None:
    config = OptimizerConfig(lr=1e-3, decoupled_lr=1e-4)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"decoupled_lr=0\.0001 has no effect: config_overrides replace the standard"):
        get_optimizer(config, [model], {ParamKey(name="1.weight"): {"max_lr": 1e-4}})
    get_optimizer(config, [model], {**get_standard_config_overrides(config), ParamKey(name="1.bias"): {"eps": 1e-6}})
