"""Over gloo processes: opt-checkpoint saves the drop-in optimizers, which keep local shards, and reshards them."""

from pathlib import Path

import pytest
import torch
from processes import Job, run_jobs
from torch_checkpoint_ranks import DROP_INS, finished, resume_with_ours, save_with_ours

# Blocks of eight-bit state follow the shards: on other shards they round otherwise, by about one part in 127.
TOLERANCE = {"drop-in, 8 bit": 1e-2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for kind in DROP_INS:
        save_with_ours(kind, str(folder / kind))
    return folder


def test_a_drop_in_optimizer_goes_on_alone(alone: Path) -> None:
    for kind in DROP_INS:
        for name, weight in finished(kind).items():
            assert torch.equal(resume_with_ours(kind, str(alone / kind))[name], weight), (kind, name)


def test_a_drop_in_optimizer_goes_on_under_fsdp2_and_on_another_number_of_ranks(alone: Path, tmp_path: Path) -> None:
    """The state is local shards, while parameters are DTensors."""
    jobs = {f"save {kind}": Job(save_with_ours, (kind, str(tmp_path / kind))) for kind in DROP_INS}
    jobs |= {f"again {kind}": Job(resume_with_ours, (kind, str(tmp_path / kind))) for kind in DROP_INS}
    jobs |= {f"from alone {kind}": Job(resume_with_ours, (kind, str(alone / kind))) for kind in DROP_INS}
    jobs |= {f"finished {kind}": Job(finished, (kind,)) for kind in DROP_INS}
    results = run_jobs(2, jobs)
    for kind in DROP_INS:
        expected = results[f"finished {kind}"][0]
        for found in (*results[f"again {kind}"], *results[f"from alone {kind}"]):
            for name, weight in expected.items():
                torch.testing.assert_close(found[name], weight, rtol=0, atol=TOLERANCE.get(kind, 0.0))
        for name, weight in resume_with_ours(kind, str(tmp_path / kind)).items():
            torch.testing.assert_close(weight, finished(kind)[name], rtol=0, atol=TOLERANCE.get(kind, 0.0))
