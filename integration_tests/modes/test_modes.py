"""Every combination of modes at 1 to 4 ranks, wrapped or not: the weights of one process, which move as in fp32;
and the planned bytes; or a refusal with a message. Saved in any numbers and moments, a run goes on in any other.

Ranks are threads. Cases hold every pair of values; at night every four values. Gradients are known to the bit (see
`parity.grads_of`), so the weights of a mode depend on the number of ranks only where the order of a sum does. They are
equal to the bit with an elementwise rule, a mean that is exact (not over three ranks), and no clip coefficient, which
comes from a norm. Otherwise they stay within `allowed`.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from modes import (
    AXES,
    IN_FP8,
    MATRIX_RULES,
    REFUSALS,
    SHAPES,
    Values,
    allocated,
    build,
    config_of,
    every_mode,
    make_net,
    name_of,
    plain,
    refused,
    state_of,
    train,
)
from parity import Wrapping, norms_while_training, roles_over, sharded_state
from tiers import NIGHT, covering, sampled
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import ConfigError, DistributedDataParallelConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Comm
from opt_kernels.quantized import quantized
from opt_stack import get_optimizer

# How far an update is from that of fp32 moments, as a fraction of it (fp8 is rounded stochastically, by up to a whole
# step); and a main value, which is rounded in each step.
MOMENTS = {"fp32": 0.0, "bf16": 2.0**-8, "scaled fp16": 2.0**-10, "scaled fp8": 2.0**-3}
MAINS = {"bf16, fp16 mains": 2.0**-11, "bf16, 24-bit mains": 2.0**-16}
STEPS = 3
# One more rounding of a stored weight, relative to it; 0 for fp32.
WEIGHT_ROUNDING = {"fp32": 0.0, "fp16": 2.0**-10, **dict.fromkeys(IN_FP8, 2.0**-3)}
# One more rounding of a moment, relative to the update.
MOMENT_ROUNDING = {"fp32": 0.0, "bf16": 2.0**-7, "scaled fp16": 2.0**-9, "scaled fp8": 2.0**-2}
# Of fp32 weights with fp32 moments. Between a mean of three ranks, or another order of a norm, and one process lie
# a few fp32 roundings of the gradient, 2**-23 relative each. Updates are of size lr whatever the gradient, and move by
# that fraction. SOAP's turn with the eigenvectors of its factors, by the same fraction over the gap between two
# eigenvalues, which is 1e-3 of the largest in such matrices. AdaptiveMuon divides each element of an update by its own
# size, so that small ones move more; SOAPMuon makes singular values equal, small ones too.
RULE = {"adaptive_muon": 1e-4, "soap": 5e-4, "soap_muon": 1e-3}


def allowed(case: Values) -> tuple[float, float, float]:
    """How far a weight may be from that of one process: rtol, atol, and the mean of the absolute differences.

    The fp32 roundings of a mean over three ranks and of a norm, and the roundings that these turn over. Few weights
    differ: roundings move a weight only at a tie. Gradients summed over three ranks in bf16 are rounded to it; matrix
    rules then turn updates of small elements.
    """
    if is_exact(case):
        return 0.0, 0.0, 0.0
    moved = STEPS * config_of(case).lr
    base = RULE.get(case["rule"], 2e-5)
    rtol = WEIGHT_ROUNDING.get(case["numbers"], 2.0**-7)
    atol = base + MOMENT_ROUNDING[case["moments"]] * moved
    if case["numbers"] == "bf16, bf16 gradients" and case["world"] == "3":
        return rtol, atol + (2 * moved if case["rule"] in MATRIX_RULES else 2.0**-7 * moved), 0.02 * moved
    return 2e-5 + rtol, atol, base


def is_exact(case: Values) -> bool:
    return case["rule"] not in MATRIX_RULES and case["world"] != "3" and case["clipping"] == "free"


def overlaps_gathers(case: Values) -> bool:
    return case["wrapping"] == Wrapping.OVERLAP.value and case["sharding"] != "replicated"


def every_case() -> Iterator[Values]:
    """Every mode that is not refused, at every number of ranks, wrapped or not, with clipping and without."""
    for mode, world, wraps, clipping in itertools.product(every_mode(), "1234", Wrapping, ("clipped", "free")):
        case = {**mode, "world": world, "wrapping": wraps.value, "clipping": clipping}
        evaluates_others = case["rule"] == "schedule_free" and overlaps_gathers(case)
        if not evaluates_others and not refused(case):
            yield case


def alone(case: Values) -> Values:
    """The same mode in one process, not wrapped."""
    return {**case, "world": "1", "sharding": "replicated", "wrapping": Wrapping.PLAIN.value}


class Trained(NamedTuple):
    start: dict[str, Tensor]  # fp32 main values before the first step, and after the last, of one process
    mains: dict[str, Tensor]
    weights: dict[str, Tensor]  # fp32; of parameters in fp8 their dequantised values
    codes: dict[str, Tensor]
    norms: list[float]
    held_bytes: int  # of main values and state
    planned_bytes: int


def train_on(case: Values, comm: Comm, start: Mapping[str, Tensor] | None = None) -> Trained:
    """`start`: the weights to begin with."""
    clip = 3.0 if case["clipping"] == "clipped" else 0.0
    wrapping = Wrapping(case["wrapping"])
    gathers = overlaps_gathers(case)
    config = config_of(case, clip_grad=clip, overlap_param_gather=gathers)
    roles = roles_over(comm)
    net = make_net(config)
    if start is not None:
        net.load_state_dict(start)
    model: nn.Module = net
    if wrapping is not Wrapping.PLAIN:
        overlaps = wrapping is Wrapping.OVERLAP
        sharded = case["sharding"] != "replicated"
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.main_grads_dtype is torch.float32,
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=gathers,
            fp8_param_gather=sharded and config.fp8_recipe is not None,
            bucket_size=1500 if overlaps else None,
        )
        model = DistributedDataParallel(ddp, net, groups=roles, optimizer_config=config)
    optimizer = get_optimizer(config, [model], {}, pg_collection=roles)
    mains = lambda: {n: s["fp32_param"] for n, s in state_of(net, optimizer).items()} if comm.size == 1 else {}
    before = mains()
    norms = norms_while_training(model, optimizer, range(STEPS), comm, SHAPES)
    params = dict(net.named_parameters())
    codes = {name: stored.codes.clone() for name, param in params.items() if (stored := quantized(param)) is not None}
    weights = {name: param.detach().float().clone() for name, param in params.items()}
    return Trained(before, mains(), weights, codes, norms, allocated(optimizer), optimizer.plan.state_bytes(comm.rank))


CASES = covering(list(every_case()), dict.items, strength=4 if NIGHT else 2)


@cache
def by_one_process(mode: tuple[tuple[str, str], ...]) -> Trained:
    return train_on(dict(mode), Alone())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ranks_have_the_weights_and_fp32_mains_of_one_process(case: Values) -> None:
    expected = by_one_process(tuple(alone(case).items()))
    (rtol, atol, mean) = allowed(case)
    for found in run_threads(int(case["world"]), partial(train_on, case)):
        for name, want in expected.weights.items():
            torch.testing.assert_close(found.weights[name], want, rtol=rtol, atol=atol)
        far = [(found.weights[name] - want).abs().flatten() for name, want in expected.weights.items()]
        assert torch.cat(far).mean() <= mean
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)
        assert found.held_bytes == pytest.approx(found.planned_bytes, rel=0.01)
        if is_exact(case):
            assert all(torch.equal(codes, expected.codes[name]) for name, codes in found.codes.items())
    wide = train_on(plain(alone(case)), Alone(), expected.start)
    for name, before in expected.start.items():
        want = wide.mains[name]
        got = expected.mains[name]
        moved = (want - before).abs().max()
        assert moved > 0, name
        far = MOMENTS[case["moments"]] * moved + STEPS * MAINS.get(case["numbers"], 0.0) * want.abs().max()
        assert (got - want).abs().max() <= far + 1e-4 * moved, name


# --- refusals, and runs that go on in other modes ---------------------------------------------------------------------

BEFORE = 3  # steps until the save
AFTER = 6  # steps in all
REFUSED = sampled([mode for mode in every_mode() if refused(mode)], dict.items)
# Every value of both axes occurs, so that each is loaded into each; by default, each mode is loaded into one other.
MODES = [
    {"rule": "adam", "numbers": numbers, "moments": moments, "sharding": "replicated", "placement": "device"}
    for numbers, moments in zip(AXES["numbers"], cycle(AXES["moments"]), strict=False)
]
PAIRS = list(itertools.product(MODES, MODES)) if NIGHT else list(zip(MODES, MODES[1:] + MODES[:1], strict=True))


@pytest.mark.parametrize("mode", REFUSED, ids=name_of)
def test_a_refused_mode_is_refused_in_one_of_its_sentences(mode: Values) -> None:
    with pytest.raises(ConfigError, match="|".join(refused(mode))):
        build(mode)


def test_every_refusal_is_among_the_cases() -> None:
    assert all(any(refusal.applies(mode) for mode in REFUSED) for refusal in REFUSALS)


@pytest.mark.parametrize(("mode", "into"), PAIRS, ids=name_of)
def test_a_run_saved_in_one_mode_goes_on_in_another(mode: Values, into: Values, tmp_path: Path) -> None:
    net, optimizer = build(mode)
    train(net, optimizer, range(BEFORE))
    save(sharded_state(net, optimizer), tmp_path / "saved")
    saved = state_of(net, optimizer)
    train(net, optimizer, range(BEFORE, AFTER))
    other, resumed = build(into)
    # If the saving run did not scale its loss, dynamic scaling starts from its initial scale.
    strict = "return_missing" if into["numbers"] == "fp16" else "raise_missing"
    loaded = load(sharded_state(other, resumed), tmp_path / "saved", dtype="cast", strict=strict).state
    resumed.load_state_dict(loaded["optimizer"])
    # Of a tensor's largest value; of an fp8 moment that is kept as its root, twice half a step.
    errors = dict.fromkeys(("exp_avg", "exp_avg_sq"), MOMENTS[into["moments"]])
    errors |= {"fp32_param": MAINS.get(into["numbers"], 0.0), "step": 0.0}
    for name, state in state_of(other, resumed).items():
        for key, error in errors.items():
            want = saved[name][key]
            torch.testing.assert_close(state[key], want, rtol=0, atol=error * want.abs().max().item())
    train(other, resumed, range(BEFORE, AFTER))
    last = state_of(net, optimizer)
    found = state_of(other, resumed)
    for name, state in last.items():
        moved = (state["fp32_param"] - saved[name]["fp32_param"]).abs().max()
        assert (found[name]["fp32_param"] - state["fp32_param"]).abs().max() <= 0.15 * moved, name  # of fp8 moments
