"""The bench of damage: runs that are spoiled at a known step, and healthy ones. `test_why_bench.py` reads them."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from damage_models import MODELS, VOCABULARY, Batch, Damage, Trial, begin, train
from torch import Tensor, nn

from opt_config import ParamKey
from opt_distributed import run_threads
from opt_distributed.comm import Comm

AT = 61  # the first damaged step, unless a run says otherwise
LAST = 100


def param(trial: Trial, name: str) -> nn.Parameter:
    return trial.model.get_parameter(name)


def group_with(trial: Trial, name: str) -> dict[str, Any]:
    """The group of a parameter."""
    wanted = param(trial, name)
    return next(group for group in trial.optimizer.param_groups if any(p is wanted for p in group["params"]))


def once(change: Callable[..., Any], at: int = AT) -> Callable[..., Any]:
    return lambda trial, *given: change(trial, *given) if trial.step == at else None


def after(change: Callable[..., Any], at: int = AT) -> Callable[..., Any]:
    return lambda trial, *given: change(trial, *given) if trial.step >= at else None


def write(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Trial], object]:
    @torch.no_grad()
    def written(trial: Trial) -> None:
        value = param(trial, name)
        value.copy_(change(value))

    return written


def scale_weights_by(factor: float) -> Callable[[Trial], object]:
    @torch.no_grad()
    def scaled(trial: Trial) -> None:
        for value in trial.model.parameters():
            value.mul_(factor)

    return scaled


def scale_weights(trial: Trial) -> None:
    for value in trial.model.parameters():
        value.data.mul_(1.05)


def load_other(trial: Trial) -> None:
    trial.model.load_state_dict(MODELS["gpt"](99).state_dict())


@torch.no_grad()
def swap_layers(trial: Trial) -> None:
    one = param(trial, "h.0.up.weight")
    other = param(trial, "h.2.up.weight")
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def add_noise(value: Tensor) -> Tensor:
    return value + torch.randn_like(value) * value.std() / 2


def set_number(key: str, change: Callable[[Any], Any], *names: str) -> Callable[[Trial], object]:
    """Change a number of the groups of these parameters; of all groups without names."""

    def changed(trial: Trial) -> None:
        groups = trial.optimizer.param_groups
        if names:
            groups = [group_with(trial, name) for name in names]
        for group in groups:
            group[key] = change(group[key])

    return changed


@torch.no_grad()
def zero_state(trial: Trial) -> None:
    for value in trial.optimizer.state.values():
        for tensor in value.values():
            if tensor.dim():
                tensor.zero_()


@torch.no_grad()
def zero_second_moments(trial: Trial) -> None:
    for value in trial.optimizer.state.values():
        value["exp_avg_sq"].zero_()


def leave_rate(trial: Trial) -> None:
    """Lower the rates from step 41 on, but not that of vectors."""
    for group in trial.optimizer.param_groups if trial.step > 40 else ():
        if group["name"] == "default":
            group["lr"] = 3e-3 * 0.95 ** (trial.step - 40)


def warm_up_again(trial: Trial) -> None:
    for group in trial.optimizer.param_groups:
        group["lr"] = 3e-3 * min((trial.step - AT + 1) / 20, 1.0)


def constant_tokens(trial: Trial, batch: Batch) -> None:
    batch.inputs = torch.zeros_like(batch.inputs)


def half_random(trial: Trial, batch: Batch) -> None:
    generator = torch.Generator().manual_seed(trial.step)
    drawn = torch.randint(0, VOCABULARY, batch.labels.shape, generator=generator)
    batch.labels = torch.where(torch.rand(drawn.shape, generator=generator) < 0.5, drawn, batch.labels)


def reversed_tokens(trial: Trial, batch: Batch) -> None:
    inputs = batch.labels.flip(1)
    batch.labels = batch.inputs.flip(1)
    batch.inputs = inputs


def same_batch(trial: Trial, batch: Batch) -> None:
    vars(batch).update(vars(trial.batch(trial.step, 0, rank=0)))


def shift_labels(trial: Trial, batch: Batch) -> None:
    batch.labels = batch.labels.roll(1, 1)


def random_labels(trial: Trial, batch: Batch) -> None:
    generator = torch.Generator().manual_seed(trial.step)
    batch.labels = torch.randint(0, VOCABULARY, batch.labels.shape, generator=generator)


def one_batch(trial: Trial, batch: Batch) -> None:
    vars(batch).update(vars(trial.batch(41)))


def scale_row(trial: Trial) -> None:
    grad = param(trial, "wte.weight").grad
    grad[3] *= 1e4


def summed(trial: Trial, losses: Tensor) -> Tensor:
    return losses.sum() / trial.num_micro


def not_divided(trial: Trial, losses: Tensor) -> Tensor:
    return losses.mean()


def scale_all(factor: float) -> Callable[[Trial], object]:
    def scaled(trial: Trial) -> None:
        for value in trial.model.parameters():
            value.grad *= factor

    return scaled


def times(factor: float) -> Callable[[Trial, Tensor], Tensor]:
    return lambda trial, losses: losses.mean() * factor


def scale_param(name: str, factor: float) -> Callable[[Trial], object]:
    return lambda trial: param(trial, name).grad.mul_(factor)


def detach_layer(trial: Trial) -> None:
    trial.model.h[1].register_forward_hook(lambda module, given, out: out.detach())


def freeze(trial: Trial) -> None:
    for of_layer in trial.model.get_submodule("h.1.up").parameters():
        of_layer.requires_grad_(False)


def kill_expert(trial: Trial) -> None:
    trial.model.h[1].alive[2] = False


def overflow_in_forward(trial: Trial) -> None:
    trial.model.h[1].out.register_forward_hook(lambda module, given, out: out * 1e6)


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A damaged run, and what the first sentence of `why` must name: regular expressions, of which one is found."""

    record: Callable[[Path, int], None]  # records every n steps to a folder
    named: str
    at: int = AT


