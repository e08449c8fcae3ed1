"""The wrapped model over real processes: gloo agrees with one process, and a lost peer is an error that says where."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).with_name("gloo_rank.py")


def run_world(scenario: str, *, size: int) -> list[list[str]]:
    """What each rank printed, by line. Raises if one failed or hung."""
    # It listens before anybody asks: on torch 2.6 a rank that comes too early may wait for half a minute.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    commands = [[sys.executable, str(PROGRAM), scenario, str(r), str(size), str(store.port)] for r in range(size)]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands]
    try:
        told = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, err) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, err
    return [out.splitlines() for out, _ in told]


def test_four_processes_train_what_one_process_trains() -> None:
    found = run_world("trains", size=4)
    assert found == [["overlap True", "fp32 sums True", "in the step True", "instances True", "finalized True"]] * 4


def test_compiled_code_trains_what_one_process_trains() -> None:
    found = run_world("trains compiled", size=2)
    assert found == [["wrapper True", "module True", "blocks True", "blocks and wrapper True"]] * 2


@pytest.mark.parametrize("absence", ["dies", "never comes"])
def test_a_lost_peer_is_an_error_that_names_the_collective_and_the_step(absence: str) -> None:
    error, unchanged = run_world(absence, size=2)[0]
    assert error.startswith("error gradient reduction 2 of bucket ")
    assert "of dense float64, float64 gradients: " in error
    assert unchanged == "unchanged True"
