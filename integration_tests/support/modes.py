"""The modes of the optimizer: every combination of values of these axes either trains a small GPT, or is refused.

`AXES` says what a value sets in the configuration, `REFUSALS` which values do not go together and with which sentence.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from char_gpt import CharGPT, batch_at, stdlib_text
from parity import roles_over
from torch import Tensor

from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_kernels.quantized import RECIPES, quantize_linears_
from opt_stack import Optimizer, get_optimizer

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.uint8
STEPS, RANKS, CONTEXT = 10, 2, 24
SIZE = {"dim": 32, "depth": 1, "num_heads": 2}
LR = {"sgd": 0.1, "lion": 2e-3, "signum": 2e-3}  # where it is not 1e-2

Fields = Mapping[str, Any]
Values = Mapping[str, str]  # one value of each axis


AWARE = {"use_precision_aware_optimizer": True}
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
BY_TORCH = "host, by torch"
ON_HOST = ("half on the host", "host", BY_TORCH)
IN_FP8 = {f"fp8, {recipe}": recipe for recipe in RECIPES}
RULES = ("adam", "sgd", "lion", "ademamix", "schedule_free", "muon", "adaptive_muon", "soap", "soap_muon")
NAMO = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "namo", "lr": 1e-2}
AXES: Mapping[str, Mapping[str, Fields]] = {
    "rule": {**{rule: {"optimizer": rule, "lr": LR.get(rule, 1e-2)} for rule in RULES}, "namo": NAMO},
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


MATRIX_RULES = ("muon", "adaptive_muon", "namo", "soap", "soap_muon")
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


def distance(values: Values) -> float:
    """Allowed distance from the fp32 loss, as a fraction of fp32's improvement.

    Ten steps with 16-bit weights lose less than a hundredth. AdaptiveMuon divides each element of an update by its own
    size, so that small ones, which are rounding errors, move as far as others. SGD's first steps are its largest, and
    round most.
    """
    in_fp8 = values["numbers"] in IN_FP8
    factor = 3 if values["rule"] == "adaptive_muon" else 4 if values["rule"] == "sgd" and in_fp8 else 1
    return factor * (0.02 if in_fp8 else 0.01)


def allocated(optimizer: Optimizer) -> int:
    """Bytes of storage that the optimizer holds in addition to parameters and gradients."""
    pieces = [piece for unit in optimizer.stepper.units for piece in unit.pieces]
    kept = [tensor for piece in pieces for tensor in (*piece.main.kept(), *piece.state.values())]
    storages = {storage.data_ptr(): storage.nbytes() for tensor in kept if (storage := tensor.untyped_storage())}
    return sum(storages.values())


class Trained(NamedTuple):
    before: float  # the loss on the text that all modes are judged by
    after: float
    optimizer: Any


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


@cache
def initial() -> tuple[dict[str, Tensor], Tensor]:
    """The initial weights of all modes, and the text."""
    torch.manual_seed(5)
    return CharGPT(**SIZE).state_dict(), stdlib_text(200_000)


def build(values: Values, comm: Comm) -> tuple[CharGPT, Any]:
    config = config_of(values)
    model = CharGPT(**SIZE)
    model.load_state_dict(initial()[0])
    model.to(config.precision.params)
    if config.fp8_recipe is not None:
        quantize_linears_(model, config.fp8_recipe)
    return model, get_optimizer(config, [model], pg_collection=roles_over(comm))


def batch(step: int, rows: slice) -> Tensor:
    return batch_at(step, initial()[1], size=8, context=CONTEXT)[rows]


def judged(model: CharGPT) -> float:
    with torch.no_grad():
        return model(batch(10_000, slice(None))).item()


def advance(model: CharGPT, optimizer: Any, step: int, comm: Comm) -> None:
    loss = model(batch(step, slice(comm.rank, None, comm.size)))
    optimizer.scale_loss(loss).backward()
    assert optimizer.step().success
    optimizer.zero_grad()


def train(values: Values, *, steps: int = STEPS, ranks: int = RANKS) -> Trained:
    """Train in the mode. Raises `ConfigError` if the mode is refused."""

    def rank_main(comm: Comm) -> Trained:
        model, optimizer = build(values, comm)
        before = judged(model)
        for step in range(steps):
            advance(model, optimizer, step, comm)
        return Trained(before, judged(model), optimizer)

    initial()  # drawn before threads are the ranks: they share torch's generator
    return run_threads(ranks, rank_main)[0]
