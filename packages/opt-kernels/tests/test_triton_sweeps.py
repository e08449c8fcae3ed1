"""Every Triton sweep against its float64 reference, dtype by dtype, and what it must leave alone."""

from dataclasses import replace

import pytest
import torch

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

from opt_kernels.backends.triton.formats import LaunchFormats
from opt_kernels.backends.triton.launches import _constants, sweeps
from opt_kernels.codecs import Plain, StateCodec
from opt_kernels.codecs.remainder import join
from opt_kernels.works import Batch, Work, Works

pytestmark = pytest.mark.needs_extra

HALF_UNIT = 2.0**-24  # of float32, relative


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
    short = 2.0**-16 if storage.remainder is torch.int8 else 0.0
    rounding = 2.0**-8 if storage.main is torch.bfloat16 else short
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
    narrow = LaunchFormats(torch.bfloat16, torch.int16, torch.bfloat16, (torch.int8, torch.uint8), True, remainder=True)
    assert (wide.bytes_moved, wide.ieee) == (28, True)
    assert (narrow.bytes_moved, narrow.ieee) == (14, False)


@pytest.mark.parametrize("states", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.int8, torch.uint8)], ids=str)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_contracted_or_approximated_where_bits_are_promised(
    grad: torch.dtype, main: torch.dtype, states: tuple[torch.dtype, ...]
) -> None:
    """The bits of CPUs are promised from 18 bytes an element on. Triton's own default of fusion varies by version."""
    formats = LaunchFormats(grad, main, None, states, True)
    moved = grad.itemsize + 2 * main.itemsize + 2 * sum(state.itemsize for state in states)
    options = _constants(formats)
    assert (options["IEEE"], options["enable_fp_fusion"]) == ((True, False) if moved >= 18 else (False, True))


@each(SWEEPS)
def test_gradients_are_never_written(sweep: Sweep, kernel_device: torch.device) -> None:
    works = make_works(sweep, Storage(), kernel_device)
    before = [work.grad.clone() for work in works]
    sweep.run(sweep.fast, [Batch(HYPER, works)], sweep.codecs(torch.float32), grad_scale=0.5)
    assert all(same_bytes(old, work.grad) for old, work in zip(before, works))


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
