"""GPU benchmarks: sweeps compared with a copy and with torch's fused ops, CUDA graphs, symmetric products.

Every step takes a `Stage` with the device and the sizes. A rehearsal runs the same steps at tiny sizes on a CPU under
Triton's interpreter; its numbers are meaningless.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from opt_kernels.backends import grad_stats
from opt_kernels.backends.triton.launches import launch_options, sweeps
from opt_kernels.backends.triton.scalars import numbers_on
from opt_kernels.backends.triton.update import kernels_of, state_options, update_
from opt_kernels.codecs import Plain, codec_for, split_
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.formula import number_of
from opt_kernels.matrices.coefficients import Coefficients
from opt_kernels.matrices.muon import Inputs
from opt_kernels.matrices.muon import triton as muon_kernels
from opt_kernels.matrices.orthogonal_basis import cholesky, householder
from opt_kernels.matrices.orthogonalization import newton_schulz
from opt_kernels.matrices.syrk import dense_product
from opt_kernels.matrices.syrk.triton import halved_product
from opt_kernels.optim import AdamW, Muon
from opt_kernels.rules import MuonRule
from opt_kernels.rules.whole_matrices import in_phases_
from opt_kernels.works import Batch, Hyper, Task, Work, Works

SIMPLE = (Coefficients(3.4445, -4.7750, 2.0315),) * 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Device and sizes of the benchmarks."""

    device: torch.device
    numel: int  # of the flat sweeps
    layers: int  # of the Llama-shaped list
    sides: tuple[int, ...]  # of square matrices
    warmups: int = 5
    repeats: int = 30
    case_seconds: float = 0.5  # after which a case is not warmed up or repeated any more

    @property
    def rehearsal(self) -> bool:
        return self.device.type != "cuda"


