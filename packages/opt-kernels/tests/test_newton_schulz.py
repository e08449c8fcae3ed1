"""Newton-Schulz and orthogonal bases: against the SVD, against its documented ranges, cut into segments or not."""

from zlib import crc32

import pytest
import torch
from torch import Tensor

from opt_kernels.matrices import CoefficientType, MatmulPrecision, TpMode
from opt_kernels.matrices.coefficients import Coefficients, Schedule, narrow_steps, schedule
from opt_kernels.matrices.orthogonal_basis import cholesky, householder
from opt_kernels.matrices.orthogonalization import AOL_RANGE, cut, newton_schulz, reference_newton_schulz, row_scales
from opt_kernels.rules import MuonRule

# Number of steps and digest of Emerging-Optimizers' table, and the documented range of singular values.
PUBLISHED = {
    CoefficientType.SIMPLE: (5, 0x33F476FC, 0.682, 1.134),
    CoefficientType.QUINTIC: (5, 0x42856729, 0.978, 1.032),
    CoefficientType.POLAR_EXPRESS: (8, 0xAC0AF198, 0.870, 1.124),
    CoefficientType.CANS: (5, 0x7555BDCE, 0.884, 1.120),
    CoefficientType.DEEPSEEKV4: (10, 0xA5467DB1, 1.000, 1.001),
    CoefficientType.CUBIC5: (5, 0xF47F16D5, 0.774, 1.300),
    CoefficientType.AOL: (4, 0x486159EC, 0.987, 1.082),
}
SETS = [kind for kind in CoefficientType if kind is not CoefficientType.CUSTOM]
ON_SETS = pytest.mark.parametrize("kind", SETS)


def steps_of(kind: CoefficientType) -> Schedule:
    return schedule(kind, num_steps={CoefficientType.DEEPSEEKV4: 10, CoefficientType.AOL: 4}.get(kind, 5))


def mapped(values: Tensor, steps: Schedule) -> Tensor:
    """What the steps make of singular values: the scalar polynomial, in float64."""
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return values


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(rows: int, cols: int, *, spectrum: Tensor | None = None) -> Tensor:
    """A (1, rows, cols) float64 matrix: Gaussian, or with the singular values given."""
    if spectrum is None:
        return normal(1, rows, cols)
    u, _, v = torch.linalg.svd(normal(1, rows, cols), full_matrices=False)
    return torch.matmul(u * spectrum, v)


def singly(steps: Schedule) -> tuple[Schedule, ...]:
    """The plain iteration: every step a segment."""
    return tuple((step,) for step in steps)


@ON_SETS
def test_coefficients_are_published_and_their_range_documented(kind: CoefficientType) -> None:
    num_steps, digest, low, high = PUBLISHED[kind]
    # A digit that is wrong moves the ranges by less than is seen below.
    steps = [tuple(step) for step in schedule(kind, num_steps=num_steps)]
    assert crc32(repr(steps).encode()) == digest
    # The range belongs to singular values in [0.01, 1] of the norm. On [0.01, 0.98] quintic and simple reach 1.03 and
    # 1.13; above, where only a matrix of rank one gets, they reach a little further.
    assert AOL_RANGE == 0.8  # in the documented range of aol
    ends = (0.02, AOL_RANGE) if kind is CoefficientType.AOL else (0.01, 1.0)
    values = mapped(torch.linspace(*ends, 20001, dtype=torch.float64), steps_of(kind))
    assert [float(values.min()), float(values.max())] == pytest.approx([low, high], abs=1.1e-3)


