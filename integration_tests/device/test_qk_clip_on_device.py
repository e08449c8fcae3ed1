"""QK-Clip on a device that runs its work later: the bits of a CPU, with state on the device and on the host."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredComm, DeferredRank, run_deferred
from offloaded import ALL, HALF, small_parts
from on_device import (
    BAD_STEP,
    NUM_ORDERS,
    SIZE,
    STEPS,
    Trained,
    built,
    equal,
    iterate,
    launch_rules_,
    launched,
    outcome,
)
from parity import Case, Numbers, Spread, Wrapping

from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_stack import QKClip
from opt_stack.qk_clip import fused_qkv

pytestmark = pytest.mark.usefixtures(launched.__name__, small_parts.__name__)

FLAT = Case(
    size=SIZE, spread=Spread.FLAT, numbers=Numbers.BF16, rule="adam", clips=False, wrapping=Wrapping.OVERLAP
)  # fmt: skip
CASES = [
    FLAT,
    replace(FLAT, numbers=Numbers.FP32, wrapping=Wrapping.PLAIN),
    replace(FLAT, numbers=Numbers.REMAINDER, spread=Spread.REPLICATED),
    replace(FLAT, numbers=Numbers.FP16, spread=Spread.WHOLE, rule="muon", wrapping=Wrapping.WRAPPED),
]
PLACES: dict[str, dict[str, Any]] = {"device": {}, "half on the host": HALF, "host": ALL}


def train(comm: Comm, case: Case, fields: dict[str, Any]) -> Trained:
    """A head of one rank is clipped after each step, also after the one that overflowed."""
    model, optimizer = built(case, comm, **fields)
    if isinstance(comm, DeferredComm):
        launch_rules_(optimizer)
    qkv = dict(model.named_parameters())[next(name for name, _ in model.named_parameters() if "qkv" in name)]
    clip = QKClip(optimizer, [fused_qkv(qkv, num_heads=2, head_dim=2)], threshold=100.0)
    results = []
    for step in range(STEPS):
        results.append(iterate(model, optimizer, step, comm))
        assert clip([torch.tensor([3.0, 250.0 if comm.rank else 2.0])]) == 250.0
    return outcome(model, optimizer, results)


def on_device(one: DeferredRank, case: Case, fields: dict[str, Any]) -> Trained:
    return train(one.comm, case, fields)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_order_gives_the_bits_of_a_cpu(case: Case, place: str) -> None:
    expected = run_threads(SIZE, partial(train, case=case, fields={}))
    assert [result[0] for result in expected[0].results] == [step != BAD_STEP for step in range(STEPS)]
    for seed in range(NUM_ORDERS):
        found = run_deferred(SIZE, partial(on_device, case=case, fields=PLACES[place]), seed=seed)
        assert all(map(equal, found, expected)), f"seed {seed}"