def plain(damage: Damage, **fields: Any) -> Callable[[Path, int], None]:
    def record(folder: Path, every: int) -> None:
        trial = begin(folder, every=every, **fields)
        train(trial, LAST, damage)
        trial.optimizer.recorder.write("end")

    return record


def resumed(damage: Damage, *, loads: bool = True, **fields: Any) -> Callable[[Path, int], None]:
    """Two runs: the second continues with the weights, and if `loads` with the state, of the first."""

    def record(folder: Path, every: int) -> None:
        first = begin(folder, every=every, **fields)
        train(first, AT - 1)
        first.optimizer.recorder.write("end")
        second = begin(None, every=every, **fields)
        second.model.load_state_dict(first.model.state_dict())
        if loads:
            second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.optimizer.stats_every(every, directory=folder)
        second.step = AT - 1
        train(second, LAST, damage)
        second.optimizer.recorder.write("end")

    return record


def on_ranks(damage: Callable[[int], Damage], num: int = 2, **fields: Any) -> Callable[[Path, int], None]:
    def record(folder: Path, every: int) -> None:
        def rank_main(comm: Comm) -> None:
            trial = begin(folder, every=every, comm=comm, **fields)
            try:
                train(trial, LAST, damage(comm.rank))
            finally:
                trial.optimizer.recorder.write("end")

        with suppress(Exception):  # a step that is refused on every rank
            run_threads(num, rank_main)

    return record


def of_rank(rank: int, damage: Damage) -> Callable[[int], Damage]:
    return lambda this: damage if this == rank else Damage()


def cosine(step: int) -> float:
    return 0.05 + 0.95 * (1 + math.cos(math.pi * min(step, LAST) / LAST)) / 2


SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1}
UNCLIPPED: dict[str, Any] = {**SGD, "clip_grad": 0.0}
SCALE = "sum|scale|accumulat"
REVIEWED: dict[str, Run] = {  # those of a reader who tried the documents
    "rates restart at a resume, too high": Run(resumed(Damage(before=set_number("lr", lambda lr: 0.3))), "rate"),
    "decay x 1000 on norms": Run(
        plain(Damage(before=once(set_number("weight_decay", lambda decay: 10.0, "ln_f.weight")))), "weight_decay"
    ),
    "qkv at 100 times the rate": Run(
        plain(Damage(), overrides={ParamKey(name="*qkv*"): {"lr_mult": 100.0}}, lr=1e-3), "qkv", at=1
    ),
    "a rank loads other weights": Run(on_ranks(of_rank(1, Damage(before=once(load_other)))), "refused"),
    "a rank's weights are written": Run(on_ranks(of_rank(1, Damage(before=once(scale_weights)))), "the weights of 'h"),
    "gradient of a row x 1e4": Run(plain(Damage(grads=after(scale_row)), **SGD), "wte"),
    "one loss x 1e4, beta2 0.5": Run(
        plain(Damage(loss=once(times(1e4))), adam_beta2=0.5, clip_grad=0.0), "the loss and all gradients"
    ),
    "loss summed": Run(plain(Damage(loss=after(summed, 41)), **UNCLIPPED), SCALE, at=41),
    "token embedding drawn again": Run(plain(Damage(before=once(write("wte.weight", torch.randn_like)))), "wte"),
    "labels shifted": Run(plain(Damage(batch=after(shift_labels))), "data"),
    "one batch": Run(plain(Damage(batch=after(one_batch, 41))), "data", at=41),
    "zero_grad never called": Run(plain(Damage(clears=after(lambda trial: False))), "zero_grad"),
    "dead layer": Run(plain(Damage(before=once(write("h.1.up.bias", lambda bias: bias - 1e3)))), r"h\.1\.up"),
    "forward overflows in fp16": Run(
        plain(Damage(before=once(overflow_in_forward)), dtype=torch.float16, fp16=True), "forward overflows"
    ),
}
OTHERS: dict[str, Run] = {
    "decay x 1000 on matrices": Run(
        plain(Damage(before=once(set_number("weight_decay", lambda decay: 10.0, "h.0.up.weight")))), "weight_decay"
    ),
    "betas wrong at a resume": Run(resumed(Damage(before=set_number("betas", lambda betas: (0.5, 0.9)))), "beta"),
    "state zeroed": Run(plain(Damage(before=once(zero_state))), "state"),
    "state not loaded": Run(resumed(Damage(), loads=False), "state"),
    "frozen layer": Run(plain(Damage(before=once(freeze))), r"h\.1\.up"),
    "dead expert": Run(plain(Damage(before=once(kill_expert)), model="experts"), r"h\.1\.(up|out)\.2"),
    "a rank repeats another's data": Run(on_ranks(of_rank(1, Damage(batch=after(same_batch)))), "data"),
    "accumulation summed": Run(plain(Damage(loss=after(not_divided)), trial={"num_micro": 4, "size": 4}), SCALE),
    "wrong loss scale": Run(plain(Damage(grads=after(scale_all(1 / 1024))), loss_scale=1024.0, model="experts"), SCALE),
    "one rate x 100": Run(plain(Damage(before=once(set_number("lr", lambda lr: lr * 100, "h.0.up.weight")))), "rate"),
    "a norm's weight negated": Run(plain(Damage(before=once(write("h.1.ln_2.weight", torch.neg)))), r"h\.1\.ln_2"),
    "random labels": Run(plain(Damage(batch=after(random_labels)), model="experts"), "data"),
    "eps 0.1": Run(plain(Damage(before=once(set_number("eps", lambda eps: 0.1)))), "eps"),
    "one poisoned batch": Run(plain(Damage(loss=once(times(math.nan))), model="experts"), "data"),
}
HELD_OUT: dict[str, Run] = {  # not looked at until the detectors were finished
    "a layer's gradient negated": Run(
        plain(Damage(grads=after(scale_param("h.0.out.weight", -1.0), 41))), r"h\.0\.out", at=41
    ),
    "a layer's gradient x 0.001": Run(
        plain(Damage(grads=after(scale_param("head.weight", 1e-3), 51)), **SGD), "head", at=51
    ),
    "a layer's gradient zero": Run(
        plain(Damage(grads=after(scale_param("h.0.up.1.weight", 0.0), 51)), model="experts"), r"h\.0\.up\.1", at=51
    ),
    "tokens constant": Run(plain(Damage(batch=after(constant_tokens))), "data"),
    "half of the labels random": Run(plain(Damage(batch=after(half_random))), "data"),
    "sequences reversed": Run(plain(Damage(batch=after(reversed_tokens)), optimizer="muon", lr=0.01), "data"),
    "noise on a weight": Run(plain(Damage(before=once(write("h.2.proj.weight", add_noise)))), r"h\.2\.proj"),
    "two layers swapped": Run(plain(Damage(before=once(swap_layers)), optimizer="muon", lr=0.01), "the weights of 'h"),
    "all weights halved": Run(plain(Damage(before=once(scale_weights_by(0.5))), model="experts"), "the weights of"),
    "second moments zeroed": Run(plain(Damage(before=once(zero_second_moments)), model="experts"), "state"),
    "momentum 0": Run(plain(Damage(before=once(set_number("momentum", lambda momentum: 0.0))), **SGD), "momentum"),
    "all rates x 30": Run(plain(Damage(before=once(set_number("lr", lambda lr: lr * 30)))), "rate"),
    "a rate left behind": Run(plain(Damage(before=leave_rate)), "rate", at=41),
    "embedding's rate 0": Run(
        plain(
            Damage(before=once(set_number("lr", lambda lr: 0.0, "wte.weight"))),
            overrides={ParamKey(name="wte*"): {"lr_mult": 0.5}},
        ),
        "rate",
    ),
    "a rank's gradient x 100": Run(on_ranks(of_rank(2, Damage(grads=after(scale_all(100.0)))), 4), "rank 2"),
    "a rank without data": Run(on_ranks(of_rank(1, Damage(loss=after(times(0.0)))), 4), "rank 1"),
    "detached layer": Run(plain(Damage(before=once(detach_layer))), r"h\.1"),
    "loss x 0.01": Run(plain(Damage(loss=after(times(0.01))), **UNCLIPPED), SCALE),
    "warmup again at a resume": Run(resumed(Damage(before=warm_up_again)), "rate"),
    "weights drawn again at a resume": Run(
        resumed(Damage(before=once(write("head.weight", torch.randn_like)))), "head"
    ),
    "infinite batch": Run(plain(Damage(loss=once(times(math.inf))), optimizer="muon", lr=0.01), "data"),
}