def gpu_name() -> str | None:
    """Name of the GPU; None if there is none that this torch can use."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def stage_on(device: str) -> Stage:
    """Sizes for "cuda"; those of the rehearsal for "cpu"."""
    if device == "cpu":
        return Stage(device=torch.device(device), numel=4000, layers=1, sides=(64,), warmups=0, repeats=1)
    free, _ = torch.cuda.mem_get_info()
    numel = min(10**9, free // BYTES_PER_ELEMENT // 1024 * 1024)
    return Stage(device=torch.device(device), numel=numel, layers=32, sides=(512, 1024, 2048, 4096, 8192))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure. `goal` is a lower bound, or an upper bound if `at_most` is true."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False


BYTES_PER_ELEMENT = 48  # for the largest flat sweep and its comparison
CYCLES_PER_SECOND = 2e9  # of a GPU's clock, at most
LONGEST_ISSUE = 5e-3  # seconds; what takes longer is not bound by its launches


def seconds(stage: Stage, run: Callable[[], object]) -> float:
    """Median device time of `run` in seconds, measured with events; on a CPU with the clock.

    The device waits until the host has issued all of `run`. Otherwise a run shorter than its launches, up to half a
    millisecond, would measure Python.
    """
    for _ in repetitions(stage, stage.warmups):
        run()
    took = host_seconds(stage, run)
    if stage.rehearsal:
        return took
    issuing = min(took, LONGEST_ISSUE)
    times = []
    for _ in repetitions(stage, stage.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(2 * issuing * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)


def host_seconds(stage: Stage, run: Callable[[], object]) -> float:
    """Median time in seconds until `run` returns, without waiting for the device."""
    times = []
    for _ in repetitions(stage, stage.repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def repetitions(stage: Stage, most: int) -> Iterator[int]:
    """Count to `most` with an idle device, or until `stage.case_seconds` have passed since the end of the first.

    The first may compile, which takes seconds.
    """
    deadline = math.inf
    for number in range(most):
        if not stage.rehearsal:
            torch.cuda.synchronize()
        if number == 1:
            deadline = time.monotonic() + stage.case_seconds
        if time.monotonic() > deadline:
            return
        yield number


def copy_bandwidth(stage: Stage) -> float:
    """Bandwidth of a copy within device memory: bytes read plus bytes written per second."""
    source = torch.ones(stage.numel, device=stage.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(stage, lambda: target.copy_(source))


def work(stage: Stage, numel: int, *, kind: str) -> Work:
    """One parameter of this kind: "fp32", "out" (with a bf16 copy), "remainder" (all 16-bit), "8-bit" (codes, too)."""
    main = torch.randn(numel, device=stage.device)
    if kind in ("fp32", "out"):
        state = {name: torch.zeros_like(main) for name in ("exp_avg", "exp_avg_sq")}
        out = main.bfloat16() if kind == "out" else None
        return Work(grad=torch.randn_like(main), main=main, state=state, out=out)
    weight = main.bfloat16()
    remainder = torch.empty_like(main, dtype=torch.int16)
    split_(weight, remainder, main)
    grad = torch.randn_like(main).bfloat16()
    codecs = (
        {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
        if kind == "8-bit"
        else dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16)
    )
    state = {name: torch.zeros_like(main, dtype=dtype) for name, dtype in codecs.items()}
    if kind == "8-bit":
        blocks = -(-numel // 128)
        state |= {f"{name}_scale": torch.zeros(blocks, device=stage.device) for name in codecs}
    return Work(grad=grad, main=None, out=weight, remainder=remainder, state=state)


BYTES = {"fp32": 28, "out": 30, "remainder": 18, "8-bit": 14.125}


def adam_step(works: Sequence[Work], *, kind: str) -> Callable[[], None]:
    """One Adam sweep over `works`."""
    m, v = {
        "remainder": (Plain(dtype=torch.bfloat16),) * 2,
        "8-bit": (codec_for("m", torch.int8, signed=True), codec_for("v", torch.uint8, signed=False)),
    }.get(kind, (Plain(), Plain()))
    batches = [Batch(Hyper(lr=1e-4, weight_decay=0.1, step=3), works)]

    def step() -> None:
        update_(batches, ADAM, {"exp_avg": m, "exp_avg_sq": v})

    return step


def flat_sweeps(stage: Stage) -> Iterator[Measure]:
    """Measure one flat parameter in each storage format against a copy, and torch's fused op."""
    bandwidth = copy_bandwidth(stage)
    yield Measure(name="copy", value=bandwidth / 1e9, unit="GB/s")
    for kind, size in BYTES.items():
        took = seconds(stage, adam_step([work(stage, stage.numel, kind=kind)], kind=kind))
        share = size * stage.numel / took / bandwidth
        yield Measure(name=f"adam {kind}, share of copy bandwidth", value=share, unit="1", goal=0.9)
    grad = torch.randn(stage.numel, device=stage.device)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = grad.to(dtype)
        took = seconds(stage, partial(grad_stats, [narrow]))
        share = narrow.nbytes / took / bandwidth
        yield Measure(name=f"grad_stats {dtype}, share of copy bandwidth", value=share, unit="1", goal=0.9)
    del grad
    flat = work(stage, stage.numel, kind="fp32")
    ours = seconds(stage, adam_step([flat], kind="fp32"))
    yield Measure(
        name="torch fused / ours, fp32 flat", value=seconds(stage, torch_fused([flat])) / ours, unit="1", goal=1.0
    )


