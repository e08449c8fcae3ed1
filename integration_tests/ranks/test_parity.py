"""Any world, layout, numbers, rule and wrapping: the weights of one process on the joined batch. Ranks are threads."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from parity import Case, Trained, dtypes, every_case, train, values_of
from tiers import covering, sampled

ALL = every_case()
CASES = sampled(ALL, values_of)

# Between a mean of three ranks, or another order of a norm's sum, and one process lie a few fp32 roundings of the
# gradient, 2**-23 relative each. Adam's and Muon's updates are of size lr = 0.02 whatever the gradient's, and move by
# that fraction; over three steps they stay below this. SOAP's turn with the eigenvectors of its factors, by the same
# fraction over the gap between two eigenvalues, which is 1e-3 of the largest in such matrices.
# AdaptiveMuon divides each element of an update by its own size, so that small ones move more.
ATOL = {"adaptive_muon": 1e-4, "soap": 5e-4}
RTOL = 2e-5
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # one more rounding of the weight


def assert_same(case: Case, got: Trained, want: Trained) -> None:
    for name, dtype in dtypes(case):
        if case.is_exact:
            assert torch.equal(got.weights[name], want.weights[name]), name
        rtol, atol = RTOL + ROUNDING[dtype], ATOL.get(case.rule, 2e-5)
        torch.testing.assert_close(got.weights[name], want.weights[name], rtol=rtol, atol=atol)
    torch.testing.assert_close(got.norms, want.norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_has_the_weights_of_one_process(case: Case) -> None:
    (want,) = train(case.alone)
    for got in train(case):
        assert_same(case, got, want)


def test_the_default_cases_hold_every_legal_pair_of_values() -> None:
    def pairs(cases: Iterable[Case]) -> set[Any]:
        return {pair for case in cases for pair in itertools.combinations(values_of(case), 2)}

    assert pairs(covering(ALL, values_of, strength=2)) == pairs(ALL)
