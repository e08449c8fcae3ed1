"""A model in torch's own DistributedDataParallel: gradients are averaged once, by torch. Gloo processes."""

import pytest
import torch
from group_ranks import STEPS, Mlp, train_alone
from processes import Job, run_jobs
from torch_ddp_ranks import KINDS, Ran, made_for, train


@pytest.fixture(scope="module")
def two() -> dict[str, list[Ran]]:
    jobs = {f"{kind}, {ignores}": Job(train, (kind, ignores)) for kind in KINDS for ignores in (False, True)}
    jobs |= {f"{kind}, alone": Job(train, (kind, False, True)) for kind in KINDS}
    jobs |= {f"{kind}, unfrozen": Job(train, (kind, False, False, True)) for kind in KINDS}
    return run_jobs(2, jobs)


@pytest.mark.parametrize(
    "wrapped",
    ["False", "True", "alone", "unfrozen"],
    ids=["all", "all but the norm", "over each rank alone", "all but the norm, unfrozen later"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_torchs_wrapper_takes_the_steps_of_one_process(
    kind: str, wrapped: str, two: dict[str, list[Ran]]
) -> None:
    """The step averages parameters that the wrapper ignores, and all parameters if the wrapper averages over other
    ranks.

    Parameters that were unfrozen after the model was wrapped had each rank's own gradients, and replicas diverged.
    """
    want = train_alone(made_for(kind))
    for got in two[f"{kind}, {wrapped}"]:
        for name, weight in want.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-5, atol=0)
        assert got.zeros == want.zeros


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_does_not_reduce_what_torchs_wrapper_has_reduced(kind: str, two: dict[str, list[Ran]]) -> None:
    numel = sum(param.numel() for param in Mlp().parameters())
    for got in two[f"{kind}, False"]:
        assert got.numel_reduced < STEPS * 16  # the statistics
    for got in two[f"{kind}, True"]:
        assert got.numel_reduced > STEPS * numel
