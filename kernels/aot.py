"""Compile every kernel variant for every architecture, without a GPU, and check the results against the gates.

    python kernels/aot.py                      all variants, all targets; exit status 1 if a gate is broken
    python kernels/aot.py --only adam/fp32     variants whose name contains this
    python kernels/aot.py --target sm_90       only for this target
    python kernels/aot.py --json report.json   also write the measurements to this file

Neither a GPU nor a driver is needed: Triton ships its own assemblers. TRITON_INTERPRET must not be set.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.compiler import ASTSource  # type: ignore[import-untyped, import-not-found, unused-ignore]
from variant import Variant
from variants import all_variants

from opt_kernels.backends.triton import INTERPRETED

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WITH_DESCRIPTORS = ("sm_90", "sm_100")
# Little's law on an H200: 4.3 TB/s times about 0.8 us of latency, over 132 processors.
IN_FLIGHT_BYTES = 26_000
MEASURED_ON = "sm_90"  # the target whose gates assume an H200: bytes in flight, instructions
REGISTERS_PER_PROCESSOR = 65536
THREADS_PER_WARP = 32
MAX_PROGRAMS_PER_PROCESSOR = 16  # 2048 threads in programs of 4 warps
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?);|^(?P<label>\.L_\w+):")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")
WIDE_LOAD = re.compile(r"LDG\.E\S*\.128\b")
IN_ONE_PROCESS = 8  # compiling this many variants takes less time than starting another process
# Accesses of the full-chunk path are unconditional in PTX; masked accesses, as in the tail, have a predicate.
ACCESS = re.compile(
    r"^\s*(?P<predicate>@!?%p\d+\s+)?(?P<kind>ld|st)\.global(?:\.\w+)*?\.(?:(?P<lanes>v\d)\.)?b(?P<bits>\d+)\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Measurements of one variant compiled for one target, and the gates it fails."""

    variant: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    accesses: dict[str, int]  # unconditional ones: "ld.v4.b32" and so on; on AMD by instruction
    in_flight_bytes: int  # per processor, for sweeps on sm_90
    instructions: float  # for each element of a full chunk, for sweeps on sm_90
    matrix_instructions: int
    broken: list[str]  # gates, each as a sentence


