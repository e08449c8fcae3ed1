"""Over gloo processes: parameters that are DTensors, over one or two mesh axes, evenly sharded or not."""

from typing import Any, NamedTuple

import pytest
import torch
from cut_ranks import (
    EVEN,
    OBLONG,
    SMALL,
    UNEVEN,
    LayOut,
    Shapes,
    Trained,
    clip_attention,
    fsdp,
    fsdp_x_tp,
    hsdp,
    replicas_of_tp,
    resume,
    resume_by_attributes,
    save_apart,
    tp,
    tp_on_a_part_of_the_mesh,
    train,
    train_and_save,
    two_axes,
)
from processes import Job, run_jobs
from torch import Tensor

from opt_config import OptimizerConfig
from opt_kernels.hooks import CautiousDecay, CentralizeGradient, ClipUpdateRms, RelativeUpdate


def config(rule: str, **changes: Any) -> OptimizerConfig:
    """Not clipped: norms are summed in another order."""
    base = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
    return OptimizerConfig(optimizer=rule, **{**base, **changes})


SOAP_OF_PARTS = config("soap", soap_split_qkv=True)
SOAP, MUON = config("soap"), config("muon", muon_tp_mode="blockwise")  # a mode of tensor parallelism only
DUPLICATED = config("muon", muon_tp_mode="duplicated")
ADAMUON = config("adaptive_muon", muon_tp_mode="duplicated")
NORMUON = config("adaptive_muon", muon_tp_mode="duplicated", adaptive_muon_moment2_method="normuon")
NAMO = config("adaptive_muon", muon_tp_mode="duplicated", adaptive_muon_moment2_method="namo")


class Case(NamedTuple):
    config: OptimizerConfig
    shapes: Shapes
    lay_out: LayOut


CASES = {
    "muon, fsdp": Case(MUON, OBLONG, fsdp),
    "adamuon, fsdp": Case(ADAMUON, OBLONG, fsdp),
    "soap, fsdp": Case(SOAP, UNEVEN, fsdp),
    "soap of parts, fsdp": Case(SOAP_OF_PARTS, UNEVEN, fsdp),
    "soap of parts, fsdp x tp": Case(SOAP_OF_PARTS, EVEN, fsdp_x_tp),
    "normuon, hsdp": Case(NORMUON, OBLONG, hsdp),
    "namo, fsdp": Case(NAMO, OBLONG, fsdp),
    "namo, hsdp": Case(NAMO, UNEVEN, hsdp),
    "namo, fsdp x tp": Case(NAMO, EVEN, fsdp_x_tp),
    "namo, tp": Case(NAMO, OBLONG, tp),
    "namo, an owner without rows": Case(NAMO, SMALL, fsdp),
    "soap, hsdp": Case(SOAP, UNEVEN, hsdp),
    "muon, fsdp x tp": Case(DUPLICATED, EVEN, fsdp_x_tp),
    "muon, rows twice": Case(MUON, OBLONG, two_axes),
    "normuon, tp": Case(NORMUON, OBLONG, tp),
    "soap, tp": Case(SOAP, UNEVEN, tp),
    "soap, an owner without rows": Case(SOAP, SMALL, fsdp),
}
JOINT = config("adaptive_muon", muon_tp_mode="distributed", adaptive_muon_moment2_method="normuon")
BY_ATTRIBUTES = {
    "soap": (SOAP, SOAP),
    "soap of parts": (SOAP_OF_PARTS, SOAP_OF_PARTS),
    "muon": (DUPLICATED, DUPLICATED),
    "normuon, gathered to joint": (NORMUON, JOINT),
    "namo": (NAMO, NAMO),
}
BLOCKWISE = {
    name: config("adaptive_muon", muon_tp_mode="blockwise", adaptive_muon_moment2_method=name)
    for name in ("normuon", "namo")
}
BLOCKS = (replicas_of_tp, fsdp_x_tp)
HOOKED = {"adam": config("adam"), "muon": DUPLICATED}
HOOKED_LAYOUTS = (fsdp, hsdp, fsdp_x_tp, tp, replicas_of_tp, tp_on_a_part_of_the_mesh, two_axes)
HOOKS = (CautiousDecay(), ClipUpdateRms(0.05), RelativeUpdate(), CentralizeGradient())
SAVED = {
    "soap": (SOAP, UNEVEN, fsdp),
    "soap of parts": (SOAP_OF_PARTS, UNEVEN, fsdp),
    "normuon": (NORMUON, OBLONG, hsdp),
    "adamuon": (ADAMUON, OBLONG, tp),
    "namo": (NAMO, OBLONG, fsdp),
    "adam, a vector outside the tensor-parallel plan": (config("adam"), EVEN, fsdp_x_tp),
    "muon, a vector outside the tensor-parallel plan": (DUPLICATED, EVEN, fsdp_x_tp),
    "adam, replicas of tensor parallelism": (config("adam"), EVEN, tp_on_a_part_of_the_mesh),
}


