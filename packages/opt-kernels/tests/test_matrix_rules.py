"""What all matrix rules have in common: stacks, company, mains of every kind, skipped steps, refusals."""

from dataclasses import replace

import pytest
import torch
from elementwise_works import NEEDS_TRITON, device_of
from matrix_works import HYPER, grads_of, moved, stepped, tensor, work_of

from opt_kernels import MatrixError
from opt_kernels.codecs import join, split_
from opt_kernels.matrices import Decay, MatmulPrecision, ScaleMode, squares_in_float64
from opt_kernels.matrices.access import STACK_NUMEL_ON_CPU
from opt_kernels.rules import (
    GRAD_SQUARES,
    WEIGHTS,
    AdaptiveMuonRule,
    Lines,
    MuonRule,
    MuownRule,
    Needs,
    Order,
    SecondMoment,
    SOAPMuonRule,
    SOAPRule,
    init_state,
    reads_weights,
    sums_gradients,
)
from opt_kernels.works import NOT_SPLIT, Batch, Hyper, MatrixPart, MatrixSpec, Task, Work

EXACT = MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST)
RULES = {
    "muon": EXACT,
    "muon, reference": replace(EXACT, backend="reference"),
    "muon, nesterov, l2": replace(EXACT, nesterov=True, weight_decay_method=Decay.L2),
    "muon, int8": replace(EXACT, momentum_buffer_dtype=torch.int8),
    **{method.value: AdaptiveMuonRule(muon=EXACT, second_moment=method) for method in SecondMoment},
    "normuon, columns": AdaptiveMuonRule(muon=EXACT, second_moment=SecondMoment.NORMUON, lines=Lines.COLS),
    "normuon, longer": AdaptiveMuonRule(muon=EXACT, second_moment=SecondMoment.NORMUON, lines=Lines.LONGER),
    "soap, plain": SOAPRule(use_kl_shampoo=False),
    "soap": SOAPRule(),
    "soap, one side": SOAPRule(one_sided=True),
    "soap, megatron": SOAPRule(order=Order.MEGATRON),
    "soap_muon": SOAPMuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST),
    "muown": MuownRule(fp32_matmul_prec=MatmulPrecision.HIGHEST),
}
INT8 = RULES["muon, int8"]
SCALES = "momentum_buffer_scale"
CODED = [
    pytest.param(INT8, id="muon"),
    pytest.param(replace(INT8, backend="reference"), id="muon, reference"),
    pytest.param(AdaptiveMuonRule(muon=INT8, second_moment=SecondMoment.NAMO), id="namo"),
    pytest.param(replace(INT8, backend="triton"), id="triton", marks=NEEDS_TRITON),
]
on_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@on_rules
def test_a_stack_of_matrices_is_so_many_matrices(rule):
    if rule.name == "muon" and rule.momentum_buffer_dtype is torch.int8:
        rule = EXACT  # codes of neighbouring matrices share scales
    main = tensor(3, 6, 8)
    grads = grads_of(3, 6, 8)
    # Square factors: null spaces of the first ones are bases of rounding, which batches round in another order.
    alone = torch.stack([moved(rule, main[i], *(grad[i] for grad in grads)) for i in range(3)])
    tolerance = 2e-2 if rule.name.startswith("soap") else 1e-4
    torch.testing.assert_close(moved(rule, main, *grads), alone, rtol=0, atol=tolerance)


PARTS = {  # shape, rows, whether each group of rows is a matrix, and the rows of each matrix
    "heads": ((24, 40), (4,), True, [[*range(i, i + 4)] for i in range(0, 24, 4)]),
    "uneven": ((24, 40), (5, 3, 16), False, [[*range(5)], [*range(5, 8)], [*range(8, 24)]]),
    "groups": ((10, 8), (3, 2), True, [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]),
    "query, key, value": ((12, 8), (4, 1, 1), False, [[0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11]]),
}


