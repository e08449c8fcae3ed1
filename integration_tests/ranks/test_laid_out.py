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
from laid_out_ranks import config, train_fsdp, train_whole
from processes import FSDP2_RUNS, Job, run_jobs
from torch import Tensor

from opt_config import OptimizerConfig
from opt_kernels.hooks import CautiousDecay, CentralizeGradient, ClipUpdateRms, RelativeUpdate

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
    reported: str  # by the plan


ONE, FOUR = (
    "one rank gathers, computes and returns each, balanced by cost",
    "all ranks gather them, compute all, keep th",
)
CASES = {
    "muon, fsdp": Case(MUON, OBLONG, fsdp, f"4 ranks (0): {ONE}"),
    "adamuon, fsdp": Case(ADAMUON, OBLONG, fsdp, f"4 ranks (0): {ONE}"),
    "soap, fsdp": Case(SOAP, UNEVEN, fsdp, f"4 ranks (0): {ONE}"),
    "soap of parts, fsdp": Case(SOAP_OF_PARTS, UNEVEN, fsdp, f"4 ranks (0): {ONE}"),
    "soap of parts, fsdp x tp": Case(SOAP_OF_PARTS, EVEN, fsdp_x_tp, f"2 x 2 ranks (tp, dp): {ONE}"),
    "normuon, hsdp": Case(NORMUON, OBLONG, hsdp, f"2 ranks (shard): {ONE}"),
    "namo, fsdp": Case(NAMO, OBLONG, fsdp, f"4 ranks (0): {ONE}"),
    "namo, hsdp": Case(NAMO, UNEVEN, hsdp, f"2 ranks (shard): {ONE}"),
    "namo, fsdp x tp": Case(NAMO, EVEN, fsdp_x_tp, f"2 x 2 ranks (tp, dp): {ONE}"),
    "namo, tp": Case(NAMO, OBLONG, tp, f"4 ranks (tp): {FOUR}"),
    "namo, an owner without rows": Case(NAMO, SMALL, fsdp, f"4 ranks (0): {ONE}"),
    "soap, hsdp": Case(SOAP, UNEVEN, hsdp, f"2 ranks (shard): {ONE}"),
    "muon, fsdp x tp": Case(DUPLICATED, EVEN, fsdp_x_tp, f"2 x 2 ranks (tp, dp): {ONE}"),
    "muon, rows twice": Case(MUON, OBLONG, two_axes, f"2 x 2 ranks (outer, inner): {ONE}"),
    "normuon, tp": Case(NORMUON, OBLONG, tp, f"4 ranks (tp): {FOUR}"),
    "soap, tp": Case(SOAP, UNEVEN, tp, f"4 ranks (tp): {ONE}"),
    "soap, an owner without rows": Case(SOAP, SMALL, fsdp, f"4 ranks (0): {ONE}"),
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


MODELS = {
    "adamw": config("adam", clip_grad=0.1),
    "muon": config("muon", clip_grad=0.1),
    "adaptive muon, distributed": config("adaptive_muon", clip_grad=0.1, muon_tp_mode="distributed"),
}
if not FSDP2_RUNS:
    MODELS = {}


class Four(NamedTuple):
    """The results of four ranks."""

    models: dict[str, list[Any]]
    trained: dict[str, list[Trained]]
    uninterrupted: dict[str, list[dict[str, Tensor]]]
    resumed: dict[str, list[dict[str, Tensor]]]  # over tensor-parallel ranks
    paths: dict[str, str]
    by_attributes: dict[str, list[dict[int, dict[str, Tensor]]]]
    blocks: dict[str, list[list[Trained]]]  # by rule, layout and rank
    apart: list[str]
    hooked: dict[str, list[list[Trained]]]  # by rule, layout and rank


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Four:
    paths = {name: str(tmp_path_factory.mktemp("checkpoints") / name) for name in SAVED}
    jobs = {name: Job(train, case[:3]) for name, case in CASES.items()}
    jobs |= {f"model, {name}": Job(train_fsdp, (rule,)) for name, rule in MODELS.items()}
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
    made = run_jobs(4, jobs)
    return Four(
        {name: made[f"model, {name}"] for name in MODELS},
        {name: made[name] for name in CASES},
        {name: made[f"save {name}"] for name in SAVED},
        {name: made[f"load {name}"] for name in SAVED},
        paths,
        {name: made[f"attributes, {name}"] for name in BY_ATTRIBUTES},
        {name: [made[f"blocks, {name}, {lay_out.__name__}"] for lay_out in BLOCKS] for name in BLOCKWISE},
        made["apart"],
        {name: [made[f"hooks, {name}, {lay_out.__name__}"] for lay_out in HOOKED_LAYOUTS] for name in HOOKED},
    )


# Ranks' means are summed in another order than one batch: a few 2**-24 of a gradient, which Adam and Muon turn into the
# same share of lr = 0.02, more where elements are small relative to the others.
# AdaptiveMuon divides each element of an update by its own size; gradients, and their norms, follow the weights.
ATOL, NORM_RTOL = (
    {"adam": 2e-5, "muon": 2e-5, "adaptive_muon": 2e-4},
    {"adam": 1e-5, "muon": 1e-5, "adaptive_muon": 1e-4},
)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_torch_sharded_takes_the_step_of_the_whole_model(name: str, four: Four) -> None:
    """Elementwise rules on local shards, Muon on gathered matrices; norms count each element once."""
    rule = MODELS[name]
    want = train_whole(rule)
    for got in four.models[name]:
        for param, weight in want.weights.items():
            torch.testing.assert_close(got.weights[param], weight, rtol=1e-4, atol=ATOL[rule.optimizer])
        torch.testing.assert_close(got.norms, want.norms, rtol=NORM_RTOL[rule.optimizer], atol=0)
        assert got.inf_norm == pytest.approx(want.inf_norm, rel=1e-4)
    assert sum(rank.state_bytes for rank in four.models[name]) == want.state_bytes


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


@pytest.mark.parametrize("name", CASES)
def test_the_plan_reports_who_computes(name: str, four: Four) -> None:
    for rank in four.trained[name]:
        assert CASES[name].reported in rank.plan


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
