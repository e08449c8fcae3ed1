"""`use_torch_optimizer_for_cpu_offload`: update on the host with torch's own optimizers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.codecs import StateCodec
from opt_kernels.codecs.remainder import join, split_
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.works import Batch, Hyper, StateSpec, Work

NAMES = ("adam", "sgd")  # the rules that Megatron-Core can update on the host


def torch_host_rule(rule: Rule, config: OptimizerConfig) -> "TorchHostRule":
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
    return TorchHostRule(rule=rule)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchHostRule:
    """One step of torch's optimizer for each row of the hyper table, on state under the names of `rule`."""

    rule: ElementwiseRule

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """Return the names of `rule`."""
        return self.rule.hyper_names

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.rule.state_specs

    @property
    def codecs(self) -> Mapping[str, StateCodec]:
        return self.rule.codecs

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return self.rule.init_state(main)

    @torch.no_grad()
    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        if skip is not None and bool(skip):
            return
        for hyper, works in batches:
            if not works:
                continue
            mains = [_main(work) for work in works]
            optimizer = self._optimizer(mains, hyper)
            for main, work in zip(mains, works, strict=True):
                main.grad = work.grad.to(main.dtype, copy=True).mul_(grad_scale)
                optimizer.state[main] = self._state(work, steps=int(hyper.step) - 1)
            optimizer.step()
            for main, work in zip(mains, works, strict=True):
                _keep_(work, main, optimizer.state[main])

    def _optimizer(self, mains: list[Tensor], hyper: Hyper) -> torch.optim.Optimizer:
        chosen: dict[str, Any] = dict(self.rule.formula.constants)
        numbers: dict[str, Any] = {"lr": float(hyper.lr), "weight_decay": float(hyper.weight_decay)}
        if self.rule.name == "sgd":
            cls: type[torch.optim.Optimizer] = torch.optim.SGD
            numbers |= {"momentum": float(hyper.momentum), "dampening": float(hyper.own["dampening"])}
            numbers["nesterov"] = chosen["nesterov"]
        else:
            cls = torch.optim.AdamW if chosen["decoupled_weight_decay"] else torch.optim.Adam
            numbers |= {"betas": hyper.betas, "eps": hyper.eps, "amsgrad": chosen["amsgrad"]}
        return cls(mains, **numbers, maximize=self.rule.maximize, fused=True)  # type: ignore[call-arg]

    def _state(self, work: Work, *, steps: int) -> dict[str, Any]:
        """Return a parameter's state in torch's form after `steps` steps. SGD allocates its buffer in the first."""
        if self.rule.name == "sgd":
            return {"momentum_buffer": work.state.get("momentum_buffer") if steps else None}
        return {"step": torch.tensor(float(steps)), **work.state}


def _main(work: Work) -> Tensor:
    """Return the main values: the work's own memory, or a new tensor if they must be joined from a remainder."""
    if work.main is not None:
        return work.main.detach()
    assert work.out is not None
    assert work.remainder is not None
    return join(work.out.detach(), work.remainder)


def _keep_(work: Work, main: Tensor, state: Mapping[str, Any]) -> None:
    """Write back what torch did not update in place."""
    made = state.get("momentum_buffer")
    if made is not None and made is not work.state["momentum_buffer"]:
        work.state["momentum_buffer"].copy_(made)
    if work.out is not None and work.remainder is not None:
        split_(work.out, work.remainder, main)
    elif work.out is not None:
        work.out.copy_(main)