@ON_SETS
def test_singular_values_are_mapped_and_vectors_kept_in_segments(kind: CoefficientType) -> None:
    steps = steps_of(kind)
    for rows, cols in [(0, 4), (1, 1), (1, 7), (5, 5), (33, 65), (64, 256), (16, 512)]:
        x = matrix(rows, cols)
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        expected = (u * mapped(s / s.norm(), steps)) @ v
        # float64 throughout: the steps multiply rounding of 1e-16 by at most their growth, 1e3 a time.
        plain = reference_newton_schulz(x, segments=(steps,))
        torch.testing.assert_close(plain, expected, rtol=0, atol=1e-10)
        segments = cut(steps, rows=rows, cols=cols, dtype=torch.float32, symmetric=True)
        got = newton_schulz(x.expand(3, rows, cols), segments=segments, dtype=torch.float64)
        torch.testing.assert_close(got, plain.expand(3, rows, cols), rtol=0, atol=1e-8)


SPECTRA = {
    "gaussian": None,
    "power_law": torch.arange(1, 65, dtype=torch.float64) ** -1.0,
    "geometric_to_1e-5": torch.logspace(0, -5, 64, dtype=torch.float64),
    "rank_3": torch.cat([torch.ones(3), torch.zeros(61)]).double(),
}


@ON_SETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_segments_are_about_as_accurate_as_single_steps(dtype: torch.dtype, kind: CoefficientType) -> None:
    # In fp32 one segment of five steps erred up to 160 times as much as five of one; on Gaussian matrices ten times.
    # Late steps cancel in aI + bR + cR² with eigenvalues of R at 1, but not in R - I.
    steps = steps_of(kind)
    is_aol = kind is CoefficientType.AOL
    segments = cut(steps, rows=64, cols=512, dtype=dtype, symmetric=True)
    assert len(segments) < len(steps)
    for name, spectrum in SPECTRA.items():
        x = matrix(64, 512, spectrum=spectrum).float()
        expected = reference_newton_schulz(x, segments=(steps,), rescale_rows=is_aol)
        together, alone = (
            (newton_schulz(x, segments=cuts, dtype=dtype, rescale_rows=is_aol).double() - expected).norm()
            for cuts in (segments, singly(steps))
        )
        # Single steps err by 4 to 20 units of rounding, with tiny singular values by up to 400. Measured: 4.3 and 2.
        assert together < (2.5 if name == "gaussian" else 5.0) * alone, name


def test_the_size_of_a_gradient_does_not_matter() -> None:
    x = matrix(16, 64).float()
    steps = steps_of(CoefficientType.QUINTIC)
    expected = newton_schulz(x, segments=(steps,))
    for scale in (1e-13, 1e-6, 1e6, 1e15, 1e25, 1e36):  # above 1.8e19 squares overflow, and the direction was zero
        torch.testing.assert_close(newton_schulz(x * scale, segments=(steps,)), expected, rtol=0, atol=1e-4)


# What five steps make of singular values below 0.01 of the norm, where it is above the upper end of the range.
OF_SMALLER = {CoefficientType.SIMPLE: 1.203, CoefficientType.QUINTIC: 1.146, CoefficientType.DEEPSEEKV4: 1.003}
UNITS = {torch.bfloat16: 12 * 2.0**-8, torch.float16: 32 * 2.0**-11}  # that rounding may add, as documented
IN_16_BITS = [kind for kind in SETS if kind is not CoefficientType.CANS]


