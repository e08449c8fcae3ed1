"""Over gloo processes: parameters that are DTensors, over one or two mesh axes, evenly sharded or not."""

from typing import Any

import cut_ranks as ranks
import pytest
import torch
from cut_ranks import (
    EVEN,
    FUSED,
    FUSED_EVEN,
    OBLONG,
    SMALL,
    UNEVEN,
    fsdp,
    fsdp_x_tp,
    hsdp,
    replicas_of_tp,
    tp,
    train,
    two_axes,
    two_meshes,
)
from processes import FSDP2_RUNS, Job, run_jobs
from tiers import NIGHT
from torch import Tensor

from opt_config import OptimizerConfig
from opt_kernels.hooks import CautiousDecay, CentralizeGradient, ClipUpdateRms, RelativeUpdate

pytestmark = pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
MATRICES = ("column.weight", "row.weight", "qkv.weight")
VECTOR = "vector.weight"


def config(rule: str, **changes: Any) -> OptimizerConfig:
    """Not clipped: norms are summed in another order."""
    base = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
    return OptimizerConfig(optimizer=rule, **{**base, **changes})


def adaptive(method: str, mode: str = "duplicated") -> OptimizerConfig:
    return config("adaptive_muon", muon_tp_mode=mode, adaptive_muon_moment2_method=method)


ADAM = config("adam")
NARROW = config("adam", use_precision_aware_optimizer=True, exp_avg_sq_dtype=torch.bfloat16)
SOAP = config("soap")
SOAP_OF_PARTS = config("soap", soap_split_qkv=True)
MUON = config("muon", muon_tp_mode="blockwise")  # a mode of tensor parallelism only
DUPLICATED = config("muon", muon_tp_mode="duplicated")
LEVELLED = config("muon", muon_tp_mode="duplicated", muon_pre_norm="rows", muon_post_norm="cols_rows")
NUCLEAR = config("muon", muon_nuclear_scale=True)
MUOWN = config("muown")
ADAMUON = adaptive("adamuon")
NORMUON = adaptive("normuon")
NAMO = adaptive("namo")

CASES: dict[str, tuple[OptimizerConfig, ranks.Shapes, ranks.LayOut]] = {
    "muon, fsdp": (MUON, OBLONG, fsdp),
    "adamuon, fsdp": (ADAMUON, OBLONG, fsdp),
    "soap, fsdp": (SOAP, UNEVEN, fsdp),
    "soap of parts, fsdp": (SOAP_OF_PARTS, UNEVEN, fsdp),
    "soap of parts, fsdp x tp": (SOAP_OF_PARTS, EVEN, fsdp_x_tp),
    "muon, two meshes": (MUON, UNEVEN, two_meshes),  # owners raised KeyError, and their peers waited for ever
    "muon with norms, fsdp x tp": (LEVELLED, EVEN, fsdp_x_tp),
    "muon with a nuclear scale, hsdp": (NUCLEAR, OBLONG, hsdp),
    "muown, fsdp": (MUOWN, UNEVEN, fsdp),
    "muown, hsdp": (MUOWN, OBLONG, hsdp),
    "muown, fsdp x tp": (MUOWN, EVEN, fsdp_x_tp),
    "muown, tp": (MUOWN, UNEVEN, tp),
    "muown, rows in turn, attributes": (MUOWN, FUSED_EVEN, ranks.tp_by_attributes),
    "normuon, hsdp": (NORMUON, OBLONG, hsdp),
    "namo, fsdp": (NAMO, OBLONG, fsdp),
    "namo, hsdp": (NAMO, UNEVEN, hsdp),
    "namo, fsdp x tp": (NAMO, EVEN, fsdp_x_tp),
    "namo, tp": (NAMO, OBLONG, tp),
    "namo, an owner without rows": (NAMO, SMALL, fsdp),
    "soap, hsdp": (SOAP, UNEVEN, hsdp),
    "muon, fsdp x tp": (DUPLICATED, EVEN, fsdp_x_tp),
    "muon, rows twice": (MUON, OBLONG, two_axes),
    "normuon, tp": (NORMUON, OBLONG, tp),
    "soap, tp": (SOAP, UNEVEN, tp),
    "soap, an owner without rows": (SOAP, SMALL, fsdp),
    "muon, rows in turn, fsdp": (MUON, FUSED, fsdp),
    "muon, rows in turn, tp": (DUPLICATED, FUSED, tp),
    "muon, rows in turn, fsdp x tp": (DUPLICATED, FUSED_EVEN, fsdp_x_tp),
    "muon, rows in turn, attributes": (DUPLICATED, FUSED_EVEN, ranks.tp_by_attributes),
    "soap, rows in turn, fsdp": (SOAP, FUSED, fsdp),
    "narrow averages, fsdp": (NARROW, UNEVEN, fsdp),
}
BLOCKWISE = {name: adaptive(name, "blockwise") for name in ("normuon", "namo")}
LAYOUTS = (fsdp, hsdp, fsdp_x_tp, tp, replicas_of_tp, ranks.tp_on_a_part_of_the_mesh, two_axes)
HOOKED = [(rule, lay_out) for rule in (ADAM, DUPLICATED) for lay_out in LAYOUTS][:: 1 if NIGHT else 2]
HOOKS = (CautiousDecay(), ClipUpdateRms(0.05), RelativeUpdate(), CentralizeGradient())
# In the first, rows of heads are cut, and the last rank has fewer.
CLIPPED = {"fsdp": (UNEVEN, fsdp), "hsdp": (EVEN, hsdp), "tp": (EVEN, tp), "fsdp x tp": (EVEN, fsdp_x_tp)}


