"""Writes docs/bits.md: which backends give equal bits, by rule and number format. `python bit_table.py [PAGE]`.

Every cell is three steps of 130 elements on the CPU, Triton in its interpreter, compared bit for bit: weights, states
and remainders. The tests of the package compare more shapes and steps.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opt_kernels import optim
from opt_kernels.formulas import FORMULAS, Formula

BACKENDS = ("cpp", "triton", "torch")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "bits.md"
FORMATS: Mapping[str, tuple[torch.dtype, Mapping[str, Any], tuple[torch.dtype, torch.dtype]]] = {
    "float32": (torch.float32, {}, (torch.float32, torch.float32)),
    "bfloat16, rounded stochastically": (
        torch.bfloat16, {"stochastic_rounding": True}, (torch.float32, torch.float32),
    ),
    "bfloat16 and remainders": (torch.bfloat16, {"mains": "remainder"}, (torch.float32, torch.float32)),
    "bfloat16 states": (torch.float32, {}, (torch.bfloat16, torch.bfloat16)),
    "float16 states": (torch.float32, {}, (torch.float16, torch.float16)),
    "8-bit states": (torch.float32, {}, (torch.int8, torch.uint8)),
    "e4m3 states": (torch.float32, {}, (torch.float8_e4m3fn, torch.float8_e4m3fn)),
    "e5m2 states": (torch.float32, {}, (torch.float8_e5m2, torch.float8_e5m2)),
}  # fmt: skip
HEAD = """# Equal bits

Which backends give equal bits, by rule and number format. `python packages/opt-kernels/benchmarks/bit_table.py` writes
this page: each cell is three steps of 130 elements on a CPU, with Triton in its interpreter, and compares weights and
states. `=` joins backends whose bits are equal; a comma separates those that differ. The torch backend runs torch's own
fused kernels for AdamW and SGD; SGD's differs in the last bit. On a GPU, Triton's bits are those of this page only
where a step moves at least 18 bytes an element; below, divisions and roots are approximate and products are contracted.

"""


def bits_of(formula: Formula, format: str, backend: str) -> list[Tensor]:
    """Weights and states after three steps."""
    dtype, options, (signed, unsigned) = FORMATS[format]
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(130, generator=generator).to(dtype))
    dtypes = {f"{state.name}_dtype": signed if state.signed else unsigned for state in formula.declared}
    optimizer = getattr(optim, formula.title)([param], lr=0.01, backend=backend, **options, **dtypes)
    for _ in range(3):
        param.grad = torch.randn(130, generator=generator).to(dtype)
        optimizer.step()
    return [param.detach(), *(value for _, value in sorted(optimizer.state[param].items()))]


def cell(formula: Formula, format: str) -> str:
    """The backends in classes of equal bits."""
    classes: list[tuple[list[str], list[Tensor]]] = []
    for backend in BACKENDS:
        bits = bits_of(formula, format, backend)
        for names, of_class in classes:
            if all(map(_are_equal, of_class, bits)):
                names.append(backend)
                break
        else:
            classes.append(([backend], bits))
    return ", ".join(" = ".join(names) for names, _ in classes)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def lines() -> Iterator[str]:
    yield f"| rule | {' | '.join(FORMATS)} |"
    yield "|---" * (1 + len(FORMATS)) + "|"
    for formula in FORMULAS.values():
        yield f"| {formula.title} | {' | '.join(cell(formula, format) for format in FORMATS)} |"


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    logging.disable(logging.WARNING)
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(HEAD + "\n".join(lines()) + "\n")
