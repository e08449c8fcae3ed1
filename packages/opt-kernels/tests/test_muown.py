"""Muown against its equations in float64, and what happens to rows that are zero or that other code has written."""

import weakref
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from elementwise_works import device_of, on
from matrix_works import tensor

from opt_kernels import MatrixError
from opt_kernels.matrices import MatmulPrecision, ScaleMode
from opt_kernels.matrices.orthogonalization import reference_newton_schulz
from opt_kernels.optim import Muown
from opt_kernels.rules import MuownRule
from opt_kernels.works import NOT_SPLIT, Batch, Hyper, MatrixSpec, TensorParallel, Work

RULE = MuownRule(fp32_matmul_prec=MatmulPrecision.HIGHEST, scale_mode=ScaleMode.MATCH_RMS_ADAMW, extra_scale_factor=2.0)
HYPER = Hyper(lr=0.05, weight_decay=0.3, momentum=0.9, betas=(0.8, 0.95), eps=1e-8)


def orthogonalised(x):
    wide = x.shape[0] <= x.shape[1]
    done = reference_newton_schulz((x if wide else x.mT)[None], segments=(RULE.orthogonalization.schedule,))[0]
    return done if wide else done.mT


def by_equations(main, grads, parts):
    """The docstring of the rule, in float64. `parts` are the rows of each matrix."""
    w = main.double()
    g = r = w.norm(dim=1, keepdim=True).clamp_min(1e-12)
    m = torch.zeros_like(w)
    a = torch.zeros_like(g)
    c = torch.zeros_like(g)
    for step, grad in enumerate(grads, start=1):
        u = w / g
        v = r * u
        dg = (grad.double() * u).sum(1, keepdim=True)
        m = 0.9 * m + 0.1 * (g / r) * (grad.double() - dg * u)
        for part in parts:
            o = orthogonalised(m[part])
            v[part] -= 0.05 * 2.0 * 0.2 * max(o.shape) ** 0.5 * o
        r = v.norm(dim=1, keepdim=True)
        a = 0.8 * a + 0.2 * dg
        c = 0.95 * c + 0.05 * dg**2
        g = (g - 0.05 * (a / (1 - 0.8**step)) / ((c / (1 - 0.95**step)).sqrt() + 1e-8)) * (1 - 0.05 * 0.3)
        w = g * v / r
    return w, g, r


def stepped(rule, main, grads, spec=NOT_SPLIT, skip=None):
    state = rule.init_state(main)
    for step, grad in enumerate(grads, start=1):
        hyper = replace(HYPER, step=step)
        rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state, matrix=spec)])], skip=skip)
    return main, state


@on("reference", "torch", "triton")
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 7)], ids=str)
def test_steps_follow_the_equations(shape, backend):
    grads = [tensor(*shape, seed=seed) for seed in range(1, 6)]
    main = tensor(*shape)
    wanted, magnitude, norm = by_equations(main, grads, [slice(None)])
    device = device_of(backend)
    got, state = stepped(replace(RULE, backend=backend), main.to(device), [grad.to(device) for grad in grads])
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(state["magnitude"].cpu().double(), magnitude.squeeze(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["direction_norm"].cpu().double(), norm.squeeze(1), rtol=1e-5, atol=1e-5)


def test_split_rows_are_orthogonalised_apart():
    grads = [tensor(12, 20, seed=seed) for seed in (1, 2)]
    main = tensor(12, 20)
    wanted, _, _ = by_equations(main, grads, [slice(8), slice(8, 12)])
    got, _ = stepped(RULE, main.clone(), grads, MatrixSpec(split_rows=(8, 4)))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)


def test_a_row_whose_length_others_change_keeps_that_length():
    """Symptom: weights that were loaded or clipped between steps came back to the lengths of before."""
    main, state = stepped(RULE, tensor(8, 16), [tensor(8, 16, seed=1)])
    main[3] *= 5.0
    length = main[3].norm()
    hyper = replace(HYPER, lr=1e-6, step=2)
    RULE.update_([Batch(hyper, [Work(grad=tensor(8, 16, seed=2), main=main, state=state)])])
    torch.testing.assert_close(main[3].norm(), length, rtol=1e-4, atol=0)


def test_rows_of_zeros_get_a_direction_and_stay_finite():
    main = tensor(8, 16)
    main[2] = 0.0
    main, _ = stepped(RULE, main, [tensor(8, 16, seed=seed) for seed in range(1, 40)])
    assert main.isfinite().all()
    assert main[2].norm() > 1e-3


