"""Every Triton sweep against its float64 reference, dtype by dtype, and what it must leave alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.reference import update as reference
from opt_kernels.backends.triton import update as triton
from opt_kernels.backends.triton.formats import LaunchFormats
from opt_kernels.backends.triton.sweep import sweeps
from opt_kernels.codecs import Plain, StateCodec, codec_for
from opt_kernels.codecs.remainder import join, split_
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.sgd import SGD as SGD_FORMULA
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.lion import Lion
from opt_kernels.rules.sgd import SGD
from opt_kernels.works import Batch, Hyper, Work, Works

SIZES = (0, 1, 63, 1025, 2048, 2112)  # whole chunks, partial ones, and whole ones with a rest
HYPER = Hyper(lr=1e-2, weight_decay=0.1, step=3, betas=(0.9, 0.99), eps=1e-8, momentum=0.9)
HALF_UNIT = 2.0**-24  # of float32, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A formula, with the fast and the slow way to run it."""

    formula: Formula
    fast: Callable[..., None] = triton.update_
    slow: Callable[..., None] = reference.update_

    @property
    def states(self) -> tuple[tuple[str, bool], ...]:
        """Names, and whether never negative."""
        return tuple((state.name, not state.signed) for state in self.formula.states)

    def run(
        self, version: Callable[..., None], batches: list[Batch], codecs: dict[str, StateCodec], **more: Any
    ) -> None:
        version(batches, self.formula, codecs, **more)

    def codecs(self, narrow: torch.dtype) -> dict[str, StateCodec]:
        eight = {True: torch.int8, False: torch.uint8}
        return {
            name: codec_for(name, eight[not positive] if narrow is torch.int8 else narrow, signed=not positive)
            for name, positive in self.states
        }


SWEEPS = {
    "adamw-torch": Sweep(formula=ADAM),
    "adam-torch": Sweep(formula=ADAM.with_constants(decoupled_weight_decay=False)),
    "adamw-te": Sweep(formula=ADAM.with_constants(order="te")),
    "adam-te": Sweep(formula=ADAM.with_constants(order="te", decoupled_weight_decay=False)),
    "sgd-nesterov": Sweep(formula=SGD_FORMULA.with_constants(nesterov=True)),
    "sgd-dampened": Sweep(formula=SGD_FORMULA.with_defaults(dampening=0.1)),
    "sgd-plain": Sweep(formula=SGD_FORMULA.with_constants(has_momentum=False)),
    "lion": Sweep(formula=LION),
}
LION_CODECS = {"exp_avg": Plain()}
ONE_OF_EACH = {name: SWEEPS[name] for name in ("adamw-torch", "sgd-nesterov", "lion")}


