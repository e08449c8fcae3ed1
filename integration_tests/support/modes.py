"""The modes of the optimizer: every combination of values of these axes either trains, or is refused.

`AXES` says what a value sets in the configuration, `REFUSALS` which values do not go together and with which sentence.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from parity import Net, norms_while_training, sharded_state
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed.comm import Alone
from opt_kernels.quantized import RECIPES, QuantizedTensor
from opt_stack import Optimizer, get_optimizer

SHAPES: Mapping[str, tuple[int, ...]] = {  # of 32 columns for mxfp8, square for SOAP
    "embedding": (13, 16),
    "first": (32, 32),
    "bias": (7,),
    "qkv": (12, 12),
    "norm": (65,),
    "router": (6, 6),
    "second": (32, 32),
    "scale": (1,),
}
IN_CODES = ("first", "second")  # the parameters in fp8, where the mode has some
BF16 = torch.bfloat16
FP16 = torch.float16
FP8 = torch.uint8
LR = {"sgd": 0.1, "lion": 2e-3, "signum": 2e-3}  # where it is not 1e-2

Fields = Mapping[str, Any]
Values = Mapping[str, str]  # one value of each axis


AWARE = {"use_precision_aware_optimizer": True}
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
BY_TORCH = "host, by torch"
ON_HOST = ("half on the host", "host", BY_TORCH)
IN_FP8 = {f"fp8, {recipe}": recipe for recipe in RECIPES}
RULES = ("adam", "sgd", "lion", "ademamix", "schedule_free", "muon", "adaptive_muon", "muown", "soap", "soap_muon")
NAMO = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "namo", "lr": 1e-2}
AXES: Mapping[str, Mapping[str, Fields]] = {
    "rule": {
        **{rule: {"optimizer": rule, "lr": LR.get(rule, 1e-2)} for rule in RULES},
        # Its usual third beta, 0.9999, is too slow for fp8.
        "ademamix": {"optimizer": "ademamix", "lr": 1e-2, "optimizer_options": {"betas": (0.9, 0.999, 0.98)}},
        "namo": NAMO,
    },
    "numbers": {
        "fp32": {},
        "bf16": {"bf16": True},
        "bf16, remainders": {**AWARE, "bf16": True},
        "bf16, bf16 gradients": {**AWARE, "bf16": True, "main_grads_dtype": BF16, "store_param_remainders": False},
        "bf16, fp16 mains": {**AWARE, "bf16": True, "main_params_dtype": FP16},
        "bf16, 24-bit mains": {**AWARE, "bf16": True, "main_params_dtype": torch.int8},
        "fp16": {"fp16": True, "initial_loss_scale": 2.0**10},
        **{name: {"bf16": True, "fp8_recipe": recipe} for name, recipe in IN_FP8.items()},
    },
    "moments": {
        "fp32": {},
        "bf16": {**AWARE, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
        "scaled fp16": {**AWARE, "exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
        "scaled fp8": {**AWARE, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
    },
    "sharding": {
        "replicated": {},
        "ZeRO-1": {"use_distributed_optimizer": True},
        "layer-wise": {"use_layer_wise_distributed_optimizer": True},
    },
    "placement": {
        "device": {},
        "half on the host": {**OFFLOAD, "optimizer_offload_fraction": 0.5},
        "host": {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True},
        BY_TORCH: {**OFFLOAD, "use_torch_optimizer_for_cpu_offload": True},
    },
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused combination: one value for each named axis."""

    when: Mapping[str, Sequence[str]]
    sentence: str  # a regular expression of the message

    def applies(self, values: Values) -> bool:
        return all(values[axis] in refused for axis, refused in self.when.items())


MATRIX_RULES = ("muon", "adaptive_muon", "namo", "muown", "soap", "soap_muon")
NARROW = ("bf16", "scaled fp16", "scaled fp8")
UNLIKE_TORCH = ("lion", "ademamix", "schedule_free", *MATRIX_RULES)

