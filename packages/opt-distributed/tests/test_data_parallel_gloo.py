"""The wrapped model over real processes: gloo agrees with one process, and a lost peer is an error that says where."""

from pathlib import Path

import pytest
from gloo_rank import meets_no_peer, trains, trains_compiled
from processes import new_meeting, run_processes, start


def test_four_processes_train_what_one_process_trains() -> None:
    want = ["overlap", "fp32 sums", "in the step", "instances", "finalized"]
    assert run_processes(4, trains) == [dict.fromkeys(want, True)] * 4


def test_compiled_code_trains_what_one_process_trains() -> None:
    want = ["wrapper", "module", "blocks", "blocks and wrapper"]
    assert run_processes(2, trains_compiled) == [dict.fromkeys(want, True)] * 2


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "never comes"])
def test_a_lost_peer_is_an_error_that_names_the_collective_and_the_step(dies: bool, tmp_path: Path) -> None:
    meeting = new_meeting(tmp_path)
    for process in [start(meets_no_peer, rank, meeting, dies) for rank in range(2)]:
        process.join(300)
        assert process.exitcode == 0
    found = Path(f"{meeting}.found").read_text()
    assert found.startswith("unchanged True: gradient reduction 2 of bucket ")
    assert "float64 dense, flat shards, float64 gradients: " in found
