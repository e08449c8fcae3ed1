"""A step that stays on the device, in the formats of main values, moments and gradients that `Numbers` leaves out."""

from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from on_device import (
    BAD_STEP,
    NUM_ORDERS,
    SIZE,
    STEPS,
    LaunchedRule,
    Trained,
    built,
    equal,
    iterate,
    launched,
    outcome,
)
from parity import Case, Numbers, Spread, Wrapping

from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.threads import run_threads
from opt_distributed.step.coded_main import CodedMain

pytestmark = pytest.mark.usefixtures(launched.__name__)

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.uint8
FORMATS: dict[str, dict[str, Any]] = {
    "scaled fp16 mains": {"main_params_dtype": FP16},
    "24-bit mains": {"main_params_dtype": torch.int8},
    "bf16 gradients and moments": {"main_grads_dtype": BF16, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "scaled fp16 moments": {"exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
    "24-bit mains and fp8 moments": {"main_params_dtype": torch.int8, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
}


def case_of(spread: Spread) -> Case:
    return Case(size=SIZE, spread=spread, numbers=Numbers.BF16, rule="adam", clips=True, wrapping=Wrapping.PLAIN)


def on_host(comm: Comm, case: Case, fields: dict[str, Any]) -> Trained:
    model, optimizer = built(case, comm, use_precision_aware_optimizer=True, **fields)
    return outcome(model, optimizer, [iterate(model, optimizer, step, comm) for step in range(STEPS)])


def on_device(one: DeferredRank, case: Case, fields: dict[str, Any]) -> Trained:
    """Nothing is read before the last step is queued."""
    model, optimizer = built(case, one.comm, use_precision_aware_optimizer=True, **fields)
    for unit in optimizer.stepper.units:
        unit.rule = LaunchedRule(unit.rule)
    with one.device.host_reads_forbidden():
        results = [iterate(model, optimizer, step, one.comm) for step in range(STEPS)]
    return outcome(model, optimizer, results)


@pytest.mark.parametrize("spread", [Spread.REPLICATED, Spread.FLAT])
@pytest.mark.parametrize("name", FORMATS)
def test_the_host_reads_nothing_and_every_order_gives_the_bits_of_a_cpu(name: str, spread: Spread) -> None:
    """One of the steps overflows."""
    expected = run_threads(SIZE, partial(on_host, case=case_of(spread), fields=FORMATS[name]))
    assert [result[0] for result in expected[0].results] == [step != BAD_STEP for step in range(STEPS)]
    for seed in range(NUM_ORDERS):
        found = run_deferred(SIZE, partial(on_device, case=case_of(spread), fields=FORMATS[name]), seed=seed)
        assert all(map(equal, found, expected)), f"seed {seed}"


def test_main_values_that_are_encoded_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, fields = case_of(Spread.FLAT), FORMATS["scaled fp16 mains"]
    expected = run_threads(SIZE, partial(on_host, case=case, fields=fields))
    open_ = CodedMain.open_

    def late(main: CodedMain) -> torch.Tensor:
        decoded = open_(main)
        main.main = decoded.clone()  # encoded as it was before the update
        return decoded

    monkeypatch.setattr(CodedMain, "open_", late)
    found = run_deferred(SIZE, partial(on_device, case=case, fields=fields), seed=0)
    assert not all(map(equal, found, expected))
