"""`torch_rule`: any `torch.optim` class as a rule for whole parameters, with state that is saved and loaded as usual.

The state of a class is found by stepping it on a small parameter. Its step count, in its state or its groups, is not
stored separately: it equals the count of the piece. A class that keeps anything else in its groups, in attributes or as
plain numbers is refused, because a checkpoint would lose it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig, Replicated
from opt_kernels.backends import read_main
from opt_kernels.codecs import Codecs, split_
from opt_kernels.hooks import hooks_of
from opt_kernels.rules import ElementwiseRule, Needs, Rule
from opt_kernels.works import Batch, StateKind, StateSpec, Work
from opt_stack.rules.built_in import HYPER_KEYS, RuleEntry

CONFIG_NUMBERS = ("lr", "weight_decay")  # read from the configuration and the groups
STEP = "step"
GROUP_STEP = f"param_groups[0][{STEP!r}]"
PROBE_SHAPES = ((3, 4), (5,))
PROBE_STEPS = 2  # a class may add state in its second step


def torch_rule(name: str, cls: type[torch.optim.Optimizer], **options: Any) -> RuleEntry:
    """Return a rule for `Registry.with_rule` that updates as `cls(params, lr=..., weight_decay=..., **options)` does.

    At every step, lr and weight_decay are read from the groups, where they start from the configuration; so are betas,
    eps and momentum, which start from `options` or the class's defaults. Other options are fixed. The class is
    constructed again for every group at every step, which costs Python time for each parameter and cannot be captured
    in a CUDA graph. The class makes its own tensors under the caller's default dtype and device, as it does outside of
    this package.

    Raises:
        ConfigError: the class cannot be stepped without a closure, has no lr, or keeps state that cannot be saved. When
            an optimizer is built with the rule: state is sharded, moments are narrow, or weight_decay is set and the
            class has none.
    """
    taken = [option for option in options if option in CONFIG_NUMBERS]
    if taken:
        raise ConfigError(
            f"torch_rule({name!r}): {taken[0]}={options[taken[0]]!r} cannot be fixed here; set it in OptimizerConfig"
        )
    rule, defaults = _probe(name, cls, options, PROBE_SHAPES[0])
    try:
        of_vector, _ = _probe(name, cls, options, PROBE_SHAPES[1])
    except ConfigError:
        of_vector = rule  # a class for matrices only; `init_state` refuses other parameters
    if of_vector != rule:
        raise ConfigError(f"torch_rule({name!r}): {cls.__name__} keeps different state for vectors and matrices")

    def make(config: OptimizerConfig) -> TorchRule:
        if not isinstance(config.sharding, Replicated):
            flag = f"use_{'layer_wise_' * config.use_layer_wise_distributed_optimizer}distributed_optimizer"
            raise ConfigError(
                f"{flag}=True: optimizer={name!r} wraps torch's {cls.__name__}, which needs the whole state on every "
                "rank; set it to False, or use a built-in rule"
            )
        return rule

    def hyper(config: OptimizerConfig) -> Mapping[str, Any]:
        if config.weight_decay and "weight_decay" not in rule.numbers:
            raise ConfigError(
                f"weight_decay={config.weight_decay!r}: optimizer={name!r} is {cls.__name__}, which has none; set 0.0"
            )
        return {number: defaults[number] for number in HYPER_KEYS if number in defaults}

    return RuleEntry(name=name, summary=f"{cls.__module__}.{cls.__qualname__}", make=make, hyper=hyper)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRule:
    """The update of one `torch.optim` class. `update_` reads the step and the hyper-parameters in `numbers`."""

    name: str
    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    numbers: tuple[str, ...]
    state_specs: tuple[StateSpec, ...]
    step_type: type[Any] | None  # type of the step count in the state of the class; None: it has no step count
    counts_in_group: bool = False  # whether it counts its steps in param_groups[0]["step"]
    hyper_names: tuple[str, ...] = ()  # of `numbers`, those that are in `Hyper.own`
    needs = Needs.ELEMENTS  # shards are refused
    codecs: ClassVar[Codecs] = MappingProxyType({})

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """Return zeros as placeholders. They are not read: the class makes its state in its first step.

        Raises ConfigError for a parameter that the class refuses, or that is not a plain tensor.
        """
        if type(main) not in (Tensor, nn.Parameter):
            raise ConfigError(
                f"optimizer={self.name!r} updates plain tensors, but a parameter is a {type(main).__name__}; use a "
                "built-in rule for it, or do not shard it"
            )
        try:
            self.cls([torch.empty_like(main, device="meta")], **self.options)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"optimizer={self.name!r} refuses a parameter of shape {tuple(main.shape)}: {error}"
            ) from error
        device = self._scalar_device(main)
        state = {}
        for spec in self.state_specs:
            if spec.kind is StateKind.LIKE_PARAM:
                state[spec.name] = torch.zeros_like(main, dtype=spec.dtype, requires_grad=False)
            else:
                state[spec.name] = torch.zeros((), dtype=spec.dtype, device=device)
        return state

    @torch.no_grad()
    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        """Take one step of the class for each batch. The host reads the skip flag and the hyper-parameters."""
        if skip is not None and bool(skip):
            return
        for hyper, works in batches:
            if not works:
                continue
            mains = [read_main(work) if work.main is None else work.main.detach() for work in works]
            of_group = {name: getattr(hyper, name) for name in HYPER_KEYS}
            numbers = {"lr": float(hyper.lr), "weight_decay": float(hyper.weight_decay), **of_group}
            numbers |= hyper.own
            optimizer = self.cls(mains, **{name: numbers[name] for name in self.numbers}, **self.options)
            taken = int(hyper.step) - 1  # steps
            if self.counts_in_group and taken > 0:
                optimizer.param_groups[0][STEP] = taken
            for main, work in zip(mains, works, strict=True):
                main.grad = work.grad.to(main.dtype) * grad_scale
                if taken > 0:
                    state = dict(work.state)
                    if self.step_type is not None and issubclass(self.step_type, Tensor):
                        device = self._scalar_device(main)
                        state[STEP] = torch.tensor(float(taken), dtype=torch.float32, device=device)
                    elif self.step_type is not None:
                        state[STEP] = self.step_type(taken)
                    optimizer.state[main] = state
            optimizer.step()
            for main, work in zip(mains, works, strict=True):
                self._keep_(work, main, optimizer.state[main])

    def _keep_(self, work: Work, main: Tensor, state: Mapping[str, Any]) -> None:
        """Write the state and main values that the class has updated back to the work."""
        kept = {key for key, value in state.items() if value is not None}
        undeclared = sorted(kept - {spec.name for spec in self.state_specs} - {STEP})
        if undeclared:
            raise ConfigError(
                f"optimizer={self.name!r} keeps {', '.join(undeclared)} with a group's current "
                "hyper-parameters, but not with those it was registered with; pass them to torch_rule, as in "
                f"torch_rule({self.name!r}, {self.cls.__name__}, momentum=...)"
            )
        for spec in self.state_specs:
            value = state.get(spec.name)  # SGD keeps none while the group's momentum is 0
            if value is not None and value is not work.state[spec.name]:
                work.state[spec.name].copy_(value)
        if work.out is not None and work.remainder is not None:
            split_(work.out, work.remainder, main)
        elif work.out is not None:
            work.out.copy_(main)

    def _scalar_device(self, main: Tensor) -> torch.device:
        """Return the device of scalar state: the host, as in torch, unless the class is capturable or fused."""
        on_device = self.options.get("capturable") or self.options.get("fused")
        return main.device if on_device else torch.device("cpu")


# --- the state of a class ---------------------------------------------------------------------------------------------


def _probe(
    name: str, cls: type[torch.optim.Optimizer], options: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[TorchRule, Mapping[str, Any]]:
    """Return the rule of `cls`, with the state that it keeps of a parameter of `shape`, and the defaults of its groups.

    Raises ConfigError if the state cannot be saved.
    """
    param = nn.Parameter(torch.full(shape, 0.5, dtype=torch.float32, device="cpu"))
    param.grad = torch.full(shape, 0.25, dtype=torch.float32, device="cpu")
    try:
        with torch.device("cpu"):  # the device of the probe, whatever the caller's default
            optimizer = cls([param], **options)
            before = _outside(optimizer)
            for _ in range(PROBE_STEPS):
                optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"torch_rule({name!r}): {cls.__name__}({dict(options)}) cannot be stepped: {error}"
        ) from error
    if "lr" not in optimizer.defaults:
        raise ConfigError(f"torch_rule({name!r}): {cls.__name__} has no lr in its defaults")
    after = _outside(optimizer)
    changed = [key for key in after if before.get(key) != after[key]]
    counts_in_group = after.get(GROUP_STEP) == repr(PROBE_STEPS) and GROUP_STEP in changed
    if counts_in_group:
        changed.remove(GROUP_STEP)
    if changed:
        raise ConfigError(
            f"torch_rule({name!r}): {cls.__name__} keeps {', '.join(changed)} outside of optimizer.state, where a "
            "checkpoint would lose it; write it as a Formula or a Rule"
        )
    specs = []
    step_type = None
    for key, value in optimizer.state[param].items():
        if key == STEP and float(value) == PROBE_STEPS:
            step_type = type(value)
        elif isinstance(value, Tensor) and value.shape in (shape, ()):
            kind = StateKind.LIKE_PARAM if value.shape == shape else StateKind.SCALAR
            specs.append(StateSpec(name=key, kind=kind, dtype=value.dtype))
        elif value is not None:
            is_tensor = isinstance(value, Tensor)
            found = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise ConfigError(
                f"torch_rule({name!r}): {cls.__name__} keeps {key!r} as {found} for a parameter of shape {shape}; "
                "allowed are tensors of the parameter's shape, and 0-d tensors"
            )
    fixed = {key: value for key, value in options.items() if key not in HYPER_KEYS}
    numbers = tuple(number for number in (*CONFIG_NUMBERS, *HYPER_KEYS) if number in optimizer.defaults)
    rule = TorchRule(
        name=name,
        cls=cls,
        options=MappingProxyType(fixed),
        numbers=numbers,
        state_specs=tuple(specs),
        step_type=step_type,
        counts_in_group=counts_in_group,
    )
    return rule, optimizer.defaults


def _outside(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what the optimizer holds outside of its `state`, as text: numbers, flags and small tensors."""
    plain = (bool, int, float, str, Tensor)
    found = {f"param_groups[0][{key!r}]": value for key, value in optimizer.param_groups[0].items()}
    found |= vars(optimizer)
    return {key: repr(value) for key, value in found.items() if isinstance(value, plain) and not key.startswith("_opt")}


