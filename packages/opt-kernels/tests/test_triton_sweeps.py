"""Triton sweeps: where they may read and write, and what they promise. Their numbers are tested with all backends'."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from elementwise_works import HYPER, work_of, written
from torch import Tensor

from opt_kernels.backends import grad_stats
from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.triton.formats import LaunchFormats
from opt_kernels.backends.triton.launches import _constants, sweeps
from opt_kernels.backends.triton.quantize import scheme
from opt_kernels.codecs import Plain
from opt_kernels.rules import SGD, Adam, ElementwiseRule, Lion
from opt_kernels.works import Batch, Work, Works

pytestmark = pytest.mark.needs_extra

NUMEL = 1025
MAKE: dict[str, Callable[..., ElementwiseRule]] = {"adam": Adam, "sgd": SGD, "lion": Lion}
CODECS = {"exp_avg": Plain()}


def shifted(work: Work, offset: int = 3) -> Work:
    """The same values, `offset` elements after an aligned address."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        memory = tensor.new_empty(tensor.numel() + offset)[offset:]
        return memory.copy_(tensor)

    state = {name: moved(tensor) for name, tensor in work.state.items()}
    others = {name: moved(getattr(work, name)) for name in ("grad", "main", "out", "remainder")}
    return replace(work, state=state, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", MAKE)
@pytest.mark.parametrize("name", ["fp32", "fp32-out16", "remainder-g16"])
def test_runs_without_alignment_give_the_same_bits(rule: str, name: str) -> None:
    made = MAKE[rule](backend="triton")
    aligned, unaligned = work_of(made, NUMEL, name, "triton"), shifted(work_of(made, NUMEL, name, "triton"))
    for work in (aligned, unaligned):
        made.update_([Batch(HYPER, [work])], grad_scale=0.5)
    assert all(map(torch.equal, written(aligned), written(unaligned)))


def test_vector_accesses_are_promised_for_aligned_runs_alone() -> None:
    # The interpreter reads from any address; a GPU faults.
    work = work_of(Lion(), NUMEL, "fp32", "triton")
    for given, expected in ((work, (True, 4)), (shifted(work), (False, 1))):
        [found] = sweeps([Batch(HYPER, [given])], CODECS)
        assert (found.formats.aligned, found.formats.vector) == expected


def test_elements_keep_the_numbers_that_they_are_given_at_each_call() -> None:
    # A table is found again by its tensors; if only the numbers have changed it must not be.
    work = work_of(Lion(), NUMEL, "fp32", "triton")
    assert work.main is not None
    for first in (0, 640):
        works = Works([work.grad], mains=[work.main], states=[work.state], firsts=(first,))
        [found] = sweeps([Batch(HYPER, works)], CODECS)
        assert found.table.records[:, -1].tolist() == [first]


@pytest.mark.parametrize("states", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.int8, torch.uint8)], ids=str)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_contracted_or_approximated_where_bits_are_promised(
    grad: torch.dtype, main: torch.dtype, states: tuple[torch.dtype, ...]
) -> None:
    """The bits of CPUs are promised from 18 bytes an element on. Triton's own default of fusion varies by version."""
    formats = LaunchFormats(grad, main, None, states, True)
    moved = grad.itemsize + 2 * main.itemsize + 2 * sum(state.itemsize for state in states)
    assert formats.bytes_moved == moved
    options = _constants(formats)
    assert (options["IEEE"], options["enable_fp_fusion"]) == ((True, False) if moved >= 18 else (False, True))
    narrow = LaunchFormats(torch.bfloat16, torch.int16, torch.bfloat16, (torch.int8, torch.uint8), True, remainder=True)
    assert (narrow.bytes_moved, narrow.ieee) == (14, False)


def test_a_tensor_of_another_dtype_at_the_same_address_is_seen(kernel_device: torch.device) -> None:
    # As when a parameter is narrowed in place: the table of the wide one would write behind its end.
    memory = torch.ones(256, device=kernel_device)
    grad = torch.ones(128, device=kernel_device)
    for dtype in (torch.float32, torch.bfloat16):
        main = memory.view(dtype)[:128]
        work = Work(grad=grad, main=main, state={"exp_avg": torch.zeros(128, device=kernel_device)})
        memory[64:] = 1.0
        Lion(backend="triton").update_([Batch(replace(HYPER, lr=0.5, weight_decay=0.0), [work])])
    assert memory[64:].tolist() == [1.0] * 192
    assert main.tolist() != [1.0] * 128


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dtypes_that_kernels_would_misread_are_refused(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Symptom: the kernels read fp8 bytes as integers, and every gradient was positive."""
    ones = torch.ones(300, device=kernel_device)
    for column in ("grad", "main", "out"):
        tensors = {"grad": ones, "main": ones.clone(), column: ones.to(dtype)}
        with pytest.raises(LayoutError, match=r"cannot sweep torch.*backend='torch'"):
            Lion(backend="triton").update_([Batch(HYPER, [Work(state=Lion().init_state(ones), **tensors)])])
    with pytest.raises(LayoutError, match="cannot sweep torch"):
        grad_stats([ones.to(dtype)], backend="triton")
    if dtype.itemsize == 1:
        with pytest.raises(LayoutError, match="has no sweep for Plain"):
            scheme(Plain(dtype=dtype))


def test_nothing_to_update_is_no_error() -> None:
    for rule in (Adam(backend="triton"), Lion(backend="triton")):
        rule.update_([])
        rule.update_([Batch(HYPER, [])])