def compiled(variant: Variant, target: GPUTarget) -> Any:
    """The variant as Triton compiles it."""
    parameters = list(variant.kernel.arg_names)
    signature = {name: variant.signature.get(name, "constexpr") for name in parameters}
    attrs = {(parameters.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=attrs)
    stages = 2 if target.backend == "hip" else variant.num_stages
    options = {"num_warps": variant.num_warps, "num_stages": stages, "enable_fp_fusion": variant.fusion}
    return triton.compile(source, target=target, options=options)


def tool(name: str, *arguments: str) -> str:
    """Return the output of one of the CUDA tools that Triton ships."""
    return subprocess.run([BINARIES / name, *arguments], capture_output=True, text=True, check=True).stdout


def accesses_in_ptx(ptx: str) -> Counter[str]:
    """Unconditional accesses to global memory, by kind and width."""
    found = (match for line in ptx.splitlines() if (match := ACCESS.match(line)) and not match["predicate"])
    return Counter(f"{m['kind']}.{m['lanes'] + '.' if m['lanes'] else ''}b{m['bits']}" for m in found)


def nvidia(variant: Variant, target: str, kernel: Any) -> Report:
    """Read registers and stack from the binary, access widths from the PTX, and instructions from the SASS.

    Every byte of stack counts as a spill. The SASS is read only of sweeps on sm_90 and of matrix products, the variants
    with gates on it, because disassembling takes as long as compiling.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        reads_sass = variant.matrix or (target == MEASURED_ON and variant.widths is not None)
        sass = tool("nvdisasm", "-c", "-ndf", file.name) if reads_sass else ""  # no data flow: half the time
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    stack = int(re.findall(r"STACK:(\d+)", usage)[-1])
    rounded = -(-registers // 8) * 8
    programs = min(
        MAX_PROGRAMS_PER_PROCESSOR, REGISTERS_PER_PROCESSOR // (rounded * variant.num_warps * THREADS_PER_WARP)
    )
    report = Report(
        variant=variant.name,
        target=target,
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=int(kernel.metadata.shared),
        accesses=dict(accesses_in_ptx(kernel.asm["ptx"])),
        in_flight_bytes=programs * variant.tile_read_bytes * tiles_ahead(variant, sass),
        instructions=instructions_per_element(variant, sass),
        matrix_instructions=len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA|QGMMA|UTCQMMA)\b", sass)),
        broken=[],
    )
    broken = [*common_gates(variant, report), *nvidia_gates(variant, report)]
    return Report(**(asdict(report) | {"broken": broken}))


def tiles_ahead(variant: Variant, sass: str) -> int:
    """Number of tiles that are loaded before the first is used; more than one if the loop is unrolled."""
    if variant.widths is None or not variant.widths.load_128:
        return 1
    longest = run = 0
    for match in re.finditer(r"\b(LDG\.E\S*\.128|FFMA|FMUL|FADD)\b", sass):
        run = run + 1 if match[1].startswith("LDG") else 0
        longest = max(longest, run)
    return max(1, longest // variant.widths.load_128)


def instructions_per_element(variant: Variant, sass: str) -> float:
    """Instructions per element in the loop over full tiles, for one lane; 0 without such a loop."""
    if variant.widths is None or not variant.widths.load_128:
        return 0.0
    found: list[str] = []
    labels: dict[str, int] = {}
    for match in filter(None, map(INSTRUCTION.match, sass.splitlines())):
        if match["label"]:
            labels[match["label"]] = len(found)
            continue
        found.append(match["text"])
        branch = BRANCH.search(match["text"])
        if branch is not None and branch[1] in labels:
            loop = found[labels[branch[1]] :]
            tiles = sum(WIDE_LOAD.match(one) is not None for one in loop) / variant.widths.load_128
            if tiles:
                elements = int(variant.constants["BLOCK"]) // (variant.num_warps * THREADS_PER_WARP)
                return len(loop) / tiles / elements
    return 0.0


def amd(variant: Variant, target: str, kernel: Any) -> Report:
    """Read all measurements from the assembly."""
    assembly = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s*(\d+)", assembly)[-1])

    report = Report(
        variant=variant.name,
        target=target,
        registers=number("vgpr_count"),
        spilled_bytes=4 * (number("vgpr_spill_count") + number("sgpr_spill_count")),
        shared_bytes=int(kernel.metadata.shared),
        accesses=dict(Counter(re.findall(r"\b(?:global|buffer)_(?:load|store)_\w+", assembly))),
        in_flight_bytes=0,
        instructions=0.0,
        matrix_instructions=len(re.findall(r"\bv_mfma", assembly)),
        broken=[],
    )
    broken = [*common_gates(variant, report), *amd_gates(variant, report)]
    return Report(**(asdict(report) | {"broken": broken}))


def common_gates(variant: Variant, report: Report) -> Iterator[str]:
    """Gates that apply to every architecture."""
    if report.spilled_bytes:
        yield f"spills: {report.spilled_bytes} bytes of stack; none is allowed"
    if report.registers > variant.max_registers:
        yield f"{report.registers} registers; at most {variant.max_registers} are allowed"
    if report.shared_bytes and not variant.shared_allowed:
        yield f"{report.shared_bytes} bytes of shared memory: tiles change their layout on the way"
    if variant.matrix and not report.matrix_instructions:
        yield "no matrix instruction"


def nvidia_gates(variant: Variant, report: Report) -> Iterator[str]:
    """Gates on the vector widths of the full-chunk path and on the bytes in flight."""
    if variant.widths is None:
        return
    expected = {
        "ld.v4.b32": variant.widths.load_128,
        "ld.v2.b32": variant.widths.load_64,
        "st.v4.b32": variant.widths.store_128,
        "st.v2.b32": variant.widths.store_64,
    }
    for access, count in expected.items():
        if report.accesses.get(access, 0) < count:
            yield f"{report.accesses.get(access, 0)} of {access} on the full-chunk path, where {count} are expected"
    for access in ("ld.b16", "st.b16", "ld.b8", "st.b8"):
        if report.accesses.get(access, 0):
            yield f"{report.accesses[access]} of {access} on the full-chunk path: elements move one by one"
    if report.target != MEASURED_ON:
        return
    if variant.max_instructions is not None and not 0 < report.instructions <= variant.max_instructions:
        yield f"{report.instructions:.1f} instructions an element, where {variant.max_instructions:.1f} can be issued"
    if report.in_flight_bytes < IN_FLIGHT_BYTES:
        yield f"{report.in_flight_bytes} bytes in flight per processor, where {IN_FLIGHT_BYTES} hide the latency"


def amd_gates(variant: Variant, report: Report) -> Iterator[str]:
    """Require at least one wide access: the assembly does not show which path an instruction is on."""
    if variant.widths is None:
        return
    wide = sum(count for name, count in report.accesses.items() if re.search(r"dwordx[24]$", name))
    if not wide:
        yield "no vector access"


def reports(only: str, among: Sequence[str]) -> Iterator[Report]:
    """Reports of every variant whose name contains `only`, on its targets among these; uses all processors."""
    wanted = [index for index, variant in enumerate(all_variants()) if only in variant.name]
    if len(wanted) * len(among) <= IN_ONE_PROCESS:
        yield from chain.from_iterable(map(partial(reports_of, among=among), wanted))
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from chain.from_iterable(pool.map(partial(reports_of, among=among), wanted))


def reports_of(index: int, among: Sequence[str]) -> list[Report]:
    """Reports of one variant on its targets among these. Takes an index, because kernels cannot be pickled."""
    variant = all_variants()[index]
    targets = WITH_DESCRIPTORS if variant.descriptors else variant.targets or tuple(TARGETS)
    return [
        (amd if TARGETS[name].backend == "hip" else nvidia)(variant, name, compiled(variant, TARGETS[name]))
        for name in targets
        if name in among
    ]


def line(report: Report) -> str:
    """One report as a line of the table."""
    widths = " ".join(f"{count}x{name}" for name, count in sorted(report.accesses.items()) if ".v" in name)
    state = "; ".join(report.broken) or "ok"
    return (
        f"{report.variant:36} {report.target:7} {report.registers:4} regs {report.shared_bytes:7} B shared "
        f"{report.in_flight_bytes / 1000:6.0f} kB in flight {report.instructions:6.1f} instructions  {state}  {widths}"
    )


def main() -> int:
    """Parse the command line, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="compile only variants whose name contains this")
    parser.add_argument("--target", choices=TARGETS, action="append", help="compile only for this target")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    arguments = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: kernels would not be compiled at all; unset it")
    done = []
    for report in reports(arguments.only, arguments.target or tuple(TARGETS)):
        print(line(report), flush=True)
        done.append(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(report) for report in done], indent=1))
    broken = sum(bool(report.broken) for report in done)
    print(f"triton {triton.__version__}: {len(done)} compiled, {broken} with a broken gate")
    return 1 if broken or not done else 0


if __name__ == "__main__":
    sys.exit(main())
