"""Every kernel variant that is compiled ahead of time, with the gates it must pass."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from variant import CHUNK, Variant, Widths, formats, sweep, widths_of

from opt_kernels.backends.triton.formats import BLOCK, NUM_WARPS, triton_dtype
from opt_kernels.backends.triton.grad_stats import SUM_BLOCK, stats_sweep, stats_total, tile_elements
from opt_kernels.backends.triton.quantize import scheme
from opt_kernels.backends.triton.scalars import fill_scalars
from opt_kernels.backends.triton.update import kernels_of, state_options
from opt_kernels.codecs import codec_for
from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.sgd import SGD
from opt_kernels.hooks import CautiousDecay, LrDecoupledDecay
from opt_kernels.hooks.compose import with_hook
from opt_kernels.hooks.measured import MOVE, MOVE_CAUTIOUSLY
from opt_kernels.matrices.muon.triton import SUM_BLOCK as MUON_SUM_BLOCK
from opt_kernels.matrices.muon.triton import descent_sweep, momentum_sweep, normalise_sweep, slot_totals
from opt_kernels.matrices.syrk.triton import TILE, TILE_BYTES_K, syrk_descriptors, syrk_pointers

F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
I16 = torch.int16
I8 = torch.int8
U8 = torch.uint8
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Formulas differ in their arithmetic only; Adam's variants show what each format becomes on each target.
FOR_ARITHMETIC = ("sm_90", "gfx942")


def update(
    name: str,
    formula: Formula,
    dtypes: tuple[torch.dtype, ...],
    *,
    stochastic_rounding: bool = False,
    slow: Collection[str] = (),
    **of: Any,
) -> Variant:
    """Variant of a formula's sweep with states of these dtypes, those named in `slow` rounded stochastically."""
    codecs = {}
    for state, dtype in zip(formula.states, dtypes, strict=True):
        codec = codec_for(state.name, dtype, signed=state.signed)
        codecs[state.name] = replace(codec, stochastic=True) if state.name in slow else codec
    kept = formats(states=dtypes, **of)
    extra = state_options(kept, codecs) | {"STOCHASTIC_ROUNDING": stochastic_rounding}
    one = sweep(name, kernels_of(formula).sweep, kept, codecs, extra)
    return one if formula.name == ADAM.name else replace(one, targets=FOR_ARITHMETIC)


def adam(name: str, m: torch.dtype, v: torch.dtype, *, order: str = "torch", **of: Any) -> Variant:
    """Adam with these moments."""
    return update(f"adam/{name}", ADAM.with_constants(order=order), (m, v), **of)


def lion(name: str, m: torch.dtype, **of: Any) -> Variant:
    """Lion with this momentum."""
    return update(f"lion/{name}", LION, (m,), **of)


def sgd(name: str, b: torch.dtype | None, **of: Any) -> Variant:
    """SGD with this momentum, or with none."""
    formula = SGD.with_constants(has_momentum=False) if b is None else SGD.with_constants(nesterov=True)
    return update(f"sgd/{name}", formula, () if b is None else (b,), **of)


def registered() -> Iterator[Variant]:
    """Float32 variants of the registered rules that are not listed above; the one with most states also in 8 bits."""
    others = {name: formula for name, formula in FORMULAS.items() if name not in ("adam", "lion", "sgd")}
    for name, formula in others.items():
        yield update(f"{name}/fp32", formula, (F32,) * len(formula.states))
    largest = max(others.values(), key=lambda formula: len(formula.states))
    codes = tuple(I8 if state.signed else U8 for state in largest.states)
    one = update(f"{largest.name}/remainder-g16-8-bit-state", largest, codes, grad=BF16, main=I16, out=BF16)
    # Bound by instructions: exact division is allowed at this size, and four codecs divide often. A third of a copy's
    # speed.
    yield replace(one, max_instructions=380)


