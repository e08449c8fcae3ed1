"""Averages of weights after a step: the EMA is torch's `AveragedModel` to the bit, EMA-Nesterov its equations, in every
layout and format; what `eval()` shows and `train()` puts back; what is refused. Ranks are threads."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import on_device
import pytest
import torch
from named import Named, normal, pieces
from on_device import launched
from parity import SHAPES, Case, Net, Numbers, Spread, Wrapping, norms_while_training, roles_over
from tiers import sampled
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.comm import Alone, Comm
from opt_distributed.pieces import AVERAGES
from opt_kernels import optim
from opt_kernels.hooks import Hyperball
from opt_kernels.quantized import QuantizedTensor
from opt_scheduler import FieldScheduler, linear
from opt_stack import Optimizer, QKClip, Registry, get_optimizer, release_gradients, torch_rule
from opt_stack.qk_clip import fused_qkv

DECAY = 0.8
BOTH = {"ema_decay": DECAY, "ema_nesterov_beta": 0.4, "ema_nesterov_gamma": 0.7}
RULES = ("adam", "sgd", "lion", "muon", "soap")


def built(model: nn.Module, overrides: Any = None, hooks: Any = (), **fields: Any) -> Optimizer:
    config = OptimizerConfig(**{"lr": 0.02, "clip_grad": 0.0, "ema_decay": DECAY, **fields})
    return get_optimizer(config, [model], {} if overrides is None else overrides, hooks=hooks)


def two(dtype: torch.dtype = torch.float32) -> Named:
    return Named(first=normal(5, 7, seed=1).to(dtype), second=normal(3, 5, seed=2).to(dtype))


def step(model: nn.Module, optimizer: Optimizer, number: int, *, without: str = "", bad: bool = False) -> None:
    for at, (name, param) in enumerate(model.named_parameters()):
        grad = normal(*param.shape, seed=10 * number + at).to(param.dtype)
        param.grad = None if name == without else grad * (math.nan if bad else 1.0)
    optimizer.step()


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def kept(model: nn.Module, optimizer: Optimizer, name: str) -> dict[str, Tensor]:
    return {key: optimizer.state[param][name].clone() for key, param in model.named_parameters()}


def assert_equal(got: Mapping[str, Tensor], want: Mapping[str, Tensor], what: object = "") -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want), what


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_step", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_average_is_torchs_averaged_model(rule: str, from_step: int) -> None:
    """Also of a parameter that has no gradient at first: torch averages it all the same."""
    model = two()
    optimizer = built(model, optimizer=rule, ema_decay=0.9999, ema_from_step=from_step)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    for number in range(1, 7):
        step(model, optimizer, number, without="second" if number in (1, 4) else "")
        if number < from_step:
            assert_equal(kept(model, optimizer, "ema"), copies(model))
        else:
            averaged.update_parameters(model)
            assert_equal(kept(model, optimizer, "ema"), copies(averaged.module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eval_shows_the_share_and_train_puts_back_the_bits(dtype: torch.dtype) -> None:
    model = two(dtype)
    optimizer = built(model, bf16=dtype is torch.bfloat16, ema_share=0.6)
    for number in range(4):
        step(model, optimizer, number)
    trained = copies(model)
    mains = dict(zip(trained, map(Tensor.clone, optimizer.get_parameters()), strict=True))
    optimizer.eval()
    optimizer.eval()
    averages = kept(model, optimizer, "ema")
    for name, shown in copies(model).items():
        expected = 0.4 * mains[name].double() + 0.6 * averages[name].double()
        torch.testing.assert_close(shown.double(), expected, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=1e-7)
        assert not torch.equal(shown, trained[name])
    with pytest.raises(RuntimeError, match="evaluation mode"):
        step(model, optimizer, 9)
    saved = optimizer.state_dict()
    optimizer.train()
    optimizer.train()
    assert_equal(copies(model), trained)
    other = two(dtype)
    resumed = built(other, bf16=dtype is torch.bfloat16, ema_share=0.6)
    resumed.load_state_dict(saved)
    assert all(torch.equal(got, averages[name]) for name, got in kept(other, resumed, "ema").items())
    resumed.train()
    assert_equal(copies(other), trained)
    step(model, optimizer, 5)
    step(other, resumed, 5)
    assert_equal(kept(other, resumed, "ema"), kept(model, optimizer, "ema"))


def test_weights_loaded_before_the_first_step_are_averaged() -> None:
    """`eval()` showed the average of the weights of before the load."""
    model = two()
    optimizer = built(model, **BOTH)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(100.0)
    loaded = copies(model)
    optimizer.eval()
    assert_equal(copies(model), loaded)
    optimizer.train()
    assert_equal(kept(model, optimizer, "ema"), loaded)
    step(model, optimizer, 1)
    assert all(bool((value.abs() < 1).all()) for value in kept(model, optimizer, "nesterov_ema").values())


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("fields", [{}, BOTH, {"ema_decay": None, "optimizer": "schedule_free"}], ids=repr)
def test_eval_refuses_weights_that_it_would_replace_by_old_ones(fields: dict[str, Any], num_steps: int) -> None:
    """It showed those of before the load without a word: main values are copies of these."""
    model = two(torch.bfloat16)
    optimizer = built(model, bf16=True, **fields)
    for number in range(num_steps):
        step(model, optimizer, number)
    model.load_state_dict({name: value + 100.0 for name, value in copies(model).items()})
    loaded = copies(model)
    with pytest.raises(UnusableGradientError, match=r"other values than its main values, .* eval\(\) or a resume"):
        optimizer.eval()
    assert_equal(copies(model), loaded)
    optimizer.reload_model_params()
    optimizer.eval()
    assert_equal(copies(model), loaded)


def test_eval_warns_of_weights_loaded_beside_averages() -> None:
    model = two()
    optimizer = built(model)
    step(model, optimizer, 1)
    model.load_state_dict({name: value + 100.0 for name, value in copies(model).items()})
    with pytest.warns(UserWarning, match=r"or an average, keeps weights of its own .* or which eval\(\) shows"):
        optimizer.eval()


def test_a_reload_of_weights_begins_averages_anew() -> None:
    model = two()
    optimizer = built(model, **BOTH)
    for number in range(3):
        step(model, optimizer, number)
    with torch.no_grad():
        model.first.add_(100.0)
    optimizer.reload_model_params()
    for name in ("ema", "nesterov_base"):
        assert_equal(kept(model, optimizer, name), copies(model), name)
    assert not any(value.any() for value in kept(model, optimizer, "nesterov_ema").values())
    step(model, optimizer, 4)  # averaged with the decay, not copied
    assert not torch.equal(optimizer.state[model.first]["ema"], optimizer.state[model.first]["nesterov_base"])


def test_weights_loaded_after_a_reset_are_where_averages_begin() -> None:
    """The load passed for a change that a step had made, in whose direction gradients were taken."""
    model = two()
    optimizer = built(model, **BOTH)
    for number in range(3):
        step(model, optimizer, number)
    optimizer.reset_state()
    with torch.no_grad():
        model.first.add_(100.0)
    step(model, optimizer, 4)
    assert all(bool((value.abs() < 1).all()) for value in kept(model, optimizer, "nesterov_ema").values())


def test_a_write_of_other_code_is_warned_of() -> None:
    model = two()
    optimizer = built(model)
    step(model, optimizer, 0)
    with torch.no_grad():
        model.first.add_(1.0)
    with pytest.warns(UserWarning, match=r"an average, keeps weights of its own"):
        step(model, optimizer, 1)


@pytest.mark.parametrize("fields", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_skipped_step_changes_no_average(fields: dict[str, Any]) -> None:
    model = two(torch.bfloat16 if fields else torch.float32)
    optimizer = built(model, **BOTH, **fields)
    for number in range(3):
        step(model, optimizer, number)
    before = {name: kept(model, optimizer, name) for name in ("ema", "ema_steps", "nesterov_base", "nesterov_ema")}
    weights = copies(model)
    step(model, optimizer, 3, bad=True)
    for name, of_params in before.items():
        assert_equal(kept(model, optimizer, name), of_params, name)
    assert_equal(copies(model), weights)


# --- numbers of groups, schedules -------------------------------------------------------------------------------------


def decays_used(
    optimizer: Optimizer, model: nn.Module, steps: int, then: Callable[[], object] = lambda: None
) -> list[float]:
    """The decay of each step after the first, from the averages of `first`; `then` is called after each step."""
    found = []
    average = model.first.detach().double()
    for number in range(steps):
        step(model, optimizer, number)
        then()
        new = optimizer.state[model.first]["ema"].double()
        weights = model.first.detach().double()
        if number:
            share = ((new - average) * (weights - average)).sum() / (weights - average).square().sum()
            found.append(1 - float(share))
        average = new
    return found


def test_the_decay_may_be_a_schedule_of_the_step() -> None:
    """It goes on after a resume, and no group has a number of its own beside it."""
    schedule: Callable[[int], float] = lambda number: 1 - 1 / number
    model = two()
    optimizer = built(model, ema_decay=schedule)
    assert decays_used(optimizer, model, 3) == pytest.approx([1 / 2, 2 / 3], abs=1e-5)
    again = two()
    resumed = built(again, ema_decay=schedule)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    before = kept(again, resumed, "ema")["first"]
    step(again, resumed, 3)
    want = before + (1 - schedule(4)) * (copies(again)["first"] - before)
    torch.testing.assert_close(kept(again, resumed, "ema")["first"], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"ema_decay=0\.25: unknown entry"):
        built(two(), {ParamKey(name="second"): {"ema_decay": 0.25}}, ema_decay=schedule)


@pytest.mark.parametrize("kind", [np.array, np.float64, torch.tensor])
def test_a_schedule_may_return_any_kind_of_number(kind: Callable[[float], Any]) -> None:
    model = two()
    used = decays_used(built(model, ema_decay=lambda step: kind(0.5)), model, 3)
    assert used == pytest.approx([0.5, 0.5], abs=1e-5)


def test_state_loaded_into_a_prepared_step_has_its_own_decay() -> None:
    """The average was that of the weights, by the decay of the first step."""
    schedule: Callable[[int], float] = lambda number: 0.0 if number == 1 else 0.9
    model = two()
    optimizer = built(model, ema_decay=schedule)
    for number in range(4):
        step(model, optimizer, number)
    again = two()
    resumed = built(again, ema_decay=schedule)
    for param in again.parameters():
        param.grad = torch.ones_like(param)
    resumed.prepare_grads()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    before = kept(again, resumed, "ema")["first"]
    resumed.step_with_ready_grads()
    want = before + 0.1 * (copies(again)["first"] - before)
    torch.testing.assert_close(kept(again, resumed, "ema")["first"], want, rtol=1e-5, atol=1e-6)


def test_a_schedule_of_decays_out_of_bounds_is_an_error() -> None:
    model = two()
    optimizer = built(model, ema_decay=lambda number: 0.5 * number)
    step(model, optimizer, 0)
    before = copies(model)
    with pytest.raises(ConfigError, match=r"ema_decay: the schedule returned 1.0 for step 2; must be in \[0, 1\)"):
        step(model, optimizer, 1)
    assert_equal(copies(model), before, "the step was made before it was refused")
    with pytest.raises(ConfigError, match="is a schedule, for which the host counts steps"):
        OptimizerConfig(ema_decay=lambda number: 0.5, optimizer_cuda_graph=True)


@pytest.mark.parametrize(
    ("schedule", "decays"),
    [(linear(0.5, 0.9, steps=4), [0.6, 0.7, 0.8]), (lambda done: 1 - 1 / (done + 1), [1 / 2, 2 / 3, 3 / 4])],
    ids=["schedule", "function"],
)
def test_a_scheduler_of_the_groups_sets_the_decay(schedule: Any, decays: list[float]) -> None:
    model = two()
    optimizer = built(model)
    scheduler = FieldScheduler(optimizer, {"ema_decay": schedule})
    assert decays_used(optimizer, model, 4, scheduler.step) == pytest.approx(decays, abs=1e-5)


def test_a_half_life_is_a_fraction_of_the_training() -> None:
    model = two()
    optimizer = built(model, ema_decay={"half_life": 0.1, "num_steps": 50})
    assert decays_used(optimizer, model, 3) == pytest.approx([0.5 ** (1 / 5)] * 2, abs=1e-5)


def test_groups_may_average_with_other_decays() -> None:
    """At 0 the average follows the weights, as the record's runs want for embeddings."""
    model = two()
    optimizer = built(model, {ParamKey(name="second"): {"ema_decay": 0.0}})
    for number in range(3):
        step(model, optimizer, number)
    averages = kept(model, optimizer, "ema")
    assert torch.equal(averages["second"], model.second)
    assert not torch.equal(averages["first"], model.first)