REFUSALS: Sequence[Refusal] = (
    Refusal({"rule": MATRIX_RULES, "sharding": ["ZeRO-1"]}, "needs whole matrices, but use_distributed_optimizer=True"),
    Refusal({"rule": ["sgd", "schedule_free"], "moments": NARROW}, "exp_avg_dtype=.*has no such state"),
    Refusal({"rule": ["lion"], "moments": NARROW}, "exp_avg_sq_dtype=.*lion has no such state"),
    Refusal({"rule": ["soap"], "moments": NARROW}, "exp_avg_dtype=.*keeps it in fp32"),
    Refusal({"rule": ["soap_muon"], "moments": NARROW}, "exp_avg_sq_dtype=.*keeps it in fp32"),
    Refusal({"rule": UNLIKE_TORCH, "placement": [BY_TORCH]}, "use_torch_optimizer_for_cpu_offload.*no counterpart"),
    Refusal({"rule": ["schedule_free"], "numbers": [*IN_FP8]}, "evaluates other weights than it trains"),
    Refusal({"numbers": [*IN_FP8], "placement": ON_HOST}, "fp8_recipe=.*excludes optimizer_cpu_offload"),
    Refusal({"moments": NARROW, "placement": [BY_TORCH]}, "torch's optimizer keeps its state in fp32"),
)


def allocated(optimizer: Optimizer) -> int:
    """Bytes of storage that the optimizer holds in addition to parameters and gradients."""
    pieces = [piece for unit in optimizer.stepper.units for piece in unit.pieces]
    kept = [tensor for piece in pieces for tensor in (*piece.main.kept.values(), *piece.state.values())]
    storages = {storage.data_ptr(): storage.nbytes() for tensor in kept if (storage := tensor.untyped_storage())}
    return sum(storages.values())


def every_mode() -> Iterator[dict[str, str]]:
    for chosen in itertools.product(*AXES.values()):
        yield dict(zip(AXES, chosen, strict=True))


def name_of(values: Values) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in values.items())


def config_of(values: Values, **others: Any) -> OptimizerConfig:
    """`others`: fields that no axis sets."""
    fields: dict[str, Any] = {"weight_decay": 0.1, "muon_fp32_matmul_prec": "highest", **others}
    for axis, of_axis in AXES.items():
        fields.update(of_axis[values[axis]])
    return OptimizerConfig(**fields)


def refused(values: Values) -> list[str]:
    """A regular expression for each reason for which the mode is refused."""
    return [refusal.sentence for refusal in REFUSALS if refusal.applies(values)]


def plain(values: Values) -> dict[str, str]:
    """The rule in fp32: the first value of every axis is the plainest."""
    return {**values, **{axis: next(iter(of_axis)) for axis, of_axis in AXES.items() if axis != "rule"}}


def make_net(config: OptimizerConfig) -> Net:
    net = Net(config.precision.params, SHAPES)
    for name in IN_CODES if config.fp8_recipe is not None else ():
        held: Any = net.get_submodule(name)
        held.weight = nn.Parameter(QuantizedTensor.of(held.weight.detach(), str(config.fp8_recipe)))
    return net


def build(values: Values) -> tuple[Net, Optimizer]:
    """One process. Raises `ConfigError` if the mode is refused."""
    config = config_of(values)
    net = make_net(config)
    return net, get_optimizer(config, [net], {})


def train(net: Net, optimizer: Optimizer, steps: range) -> None:
    norms_while_training(net, optimizer, steps, Alone(), SHAPES)


def state_of(net: Net, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Copies of main values and states in fp32, by parameter and key."""
    params = dict(net.named_parameters())
    held = sharded_state(net, optimizer)["optimizer"]["state"]
    return {
        name: {"fp32_param": params[name].detach().float().clone()}
        | {key: box.data.float().clone() for key, box in state.items()}
        for name, state in held.items()
    }
