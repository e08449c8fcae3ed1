"""`use_torch_optimizer_for_cpu_offload`: update on the host with torch's own optimizers."""

from types import MappingProxyType
from typing import Any

import torch

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.rules.base import Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_stack.rules.torch_rule import TorchRule

NAMES = ("adam", "sgd")  # the rules that Megatron-Core can update on the host


def torch_host_rule(rule: Rule, config: OptimizerConfig) -> TorchRule:
    """Return a rule that updates with torch's Adam, AdamW or SGD in place of `rule`.

    Raises:
        ConfigError: no torch optimizer computes what `rule` does, or keeps its state in the same dtypes.
    """
    problem = _problem(rule)
    if problem:
        raise ConfigError(
            f"use_torch_optimizer_for_cpu_offload=True: optimizer={rule.name!r} {problem}; allowed are "
            f"{' and '.join(map(repr, NAMES))} in fp32 without hooks; leave it at False: opt-stack's own update also "
            "runs on the host"
        )
    assert isinstance(rule, ElementwiseRule)
    chosen: dict[str, Any] = dict(rule.formula.constants)
    options: dict[str, Any] = {"maximize": rule.maximize, "fused": True}
    if rule.name == "sgd":
        cls: type[torch.optim.Optimizer] = torch.optim.SGD
        numbers: tuple[str, ...] = ("momentum", "dampening")
        options["nesterov"] = chosen["nesterov"]
    else:
        cls = torch.optim.AdamW if chosen["decoupled_weight_decay"] else torch.optim.Adam
        numbers = ("betas", "eps")
        options["amsgrad"] = chosen["amsgrad"]
    return TorchRule(
        name=rule.name,
        cls=cls,
        options=MappingProxyType(options),
        numbers=("lr", "weight_decay", *numbers),
        hyper_names=rule.hyper_names,
        state_specs=rule.state_specs,
        step_type=None if rule.name == "sgd" else torch.Tensor,
    )


def _problem(rule: Rule) -> str:
    if not isinstance(rule, ElementwiseRule) or rule.name not in NAMES:
        return "has no counterpart in torch.optim that Megatron-Core uses"
    if rule.hooks:
        return f"has hooks {', '.join(map(repr, rule.hooks))}, which torch's optimizer does not support"
    narrow = [f"{spec.name} in {spec.dtype}" for spec in rule.state_specs if spec.dtype is not torch.float32]
    if narrow:
        return f"keeps {narrow[0]}, but torch's optimizer keeps its state in fp32"
    if dict(rule.formula.constants).get("order", "torch") != "torch":
        return "computes in Transformer Engine's order of operations, which torch's optimizer does not"
    return ""
