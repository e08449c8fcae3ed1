"""The wrapped model over real processes: gloo agrees with one process, and a lost peer is an error that says where."""

import multiprocessing as mp
from collections.abc import Callable
from pathlib import Path

import gloo_rank
import pytest
import torch.distributed as dist

RunWorld = Callable[[str, int], list[list[str]]]


@pytest.fixture
def run_world(tmp_path: Path) -> RunWorld:
    """`run_world(scenario, size)`: what each rank printed, by line. Raises if one failed or hung."""
    context = mp.get_context("forkserver")  # each rank is forked from a process that has imported, and computed nothing
    context.set_forkserver_preload(["opt_distributed.buffers.data_parallel", "opt_distributed.finalize"])

    def run(scenario: str, size: int) -> list[list[str]]:
        # It listens before anybody asks: on torch 2.6 a rank that comes too early may wait for half a minute.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outputs = [tmp_path / str(rank) for rank in range(size)]
        ranks = [
            context.Process(target=gloo_rank.run, args=(scenario, rank, size, store.port, str(output)))
            for rank, output in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(300)
            process.kill()
        for process, output in zip(ranks, outputs, strict=True):
            assert process.exitcode == 0, output.with_suffix(".err").read_text()
        return [output.with_suffix(".out").read_text().splitlines() for output in outputs]

    return run


def test_four_processes_train_what_one_process_trains(run_world: RunWorld) -> None:
    found = run_world("trains", 4)
    assert found == [["overlap True", "fp32 sums True", "in the step True", "instances True", "finalized True"]] * 4


def test_compiled_code_trains_what_one_process_trains(run_world: RunWorld) -> None:
    found = run_world("trains compiled", 2)
    assert found == [["wrapper True", "module True", "blocks True", "blocks and wrapper True"]] * 2


@pytest.mark.parametrize("absence", ["dies", "never comes"])
def test_a_lost_peer_is_an_error_that_names_the_collective_and_the_step(absence: str, run_world: RunWorld) -> None:
    error, unchanged = run_world(absence, 2)[0]
    assert error.startswith("error gradient reduction 2 of bucket ")
    assert "of dense float64, float64 gradients: " in error
    assert unchanged == "unchanged True"