WITH_PARTS = [
    *(pytest.param(rule, id=name) for name, rule in RULES.items() if name in ("muon", "muon, reference")),
    *(pytest.param(rule, id=name) for name, rule in RULES.items() if name.startswith("soap")),
    pytest.param(replace(EXACT, backend="triton", scale_mode=ScaleMode.UNIT_RMS_NORM), id="triton", marks=NEEDS_TRITON),
]


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("rule", WITH_PARTS)
def test_parts_of_rows_are_matrices_of_their_own(rule, case):
    shape, rows, by_group, matrices = PARTS[case]
    for batch in ((), (3,)):
        tensors = tensor(*batch, *shape), *grads_of(*batch, *shape)
        main, *grads = (values.to(device_of(rule.backend)) for values in tensors)
        got = moved(rule, main, *grads, matrix=MatrixSpec(split_rows=rows, by_group=by_group))
        for part in matrices:
            alone = moved(rule, main[..., part, :], *(grad[..., part, :] for grad in grads))
            torch.testing.assert_close(got[..., part, :], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", PARTS)
def test_parts_together_have_the_norm_of_orthogonal_ones(case):
    """With adamuon_paper, that of one matrix of all rows: 0.58 of three square ones'."""
    shape, rows, by_group, matrices = PARTS[case]
    rule = AdaptiveMuonRule(muon=EXACT, second_moment=SecondMoment.ADAMUON_PAPER)
    main = tensor(*shape)
    spec = MatrixSpec(split_rows=rows, by_group=by_group)
    work = Work(grad=grads_of(*shape)[0], main=main, state=rule.init_state(main), matrix=spec)
    update = rule.transform_([Task(Hyper(lr=0.1, step=1), work)], work.grad[None], None)
    squares = sum(min(len(part), shape[1]) for part in matrices)
    assert float(update.square().sum()) == pytest.approx(squares, rel=1e-5)


@on_rules
def test_company_makes_no_difference(rule):
    # Equal shapes are stacked over groups, in rounds of bounded size; each keeps its group's numbers.
    large = [(1024, 600)] * 3 if rule.name == "muon" else []
    assert 3 * 1024 * 600 > STACK_NUMEL_ON_CPU > 1024 * 600
    shapes = [(16, 16), (24, 24), (16, 16), (8, 8), (16, 16), *large]
    hypers = [replace(HYPER, step=2), replace(HYPER, step=2, lr=0.02, momentum=0.5)]

    def works():
        made = [work_of(rule, tensor(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
        for work in made:
            stepped(rule, [tensor(*work.grad.shape, seed=9)], work)
        return [replace(work, grad=0.5 * tensor(*work.grad.shape, seed=9)) for work in made]

    together = works()
    alone = works()
    rule.update_([Batch(hypers[0], together[::2]), Batch(hypers[1], together[1::2])])
    for index, work in enumerate(alone):
        rule.update_([Batch(hypers[index % 2], [work])])
    # The same products in another batch may be summed in another order.
    torch.testing.assert_close([work.main for work in together], [work.main for work in alone], rtol=0, atol=1e-4)


@on_rules
def test_mains_of_every_kind_update_equally_with_read_only_grads(rule):
    main = tensor(8, 12)
    grads = grads_of(8, 12)
    before = [grad.clone() for grad in grads]
    expected = moved(rule, main, *(0.5 * grad for grad in grads))
    out = torch.empty(8, 12, dtype=torch.bfloat16)
    remainder = torch.empty(8, 12, dtype=torch.int16)
    split_(out, remainder, main)
    halves = replace(work_of(rule, main), main=None, out=out, remainder=remainder)
    with_copy = work_of(rule, main.clone(), out=torch.zeros(8, 12, dtype=torch.bfloat16))
    stepped(rule, grads, halves, grad_scale=0.5)
    stepped(rule, grads, with_copy, grad_scale=0.5)
    torch.testing.assert_close(join(out, remainder), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(with_copy.main, expected, rtol=0, atol=1e-5)
    assert torch.equal(with_copy.out, with_copy.main.bfloat16())
    assert all(map(torch.equal, grads, before))
    narrow = main.bfloat16()
    assert torch.equal(moved(rule, narrow, grads[0]), moved(rule, narrow.float(), grads[0]).bfloat16())


@on_rules
def test_a_skipped_step_leaves_every_byte(rule):
    work = work_of(rule, tensor(24, 40), out=tensor(24, 40).bfloat16())
    stepped(rule, grads_of(24, 40, steps=2), work)
    halves = replace(work, main=None, remainder=torch.ones(24, 40, dtype=torch.int16))
    for of in (work, halves):
        tensors = [t for t in (of.main, of.out, of.remainder, *of.state.values()) if t is not None]
        before = [t.clone() for t in tensors]
        for bad in (torch.nan, torch.inf):
            batch = Batch(replace(HYPER, step=3), [replace(of, grad=torch.full((24, 40), bad))])
            rule.update_([batch], skip=torch.tensor(True))
        assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("rule", CODED)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan, -1e30])
def test_an_outlier_loses_its_own_momentum_only(rule, bad):
    """Symptom: one infinite, NaN or huge element lost the momenta of the 127 next to it."""
    works = []
    grads = grads_of(24, 40, steps=2)
    for value in (0.0, bad):
        grads[0][3, 7] = grads[1][3, 7] = value
        works.append(work_of(rule, tensor(24, 40).to(device_of(getattr(rule, "backend", None)))))
        stepped(rule, [grad.to(works[-1].main) for grad in grads], works[-1])
    assert all(torch.equal(works[1].state[name], works[0].state[name]) for name in ("momentum_buffer", SCALES))


@on_rules
def test_zero_gradients_only_decay_and_leave_finite_states(rule):
    main = tensor(6, 4)
    work = work_of(rule, main.clone())
    stepped(rule, [torch.zeros(6, 4)] * 3, work)
    if rule.name != "muon" or rule.weight_decay_method is not Decay.L2:
        steps = 2 if rule.name == "soap" and rule.order is Order.PAPER else 3  # of which the first finds the bases
        torch.testing.assert_close(work.main, main * (1 - 0.1 * 0.3) ** steps)
    stepped(rule, grads_of(6, 4), work, first=4)
    assert all(bool(t.float().isfinite().all()) for t in (work.main, *work.state.values()))


@on_rules
def test_states_match_their_declaration_also_of_empty_matrices(rule):
    assert rule.needs is Needs.MATRICES
    state = init_state(rule, tensor(8, 12), NOT_SPLIT)  # refuses other shapes and dtypes
    assert {spec.name for spec in rule.state_specs if not spec.optional} <= state.keys()
    assert state.keys() <= {spec.name for spec in rule.state_specs}
    for shape in ((0, 8), (8, 0)) if not rule.name.startswith("soap") else ():
        moved(rule, torch.zeros(shape), torch.zeros(shape))
    rule.update_([])
    rule.update_([Batch(HYPER, [])])


@pytest.mark.parametrize("rule", [EXACT, RULES["normuon"], RULES["soap"]], ids=["muon", "normuon", "soap"])
def test_what_is_no_matrix_is_refused(rule):
    for shape, spec, message in (
        ((8,), MatrixSpec(), r"shape \(8,\) is not a matrix"),
        ((2, 2, 3, 3), MatrixSpec(), r"view a convolution's weight as \(out, in \* kernel\)"),
        ((8, 4), MatrixSpec(split_rows=(4, 1, 1)), "does not divide the 8 rows"),
        ((8, 4), MatrixSpec(split_rows=(8, 0)), "pass positive rows"),
        ((8, 4), MatrixSpec(partition_dim=2), "partition_dim=2 is out of range"),
    ):
        work = Work(grad=torch.zeros(shape), main=torch.zeros(shape), state={}, matrix=spec)
        with pytest.raises(MatrixError, match=message):
            rule.update_([Batch(HYPER, [work])])


def test_state_of_another_split_is_refused():
    rule = SOAPRule()
    main = tensor(6, 6)
    matrix = MatrixSpec(split_rows=(2,), by_group=True)
    work = Work(grad=main, main=main, state=rule.init_state(main), matrix=matrix)
    with pytest.raises(MatrixError, match=r"state 'L' has shape \(6, 6\), but for rows split as '2-each' its shape is"):
        rule.update_([Batch(HYPER, [work])])


# --- phases: parts are prepared and applied where they lie, and whole matrices transformed elsewhere ------------------

MUON = MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST, scale_mode=ScaleMode.UNIT_RMS_NORM, nesterov=True)
NORMUON = AdaptiveMuonRule(muon=MUON, second_moment=SecondMoment.NORMUON)
IN_PHASES = {
    "muon": MUON,
    "adamuon": AdaptiveMuonRule(muon=MUON),
    "normuon": NORMUON,
    "normuon of columns": replace(NORMUON, lines=Lines.COLS),
    "namo": AdaptiveMuonRule(second_moment=SecondMoment.NAMO, muon=MUON),
    **{name: RULES[name] for name in ("soap", "soap, megatron", "soap_muon", "muown")},
}
SPLIT = MatrixSpec(split_rows=(4, 1, 1))


@pytest.mark.parametrize("cuts", [[(0, 5), (5, 11), (11, 24)], [(0, 0), (0, 24)]], ids=["rows", "none and all"])
@pytest.mark.parametrize("rule", IN_PHASES.values(), ids=IN_PHASES)
def test_parts_move_as_the_whole_does(rule, cuts):
    """To the bit, however rows are cut: also those of q, k and v, which have scales of their own, in groups of 6."""
    main = tensor(24, 24)
    state = init_state(rule, tensor(24, 24), SPLIT)
    whole = {spec.name for spec in rule.state_specs if spec.whole}
    of_whole = {name: value.clone() for name, value in state.items() if name in whole}
    parts = []
    for first, stop in cuts:
        rows = main[first:stop].clone()
        kept = {name: value for name, value in rule.init_state(rows).items() if name not in whole}
        spec = replace(SPLIT, part=MatrixPart("w", (24, 24), first))
        parts.append((first, stop, Work(grad=rows, main=rows, state=kept, matrix=spec)))
    for step in range(1, 4):
        grad = tensor(24, 24, seed=step)
        hyper = replace(HYPER, step=step)
        rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state, matrix=SPLIT)])])
        inputs = [grad[first:stop].clone() for first, stop, _ in parts]
        squares = torch.zeros((), dtype=torch.float64)
        for rows, (_, _, work) in zip(inputs, parts):
            squares += squares_in_float64(rows)
            rule.prepare_(Task(hyper, replace(work, grad=rows)), rows, None)
        of_grad = {GRAD_SQUARES: squares} if sums_gradients(rule) else {}
        if reads_weights(rule):
            of_grad = {WEIGHTS: torch.cat([work.main for _, _, work in parts])}
        gathered = Work(grad=torch.cat(inputs), main=None, state=of_whole | of_grad, matrix=SPLIT)
        (update,) = rule.transform_([Task(hyper, gathered)], gathered.grad.unsqueeze(0), None)
        for first, stop, work in parts:
            rule.apply_(Task(hyper, work), update[first:stop].clone(), None)
    assert torch.equal(torch.cat([work.main for _, _, work in parts]), main)
