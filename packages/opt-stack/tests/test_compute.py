"""Who computes matrices that ranks store parts of: the decision for each kind of cut, and what is refused."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig, WholeParams
from opt_distributed import run_threads
from opt_distributed.buffers import WorldSizes, plan_buffers
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.collectives import Pending, Sizes
from opt_distributed.comm.threads import ThreadComm, World
from opt_distributed.layout import Computes, LayoutError
from opt_kernels.matrices import TpMode
from opt_kernels.rules import AdaptiveMuonRule, Lines, MuonRule, Rule, SecondMoment, SOAPRule
from opt_paramgroups import MeshPlacement, ParamId, ParamMeta
from opt_stack import Plan, get_optimizer, get_optimizer_based_on_param_groups
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
PART, JOINT, OWNER = Computes
CASES = {
    "whole": (DUPLICATED, meta(), []),
    "marked, blockwise": (BLOCKWISE, meta(**MARKED), [(PART, ["tensor parallel"], 1)]),
    "marked, duplicated": (DUPLICATED, meta(**MARKED), [(OWNER, ["tensor parallel"], 0)]),
    "marked, distributed": (DISTRIBUTED, meta(**MARKED), [(JOINT, ["tensor parallel"], 1)]),
    "marked, adaptive": (AdaptiveMuonRule(muon=DUPLICATED), meta(**MARKED), [(OWNER, ["tensor parallel"], 0)]),
    "marked, soap": (SOAPRule(), meta(**MARKED), [(OWNER, ["tensor parallel"], 0)]),
    "tp, blockwise": (BLOCKWISE, meta((16, 8), TP), [(PART, ["tp"], 1)]),
    "tp, distributed": (DISTRIBUTED, meta((16, 8), TP), [(JOINT, ["tp"], 1)]),
    "tp, soap": (SOAPRule(), meta((16, 8), TP), [(OWNER, ["tp"], 0)]),
    "fsdp has no mode": (BLOCKWISE, meta((16, 8), FSDP), [(OWNER, ["dp"], 0)]),
    "hsdp": (SOAPRule(), meta((16, 8), MeshPlacement("replicate", 2, None), FSDP), [(OWNER, ["dp"], 0)]),
    "tp, namo": (replace(NAMO, muon=DUPLICATED), meta((16, 8), TP), [(OWNER, ["tp"], 0)]),
    "fsdp, namo": (NAMO, meta((16, 8), FSDP), [(OWNER, ["dp"], 0)]),
    "axes of one rank": (SOAPRule(), meta((16, 8), MeshPlacement("dp", 1, 0)), []),
    "fsdp after tp": (DISTRIBUTED, meta((16, 8), LAST_FSDP, TP), [(OWNER, ["tp", "dp"], 0)]),
    "fsdp of blocks": (BLOCKWISE, meta((16, 8), LAST_FSDP, TP), [(OWNER, ["tp", "dp"], 1)]),
    "fsdp of blocks of columns": (BLOCKWISE, meta((16, 8), FSDP, COLUMNS), [(OWNER, ["tp", "dp"], 1)]),
    "a dealt stack": (BLOCKWISE, meta((8, 16, 4), FSDP), [(PART, ["dp"], 1)]),
    "a dealt stack of cut ones": (DUPLICATED, meta((8, 16, 4), FSDP, COLUMNS), [(OWNER, ["dp", "tp"], 1)]),
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


def test_layer_sharded_and_duplicated_are_names_of_one_rule() -> None:
    assert MuonRule(tp_mode=TpMode("layer_sharded")) == DUPLICATED
    names = ("duplicated", "layer_sharded")
    shardings = [OptimizerConfig(use_layer_wise_distributed_optimizer=True, muon_tp_mode=m).sharding for m in names]
    assert shardings == [WholeParams(overlap_gather=False, by_owner=True)] * 2


def owners_of(shapes: dict[str, tuple[tuple[int, ...], bool]], *, by_owner: bool) -> dict[str, int]:
    """The data-parallel rank of two that owns each matrix (whole shape; whether two ranks hold halves of its rows)."""
    metas = {}
    for name, (shape, is_cut) in shapes.items():
        local = (shape[0] // 2, shape[1]) if is_cut else shape
        metas[ParamId(0, name)] = meta(local, name=name, **(MARKED if is_cut else {}))
    (buffer,) = plan_buffers(
        metas,
        sharding=WholeParams(overlap_gather=False, by_owner=by_owner),
        sizes=WorldSizes(dense=2, dense_tp=2),
        needs_whole=lambda meta: True,
        grad_dtype=lambda meta: torch.float32,
        bucket_size=lambda numel: None,
    )
    owned = {rank: buffer.layout.owned(rank) for rank in range(2)}
    return {piece.id.name: rank for rank, pieces in owned.items() for _, piece in pieces}


def test_teams_are_balanced_by_the_cost_of_whole_matrices() -> None:
    """A half of a costs as much as b and c, which are not cut; so a rank of its team, which updates all of a, and both
    ranks, which update c, had the work of three."""
    shapes = {"a": ((256, 256), True), "b": ((128, 256), False), "c": ((128, 256), False)}
    assert owners_of(shapes, by_owner=False) == {"a": 0, "b": 1, "c": 0}
    assert owners_of(shapes, by_owner=True) == {"a": 0, "b": 1, "c": 1}


def test_the_plan_says_what_dividing_matrices_would_give() -> None:
    """Products of one step: 2 x 8 x 8 x 16 + 8 x 8 x 8 whole; with columns on two ranks, a half of the first. Three
    matrices on 2 x 2 ranks, two of them in one team."""
    metas = [meta((8, 8), name=name, **MARKED) for name in "abc"]
    plans = plan(DUPLICATED, *metas, team_of={metas[2].id: 1})
    lines = list(compute_lines(plans, num_teams=2))
    assert lines[0] == (
        "3 matrices cut over 2 ranks (tensor parallel): one rank gathers, computes and returns each, balanced by cost "
        "(muon_tp_mode='duplicated')"
    )
    assert lines[1].endswith("; the slowest works 1.33 times the mean")
    divided = 2 * (8 * 8 * 16 + 8**3) / (3 * (2 * 8 * 8 * 16 + 8**3) / 4)
    assert lines[2] == (
        "  fewer owners than ranks (3 of 4): slowest rank 1.3 times the mean; "
        f"muon_tp_mode='distributed': {divided:.1f}"
    )
    assert len(list(compute_lines(plan(DUPLICATED, *metas)))) == 2  # as many owners as ranks
    assert len(list(compute_lines(plan(DUPLICATED, meta((16, 8), FSDP))))) == 2  # nothing else divides these


def test_matrices_of_one_shard_are_dealt_among_its_ranks() -> None:
    """Each of two data-parallel shards has its costly and its cheap matrix, and two tensor-parallel ranks for them."""
    shapes = {"a": (64, 64), "b": (64, 64), "c": (8, 8), "d": (8, 8)}
    metas = [meta(shape, name=name, **MARKED) for name, shape in shapes.items()]
    team_of = {ParamId(0, name): number for name, number in zip(shapes, (0, 0, 1, 1), strict=True)}
    owners = {m.id.name: m.owner for p in plan(SOAPRule(), *metas, team_of=team_of) for m in p.layout.matrices}
    assert owners == {"a": (0,), "b": (1,), "c": (0,), "d": (1,)}


def test_an_added_layout_of_whole_parameters_has_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of different shards were planned to compute one matrix, although only those of one shard store it."""
    replicas = [World(2), World(2)]
    parts = [World(2), World(2)]

    def plan_on(everyone: Comm) -> Plan:
        shard, part = divmod(everyone.rank, 2)
        net = nn.Sequential(*(nn.Linear(64, 32, bias=False) for _ in range(5)))
        for param in net.parameters():
            torch.nn.init.ones_(param)
            vars(param).update(tensor_model_parallel=True, partition_dim=0)
        axes = Axes(dp=ThreadComm(replicas[part], shard), tp=ThreadComm(parts[shard], part))
        fields = {"optimizer": "muon", "muon_tp_mode": "duplicated", "use_layer_wise_distributed_optimizer": True}
        roles = Roles(dense=axes, expert=axes, everyone=everyone)
        return get_optimizer(OptimizerConfig(lr=1e-2, **fields), [net], {}, pg_collection=roles).plan

    usual, *_ = run_threads(4, plan_on)
    added = replace(usual.buffers[0].kind, name="added")
    monkeypatch.setattr("opt_distributed.buffers.planner.kind_of", lambda *_, **__: added)
    found, *_ = run_threads(4, plan_on)
    assert str(found) == str(usual).replace("whole parameters", "added")


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


