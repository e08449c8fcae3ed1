"""Dtypes of states, codecs with scales, and values next to the edges of their codes and of bfloat16."""

import pytest
import torch
from torch import Tensor

from opt_kernels.codecs import codec_for, split_

# Of signed states, and of those that are never negative.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2),
    "8-bit": (torch.int8, torch.uint8),
}
CODECS = {
    f"{name}-{'signed' if signed else 'square'}": (codec_for("x", dtypes[0 if signed else 1], signed=signed), signed)
    for name, dtypes in DTYPES.items()
    for signed in (True, False)
    if name not in ("fp32", "bf16")
}
ON_CODECS = pytest.mark.parametrize(("codec", "signed"), CODECS.values(), ids=CODECS.keys())
SPECIAL = [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, 1e-45, -1e-40, 3.4028235e38, -3.4028235e38, 1.1754944e-38]


def _words(upper: Tensor, lower: list[int]) -> Tensor:
    """Every float32 whose upper half is one of `upper` and whose lower half is one of `lower`."""
    both = (upper.to(torch.int64)[:, None] << 16) + torch.tensor(lower)
    return (both - (both >= 1 << 31).to(torch.int64) * (1 << 32)).to(torch.int32).flatten().view(torch.float32)


# Every sign, exponent and mantissa that bfloat16 has, beside the lower halves at and around a tie, none and all.
EVERY_UPPER_HALF = _words(torch.arange(1 << 16), [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])


def at_ties(*, count: int) -> Tensor:
    """float32 numbers of every exponent, among them ties of both roundings of an 8-bit remainder."""
    word = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0))
    ties = word.clone()
    ties[::2] = (ties[::2] & ~0xFF) | 0x80
    ties[::3] = (ties[::3] & ~0xFFFF) | 0x8000
    return torch.cat([torch.cat([word, ties]).to(torch.int32).view(torch.float32), torch.tensor(SPECIAL)])


def split(main: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The halves of `main`, with a remainder of this dtype."""
    weight = torch.empty_like(main, dtype=torch.bfloat16)
    rest = torch.empty_like(main, dtype=dtype)
    split_(weight, rest, main)
    return weight, rest


def near_ties() -> Tensor:
    """Groups of 128: a largest value, then values half way between two codes of any codec, and their neighbours."""
    halves = torch.arange(255 * 4).double().add(0.5) / (255 * 4)
    ties = [halves / (2 - halves), halves, halves.square(), torch.ldexp(torch.arange(1, 33).double(), torch.tensor(-5))]
    exact = torch.cat(ties).float()
    around = [exact.nextafter(torch.tensor(end)) for end in (1.0, 0.0)]
    near = torch.cat([exact, *around, exact * (1 + 1e-6)])
    groups = torch.nn.functional.pad(near, (0, -near.numel() % 127)).view(-1, 127)
    return torch.cat([torch.ones(groups.shape[0], 1), groups], 1).flatten()


def single_ties(groups: int, *, signed: bool) -> Tensor:
    """Groups of 128 with zeros, a largest value, and one value in 32 within a few units of a tie of an 8-bit code.

    A sweep that decides for many elements at a time whether to round exactly must see each of them.
    """
    generator = torch.Generator().manual_seed(0)
    largest = 127 if signed else 255
    tie = (largest - 0.5 - torch.randint(60, (groups, 4), generator=generator)) / (2 * largest if signed else largest)
    share = tie / (1 - tie) if signed else tie
    units = torch.randint(-3, 4, (groups, 4), generator=generator)
    x = torch.zeros(groups, 128)
    x[:, 0] = torch.rand(groups, generator=generator) + 0.5
    x[:, 1::32] = x[:, :1] * share * (1 + units * 2.0**-24)
    return (x if signed else x.double().square().float()).flatten()
