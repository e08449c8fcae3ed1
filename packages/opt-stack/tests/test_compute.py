"""Who computes matrices that ranks store parts of: the decision for each kind of cut, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.layout import Computes, LayoutError
from opt_kernels.matrices import TpMode
from opt_kernels.rules import AdaptiveMuonRule, MuonRule, Rule, SecondMoment, SOAPRule
from opt_paramgroups import MeshPlacement, ParamId, ParamMeta
from opt_stack import get_optimizer, get_optimizer_based_on_param_groups
from opt_stack.planning.matrices import ComputePlan, plan_compute, split_rows
from opt_stack.planning.plan import compute_lines

BLOCKWISE, DUPLICATED, DISTRIBUTED = (MuonRule(tp_mode=mode) for mode in TpMode)
NAMO = AdaptiveMuonRule(second_moment=SecondMoment.NAMO)
FSDP = MeshPlacement("dp", 4, 0)
TP = MeshPlacement("tp", 2, 0)
LAST_FSDP = MeshPlacement("dp", 4, 0, True)
COLUMNS = MeshPlacement("tp", 2, 1)


def meta(shape: tuple[int, ...] = (16, 8), *placements: MeshPlacement, name: str = "w", **fields: Any) -> ParamMeta:
    return ParamMeta(id=ParamId(0, name), shape=shape, local_shape=shape, dtype=None, placements=placements, **fields)


def plan(rule: Rule, *metas: ParamMeta, **changes: Any) -> tuple[ComputePlan, ...]:
    splits = split_rows(metas, split_qkv=changes.pop("split_qkv", True))
    given = {"tensor_parallel": 2, "team_of": {}, "splits": splits, **changes}
    return plan_compute(rule, metas, **given)


def reported(plans: Sequence[ComputePlan]) -> list[Any]:
    return [(plan.layout.computes, [axis.name for axis in plan.axes], plan.layout.kept) for plan in plans]


MARKED = {"tensor_parallel": True, "partition_dim": 0}
PART, EVERY, JOINT, OWNER = Computes
CASES = {
    "whole": (DUPLICATED, meta(), []),
    "marked, blockwise": (BLOCKWISE, meta(**MARKED), [(PART, ["tensor parallel"], 1)]),
    "marked, duplicated": (DUPLICATED, meta(**MARKED), [(EVERY, ["tensor parallel"], 0)]),
    "marked, distributed": (DISTRIBUTED, meta(**MARKED), [(JOINT, ["tensor parallel"], 1)]),
    "marked, adaptive": (AdaptiveMuonRule(muon=DUPLICATED), meta(**MARKED), [(EVERY, ["tensor parallel"], 0)]),
    "marked, soap": (SOAPRule(), meta(**MARKED), [(OWNER, ["tensor parallel"], 0)]),
    "tp, blockwise": (BLOCKWISE, meta((16, 8), TP), [(PART, ["tp"], 1)]),
    "tp, distributed": (DISTRIBUTED, meta((16, 8), TP), [(JOINT, ["tp"], 1)]),
    "tp, soap": (SOAPRule(), meta((16, 8), TP), [(OWNER, ["tp"], 0)]),
    "fsdp has no mode": (BLOCKWISE, meta((16, 8), FSDP), [(OWNER, ["dp"], 0)]),
    "hsdp": (SOAPRule(), meta((16, 8), MeshPlacement("replicate", 2, None), FSDP), [(OWNER, ["dp"], 0)]),
    "tp, namo": (replace(NAMO, muon=DUPLICATED), meta((16, 8), TP), [(EVERY, ["tp"], 0)]),
    "fsdp, namo": (NAMO, meta((16, 8), FSDP), [(OWNER, ["dp"], 0)]),
    "axes of one rank": (SOAPRule(), meta((16, 8), MeshPlacement("dp", 1, 0)), []),
    "fsdp after tp": (DISTRIBUTED, meta((16, 8), LAST_FSDP, TP), [(OWNER, ["tp", "dp"], 0)]),
    "fsdp of blocks": (BLOCKWISE, meta((16, 8), LAST_FSDP, TP), [(OWNER, ["tp", "dp"], 1)]),
    "fsdp of blocks of columns": (BLOCKWISE, meta((16, 8), FSDP, COLUMNS), [(OWNER, ["tp", "dp"], 1)]),
    "a dealt stack": (BLOCKWISE, meta((8, 16, 4), FSDP), [(PART, ["dp"], 1)]),
    "a dealt stack of cut ones": (DUPLICATED, meta((8, 16, 4), FSDP, COLUMNS), [(EVERY, ["dp", "tp"], 1)]),
}


@pytest.mark.parametrize("case", CASES)
def test_who_computes_follows_from_rule_mode_and_cuts(case: str) -> None:
    rule, matrix, expected = CASES[case]
    assert reported(plan(rule, matrix)) == expected


MODES = {  # whether muon_tp_mode would change the update
    "marked": (meta(**MARKED), True), "tp": (meta((16, 8), TP), True), "stack, tp": (meta((8, 16, 4), TP), False),
    "fsdp": (meta((16, 8), FSDP), False), "fsdp x tp": (meta((16, 8), LAST_FSDP, TP), True),
}  # fmt: skip


@pytest.mark.parametrize("case", MODES)
@pytest.mark.parametrize("mode", TpMode)
def test_the_mode_is_that_of_cut_rows_or_columns(case: str, mode: TpMode) -> None:
    matrix, has_mode = MODES[case]
    (of_case,) = plan(MuonRule(tp_mode=mode), matrix)
    assert of_case.tp_mode == (mode if has_mode else None)


def test_matrices_of_one_shard_are_dealt_among_its_ranks() -> None:
    """Each of two data-parallel shards has its costly and its cheap matrix, and two tensor-parallel ranks for them."""
    shapes = {"a": (64, 64), "b": (64, 64), "c": (8, 8), "d": (8, 8)}
    metas = [meta(shape, name=name, **MARKED) for name, shape in shapes.items()]
    team_of = {ParamId(0, name): number for name, number in zip(shapes, (0, 0, 1, 1), strict=True)}
    owners = {s.matrix.id.name: s.owner for p in plan(SOAPRule(), *metas, team_of=team_of) for s in p.layout.slots}
    assert owners == {"a": (0,), "b": (1,), "c": (0,), "d": (1,)}


def test_the_plan_counts_matrices_by_who_computes_them() -> None:
    metas = [*(meta((16, 8), FSDP, name=name) for name in "abc"), meta((16, 8), LAST_FSDP, TP, name="d")]
    first, load, second, _, last = compute_lines(plan(BLOCKWISE, *metas))
    assert load == "  in 1 run, an owner holds at most 0.0 MiB; the slowest works 1.33 times the mean"
    assert first.startswith("3 matrices cut over 4 ranks (dp): one rank gathers, computes and returns each")
    assert second.startswith("1 matrix cut over 2 x 4 ranks (tp, dp): ")
    assert second.endswith(" (muon_tp_mode='blockwise')")
    assert last == (
        "  muon_tp_mode='blockwise': updates depend on the number of tensor-parallel ranks; set "
        "muon_tp_mode='duplicated' to update whole matrices"
    )
    for rule in (DUPLICATED, DISTRIBUTED, SOAPRule()):
        assert "updates depend" not in "".join(compute_lines(plan(rule, *metas)))


@pytest.mark.parametrize("marks", [{}, {"split_rows": (1, 1)}, {"head_rows": (3, 1)}], ids=lambda marks: "".join(marks))
@pytest.mark.parametrize("mode", ["distributed", "duplicated", "soap"])
def test_parts_on_two_ranks_are_updated_as_the_whole_matrix(mode: str, marks: dict[str, Any]) -> None:
    rule = {"optimizer": "soap"} if mode == "soap" else {"optimizer": "muon", "muon_tp_mode": mode}
    config = OptimizerConfig(lr=0.1, muon_fp32_matmul_prec="highest", **rule)
    start, grad = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def moved(tp: Comm) -> Tensor:
        part, part_grad = (whole.chunk(tp.size)[tp.rank].clone() for whole in (start, grad))
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(part))
        vars(model.w).update(tensor_model_parallel=tp.size > 1, partition_dim=0, **marks)
        axes = Axes(dp=Alone(), tp=tp)
        optimizer = get_optimizer(config, [model], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=tp))
        model.w.grad = part_grad
        optimizer.step()
        return model.w.detach()

    torch.testing.assert_close(torch.cat(run_threads(2, moved)), moved(Alone()), rtol=0, atol=1e-5)


class NoPhases:
    """A matrix rule of another package, which only has `update_`."""

    name = "theirs"


QKV = {"qkv_split_shapes": (4, 2, 2)}
CUT = "are cut: 12 of 24 rows are on one rank; give each rank whole groups, or set muon_tp_mode='duplicated'"
REFUSED: dict[str, tuple[Any, ParamMeta, str]] = {
    "unequal parts of a joint update": (
        DISTRIBUTED, meta((15, 8), TP), "w of shape (15, 8) does not divide into (2,) equal parts along dims (0,)"
    ),
    "query groups cut by blocks": (
        BLOCKWISE, meta((24, 8), TP, **QKV), f"w: qkv_split_shapes=(4, 2, 2): query groups of 8 rows {CUT}"
    ),
    "heads cut by blocks": (BLOCKWISE, meta((24, 8), TP, head_rows=8), f"w: head_rows=8: heads of 8 rows {CUT}"),
    "matrices cut by blocks": (
        DISTRIBUTED, meta((24, 8), TP, split_sizes=(20, 4)), f"w: split_sizes=(20, 4): matrices of 24 rows {CUT}"
    ),
    "pairs of rows cut by blocks": (
        DISTRIBUTED, meta((18, 8), TP, split_rows=(1, 1)),
        "w: split_rows=(1, 1): groups of 2 rows are cut: 9 of 18 rows are on one rank; give each rank whole groups"
    ),
    "blocks of other sizes with common norms": (
        NAMO, meta((15, 8), TP),
        "muon_tp_mode='blockwise', but w of shape (15, 8) is cut into unequal blocks, and this adaptive_m"
    ),
    "blocks of other sizes that fsdp cuts further": (
        replace(NAMO, second_moment=SecondMoment.NORMUON), meta((8, 15), FSDP, COLUMNS),
        "muon_tp_mode='blockwise', but w of shape (8, 15) is cut into unequal blocks, and this adaptive_m"
    ),
    "a rule without phases": (
        NoPhases(), meta((16, 8), FSDP),
        "optimizer='theirs' needs whole matrices, but w is cut along dim 0 over 4 ranks (dp), and only for an "
        "opt_kernels.rules.base.MatrixRule parts can be gathered",
    ),
    "tensor parallelism after fsdp": (
        BLOCKWISE, meta((16, 8), FSDP, TP),
        "muon_tp_mode='blockwise', but w is cut along dim 0 over 4 ranks (dp), along dim 0 over 2 ranks (tp): what one "
        "rank of 'tp' holds is not a block of rows or columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_when_it_is_planned(case: str) -> None:
    rule, matrix, message = REFUSED[case]
    with pytest.raises(LayoutError if case.startswith("unequal") else ConfigError) as caught:
        plan(rule, matrix)
    assert str(caught.value).startswith(message)


def test_query_groups_may_be_cut_if_gathered_dealt_or_unsplit() -> None:
    assert plan(DUPLICATED, meta((24, 8), TP, **QKV))
    assert plan(BLOCKWISE, meta((24, 8), TP, **QKV), split_qkv=False)
    assert plan(DUPLICATED, meta((24, 8), TP, split_sizes=(20, 4)))
    assert plan(DUPLICATED, meta((18, 8), TP, split_rows=(1, 1)))
    assert plan(BLOCKWISE, meta((10, 8), FSDP, split_rows=(1, 1)))
    assert plan(SOAPRule(), meta((24, 8), FSDP, head_rows=8))
    assert plan(BLOCKWISE, meta((32, 8), TP, head_rows=8), split_qkv=False)
    for rule in (AdaptiveMuonRule(), replace(NAMO, muon=DUPLICATED)):  # no block sums over others
        assert plan(rule, meta((15, 8), TP))


@pytest.mark.parametrize(("rule", "shape"), [("muon", (5,)), ("soap", (2, 3, 4, 5))])
def test_what_is_no_matrix_is_refused_before_the_first_step(rule: str, shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(shape)))
    config = OptimizerConfig(lr=0.1, optimizer=rule)
    with pytest.raises(ConfigError) as caught:
        get_optimizer_based_on_param_groups(config, [model], [{"params": [model.w]}])
    assert str(caught.value) == (
        f"optimizer={rule!r} updates matrices (2-D or 3-D parameters), but w has shape {shape}; move it to a group "
        'with "optimizer": "adam", or another elementwise rule'
    )