MODES_OF_PARTS = [(2, mode) for mode in ("distributed", "duplicated", "layer_sharded", "soap")]
OF_MANY = [(4, "duplicated"), (6, "duplicated"), (6, "soap")]


@pytest.mark.parametrize("marks", [{}, {"split_rows": (1, 1)}, {"head_rows": (3, 1)}], ids=lambda marks: "".join(marks))
@pytest.mark.parametrize(("size", "mode"), [*MODES_OF_PARTS, *OF_MANY])
def test_parts_on_ranks_are_updated_as_the_whole_matrix(
    size: int, mode: str, marks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over four and six ranks in two hops."""
    monkeypatch.setattr("opt_stack.planning.matrices.MAX_PEERS", 3)
    rule = {"optimizer": "soap"} if mode == "soap" else {"optimizer": "muon", "muon_tp_mode": mode}
    config = OptimizerConfig(lr=0.1, muon_fp32_matmul_prec="highest", **rule)
    start, grad = torch.randn(2, 48, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def moved(tp: Comm) -> Tensor:
        part, part_grad = (whole.chunk(tp.size)[tp.rank].clone() for whole in (start, grad))
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(part))
        vars(model.w).update(tensor_model_parallel=tp.size > 1, partition_dim=0, **marks)
        axes = Axes(dp=Alone(), tp=tp)
        optimizer = get_optimizer(config, [model], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=tp))
        stages = [len(stage.comms) for unit in optimizer.stepper.units for stage in unit.stages]
        assert stages == ([] if tp.size == 1 or mode == "distributed" else [1 + (tp.size > 3)])
        model.w.grad = part_grad
        optimizer.step()
        return model.w.detach()

    found = torch.cat(run_threads(size, moved))
    tolerance = 1e-5 if mode == "distributed" else 0
    torch.testing.assert_close(found, moved(Alone()), rtol=0, atol=tolerance)


MANY = {
    "2 x 2": (4, 2, [("dp nodes", 2, range(0, 4, 2)), ("dp local", 2, range(2))]),
    "2 x 3": (6, 3, [("dp nodes", 2, range(0, 6, 3)), ("dp local", 3, range(3))]),
    "64 nodes of 8": (512, 256, [("dp nodes", 64, range(0, 512, 8)), ("dp local", 8, range(8))]),
    "256 nodes of 16": (4096, 256, [("dp nodes", 256, range(0, 4096, 16)), ("dp local", 16, range(16))]),
    "few enough": (256, 256, [("dp", 256, None)]),
    "a prime number": (257, 256, [("dp", 257, None)]),
    "more than two hops": (24, 4, [("dp", 24, None)]),
}


@pytest.mark.parametrize("name", MANY)
def test_many_peers_are_reached_in_two_hops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank exchanges with the first of each node, and with its own node."""
    size, max_peers, expected = MANY[name]
    monkeypatch.setattr("opt_stack.planning.matrices.MAX_PEERS", max_peers)
    (found,) = plan(DUPLICATED, meta((12 * size, 8), MeshPlacement("dp", size, 0)))
    peers = [(axis.name, axis.size, axis.hop[0] if axis.hop else None) for axis in found.axes]
    assert peers == expected
    (matrix,) = found.layout.matrices
    for rank in (0, 1, size - 1):
        at = tuple(next((ranks.index(rank) for ranks in axis.hop if rank in ranks), rank) for axis in found.axes)
        assert matrix.block(found.layout.sizes, at) == ((12 * rank, 0), (12, 8))


def test_uneven_parts_and_kept_axes_stay_in_one_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opt_stack.planning.matrices.MAX_PEERS", 2)
    for rows in (5, 4 * 3 + 1):
        (found,) = plan(DUPLICATED, meta((rows, 8), FSDP))
        assert [axis.name for axis in found.axes] == ["dp"]
    (found,) = plan(BLOCKWISE, meta((64, 8), MeshPlacement("tp", 4, 0)))
    assert [axis.name for axis in found.axes] == ["tp"]
    both = (MeshPlacement("dp", 4, 0, True), MeshPlacement("tp", 4, 0))
    (found,) = plan(BLOCKWISE, meta((64, 8), *both))
    assert [axis.name for axis in found.axes] == ["tp", "dp nodes", "dp local"]
    (found,) = plan(BLOCKWISE, meta((8, 8), *both))
    assert [axis.name for axis in found.axes] == ["tp", "dp"]


class NotingComm(ThreadComm):
    """Notes the exchanges of matrices."""

    def __init__(self, world: World, rank: int, events: list[str]):
        super().__init__(world, rank)
        self.events = events

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        self.events.append("exchange")
        return super().all_to_all_(out, x, sizes=sizes, async_op=async_op)


def test_matrices_are_gathered_before_other_units_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of one rule each: vectors by Adam, then matrices, experts after dense ones."""
    world = World(2)

    def events(comm: ThreadComm) -> list[str]:
        found: list[str] = []
        tp = NotingComm(world, comm.rank, found)
        model = nn.Module()
        for name, shape in {"bias": (4,), "up": (8, 8), "expert_bias": (4,), "expert": (8, 8)}.items():
            model.register_parameter(name, nn.Parameter(torch.ones(shape)))
            is_cut = len(shape) == 2
            marks = {"tensor_model_parallel": is_cut, "partition_dim": 0 if is_cut else -1}
            vars(getattr(model, name)).update(marks, allreduce="expert" not in name)
        axes = Axes(dp=Alone(), tp=tp)
        config = OptimizerConfig(lr=0.1, optimizer="muon", muon_tp_mode="layer_sharded")
        optimizer = get_optimizer(config, [model], {}, pg_collection=Roles(dense=axes, expert=axes, everyone=tp))
        units = optimizer.stepper.units
        for unit in units:
            unit.rule = noting(unit.rule, unit.name, found)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return found

    def noting(rule: Any, name: str, found: list[str]) -> Any:
        class Noting(type(rule)):  # type: ignore[misc]
            def update_(self, batches: Any, **given: Any) -> None:
                found.append(name)
                super().update_(batches, **given)

        return Noting(**{f.name: getattr(rule, f.name) for f in fields(rule) if f.init})

    assert (
        run_threads(2, events)
        == [["exchange", "adam", "muon", "exchange", "exchange", "adam/experts", "muon/experts", "exchange"]] * 2
    )


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
    "parts whose longer side is the other one": (
        AdaptiveMuonRule(muon=DISTRIBUTED, second_moment=SecondMoment.NORMUON, lines=Lines.LONGER),
        meta((8, 12), COLUMNS),
        "adaptive_muon_lines='longer', but muon_tp_mode='distributed' cuts w of shape (8, 12) into parts of (8, 6), of "
        "which the longer side is the other one; set adaptive_muon_lines to 'rows' or 'cols', or muon_tp_mode="
    ),
    "blocks whose longer side is the other one": (
        AdaptiveMuonRule(muon=BLOCKWISE, second_moment=SecondMoment.NORMUON, lines=Lines.LONGER),
        meta((8, 12), COLUMNS),
        "adaptive_muon_lines='longer', but muon_tp_mode='blockwise' cuts w of shape (8, 12) into parts of (8, 6), of "
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
