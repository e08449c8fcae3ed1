"""Works that Triton sweeps take: layouts, dtypes, groups, addresses that change, refusals."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from elementwise_works import main_of
from sweep_works import (
    HYPER,
    ONE_OF_EACH,
    STORAGES,
    SWEEPS,
    Storage,
    Sweep,
    each,
    make_works,
    same_bytes,
    snapshot,
    tensors,
)

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.reference import update as reference
from opt_kernels.backends.triton import update as triton
from opt_kernels.codecs import Plain
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.lion import LION
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.lion import Lion
from opt_kernels.rules.sgd import SGD
from opt_kernels.works import Batch, Work, Works

pytestmark = pytest.mark.needs_extra

LION_CODECS = {"exp_avg": Plain()}


@each(ONE_OF_EACH)
@pytest.mark.parametrize("name", ["fp32", "bf16-out", "remainder-all-16-bit"])
def test_runs_without_alignment_give_the_same_bits(sweep: Sweep, name: str, kernel_device: torch.device) -> None:
    storage = STORAGES[name]
    aligned, shifted = (make_works(sweep, storage, kernel_device, offset=offset) for offset in (0, 3))
    for works in (aligned, shifted):
        sweep.run(sweep.fast, [Batch(HYPER, works)], sweep.codecs(storage.state))
    for (label, a), (_, b) in zip(tensors(aligned), tensors(shifted)):
        assert same_bytes(a, b), label


@each(ONE_OF_EACH)
@pytest.mark.parametrize("name", ["fp32", "remainder-all-16-bit"])
def test_nothing_is_written_outside_a_run(sweep: Sweep, name: str, kernel_device: torch.device) -> None:
    storage, n = STORAGES[name], 1025
    [whole] = make_works(sweep, storage, kernel_device, sizes=(n + 200,))
    before = snapshot([whole])

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[64 : 64 + n]

    inner = replace(
        whole,
        grad=whole.grad[64 : 64 + n],
        main=cut(whole.main),
        out=cut(whole.out),
        remainder=cut(whole.remainder),
        state={key: value[64 : 64 + n] for key, value in whole.state.items()},
    )
    sweep.run(sweep.fast, [Batch(HYPER, [inner])], sweep.codecs(storage.state))
    for old, (label, new) in zip(before, tensors([whole])):
        assert same_bytes(old[:64], new[:64]), label
        assert same_bytes(old[64 + n :], new[64 + n :]), label


@each(ONE_OF_EACH)
@pytest.mark.parametrize("name", ["fp32", "bf16-itself", "remainder-all-16-bit"])
def test_the_bits_do_not_depend_on_where_a_parameter_is_cut(
    sweep: Sweep, name: str, kernel_device: torch.device
) -> None:
    storage, n = STORAGES[name], 5000
    [whole], [parts] = (make_works(sweep, storage, kernel_device, sizes=(n,)) for _ in range(2))
    cuts = [(0, 64), (64, 1088), (1088, 4992), (4992, n)]

    def piece(begin: int, end: int) -> Work:
        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[begin:end]

        return replace(
            parts,
            grad=parts.grad[begin:end],
            main=cut(parts.main),
            out=cut(parts.out),
            remainder=cut(parts.remainder),
            state={key: value[begin:end] for key, value in parts.state.items()},
            first=parts.first + begin,
        )

    more = {"stochastic_rounding": True} if sweep is SWEEPS["adamw-torch"] else {}
    sweep.run(sweep.fast, [Batch(HYPER, [whole])], sweep.codecs(storage.state), **more)
    sweep.run(sweep.fast, [Batch(HYPER, [piece(*cut) for cut in cuts])], sweep.codecs(storage.state), **more)
    for (label, a), (_, b) in zip(tensors([whole]), tensors([parts])):
        assert same_bytes(a, b), label


def test_every_group_moves_by_its_own_row(kernel_device: torch.device) -> None:
    sweep = SWEEPS["adamw-torch"]
    rows = [replace(HYPER, lr=lr, weight_decay=decay) for lr, decay in ((1e-2, 0.1), (1e-3, 0.0), (0.0, 0.5))]
    together, alone = (
        [Batch(row, make_works(sweep, Storage(), kernel_device, sizes=(65, 3000))) for row in rows] for _ in range(2)
    )
    sweep.run(sweep.fast, together, sweep.codecs(torch.float32))
    for batch in alone:
        sweep.run(sweep.fast, [batch], sweep.codecs(torch.float32))
    for a, b in zip(together, alone):
        for (label, x), (_, y) in zip(tensors(list(a.works)), tensors(list(b.works))):
            assert same_bytes(x, y), label


def test_dtypes_may_be_mixed_in_one_call(kernel_device: torch.device) -> None:
    sweep = SWEEPS["adamw-torch"]
    names = ("fp32", "bf16-grads", "bf16-out", "remainder")
    mixed, alone = (
        [make_works(sweep, STORAGES[name], kernel_device, sizes=(65, 300)) for name in names] for _ in range(2)
    )
    sweep.run(sweep.fast, [Batch(HYPER, [work for works in mixed for work in works])], sweep.codecs(torch.float32))
    for a, b in zip(mixed, alone):
        sweep.run(sweep.fast, [Batch(HYPER, b)], sweep.codecs(torch.float32))
        for (label, x), (_, y) in zip(tensors(a), tensors(b)):
            assert same_bytes(x, y), label


def test_matrices_may_lie_transposed_in_memory(kernel_device: torch.device) -> None:
    sweep = SWEEPS["adamw-torch"]
    [flat] = make_works(sweep, Storage(), kernel_device, sizes=(1200,))

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.view(30, 40).t().contiguous().t()

    assert flat.main is not None
    state = {name: laid_out(tensor) for name, tensor in flat.state.items()}
    # The gradient keeps the other order: it must be matched by element, not by address.
    turned = Work(grad=flat.grad.view(30, 40), main=laid_out(flat.main), state=state)
    for work in (flat, turned):
        sweep.run(sweep.fast, [Batch(HYPER, [work])], sweep.codecs(torch.float32))
    assert turned.main is not None
    assert torch.equal(turned.main.reshape(-1), flat.main)


def test_holes_are_refused(kernel_device: torch.device) -> None:
    [work] = make_works(SWEEPS["lion"], Storage(), kernel_device, sizes=(100,))
    holes = replace(work, grad=work.grad[::2], main=work.main[::2] if work.main is not None else None, state={
        name: tensor[::2] for name, tensor in work.state.items()
    })  # fmt: skip
    with pytest.raises(LayoutError, match="contiguous"):
        triton.update_([Batch(HYPER, [holes])], LION, LION_CODECS)


def test_float64_is_refused_with_a_way_on(kernel_device: torch.device) -> None:
    p = torch.zeros(4, dtype=torch.float64, device=kernel_device)
    work = Work(grad=p, main=p.clone(), state={"exp_avg": p.clone()})
    with pytest.raises(LayoutError, match="backend='torch'"):
        triton.update_([Batch(HYPER, [work])], LION, LION_CODECS)


def test_a_gradient_that_has_moved_is_found_again(kernel_device: torch.device) -> None:
    works, expected = (make_works(SWEEPS["lion"], Storage(), kernel_device) for _ in range(2))
    for _ in range(3):
        works = [replace(work, grad=work.grad.clone()) for work in works]
        triton.update_([Batch(HYPER, works)], LION, LION_CODECS)
        reference.update_([Batch(HYPER, expected)], LION, LION_CODECS)
    for work, other in zip(works, expected):
        torch.testing.assert_close(work.main, other.main, rtol=1e-6, atol=1e-7)


def test_a_tensor_of_another_dtype_at_the_same_address_is_seen(kernel_device: torch.device) -> None:
    # As when a parameter is narrowed in place: the table of the wide one would write behind its end.
    memory = torch.ones(256, device=kernel_device)
    grad = torch.ones(128, device=kernel_device)
    for dtype in (torch.float32, torch.bfloat16):
        main = memory.view(dtype)[:128]
        work = Work(grad=grad, main=main, state={"exp_avg": torch.zeros(128, device=kernel_device)})
        memory[64:] = 1.0
        triton.update_([Batch(replace(HYPER, lr=0.5, weight_decay=0.0), [work])], LION, LION_CODECS)
    assert memory[64:].tolist() == [1.0] * 192
    assert main.tolist() != [1.0] * 128


@each(ONE_OF_EACH)
@pytest.mark.parametrize("name", ["bf16-out", "remainder-all-16-bit"])
def test_works_in_columns_move_like_any_others(sweep: Sweep, name: str, kernel_device: torch.device) -> None:
    one, other = (make_works(sweep, STORAGES[name], kernel_device) for _ in range(2))
    columns = Works(
        [work.grad for work in other],
        mains=None if other[0].main is None else [work.main for work in other if work.main is not None],
        states=[work.state for work in other],
        outs=[work.out for work in other if work.out is not None],
        remainders=None if other[0].main is not None else [w.remainder for w in other if w.remainder is not None],
        firsts=tuple(work.first for work in other),
    )
    assert [work.first for work in columns[1:3]] == [work.first for work in other[1:3]]
    for works in (one, columns):
        sweep.run(sweep.fast, [Batch(HYPER, works)], sweep.codecs(STORAGES[name].state))
    for (label, a), (_, b) in zip(tensors(one), tensors(list(columns))):
        assert same_bytes(a, b), label


@pytest.mark.parametrize("rule", [Adam, SGD, Lion], ids=lambda rule: rule.__name__)
def test_a_rule_runs_on_triton_if_requested_by_name(
    rule: type[Adam] | type[SGD] | type[Lion], kernel_device: torch.device
) -> None:
    chosen, usual = rule(backend="triton"), rule(backend="torch")
    generator = torch.Generator().manual_seed(1)
    p, g = (torch.randn(300, generator=generator).to(kernel_device) for _ in range(2))
    works = [Work(grad=g, main=p.clone(), state=one.init_state(p)) for one in (chosen, usual)]
    for one, work in zip((chosen, usual), works):
        one.update_([Batch(replace(HYPER, step=1), [work])], grad_scale=0.5)
    a, b = (main_of(work) for work in works)
    assert not torch.equal(a, p.double())
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_nothing_to_update_is_no_error() -> None:
    triton.update_([], ADAM, {"exp_avg": Plain(), "exp_avg_sq": Plain()})
    triton.update_([Batch(HYPER, [])], LION, LION_CODECS)