CLIPPED: dict[str, tuple[Shapes, LayOut]] = {
    "fsdp": (UNEVEN, fsdp),  # rows of heads are cut, and the last rank has fewer
    "hsdp": (EVEN, hsdp),
    "tp": (EVEN, tp),
    "fsdp x tp": (EVEN, fsdp_x_tp),
}


class Four(NamedTuple):
    """The results of four ranks."""

    trained: dict[str, list[Trained]]
    uninterrupted: dict[str, list[dict[str, Tensor]]]
    resumed: dict[str, list[dict[str, Tensor]]]  # over tensor-parallel ranks
    paths: dict[str, str]
    by_attributes: dict[str, list[dict[int, dict[str, Tensor]]]]
    blocks: dict[str, list[list[Trained]]]  # by rule, layout and rank
    apart: list[str]
    clipped: dict[str, list[dict[str, Tensor]]]  # by layout
    hooked: dict[str, list[list[Trained]]]  # by rule, layout and rank


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Four:
    paths = {name: str(tmp_path_factory.mktemp("checkpoints") / name) for name in SAVED}
    jobs = {name: Job(train, case) for name, case in CASES.items()}
    jobs |= {f"save {name}": Job(train_and_save, (*saved, paths[name])) for name, saved in SAVED.items()}
    jobs |= {f"load {name}": Job(resume, (*saved[:2], tp, paths[name])) for name, saved in SAVED.items()}
    jobs |= {
        f"blocks, {name}, {lay_out.__name__}": Job(train, (rule, EVEN, lay_out))
        for name, rule in BLOCKWISE.items()
        for lay_out in BLOCKS
    }
    jobs |= {
        f"hooks, {name}, {lay_out.__name__}": Job(train, (rule, EVEN, lay_out, HOOKS))
        for name, rule in HOOKED.items()
        for lay_out in HOOKED_LAYOUTS
    }
    jobs["apart"] = Job(save_apart, (str(tmp_path_factory.mktemp("apart") / "checkpoint"),))
    for name, (saved, loaded) in BY_ATTRIBUTES.items():
        path = str(tmp_path_factory.mktemp("by_attributes") / "checkpoint")
        jobs[f"attributes, {name}"] = Job(resume_by_attributes, (saved, loaded, EVEN, path))
    jobs |= {f"clipped, {name}": Job(clip_attention, case) for name, case in CLIPPED.items()}
    made = run_jobs(4, jobs)
    return Four(
        {name: made[name] for name in CASES},
        {name: made[f"save {name}"] for name in SAVED},
        {name: made[f"load {name}"] for name in SAVED},
        paths,
        {name: made[f"attributes, {name}"] for name in BY_ATTRIBUTES},
        {name: [made[f"blocks, {name}, {lay_out.__name__}"] for lay_out in BLOCKS] for name in BLOCKWISE},
        made["apart"],
        {name: made[f"clipped, {name}"] for name in CLIPPED},
        {name: [made[f"hooks, {name}, {lay_out.__name__}"] for lay_out in HOOKED_LAYOUTS] for name in HOOKED},
    )