# --- `use_torch_optimizer_for_cpu_offload`: updates on the host with torch's own optimizers ---------------------------

HOST_NAMES = ("adam", "sgd")  # the rules that Megatron-Core can update on the host


def torch_host_rule(rule: Rule, config: OptimizerConfig) -> TorchRule:
    """Return a rule that updates with torch's Adam, AdamW or SGD in place of `rule`.

    Raises:
        ConfigError: no torch optimizer computes what `rule` does, or keeps its state in the same dtypes.
    """
    problem = ""
    narrow = [f"{spec.name} in {spec.dtype}" for spec in rule.state_specs if spec.dtype is not torch.float32]
    if not isinstance(rule, ElementwiseRule) or rule.name not in HOST_NAMES:
        problem = "has no counterpart in torch.optim that Megatron-Core uses"
    elif hooks := hooks_of(rule):
        problem = f"has hooks {', '.join(map(repr, hooks))}, which torch's optimizer does not support"
    elif narrow:
        problem = f"keeps {narrow[0]}, but torch's optimizer keeps its state in fp32"
    elif dict(rule.formula.constants).get("order", "torch") != "torch":
        problem = "computes in Transformer Engine's order of operations, which torch's optimizer does not"
    if problem:
        raise ConfigError(
            f"use_torch_optimizer_for_cpu_offload=True: optimizer={rule.name!r} {problem}; allowed are "
            f"{' and '.join(map(repr, HOST_NAMES))} in fp32 without hooks; leave it at False: opt-stack's own update "
            "also runs on the host"
        )
    assert isinstance(rule, ElementwiseRule)
    chosen = dict(rule.formula.constants)
    options: dict[str, Any] = {"maximize": rule.maximize, "fused": True}
    step_type: type[Any] | None = None
    if rule.name == "sgd":
        cls: type[torch.optim.Optimizer] = torch.optim.SGD
        numbers = (*CONFIG_NUMBERS, "momentum", "dampening")
        options["nesterov"] = chosen["nesterov"]
    else:
        cls = torch.optim.AdamW if chosen["decoupled_weight_decay"] else torch.optim.Adam
        numbers = (*CONFIG_NUMBERS, "betas", "eps")
        options["amsgrad"] = chosen["amsgrad"]
        step_type = Tensor
    return TorchRule(
        name=rule.name,
        cls=cls,
        options=MappingProxyType(options),
        numbers=numbers,
        hyper_names=rule.hyper_names,
        state_specs=rule.state_specs,
        step_type=step_type,
    )