def of_every_rank(kind: CoefficientType) -> list[Tensor]:
    """Matrices of rank one and more. Their largest singular values are those whose image is an end of a step's range,
    from where rounding leads out of the domain of the next step."""
    even = torch.linspace(0.001, 1.0, 20_001, dtype=torch.float64)
    turns = []
    for number in range(1, 5):
        slopes = mapped(even, steps_of(kind)[:number]).diff()
        turns.append(even[1:-1][slopes[1:] * slopes[:-1] < 0])
    ends = torch.cat(turns)
    found = [matrix(*shape) for shape in ((1, 50), (50, 1), (1, 1), (5, 9))]
    found += [matrix(rows, 1) @ matrix(1, cols) for rows, cols in ((64, 64), (48, 200))]
    for rows, cols in ((32, 48), (48, 200), (300, 16)):
        rank = min(rows, cols)
        alone = torch.cat([ends[:1], (1 - ends[:1] ** 2).clamp_min(0).sqrt(), torch.zeros(rank - 2).double()])
        uniform = torch.rand(rank, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        cycle = ends[torch.arange(rank) % len(ends)]
        found += [
            matrix(rows, cols, spectrum=values) for values in (alone, uniform, cycle, torch.logspace(0, -3, rank))
        ]
    return found


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("kind", IN_16_BITS)
def test_sixteen_bits_keep_the_documented_range(kind: CoefficientType, dtype: torch.dtype) -> None:
    """In bf16 cubic5 made (1, n) matrices 0.08 long, and polar_express lifted singular values to 1.95."""
    *_, low, high = PUBLISHED[kind]
    is_aol = kind is CoefficientType.AOL
    steps = narrow_steps(steps_of(kind)) or steps_of(kind)
    for x in of_every_rank(kind):
        wide = x.mT if x.shape[-2] > x.shape[-1] else x
        wide = wide / wide.norm()
        rows, cols = wide.shape[-2:]
        segments = cut(steps, rows=rows, cols=cols, dtype=dtype, symmetric=True)
        got = newton_schulz(wide.float(), segments=segments, dtype=dtype, rescale_rows=is_aol).double()
        # Rows that aol rescales have other singular vectors.
        u, s, v = torch.linalg.svd(row_scales(wide @ wide.mT) * wide if is_aol else wide, full_matrices=False)
        kept = s[0] >= (0.02 if is_aol else 0.01)
        of_kept = torch.linalg.svdvals(u[0][:, kept].mT @ got[0] @ v[0][kept].mT)
        assert float(of_kept.min()) >= low - UNITS[dtype], tuple(x.shape)
        assert float(torch.linalg.matrix_norm(got, 2)) <= OF_SMALLER.get(kind, high) + UNITS[dtype], tuple(x.shape)


def test_coefficients_that_diverge_in_16_bits_are_refused() -> None:
    """One step of cans on a gradient of rank one moved weights by 1e4 to 1e10 learning rates."""
    own = tuple(steps_of(CoefficientType.CANS))
    for chosen in (
        {"coefficient_type": CoefficientType.CANS},
        {"coefficient_type": CoefficientType.CUSTOM, "custom_coefficients": own},
    ):
        with pytest.raises(ValueError, match=r"fp32_matmul_prec 'medium': .*'high' or 'highest'"):
            MuonRule(**chosen)  # type: ignore[arg-type]
        rule = MuonRule(**chosen, fp32_matmul_prec=MatmulPrecision.HIGHEST)  # type: ignore[arg-type]
        direction = rule.orthogonalization(matrix(1, 50).float())
        assert float(direction.norm()) == pytest.approx(mapped(torch.ones(1).double(), own).item(), abs=0.02)


@pytest.mark.parametrize("precision", [MatmulPrecision.HIGHEST, MatmulPrecision.MEDIUM])
def test_steps_are_damped_for_sixteen_bits_only(precision: MatmulPrecision) -> None:
    x = matrix(48, 1) @ matrix(1, 200)
    rule = MuonRule(coefficient_type=CoefficientType.CUBIC5, fp32_matmul_prec=precision)
    published = steps_of(CoefficientType.CUBIC5)
    steps = published if precision is MatmulPrecision.HIGHEST else narrow_steps(published)
    assert steps is not None
    wanted = mapped(torch.ones(1).double(), steps).item()  # 0.774, or 1.134
    assert float(rule.orthogonalization(x.float()).norm()) == pytest.approx(wanted, abs=0.1)


def test_schedules_repeat_as_declared_and_wrong_ones_are_refused() -> None:
    quintic, cans = (schedule(kind, num_steps=7) for kind in (CoefficientType.QUINTIC, CoefficientType.CANS))
    assert quintic[5:] == quintic[:2]
    assert cans[5] == cans[6] == cans[4] != cans[3]
    custom = schedule(CoefficientType.CUSTOM, num_steps=3, custom=[(1.5, -0.5, 0.0), (2.0, -1.5, 0.5)])
    assert custom == (Coefficients(1.5, -0.5, 0.0), Coefficients(2.0, -1.5, 0.5), Coefficients(1.5, -0.5, 0.0))
    for kind, num_steps, of_custom, message in (
        (CoefficientType.CUBIC5, 6, None, "exactly 5 steps"),
        (CoefficientType.CUSTOM, 5, None, "needs custom_coefficients"),
        (CoefficientType.CANS, 5, [(1.0, 0.0, 0.0)], "set it to 'custom'"),
    ):
        with pytest.raises(ValueError, match=message):
            schedule(kind, num_steps=num_steps, custom=of_custom)


AOL_MATRICES = {
    "gaussian": matrix(24, 96),
    "square": matrix(33, 33),
    "rank_one": matrix(24, 1) @ matrix(1, 96),
    "orthogonal_rows": torch.eye(24, 96, dtype=torch.float64)[None],
    "with_a_row_of_zeros": torch.cat([matrix(23, 96), torch.zeros(1, 1, 96).double()], dim=1),
}


@pytest.mark.parametrize("name", AOL_MATRICES)
def test_aol_rescales_rows_and_orthogonalises_what_it_made(name: str) -> None:
    x = AOL_MATRICES[name]
    steps = steps_of(CoefficientType.AOL)
    x = x / x.norm()
    u, s, v = torch.linalg.svd(row_scales(x @ x.mT) * x, full_matrices=False)
    assert float(s.max()) <= AOL_RANGE * (1 + 1e-12)
    expected = (u * mapped(s, steps)) @ v
    got = reference_newton_schulz(x, segments=(steps,), rescale_rows=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    assert float((got * x).sum()) > 0
    fast = newton_schulz(x, segments=singly(steps), dtype=torch.float64, rescale_rows=True)
    torch.testing.assert_close(fast, expected, rtol=0, atol=1e-10)


def test_aol_of_parts_that_are_not_gathered_is_refused() -> None:
    """It rescaled the rows of the longer side, where that was not cut: 13 % of the update."""
    with pytest.raises(ValueError, match="'aol' with tp_mode 'distributed': it rescales the rows of the side that is"):
        MuonRule(coefficient_type=CoefficientType.AOL, num_ns_steps=4, tp_mode=TpMode.DISTRIBUTED)


# --- orthogonal bases: CholeskyQR2 against Householder QR, where it works and where it must give way ------------------


def identity_error(q: Tensor) -> float:
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max())


@pytest.mark.parametrize("n", [1, 2, 17, 64, 200])
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e12])
def test_choleskys_basis_equals_householders_at_any_condition(n: int, condition: float) -> None:
    # K Q, K of that condition and Q close to its eigenvectors: what a basis is followed with.
    exact = householder(normal(1, n, n))
    k = (exact * torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)) @ exact.mT
    columns = k @ householder(exact + 1e-3 / condition**0.5 * normal(1, n, n, seed=1))
    got = cholesky(columns.float()).double()
    assert identity_error(got) < 1e-5
    # Columns rounded to fp32 differ by 6e-8 of their length; orthogonalising multiplies that by their condition.
    torch.testing.assert_close(got, householder(columns), rtol=0, atol=1e-4)


def test_nearly_dependent_columns_are_left_to_householder() -> None:
    easy = normal(9, 9, seed=3)
    ones = torch.ones(9, 9, dtype=torch.float64)
    zero_column = normal(9, 9).index_fill(1, torch.tensor([4]), 0.0)
    nearly_parallel = ones + 1e-6 * normal(9, 9)
    for hard in (0 * ones, ones, zero_column, nearly_parallel):
        got = cholesky(torch.stack([easy, hard]).float())
        assert identity_error(got) < 1e-5
        torch.testing.assert_close(got[0].double(), householder(easy), rtol=0, atol=1e-4)