def torch_fused(works: list[Work]) -> Callable[[], None]:
    """torch's own fused AdamW over the same tensors."""
    mains = [w.main for w in works if w.main is not None]
    steps = [torch.ones((), device=mains[0].device) for _ in mains]
    grads = [w.grad for w in works]
    m, v = ([w.state[name] for w in works] for name in ("exp_avg", "exp_avg_sq"))
    return lambda: torch._fused_adamw_(
        mains,
        grads,
        m,
        v,
        [],
        steps,
        lr=1e-4,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


SHAPES = [(512, 4, True), (1024, 4, True), (1024, 4, False), (1024, 8, True), (2048, 8, True)]  # tile, warps, IEEE


def launch_shapes(stage: Stage) -> Iterator[Measure]:
    """Measure tile sizes and warp counts of the fp32 and the 16-bit sweep, to check the fixed choice."""
    for kind, dtype in (("fp32", torch.float32), ("remainder", torch.bfloat16)):
        one = work(stage, stage.numel, kind=kind)
        for tile, warps, ieee in SHAPES:
            took = seconds(stage, adam_launch(one, dtype, {"BLOCK": tile, "num_warps": warps, "IEEE": ieee}))
            label = f"adam {kind}, tile {tile}, {warps} warps, {'IEEE' if ieee else 'approximate'} division"
            yield Measure(name=label, value=BYTES[kind] * stage.numel / took / 1e9, unit="GB/s")


def adam_launch(one: Work, dtype: torch.dtype, changed: dict[str, object]) -> Callable[[], None]:
    """Launch of the Adam kernel alone with moments of `dtype` and changed launch options."""
    codecs = dict.fromkeys(("exp_avg", "exp_avg_sq"), Plain(dtype=dtype))
    batches = [Batch(Hyper(lr=1e-4, step=3), [one])]
    [(formats, table, _)] = sweeps(batches, codecs)
    kernels = kernels_of(ADAM)
    hyper = batches[0].hyper
    rows = [(hyper.lr, hyper.weight_decay, hyper.step, 1.0, *[number_of(hyper, name, ADAM) for name in kernels.own])]
    block = torch.empty((len(rows), kernels.row_width), dtype=torch.float32, device=one.grad.device)
    kernels.fill[(len(rows),)](block, numbers_on(one.grad.device, rows), None, enable_fp_fusion=False)
    options = launch_options(formats, table) | state_options(formats, codecs) | {"STOCHASTIC_ROUNDING": False} | changed
    return lambda: kernels.sweep[(table.num_chunks,)](table.records, table.grads, block, **options)


def llama(stage: Stage) -> list[int]:
    """Parameter sizes of a Llama model: 9 tensors per layer and two more; 290 for 32 layers."""
    wide = 1024 if not stage.rehearsal else 16
    layer = [wide * wide] * 2 + [wide * wide // 4] * 2 + [wide * wide * 7 // 2] * 3 + [wide] * 2
    return layer * stage.layers + [wide * wide * 31, wide]


def host_times(stage: Stage) -> Iterator[Measure]:
    """Measure the host time of a step over many tensors, for the rule and for the drop-in optimizer."""
    for label, sizes in {
        "llama list": llama(stage),
        "2000 small tensors": [4096] * (2000 if not stage.rehearsal else 5),
    }.items():
        works = [work(stage, size, kind="fp32") for size in sizes]
        params = [torch.nn.Parameter(w.main) for w in works if w.main is not None]
        for param, one in zip(params, works):
            param.grad = one.grad
        optimizer = AdamW(params, backend="triton")
        goal = 450.0 if label == "llama list" else None
        steps: dict[str, Callable[[], object]] = {
            "rule": adam_step(in_columns(works), kind="fp32"),
            "drop-in AdamW": optimizer.step,
        }
        for name, step in steps.items():
            seconds(stage, step)
            ours = host_seconds(stage, step)
            label_of = f"host time of a step, {name}, {label}"
            yield Measure(name=label_of, value=ours * 1e6, unit="us", goal=goal, at_most=True)
            peer = host_seconds(stage, torch_fused(works))
            yield Measure(name=f"torch fused / ours, host, {name}, {label}", value=peer / ours, unit="1")
        del works, params, optimizer


def in_columns(works: list[Work]) -> Works:
    """The same works, column by column."""
    mains = [w.main for w in works if w.main is not None]
    return Works([w.grad for w in works], mains=mains, states=[w.state for w in works])


MUON_BYTES = 14 + 4 + 12  # momentum and its copy, normalisation, update with a bf16 weight


class AroundProducts(MuonRule):
    """Muon without products: only the work around them is measured."""

    def directions(self, tasks: Sequence[Task], inputs: Tensor, normalised: bool) -> Tensor:
        return inputs

    def scales(self, work: Work) -> tuple[float, ...]:
        return (0.2,)

    def inputs(self, work: Work) -> Inputs:
        return Inputs(torch.float16, True)


def muon_sweeps(stage: Stage) -> Iterator[Measure]:
    """Compare Muon's elementwise parts with a copy and with torch's operations, and a whole step with torch's Muon."""
    bandwidth = copy_bandwidth(stage)
    side = 4096 if not stage.rehearsal else 32
    count = max(1, stage.numel // 4 // side**2)
    works = [
        Work(
            grad=torch.randn(side, side, device=stage.device),
            main=torch.randn(side, side, device=stage.device),
            out=torch.empty(side, side, device=stage.device, dtype=torch.bfloat16),
            state={"momentum_buffer": torch.zeros(side, side, device=stage.device)},
        )
        for _ in range(count)
    ]
    batches = [Batch(Hyper(lr=1e-4, weight_decay=0.1, momentum=0.95), works)]
    rule = AroundProducts(nesterov=True)
    ours = seconds(stage, partial(muon_kernels.in_phases_, batches, rule))
    share = MUON_BYTES * count * side**2 / ours / bandwidth
    yield Measure(name="muon around the products, share of copy bandwidth", value=share, unit="1", goal=0.9)
    peer = seconds(stage, partial(in_phases_, batches, rule))
    yield Measure(name="muon around the products, torch's operations / ours", value=peer / ours, unit="1")
    yield from muon_step(stage, side)


def muon_step(stage: Stage, side: int) -> Iterator[Measure]:
    """Compare a whole step on matrices of one shape, with equal numbers of Newton-Schulz steps."""
    if not hasattr(torch.optim, "Muon"):  # new in torch 2.9
        return
    times = []
    for made in (torch.optim.Muon, partial(Muon, use_syrk=not stage.rehearsal, backend="triton")):
        params = [torch.nn.Parameter(torch.randn(side, side, device=stage.device)) for _ in range(4)]
        for param in params:
            param.grad = torch.randn_like(param)
        times.append(seconds(stage, made(params, lr=1e-4, momentum=0.95, weight_decay=0.1).step))
    yield Measure(name=f"torch.optim.Muon / ours, 4 x {side}", value=times[0] / times[1], unit="1", goal=1.0)


def graphs(stage: Stage) -> Iterator[Measure]:
    """Measure statistics, scalar block and update in one CUDA graph, and a shard that fits the L2 cache."""
    if stage.rehearsal:
        return
    works = [work(stage, min(stage.numel, 10_000_000), kind="out")]
    lr, step, decay = (torch.tensor(x, device=stage.device) for x in (1e-4, 3, 0.1))
    batches = [Batch(Hyper(lr=lr, weight_decay=decay, step=step), works)]

    def whole_step() -> None:
        found = grad_stats([w.grad for w in works])
        scale = (1.0 / (found.sum_of_squares.sqrt() + 1e-6)).clamp(max=1.0)
        codecs = {"exp_avg": Plain(), "exp_avg_sq": Plain()}
        update_(batches, ADAM, codecs, grad_scale=scale, skip=found.nonfinite)

    whole_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        whole_step()
    eager = seconds(stage, whole_step)
    yield Measure(name="eager / captured, whole step of 10M", value=eager / seconds(stage, graph.replay), unit="1")


def symmetric_products(stage: Stage) -> Iterator[Measure]:
    """Compare the kernel with torch's product over sizes and batches; then five Newton-Schulz steps."""
    for dtype in (torch.float16, torch.bfloat16):
        for side in stage.sides:
            for batch in (1, 8) if side <= 2048 else (1,):
                x = torch.randn(batch, side, side, device=stage.device).to(dtype) / side**0.5
                ratio = seconds(stage, partial(torch.bmm, x, x.mT)) / seconds(stage, partial(halved_product, x, x.mT))
                name = f"torch.bmm / syrk, {batch} x {side}, {dtype}"
                yield Measure(name=name, value=ratio, unit="1", goal=1.5 if side == 4096 and batch == 1 else None)
    for m, n in ((4096, 14336), (2048, 2048)) if not stage.rehearsal else ((64, 128),):
        x = torch.randn(1, m, n, device=stage.device)

        def ns(segments: list[tuple[Coefficients, ...]], product: Callable[..., Tensor], x: Tensor = x) -> float:
            return seconds(stage, lambda: newton_schulz(x, segments=segments, dtype=torch.float16, product=product))

        plain = ns([(c,) for c in SIMPLE], dense_product)
        yield Measure(
            name=f"NS5 plain / symmetric, {m}x{n}", value=plain / ns([(c,) for c in SIMPLE], halved_product), unit="1"
        )
        gram = ns([SIMPLE[:2], SIMPLE[2:]], halved_product)
        yield Measure(name=f"NS5 plain / Gram symmetric, {m}x{n}", value=plain / gram, unit="1")


def orthonormal_bases(stage: Stage) -> Iterator[Measure]:
    """Compare CholeskyQR2 with Householder QR."""
    for side in stage.sides[-3:]:
        basis = torch.linalg.qr(torch.randn(1, side, side, device=stage.device))[0]
        columns = basis * torch.logspace(0, -4, side, device=stage.device)
        slow = seconds(stage, partial(householder, columns))
        fast = seconds(stage, partial(cholesky, columns))
        yield Measure(name=f"Householder / CholeskyQR2, {side}", value=slow / fast, unit="1")


STEPS: dict[str, Callable[[Stage], Iterator[Measure]]] = {
    "flat sweeps": flat_sweeps,
    "launch shapes": launch_shapes,
    "host times": host_times,
    "muon sweeps": muon_sweeps,
    "graphs": graphs,
    "symmetric products": symmetric_products,
    "orthonormal bases": orthonormal_bases,
}
