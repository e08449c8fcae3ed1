"""Every kernel passes its gates when compiled ahead of time, and each gate can fail.

For sm_90 here; at night for every architecture.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiers import NIGHT

from opt_kernels.formulas import FORMULAS

pytest.importorskip("triton", reason="triton is not installed")

WORKBENCH = Path(__file__).parents[1]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942") if NIGHT else ("sm_90",)
# A separate process, because this one may have defined kernels for Triton's interpreter, which compiles nothing.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The reports of `kernels/aot.py`, compiled once for all tests."""
    path = tmp_path_factory.mktemp("aot") / "report.json"
    targets = [word for target in TARGETS for word in ("--target", target)]
    command = [sys.executable, str(WORKBENCH / "aot.py"), "--json", str(path), *targets]
    finished = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert path.exists(), finished.stderr[-2000:]
    loaded: list[dict[str, Any]] = json.loads(path.read_text())
    return loaded


@pytest.mark.parametrize("target", TARGETS)
def test_every_op_with_a_kernel_compiles_within_its_gates(target: str, reports: list[dict[str, Any]]) -> None:
    of_target = [report for report in reports if report["target"] == target]
    assert not {report["variant"]: report["broken"] for report in of_target if report["broken"]}
    names = {report["variant"] for report in of_target}
    ops = {"adam", "muon", "grad_stats", "scalars", "syrk"}
    if target in ("sm_90", "gfx942"):  # other formulas differ in arithmetic alone
        ops |= {*FORMULAS, "hooks"}
    assert {name.split("/")[0] for name in names} == ops
    if target in ("sm_90", "sm_100"):  # which have descriptors
        assert {f"syrk/descriptors-{dtype}-gram" for dtype in ("fp16", "bf16", "fp32")} <= names


KERNELS_OF_TORCH = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from opt_kernels.matrices.syrk.triton import SMALLEST_ROWS, halving_pays, input_precision
from opt_kernels.backends.triton.formats import triton_dtype
from variants import all_variants
compiled = {(v.constants["PRECISION"], v.name.split("-")[1]) for v in all_variants() if v.name.startswith("syrk/")}
for setting in ("highest", "high", "medium"):
    torch.set_float32_matmul_precision(setting)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if halving_pays(torch.empty(1, SMALLEST_ROWS, 8, dtype=dtype, device="meta")):
            wanted = (input_precision(dtype), str(triton_dtype(dtype)))
            print("missing" if wanted not in compiled else "compiled", *wanted)
"""


def test_every_product_that_is_launched_is_compiled() -> None:
    command = [sys.executable, "-c", KERNELS_OF_TORCH, str(WORKBENCH)]
    finished = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert "compiled tf32 fp32" in finished.stdout
    assert "missing" not in finished.stdout


SCRIPT = """
import sys
from dataclasses import fields, replace
sys.path.insert(0, sys.argv[1])
import aot
from variant import Widths
from variants import all_variants
variant = next(v for v in all_variants() if v.name == "adam/bf16-out")
of_syrk = next(v for v in all_variants() if v.name == "syrk/descriptors-fp32-gram")
SYRK = {field.name: getattr(of_syrk, field.name) for field in fields(of_syrk)}
known = {"Widths": Widths, "constants": variant.constants, "SYRK": SYRK}
for change in sys.argv[2:]:
    changed = replace(variant, **eval(change, known))
    report = aot.nvidia(changed, "sm_90", aot.compiled(changed, aot.TARGETS["sm_90"]))
    print("; ".join(report.broken))
"""
# A change of the variant, and the message of the gate that must fail.
CHANGES = {
    "registers": ("{'max_registers': 16}", "16 are allowed"),
    "two-layouts": ("{'constants': constants | {'E': 8}}", "shared memory"),
    "no-alignment-hint": ("{'constants': constants | {'E': 1}}", "where 8 are expected"),
    "16-bit-scalars": ("{'constants': constants | {'E': 1}}", "elements move one by one"),
    "widths": ("{'widths': Widths(load_128=9)}", "where 9 are expected"),
    "bytes-in-flight": ("{'tile_read_bytes': 1024}", "hide the latency"),
    "instructions": ("{'max_instructions': 60}", "where 60.0 can be issued"),
    "tensor-cores": ("{'matrix': True}", "no matrix instruction"),
    # The reason why `halving_pays` leaves exact float32 products to torch.
    "exact-float32": ("SYRK | {'constants': SYRK['constants'] | {'PRECISION': 'ieee'}}", "spills"),
}


@pytest.fixture(scope="session")
def broken_by() -> dict[str, str]:
    """Messages of the failed gates for each change. One process compiles all, because its imports are slow."""
    command = [sys.executable, "-c", SCRIPT, str(WORKBENCH), *(change for change, _ in CHANGES.values())]
    finished = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    return dict(zip(CHANGES, finished.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", CHANGES)
def test_a_gate_fails_where_it_must(name: str, broken_by: dict[str, str]) -> None:
    assert CHANGES[name][1] in broken_by[name]