# --- healthy runs -----------------------------------------------------------------------------------------------------


def scheduled(change: Callable[[int], float]) -> dict[str, Any]:
    return {"trial": {"schedule": change}}


def on_purpose(step: int) -> float:
    if step <= 50:
        return 1.0
    return 0.3 if step <= 80 else 0.9


HEALTHY: dict[str, dict[str, Any]] = {
    "adam": {},
    "experts": {"model": "experts"},
    "muon": {"optimizer": "muon", "lr": 0.02},
    "schedule_free": {"optimizer": "schedule_free"},
    "fp16 with the default scale": {"dtype": torch.float16, "fp16": True},
    "bf16": {"dtype": torch.bfloat16, "bf16": True},
    "warmup": scheduled(lambda step: min(step / 50, 1.0)),
    "restarts": scheduled(lambda step: 0.02 + 0.98 * (1 + math.cos(math.pi * (step % 40) / 40)) / 2),
    "small batches": {"trial": {"size": 1}},
    "a resume": scheduled(cosine),
    "a rate changed on purpose": scheduled(on_purpose),
    "sgd": SGD,
}
MORE_HEALTHY: dict[str, dict[str, Any]] = {
    "large rate": {"lr": 1e-2, **scheduled(cosine)},
    "lion": {"optimizer": "lion", "lr": 3e-4},
    "small rate": {"lr": 3e-4},
    "no clipping": {"clip_grad": 0.0, "model": "experts"},
    "micro batches": {"trial": {"num_micro": 2, "size": 2}},
}