def each(sweeps: dict[str, Sweep]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sweep", sweeps.values(), ids=sweeps.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """In which numbers a work is kept."""

    grad: torch.dtype = torch.float32
    main: torch.dtype | None = torch.float32  # None: remainder
    out: torch.dtype | None = None
    state: torch.dtype = torch.float32


STORAGES = {
    "fp32": Storage(),
    "bf16-grads": Storage(grad=torch.bfloat16),
    "bf16-out": Storage(out=torch.bfloat16),
    "fp16-out": Storage(grad=torch.float16, out=torch.float16),
    "bf16-itself": Storage(grad=torch.bfloat16, main=torch.bfloat16),
    "remainder": Storage(main=None, out=torch.bfloat16),
    "remainder-all-16-bit": Storage(grad=torch.bfloat16, main=None, out=torch.bfloat16, state=torch.bfloat16),
    "bf16-state": Storage(state=torch.bfloat16),
    "fp16-state": Storage(state=torch.float16),
    "fp8-state": Storage(state=torch.float8_e4m3fn),
    "e5m2-state": Storage(state=torch.float8_e5m2),
    "int8-state-remainder": Storage(grad=torch.bfloat16, main=None, out=torch.bfloat16, state=torch.int8),
}


def make_works(
    sweep: Sweep, storage: Storage, device: torch.device, *, sizes: tuple[int, ...] = SIZES, offset: int = 0
) -> list[Work]:
    """Works with random contents, the same at every call; `out` is NaN until it is written.

    An element's mains, gradients and signed states share one sign: no sum of them cancels, which leaves nothing but
    rounding to explain a difference.
    """
    generator = torch.Generator().manual_seed(17)

    def size(n: int) -> Tensor:
        # Over four decades, so that narrow codecs meet large and small values in one block.
        spread = 10 ** (-4 * torch.rand(n, generator=generator))
        return torch.randn(n, generator=generator).abs() * spread

    works = []
    for n in sizes:
        sign = torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1
        p, g = sign * size(n), sign * size(n)
        state = {}
        for name, codec in sweep.codecs(storage.state).items():
            values = size(n).square() if dict(sweep.states)[name] else sign * size(n)
            codes = empty(n, codec.dtype, device, offset)
            scales = torch.empty(-(-n // codec.block), device=device) if codec.block else None
            codec.encode_(codes, scales, values.to(device))
            state[name] = codes
            if scales is not None:
                state[f"{name}_scale"] = scales
        main, out, remainder = None, None, None
        if storage.out is not None:
            out = empty(n, storage.out, device, offset).fill_(torch.nan)
        if storage.main is None:
            remainder = empty(n, torch.int16, device, offset)
            assert out is not None
            split_(out, remainder, p.to(device))
        else:
            main = empty(n, storage.main, device, offset).copy_(p)
        grad = empty(n, storage.grad, device, offset).copy_(g)
        works.append(Work(grad=grad, main=main, out=out, remainder=remainder, state=state, first=7 * 64))
    return works


def empty(n: int, dtype: torch.dtype, device: torch.device, offset: int) -> Tensor:
    """An uninitialised run that begins `offset` elements after an aligned address."""
    return torch.empty(n + offset, dtype=dtype, device=device)[offset:]


def tensors(works: list[Work]) -> Iterator[tuple[str, Tensor]]:
    for work in works:
        named = {"grad": work.grad, "main": work.main, "out": work.out, "remainder": work.remainder, **work.state}
        yield from ((name, tensor) for name, tensor in named.items() if tensor is not None)


def snapshot(works: list[Work]) -> list[Tensor]:
    return [tensor.clone() for _, tensor in tensors(works)]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def in_float64(work: Work, codecs: dict[str, StateCodec]) -> Work:
    """The same work with float64 mains and states, decoded: what the reference moves without rounding anything."""
    state = {}
    for name, codec in codecs.items():
        values = torch.empty(work.grad.numel(), dtype=torch.float64, device=work.grad.device)
        codec.decode_(values, work.state[name], work.state.get(f"{name}_scale"))
        state[name] = values
    main = work.main
    if main is None:
        assert work.out is not None
        assert work.remainder is not None
        main = join(work.out, work.remainder)
    return replace(work, main=main.double(), out=None, remainder=None, state=state, grad=work.grad.double())


def main_of(work: Work) -> Tensor:
    if work.main is not None:
        return work.main.double()
    assert work.out is not None
    assert work.remainder is not None
    return join(work.out, work.remainder).double()


# Storage and formula meet in device functions that know nothing of each other: every storage with one sweep of each
# op, every other sweep with two.
CASES = {
    f"{sweep}-{storage}": (SWEEPS[sweep], STORAGES[storage])
    for sweep in SWEEPS
    for storage in (STORAGES if sweep in ONE_OF_EACH else ("fp32", "remainder-all-16-bit"))
}


@pytest.mark.parametrize(("sweep", "storage"), CASES.values(), ids=CASES.keys())
def test_a_sweep_equals_its_float64_reference(sweep: Sweep, storage: Storage, kernel_device: torch.device) -> None:
    codecs = sweep.codecs(storage.state)
    works = make_works(sweep, storage, kernel_device)
    exact = [in_float64(work, codecs) for work in works]
    before = [work.main.clone() for work in exact if work.main is not None]
    wide: dict[str, StateCodec] = {name: Plain(dtype=torch.float64) for name in codecs}
    sweep.run(sweep.slow, [Batch(HYPER, exact)], wide, grad_scale=0.5)
    sweep.run(sweep.fast, [Batch(HYPER, works)], codecs, grad_scale=torch.tensor(0.5, device=kernel_device))
    rounding = 2.0**-8 if storage.main is torch.bfloat16 else 0.0
    for work, true, old in zip(works, exact, before):
        assert true.main is not None
        moved = (true.main - old).abs()
        # A dozen float32 roundings of the update, a few of the sum, and the one of what the main is stored in.
        # Below 18 bytes an element divisions are the hardware's, two units more each.
        allowed = 16 * HALF_UNIT * moved + 2 * HALF_UNIT * old.abs() + (HALF_UNIT + rounding) * true.main.abs() + 1e-37
        assert ((main_of(work) - true.main).abs() <= allowed).all()
        if work.out is not None and work.main is not None:
            assert torch.equal(work.out, work.main.to(work.out.dtype))


@each(ONE_OF_EACH)
@pytest.mark.parametrize("name", ["fp32", "remainder-all-16-bit"])
def test_many_chunks_are_as_good_as_one(sweep: Sweep, name: str, kernel_device: torch.device) -> None:
    storage, n = STORAGES[name], 65537
    [whole], [expected] = (make_works(sweep, storage, kernel_device, sizes=(n,)) for _ in range(2))
    sweep.run(sweep.fast, [Batch(HYPER, [whole])], sweep.codecs(storage.state))
    sweep.run(sweep.slow, [Batch(HYPER, [expected])], sweep.codecs(storage.state))
    # Both compute in float32 and differ by a unit or two; an element of the wrong chunk differs by all of itself.
    torch.testing.assert_close(main_of(whole), main_of(expected), rtol=1e-5, atol=1e-6)


@each(ONE_OF_EACH)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_narrow_states_hold_the_codes_that_their_codec_gives(
    sweep: Sweep, narrow: torch.dtype, kernel_device: torch.device
) -> None:
    storage = Storage(state=narrow)
    codecs = sweep.codecs(narrow)
    works, expected = (make_works(sweep, storage, kernel_device) for _ in range(2))
    sweep.run(sweep.slow, [Batch(HYPER, expected)], codecs)
    sweep.run(sweep.fast, [Batch(HYPER, works)], codecs)
    for work, other in zip(works, expected):
        for name in codecs:
            # The order of float32 operations is the same but for torch's fused multiply-adds: one value in a
            # hundred may fall on the other side of a rounding boundary, by one code.
            codes, others = (w.state[name].view(integers(narrow)).int() for w in (work, other))
            assert ((codes - others).abs() <= 1).all()
            assert (codes != others).sum() <= max(1, 0.01 * codes.numel())


def integers(narrow: torch.dtype) -> torch.dtype:
    return torch.int16 if narrow.itemsize == 2 else torch.uint8


@each(SWEEPS)
@pytest.mark.parametrize("name", ["bf16-out", "int8-state-remainder"])
def test_a_skip_flag_leaves_every_byte_as_it_was(sweep: Sweep, name: str, kernel_device: torch.device) -> None:
    works = make_works(sweep, STORAGES[name], kernel_device)
    before = snapshot(works)
    codecs = sweep.codecs(STORAGES[name].state)
    sweep.run(sweep.fast, [Batch(HYPER, works)], codecs, skip=torch.tensor(True, device=kernel_device))
    for old, (label, new) in zip(before, tensors(works)):
        assert same_bytes(old, new), label


@each(ONE_OF_EACH)
def test_a_gradient_whose_sign_is_a_flag_is_read_with_it(sweep: Sweep, kernel_device: torch.device) -> None:
    # As the gradient of an imaginary part may be; the sweep read the memory without the sign.
    plain, lazy = (make_works(sweep, Storage(), kernel_device) for _ in range(2))
    flagged = [replace(work, grad=torch._neg_view(-work.grad)) for work in lazy]
    assert all(work.grad.is_neg() for work in flagged)
    for works in (plain, flagged):
        sweep.run(sweep.fast, [Batch(HYPER, works)], sweep.codecs(torch.float32))
    for work, other in zip(plain, lazy):
        assert same_bytes(main_of(work), main_of(other))


@each(ONE_OF_EACH)
@pytest.mark.parametrize("offset", [0, 3])
def test_vector_accesses_are_promised_for_aligned_runs_alone(
    sweep: Sweep, offset: int, kernel_device: torch.device
) -> None:
    # The interpreter reads from any address; a GPU faults.
    works = make_works(sweep, Storage(), kernel_device, sizes=(1025, 2048), offset=offset)
    found = sweeps([Batch(HYPER, works)], sweep.codecs(torch.float32))
    assert {(one.formats.aligned, one.formats.vector) for one in found} == {(True, 4) if offset == 0 else (False, 1)}


def test_elements_keep_the_numbers_that_they_are_given_at_each_call(kernel_device: torch.device) -> None:
    # A table is found again by its tensors; where only the numbers have changed it must not be.
    sweep = SWEEPS["adamw-torch"]
    [work] = make_works(sweep, Storage(), kernel_device, sizes=(1025,))
    assert work.main is not None
    for first in (0, 640):
        works = Works([work.grad], mains=[work.main], states=[work.state], firsts=(first,))
        [found] = sweeps([Batch(HYPER, works)], sweep.codecs(torch.float32))
        assert found.table.records[:, -1].tolist() == [first]


def test_divisions_are_exact_where_memory_hides_them() -> None:
    wide = LaunchFormats(torch.float32, torch.float32, None, (torch.float32, torch.float32), True)
    narrow = LaunchFormats(torch.bfloat16, None, torch.bfloat16, (torch.int8, torch.uint8), True)
    assert (wide.bytes_moved, wide.ieee) == (28, True)
    assert (narrow.bytes_moved, narrow.ieee) == (14, False)


@each(SWEEPS)
def test_gradients_are_never_written(sweep: Sweep, kernel_device: torch.device) -> None:
    works = make_works(sweep, Storage(), kernel_device)
    before = [work.grad.clone() for work in works]
    sweep.run(sweep.fast, [Batch(HYPER, works)], sweep.codecs(torch.float32), grad_scale=0.5)
    assert all(same_bytes(old, work.grad) for old, work in zip(before, works))


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


def test_stochastic_rounding_draws_the_bits_of_the_reference(kernel_device: torch.device) -> None:
    sweep, storage = SWEEPS["adamw-torch"], STORAGES["bf16-itself"]
    # The run crosses element number 2^32, where the upper half of the counter changes.
    fast, slow = (
        [replace(work, first=2**32 - 640) for work in make_works(sweep, storage, kernel_device, sizes=(1, 5000))]
        for _ in range(2)
    )
    sweep.run(sweep.fast, [Batch(HYPER, fast)], sweep.codecs(torch.float32), stochastic_rounding=True)
    sweep.run(sweep.slow, [Batch(HYPER, slow)], sweep.codecs(torch.float32), stochastic_rounding=True)
    for a, b in zip(fast, slow):
        assert a.main is not None
        assert b.main is not None
        # Of a main that differs in its last float32 bit one in 65536 is rounded to the other side.
        assert (a.main != b.main).sum() <= 1


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


@each(ONE_OF_EACH)
def test_nan_reaches_the_weight_and_its_remainder(sweep: Sweep, kernel_device: torch.device) -> None:
    storage = STORAGES["remainder"]
    works = make_works(sweep, storage, kernel_device, sizes=(70,))
    works[0].grad[[3, 69]] = torch.nan
    sweep.run(sweep.fast, [Batch(HYPER, works)], sweep.codecs(torch.float32))
    assert works[0].out is not None
    assert works[0].out.isnan().nonzero().flatten().tolist() == [3, 69]


@each(SWEEPS)
def test_an_infinite_parameter_stays_without_weight_decay(sweep: Sweep, kernel_device: torch.device) -> None:
    [work] = make_works(sweep, STORAGES["fp32"], kernel_device, sizes=(2112,))
    assert work.main is not None
    work.main.fill_(-torch.inf)
    sweep.run(sweep.fast, [Batch(replace(HYPER, weight_decay=0.0), [work])], sweep.codecs(torch.float32))
    assert bool((work.main == -torch.inf).all())


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
