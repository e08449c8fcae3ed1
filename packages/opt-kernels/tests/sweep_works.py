"""Sweeps of Triton with their references, and works in every storage format."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.reference import update as reference
from opt_kernels.backends.triton import update as triton
from opt_kernels.codecs import StateCodec, codec_for
from opt_kernels.codecs.remainder import split_
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.sgd import SGD as SGD_FORMULA
from opt_kernels.works import Batch, Hyper, Work

SIZES = (0, 1, 63, 1025, 2048, 2112)  # whole chunks, partial ones, and whole ones with a rest
HYPER = Hyper(lr=1e-2, weight_decay=0.1, step=3, betas=(0.9, 0.99), eps=1e-8, momentum=0.9)


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
ONE_OF_EACH = {name: SWEEPS[name] for name in ("adamw-torch", "sgd-nesterov", "lion")}


def each(sweeps: dict[str, Sweep]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sweep", sweeps.values(), ids=sweeps.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The numbers that a work is kept in."""

    grad: torch.dtype = torch.float32
    main: torch.dtype | None = torch.float32  # None: remainder
    remainder: torch.dtype = torch.int16
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
    "short-remainder": Storage(main=None, remainder=torch.int8, out=torch.bfloat16),
    "short-remainder-all-16-bit": Storage(
        grad=torch.bfloat16, main=None, remainder=torch.int8, out=torch.bfloat16, state=torch.bfloat16
    ),
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
            remainder = empty(n, storage.remainder, device, offset)
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