@pytest.mark.parametrize("name", CASES)
def test_cut_matrices_take_the_step_of_whole_ones(name: str, four: Four) -> None:
    """Bit-equal: gradients are equal, and the same matrix goes through the same products on any rank."""
    want = train(*CASES[name][:2])
    for got in four.trained[name]:
        for param in ("column.weight", "row.weight", "qkv.weight"):
            assert torch.equal(got.weights[param], want.weights[param])
        # Adam on other runs of elements: in the lanes of a vector, or left over.
        torch.testing.assert_close(got.weights["vector.weight"], want.weights["vector.weight"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-6, atol=0)


def test_of_what_fsdp_cuts_all_ranks_together_keep_the_state_of_one(four: Four) -> None:
    for name in ("muon, fsdp", "adamuon, fsdp", "namo, fsdp", "soap, fsdp", "soap, tp"):
        alone = train(*CASES[name][:2])
        vector = 2 * 9 * 3 * (name == "soap, tp")  # Adam's, which tensor parallelism repeats on the other three
        kept = sum(rank.state_numel for rank in four.trained[name])
        assert kept == alone.state_numel + vector
        planned = sum(rank.planned_bytes for rank in four.trained[name])  # equal shares, rounded down by state
        assert 4 * kept - 4 * 8 * 3 <= planned <= 4 * kept


@pytest.mark.parametrize("rule", BLOCKWISE)
def test_blocks_of_tensor_parallelism_stay_blocks_where_fsdp_cuts_them_further(rule: str, four: Four) -> None:
    """Row statistics and norms are still those of the whole matrix: summed over the owners of the blocks."""
    for kept, cut in zip(*four.blocks[rule], strict=True):
        for param in ("column.weight", "row.weight", "qkv.weight"):
            assert torch.equal(cut.weights[param], kept.weights[param])
    whole = train(BLOCKWISE[rule], EVEN).weights
    assert not torch.allclose(four.blocks[rule][0][0].weights["row.weight"], whole["row.weight"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_run_goes_on_where_matrices_are_cut_otherwise_or_whole(name: str, four: Four) -> None:
    rule, shapes, _ = SAVED[name]
    alone = resume(rule, shapes, None, four.paths[name])
    for param, want in train(rule, shapes).weights.items():
        for got in (*four.uninterrupted[name], *four.resumed[name], alone):
            torch.testing.assert_close(got[param], want, rtol=1e-6, atol=1e-7)


def test_replicas_that_have_come_apart_are_refused_on_every_rank(four: Four) -> None:
    for message in four.apart:
        assert "column.weight: Invalid access pattern: rank 0" in message
        assert "their values differ" in message


@pytest.mark.parametrize("name", BY_ATTRIBUTES)
def test_a_tensor_parallel_run_goes_on_at_another_tensor_parallel_size(name: str, four: Four) -> None:
    """Matrix state that one rank has, that all have, or that lies in parts, is saved as that of the whole."""
    want = train(BY_ATTRIBUTES[name][0], EVEN).weights
    for rank in four.by_attributes[name]:
        for weights in rank.values():
            for param, weight in weights.items():
                torch.testing.assert_close(weight, want[param], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rule", HOOKED)
def test_norms_and_row_means_of_hooks_are_those_of_whole_parameters(four: Four, rule: str) -> None:
    wanted = train(HOOKED[rule], EVEN, None, HOOKS)
    for lay_out, by_rank in zip(HOOKED_LAYOUTS, four.hooked[rule], strict=True):
        for name, weight in wanted.weights.items():
            for rank in by_rank:
                close = torch.allclose(rank.weights[name], weight, rtol=2e-5, atol=2e-5)
                assert close, f"{lay_out.__name__}, {name}"


@pytest.mark.parametrize("name", CLIPPED)
def test_heads_of_dtensors_are_scaled_by_qk_clip_as_in_one_process(name: str, four: Four) -> None:
    expected = clip_attention(CLIPPED[name][0], None)
    before = clip_attention(CLIPPED[name][0], None, clips=False)
    assert not any(torch.equal(expected[part], before[part]) for part in ("qkv", "column"))
    for found in four.clipped[name]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[part], expected[part]) for part in expected)