AVERAGED = OptimizerConfig(optimizer="schedule_free", lr=0.1, weight_decay=0.0, clip_grad=0.0)
BESIDE = {"eval and train": AVERAGED, "a reload": ADAM, "a load": config("adam", bf16=True), "a step": ADAM}
BESIDE |= {"a move": ADAM, "a move of matrices": DUPLICATED, "a move of bf16": config("muon", bf16=True)}


@pytest.fixture(scope="module")
def four() -> dict[Any, list[Any]]:
    """The results of four ranks, by job."""
    jobs = {name: Job(train, case) for name, case in CASES.items()}
    for name, rule in BLOCKWISE.items():
        jobs |= {f"blocks {name} {at.__name__}": Job(train, (rule, EVEN, at)) for at in (replicas_of_tp, fsdp_x_tp)}
    for rule, at in HOOKED:
        jobs[f"hooks {rule.optimizer} {at.__name__}"] = Job(train, (rule, EVEN, at, HOOKS))
    jobs |= {f"clipped {name}": Job(ranks.clip_attention, case) for name, case in CLIPPED.items()}
    jobs |= {f"beside {write}": Job(ranks.write_beside_steps, (rule, write)) for write, rule in BESIDE.items()}
    jobs |= {f"unmoved {write}": Job(ranks.write_beside_steps, (BESIDE[write], "nothing")) for write in BESIDE}
    jobs["built late"] = Job(ranks.step_after_a_forward)
    jobs["clipped twice"] = Job(ranks.clip_twice)
    jobs["two hops"] = Job(ranks.train_in_two_hops, (MUON, EVEN, fsdp))
    return run_jobs(4, jobs)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "", **tolerance: float) -> None:
    for name, weight in got.items():
        torch.testing.assert_close(weight, want[name], **tolerance, msg=f"{what} {name}")


@pytest.mark.parametrize("name", CASES)
def test_cut_matrices_take_the_step_of_whole_ones(name: str, four: Any) -> None:
    """Bit-equal: gradients are equal, and the same matrix goes through the same products on any rank."""
    want = train(*CASES[name][:2])
    for got in four[name]:
        assert all(torch.equal(got.weights[param], want.weights[param]) for param in want.weights if param != VECTOR)
        # Adam on other runs of elements: in the lanes of a vector, or left over.
        assert_close(got.weights, want.weights, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-6, atol=0)