def test_rows_of_one_element_keep_their_direction():
    """Rounding errors of their tangents were orthogonalised to steps of full size, and turned signs."""
    main = tensor(64, 1)
    before = main.sign()
    main, state = stepped(RULE, main, [tensor(64, 1, seed=seed) for seed in range(1, 60)])
    assert not state["momentum_buffer"].any()
    state["momentum_buffer"].copy_(1e-7 * before)  # as it was saved before
    for step in range(60, 120):
        RULE.update_([Batch(replace(HYPER, step=step), [Work(grad=torch.zeros_like(main), main=main, state=state)])])
    assert torch.equal(main.sign(), before * state["magnitude"].sign().unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_counted_on_a_device_have_the_bits_of_the_hosts(dtype):
    """Its corrections were in the default dtype: in bfloat16, one of zero gave NaN."""
    grads = [tensor(6, 8, seed=seed) for seed in (1, 2, 3)]
    wanted, _ = stepped(RULE, tensor(6, 8), grads)
    main = tensor(6, 8)
    state = RULE.init_state(main)
    torch.set_default_dtype(dtype)
    try:
        for step, grad in enumerate(grads, start=1):
            hyper = replace(HYPER, step=torch.tensor(step))
            RULE.update_([Batch(hyper, [Work(grad=grad, main=main, state=state, matrix=NOT_SPLIT)])])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(main, wanted)


def test_a_skipped_step_writes_nothing():
    main, state = stepped(RULE, tensor(8, 16), [tensor(8, 16, seed=1)])
    before = {name: value.clone() for name, value in state.items()}
    weights = main.clone()
    work = Work(grad=torch.full((8, 16), torch.nan), main=main, state=state)
    RULE.update_([Batch(replace(HYPER, step=2), [work])], skip=torch.tensor(1.0))
    assert torch.equal(main, weights)
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_bf16_weights_follow_the_equations_within_their_rounding():
    grads = [tensor(24, 40, seed=seed) for seed in range(1, 6)]
    main = tensor(24, 40).bfloat16()
    wanted, _, _ = by_equations(main, grads, [slice(None)])
    got, _ = stepped(RULE, main, grads)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-2)


def test_a_part_of_a_matrix_is_refused():
    group = TensorParallel(rank=0, size=2, all_reduce=lambda x: x, all_gather=lambda x, dim: x)
    spec = MatrixSpec(partition_dim=0, tensor_parallel=group)
    with pytest.raises(MatrixError, match="muown needs whole matrices, but dim 0 of this one is cut"):
        stepped(RULE, tensor(8, 16), [tensor(8, 16, seed=1)], spec)


def test_the_drop_in_takes_the_steps_of_the_rule():
    weight = torch.nn.Parameter(tensor(24, 40))
    bias = torch.nn.Parameter(tensor(40))
    optimizer = Muown(
        [weight, bias], lr=0.05, momentum=0.9, weight_decay=0.3, betas=(0.8, 0.95), scalar_optimizer="adam",
        scale_mode="match_rms_adamw", extra_scale_factor=2.0, fp32_matmul_prec="highest",
    )  # fmt: skip
    grads = [tensor(24, 40, seed=seed) for seed in (1, 2, 3)]
    wanted, _ = stepped(RULE, tensor(24, 40), grads)
    for grad in grads:
        weight.grad = grad
        bias.grad = torch.ones(40)
        optimizer.step()
    assert torch.equal(weight, wanted)


def test_weights_are_joined_for_one_stack_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for all matrices of a group: their float32 copies would take twice the memory of bfloat16 weights."""
    rules = import_module("opt_kernels.rules.whole_matrices")
    read_main = rules.read_main
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def read(work: Work) -> torch.Tensor:
        nonlocal most
        value = read_main(work)
        alive.append(weakref.ref(value))
        most = max(most, sum(kept() is not None for kept in alive))
        return value

    monkeypatch.setattr(rules, "read_main", read)
    monkeypatch.setattr("opt_kernels.matrices.access.STACK_NUMEL_ON_CPU", 1)
    rule = MuownRule()
    works = []
    for _ in range(6):
        halves = {"out": torch.zeros(4, 3).bfloat16(), "remainder": torch.zeros(4, 3, dtype=torch.int16)}
        state = rule.init_state(torch.zeros(4, 3))
        works.append(Work(grad=torch.ones(4, 3), main=None, state=state, **halves))
    rule.update_([Batch(Hyper(lr=0.1), works)])
    assert len(alive) == 6
    assert most <= 2