@pytest.mark.parametrize("name", ["ema_decay", "ema_nesterov_beta"])
def test_a_number_that_is_not_allowed_refuses_the_step(name: str) -> None:
    model = two()
    optimizer = built(model, **BOTH)
    for number in range(2):
        step(model, optimizer, number)
    optimizer.param_groups[0][name] = 1.0
    before = copies(model)
    with pytest.raises(ValueError, match=rf"{name}=1.* not allowed"):
        step(model, optimizer, 3)
    assert_equal(copies(model), before)


# --- layouts and formats ----------------------------------------------------------------------------------------------

CASES = sampled(
    [
        Case(size=size, spread=spread, numbers=numbers, rule=rule, clips=False, wrapping=wrapping)
        for size, spread, numbers, rule, wrapping in itertools.product(
            (2, 3), Spread, Numbers, ("adam", "muon"), Wrapping
        )
        if spread is Spread.WHOLE or rule == "adam"
    ],
    lambda case: [("size", case.size), ("spread", case.spread), ("numbers", case.numbers), ("wraps", case.wrapping)],
)


def train_watched(case: Case, comm: Comm, **more: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Check each step's averages of this rank against the equations; return the trained and the shown weights."""
    config = replace(case.config, **BOTH, **more)
    roles = roles_over(comm)
    net = Net(case.numbers.dtype)
    model: nn.Module = net
    if case.wrapping is not Wrapping.PLAIN:
        model = DistributedDataParallel(case.ddp_config, net, groups=roles, optimizer_config=config)
    optimizer = get_optimizer(config, [model], {}, pg_collection=roles)
    held = pieces(optimizer)
    base = [piece.main.value().detach().clone() for piece in held]
    changes = [torch.zeros_like(value) for value in base]
    ema = [value.clone() for value in base]
    for number in range(4):
        norms_while_training(model, optimizer, range(number, number + 1), comm, SHAPES)
        for at, piece in enumerate(held):
            new = piece.state["nesterov_base"]
            changes[at] = torch.lerp(changes[at], new - base[at], 1 - 0.7)
            base[at] = new.clone()
            ema[at] = new.clone() if number == 0 else torch.lerp(ema[at], new, 1 - DECAY)
            assert torch.equal(piece.state["nesterov_ema"], changes[at])
            assert torch.equal(piece.state["ema"], ema[at])
            assert torch.equal(piece.main.value(), new + 0.4 * changes[at])
    trained = copies(net)
    optimizer.eval()
    shown = copies(net)
    optimizer.train()
    assert_equal(copies(net), trained)
    assert optimizer.plan.state_bytes(comm.rank) == sum(unit.state_bytes() for unit in optimizer.stepper.units)
    return trained, shown


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_has_the_averages_of_its_weights(case: Case) -> None:
    alone = train_watched(case.alone, Alone())
    for found in run_threads(case.size, partial(train_watched, case)):
        for got, want in zip(found, alone, strict=True):
            if case.rule == "adam" and case.size == 2:
                assert_equal(got, want)
            for name, value in got.items():
                torch.testing.assert_close(value, want[name], rtol=2**-7, atol=2e-4)


# --- a device that runs its work later --------------------------------------------------------------------------------

DEFERRED = {
    "flat": replace(on_device.FLAT, wrapping=Wrapping.PLAIN),
    "remainders": replace(on_device.FLAT, numbers=Numbers.REMAINDER, spread=Spread.REPLICATED),
    "overlapped gathers": replace(on_device.FLAT, numbers=Numbers.FP32, wrapping=Wrapping.OVERLAP),
    "layer-wise": replace(on_device.FLAT, numbers=Numbers.BF16, spread=Spread.WHOLE, rule="muon"),
}
DEVICES = {"late verdicts": {}, "graphs": {"optimizer_cuda_graph": True}, "host": on_device.ALL | on_device.OVERLAPS}
# On a CPU, remainders are split by a sum that the host reads, which a captured step must not.
ON_DEVICES = [(n, d) for n in DEFERRED for d in DEVICES if (n, d) != ("remainders", "graphs")]


@pytest.mark.usefixtures(launched.__name__)
@pytest.mark.parametrize(("name", "device"), ON_DEVICES)
def test_a_device_that_works_later_has_the_bits_of_a_cpu(name: str, device: str) -> None:
    """One of the steps overflows, which the host learns later. Decays change at every step, also in replays."""
    may_read = DEFERRED[name].numbers is Numbers.REMAINDER

    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> on_device.Trained:
        results = []
        for number in range(6):
            for group in optimizer.param_groups:
                group |= {"ema_decay": 0.9 - 0.1 * number, "ema_nesterov_beta": 0.1 * number}
            results.append(on_device.iterate(model, optimizer, number, comm, may_read=may_read))
        found = on_device.outcome(model, optimizer, results)
        assert [result[0] for result in found.results] == [number != on_device.BAD_STEP for number in range(6)]
        averages = []
        for piece in pieces(optimizer):
            averages += [value.clone() for name, value in piece.state.items() if name in AVERAGES]
        optimizer.eval()
        shown = on_device.outcome(model, optimizer, []).weights
        optimizer.train()
        assert all(map(torch.equal, on_device.outcome(model, optimizer, []).weights, found.weights))
        return found._replace(weights=[*found.weights, *averages, *shown])

    on_device.assert_bits_of_a_cpu(DEFERRED[name], program, on_device=[DEVICES[device]], **BOTH, ema_share=0.5)


# --- refusals ---------------------------------------------------------------------------------------------------------

NESTEROV = {"ema_decay": None, "ema_nesterov_beta": 0.4}
AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
FP8 = {"bf16": True, "fp8_recipe": "tensorwise"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "schedule_free by an override": (
        {"overrides": {ParamKey(name="second"): {"optimizer": "schedule_free"}}},
        r"ema_decay=0.8: optimizer='schedule_free' keeps an average of its own",
    ),
    "fp8": (FP8, r"ema_decay=0.8: parameter 'first' is stored in fp8"),
    "scaled fp16": (AWARE | NESTEROV | {"main_params_dtype": torch.float16}, "ema_nesterov_beta=0.4 with main_params"),
    "a ball of the weights with their look-ahead": (
        NESTEROV | {"optimizer": "muon", "weight_decay": 0.0, "hooks": {"muon": (Hyperball(),)}},
        r"ema_nesterov_beta=0.4: Hyperball\(\) would keep the norm",
    ),
    "lengths of rows": (
        NESTEROV | {"optimizer": "muown"},
        "ema_nesterov_beta=0.4: optimizer='muown' keeps the lengths",
    ),
    "a decay of a group without averages": (
        {"ema_decay": None, "overrides": {ParamKey(name="second"): {"ema_decay": 0.5}}},
        "ema_decay=0.5: unknown entry",
    ),
    "a decay of a group that is not allowed": (
        {"overrides": {ParamKey(name="second"): {"ema_decay": 1.0}}},
        "ema_decay=1.0 is not allowed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_average_is_refused_by_name(name: str) -> None:
    fields, message = REFUSED[name]
    model = two(torch.bfloat16 if "bf16" in fields else torch.float32)
    if "fp8_recipe" in fields:
        model.first = nn.Parameter(QuantizedTensor.of(model.first.detach(), "tensorwise"))
    with pytest.raises(ConfigError, match=message):
        built(model, **fields)


def test_an_average_that_has_not_begun_follows_writes() -> None:
    """Evaluations and saves had the weights after the last step."""
    model = two()
    optimizer = built(model, ema_from_step=4)
    step(model, optimizer, 1)
    with torch.no_grad():
        model.first.mul_(2.0)
    written = copies(model)
    assert torch.equal(optimizer.state_dict()["state"][0]["ema"], written["first"])
    with torch.no_grad():
        model.first.mul_(2.0)
    written = copies(model)
    optimizer.eval()
    assert_equal(copies(model), written)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop])
def test_a_rule_sees_only_its_own_states(cls: type[torch.optim.Optimizer]) -> None:
    """A class of torch refused the averages among the states of its second step."""
    registry = Registry().with_rule(torch_rule("of_torch", cls))
    weights = []
    for decay in (None, DECAY):
        model = two()
        config = OptimizerConfig(optimizer="of_torch", lr=0.02, ema_decay=decay)
        optimizer = get_optimizer(config, [model], {}, rules=registry)
        for number in range(1, 4):
            step(model, optimizer, number)
        weights.append(copies(model))
    assert_equal(*weights)


class WithAverage(torch.optim.SGD):
    """Keeps a state that is called as the average is."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param]["ema"] = param.detach().clone()


def test_a_rule_with_a_state_of_the_same_name_is_refused() -> None:
    """The average was written over the state of the rule."""
    registry = Registry().with_rule(torch_rule("averaging", WithAverage))
    config = OptimizerConfig(optimizer="averaging", lr=0.1, weight_decay=0.0, ema_decay=0.9)
    with pytest.raises(ConfigError, match="optimizer='averaging' keeps an average of its own"):
        get_optimizer(config, [two()], {}, rules=registry)


def test_release_of_gradients_and_clips_of_mains_are_refused() -> None:
    model = two()
    with pytest.raises(ConfigError, match="averages all weights at the end of a step"):
        release_gradients(built(model))
    qkv = Named(weight=normal(16, 4, seed=1))
    optimizer = built(qkv, **NESTEROV)
    layer = fused_qkv(qkv.weight, num_heads=2, num_query_groups=1, head_dim=4)
    with pytest.raises(ConfigError, match="the state of 'weight' has other weights"):
        QKClip(optimizer, [layer])
    of_rows = built(qkv, optimizer="muown", ema_decay=None)
    with pytest.raises(ConfigError, match="the rule of 'weight', muown, keeps the lengths of rows"):
        QKClip(of_rows, [layer])


@pytest.mark.parametrize("name", ["ema_decay", "ema_nesterov_beta"])
def test_a_drop_in_says_who_averages(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: opt_stack.get_optimizer"):
        optim.AdamW(two().parameters(), **{name: 0.9})


def test_ranks_with_other_decays_are_refused() -> None:
    def rank_main(comm: Comm) -> str:
        model = two()
        with pytest.raises(ValueError, match=r"configured differently: ema_decay is 0\.5 on ranks") as error:
            get_optimizer(
                OptimizerConfig(lr=0.1, ema_decay=0.5 + 0.1 * comm.rank), [model], {}, pg_collection=roles_over(comm)
            )
        other = get_optimizer(OptimizerConfig(lr=0.1, ema_decay=0.5), [model], {}, pg_collection=roles_over(comm))
        other.param_groups[0]["ema_decay"] = 0.5 + 0.1 * comm.rank
        with pytest.raises(ValueError, match="has different numbers on the ranks"):
            step(model, other, 2)
        return str(error.value)

    assert len(set(run_threads(2, rank_main))) == 1


def test_ranks_may_be_given_a_schedule_each() -> None:
    """Its address in memory was compared."""

    def rank_main(comm: Comm) -> Tensor:
        model = two()
        config = OptimizerConfig(lr=0.1, ema_decay=lambda step: 0.5 if step < 2 else 0.9)
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(comm))
        for number in range(3):
            step(model, optimizer, number)
        return kept(model, optimizer, "ema")["first"]

    first, second = run_threads(2, rank_main)
    assert torch.equal(first, second)