def test_two_hops_have_the_bits_of_one_process(four: Any) -> None:
    want = train(MUON, EVEN)
    for got in four["two hops"]:
        assert all(torch.equal(got.weights[param], want.weights[param]) for param in MATRICES)


def test_fsdp_ranks_together_hold_the_state_of_one_process(four: Any) -> None:
    for name in ("muon, fsdp", "adamuon, fsdp", "namo, fsdp", "soap, fsdp", "soap of parts, fsdp", "soap, tp"):
        alone = train(*CASES[name][:2])
        vector = 2 * 9 * 3 * (name == "soap, tp")  # Adam's, which tensor parallelism repeats on the other three
        kept = sum(rank.state_numel for rank in four[name])
        assert kept == alone.state_numel + vector
        planned = sum(rank.planned_bytes for rank in four[name])  # equal shares, rounded down by state
        assert 4 * kept - 4 * 8 * 3 <= planned <= 4 * kept


@pytest.mark.parametrize("rule", BLOCKWISE)
def test_tensor_parallel_blocks_survive_further_cuts_by_fsdp(rule: str, four: Any) -> None:
    """Row statistics and norms are still those of the whole matrix: summed over the owners of the blocks."""
    blocks = four[f"blocks {rule} replicas_of_tp"]
    for kept, cut in zip(blocks, four[f"blocks {rule} fsdp_x_tp"], strict=True):
        assert all(torch.equal(cut.weights[param], kept.weights[param]) for param in MATRICES)
    whole = train(BLOCKWISE[rule], EVEN).weights
    assert not torch.allclose(blocks[0].weights["row.weight"], whole["row.weight"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rule", "lay_out"), HOOKED, ids=lambda value: getattr(value, "optimizer", value))
def test_hooks_use_norms_and_row_means_of_whole_parameters(four: Any, rule: Any, lay_out: Any) -> None:
    wanted = train(rule, EVEN, None, HOOKS).weights
    for rank in four[f"hooks {rule.optimizer} {lay_out.__name__}"]:
        assert_close(rank.weights, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CLIPPED)
def test_qk_clip_scales_heads_of_dtensors_as_in_one_process(name: str, four: Any) -> None:
    expected = ranks.clip_attention(CLIPPED[name][0], None)
    before = ranks.clip_attention(CLIPPED[name][0], None, clips=False)
    assert not any(torch.equal(expected[part], before[part]) for part in ("qkv.weight", "column.weight"))
    for found in four[f"clipped {name}"]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[part], expected[part]) for part in expected)


@pytest.mark.parametrize("write", BESIDE)
def test_fsdp2_trains_from_weights_written_while_gathered(write: str, four: Any) -> None:
    """The root kept the copies that an evaluation had gathered, and was trained from these: 0.2 off."""
    want = ranks.write_beside_steps(BESIDE[write], write)
    for got in four[f"beside {write}"]:
        is_bf16 = BESIDE[write].precision.params is torch.bfloat16
        assert_close(got, want, write, rtol=1e-4, atol=1e-2 if is_bf16 else 1e-5)


def test_fsdp2_has_the_same_bits_if_it_is_moved_between_steps(four: Any) -> None:
    for name in (name for name in BESIDE if name.startswith("a move")):
        for got, want in zip(four[f"beside {name}"], four[f"unmoved {name}"], strict=True):
            assert all(torch.equal(got[param], want[param]) for param in want)


def test_gradients_written_after_a_norm_are_measured_again(four: Any) -> None:
    """torch counted the writes of a DTensor, and we looked at those of its local part: ten times too far a step."""
    for before, after in four["clipped twice"]:
        assert after == pytest.approx(100 * before, rel=1e-5)


def test_an_optimizer_of_gathered_copies_is_refused(four: Any) -> None:
    """The first step raised "setStorage: sizes ... out of bounds for storage of size 0"."""
    for message in four["built late"]:
        assert "was replaced in the model after the optimizer was built, as by fully_shard" in message