def stats(name: str, dtype: torch.dtype) -> Variant:
    """The statistics sweep over gradients of this dtype."""
    block = tile_elements(dtype)
    return Variant(
        name=f"grad_stats/{name}",
        kernel=stats_sweep,
        signature={"records": "*i64", "sums": "*fp64", "counts": "*i32"},
        constants={
            "GRAD": triton_dtype(dtype),
            "MAXIMUM": False,
            "WIDTH": 8,
            "CHUNK": CHUNK,
            "BLOCK": block,
            "E": 16 // dtype.itemsize,
        },
        aligned=("records",),
        fusion=True,
        max_registers=96,
        widths=Widths(load_128=block * dtype.itemsize // (NUM_WARPS * 32 * 16)),
        tile_read_bytes=block * dtype.itemsize,
        shared_allowed=True,
    )


def muon_momentum(
    name: str, m: torch.dtype, u: torch.dtype, *, scheme_u: str = "plain", nesterov: bool = True, **of: Any
) -> Variant:
    """Muon's momentum sweep, which writes the matrix to orthogonalise to `u`."""
    codec = codec_for("momentum_buffer", m, signed=True)
    kept = formats(states=(m,), **of)
    extra = {
        "MOMENTUM": triton_dtype(m),
        "SCHEME": scheme(codec),
        "U": triton_dtype(u),
        "SCHEME_U": scheme_u,
        "NESTEROV": nesterov,
        "DECAY": "decoupled",
    }
    one = sweep(f"muon/momentum-{name}", momentum_sweep, kept, {"momentum_buffer": codec}, extra)
    return replace(
        one,
        signature=one.signature | {"u": f"*{triton_dtype(u)}", "u_scales": "*fp32", "sums": "*fp64"},
        aligned=(*one.aligned, "u", "u_scales"),
        # With decoupled decay the main parameter is neither read nor written.
        widths=widths_of([kept.grad.itemsize, m.itemsize], [m.itemsize, u.itemsize], kept.vector),
        tile_read_bytes=BLOCK * (kept.grad.itemsize + m.itemsize),
        max_instructions=None,
        shared_allowed=True,
    )


def muon_normalise(name: str, u: torch.dtype, x: torch.dtype, vector: int) -> Variant:
    """Muon's normalisation of `u` in place."""
    narrow = u is F16
    return Variant(
        name=f"muon/normalise-{name}",
        kernel=normalise_sweep,
        signature={
            "records": "*i64",
            "u": f"*{triton_dtype(u)}",
            "u_scales": "*fp32",
            "x": f"*{triton_dtype(x)}",
            "totals": "*fp64",
            "smallest": "fp32",
        },
        constants={
            "X": triton_dtype(x),
            "SCHEME_U": "half" if narrow else "plain",
            "TAG": 3,
            "WIDTH": 8,
            "CHUNK": CHUNK,
            "BLOCK": BLOCK,
            "E": vector,
        },
        aligned=("records", "u", "u_scales", "x", "totals"),
        max_registers=96,
        widths=widths_of([u.itemsize], [x.itemsize], vector),
        tile_read_bytes=BLOCK * u.itemsize,
        shared_allowed=narrow,
    )


def muon_descent(name: str, o: torch.dtype, **of: Any) -> Variant:
    """Muon's update in the directions stored in `o`."""
    kept = formats(states=(F32,), **of)
    one = sweep(f"muon/descent-{name}", descent_sweep, kept, {}, {"DECAY": "decoupled", "TAG": 3})
    main = [kept.main.itemsize, 2] if kept.remainder else [kept.main.itemsize]
    written = main if kept.remainder or kept.out is None else [*main, kept.out.itemsize]
    return replace(
        one,
        signature={
            "records": "*i64",
            "block": "*fp32",
            "directions": f"*{triton_dtype(o)}",
            "origin": "i64",
            "factors": "*fp32",
        },
        constants={name: value for name, value in one.constants.items() if name in descent_sweep.arg_names},
        aligned=("records", "block", "directions", "factors"),
        widths=widths_of([*main, o.itemsize], written, kept.vector),
        tile_read_bytes=BLOCK * (sum(main) + o.itemsize),
        max_instructions=None,
    )


def small_kernels() -> Iterator[Variant]:
    """The two kernels that run one or a few programs."""
    yield Variant(
        name="grad_stats/total",
        kernel=stats_total,
        signature={"sums": "*fp64", "counts": "*i32", "power": "*fp64", "totals": "*i64", "num_chunks": "i32"},
        constants={"MAXIMUM": False, "BLOCK": SUM_BLOCK},
        aligned=("sums", "counts", "power", "totals"),
        num_warps=8,
        fusion=True,
        shared_allowed=True,
    )
    yield Variant(
        name="muon/totals",
        kernel=slot_totals,
        signature={"sums": "*fp64", "bounds": "*i64", "totals": "*fp64"},
        constants={"BLOCK": MUON_SUM_BLOCK},
        aligned=("sums", "bounds", "totals"),
        shared_allowed=True,
    )
    arguments = {"block": "*fp32", "numbers": "*fp64"}
    hooked = {"adam-cautious-decay": with_hook(ADAM, CautiousDecay()), "move": MOVE}
    for name, formula in ({**FORMULAS} | hooked).items():
        yield Variant(
            name=f"scalars/{name}",
            kernel=kernels_of(formula).fill,
            signature=arguments | {"skip": "*i1"},
            constants={},
            aligned=("block", "numbers"),
            targets=None if name == ADAM.name else FOR_ARITHMETIC,
        )
    for name, more, constants in (("skipped", {"skip": "*i1"}, {}), ("always", {}, {"skip": None})):
        yield Variant(
            name=f"scalars/{name}",
            kernel=fill_scalars,
            signature=arguments | more,
            constants=constants,
            aligned=("block", "numbers"),
        )


def syrk(dtype: torch.dtype, *, descriptors: bool, transposed: bool = True) -> Variant:
    """Symmetric product of operands with contiguous rows, loaded through descriptors or pointers."""
    name = str(triton_dtype(dtype))
    tile_k = TILE_BYTES_K // dtype.itemsize
    constants: dict[str, Any] = {"TILE": TILE, "TILE_K": tile_k, "PRECISION": "tf32" if dtype is F32 else "ieee"}
    common = {"added": f"*{name}", "out": f"*{name}", "m": "i32", "k": "i32", "alpha": "fp32", "beta": "fp32"}
    if descriptors:
        box = f"tensordesc<{name}[1,{TILE},{tile_k}]>"
        other = box if transposed else f"tensordesc<{name}[1,{tile_k},{TILE}]>"
        return Variant(
            name=f"syrk/descriptors-{name}-{'gram' if transposed else 'general'}",
            kernel=syrk_descriptors,
            signature={"left": box, "right": other} | common,
            constants=constants | {"TRANSPOSED": transposed},
            aligned=("added", "out", "m", "k"),
            num_warps=8,
            num_stages=4,
            fusion=True,
            matrix=True,
            descriptors=True,
            shared_allowed=True,
        )
    strides = ("left_batch", "left_row", "right_batch", "right_col")
    return Variant(
        name=f"syrk/pointers-{name}",
        kernel=syrk_pointers,
        signature={"left": f"*{name}", "right": f"*{name}"} | common | dict.fromkeys(strides, "i32"),
        constants=constants | {"left_col": 1, "right_row": 1},
        aligned=("left", "right", "added", "out", "m", "k", *strides),
        num_warps=8,
        fusion=True,
        matrix=True,
        shared_allowed=True,
    )


def all_variants() -> list[Variant]:
    """All variants with gates."""
    remainder: dict[str, Any] = {"main": I16, "out": BF16}
    short: dict[str, Any] = {"main": I8, "out": BF16}
    return [
        adam("fp32", F32, F32),
        adam("fp32-te", F32, F32, order="te"),
        adam("fp32-unaligned", F32, F32, aligned=False),
        adam("bf16-out", F32, F32, out=BF16),
        adam("fp16-out", F32, F32, grad=F16, out=F16),
        adam("bf16-state", BF16, BF16),
        adam("bf16-slow-state", BF16, BF16, slow=("exp_avg", "exp_avg_sq")),
        adam("remainder", F32, F32, **remainder),
        adam("remainder-g16", F32, F32, grad=BF16, **remainder),
        adam("remainder-g16-bf16-state", BF16, BF16, grad=BF16, **remainder),
        adam("short-remainder", F32, F32, **short),
        adam("short-remainder-g16-bf16-state", BF16, BF16, grad=BF16, **short),
        adam("bf16-stochastic", BF16, BF16, grad=BF16, main=BF16, stochastic_rounding=True),
        # Triton 3.9 takes 100 and 104 registers on Blackwell, whose 41 kB in flight are enough.
        replace(adam("remainder-g16-fp16-state", F16, F16, grad=BF16, **remainder), max_registers=104),
        # With the default betas only the second moment is slow.
        replace(
            adam("remainder-g16-bf16-slow-state", BF16, BF16, grad=BF16, slow=("exp_avg_sq",), **remainder),
            max_registers=104,
        ),
        adam("remainder-g16-e4m3-state", E4M3, E4M3, grad=BF16, **remainder),
        adam("remainder-g16-e5m2-state", E5M2, E5M2, grad=BF16, **remainder),
        adam("remainder-g16-8-bit-state", I8, U8, grad=BF16, **remainder),
        # Bound by instructions: two thirds of a copy's speed.
        replace(
            adam("bf16-stochastic-8-bit-state", I8, U8, grad=BF16, main=BF16, stochastic_rounding=True),
            max_instructions=104,
        ),
        lion("fp32", F32),
        lion("remainder-g16-bf16-state", BF16, grad=BF16, **remainder),
        lion("remainder-g16-8-bit-state", I8, grad=BF16, **remainder),
        *registered(),
        sgd("fp32", F32),
        sgd("fp32-no-momentum", None),
        sgd("remainder-g16-bf16-state", BF16, grad=BF16, **remainder),
        update("adam/fp32-cautious-decay", with_hook(ADAM, CautiousDecay()), (F32, F32)),
        update(
            "adam/remainder-g16-cautious-decay", with_hook(ADAM, CautiousDecay()), (F32, F32), grad=BF16, **remainder
        ),
        update("lion/fp32-lr-decoupled-decay", with_hook(LION, LrDecoupledDecay(1e-3)), (F32,)),
        update("hooks/move", MOVE, ()),
        update("hooks/move-cautiously-remainder", MOVE_CAUTIOUSLY, (), **remainder),
        muon_momentum("fp32-to-fp16", F32, F16, scheme_u="half"),
        muon_momentum("fp32-to-fp32", F32, F32, nesterov=False),
        muon_momentum("g16-to-fp16", F32, F16, scheme_u="half", grad=BF16, **remainder),
        muon_momentum("g16-bf16-to-fp16", BF16, F16, scheme_u="half", grad=BF16, **remainder),
        muon_momentum("g16-8-bit-to-fp16", I8, F16, scheme_u="half", grad=BF16, **remainder),
        muon_normalise("fp16", F16, F16, 4),
        muon_normalise("fp16-wide", F16, F16, 8),
        muon_normalise("fp32", F32, F32, 4),
        muon_descent("fp32", F16),
        muon_descent("bf16-out", F16, out=BF16),
        muon_descent("remainder", F16, **remainder),
        muon_descent("fp32-directions", F32),
        stats("fp32", F32),
        stats("bf16", BF16),
        *small_kernels(),
        *(syrk(dtype, descriptors=False) for dtype in (F16, BF16, F32)),
        *(syrk(dtype, descriptors=True) for dtype in (F16, BF16, F32)),
        syrk(F16, descriptors=True, transposed=False),
    ]
