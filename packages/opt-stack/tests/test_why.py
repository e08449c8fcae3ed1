"""Runs that diverge in five ways; `why` names the cause, the place, the rank and the step of each."""

import gc
import json
import math
import multiprocessing
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import roles_over, sharded_state
from torch import Tensor, nn

from opt_checkpoint import CheckpointManager, load, save, sharded_model
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_stack import Optimizer, get_optimizer, release_gradients, why
from opt_stack.__main__ import main
from opt_stack.diagnosis import JsonLines, TensorBoard, WeightsAndBiases
from opt_stack.diagnosis.why import read_recordings

pytestmark = pytest.mark.filterwarnings("ignore::opt_stack.SkippedStepWarning")
Batch = Callable[[int, Tensor], Tensor]


def as_drawn(step: int, batch: Tensor) -> Tensor:
    return batch


def make(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return model


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: range,
    change: Batch = as_drawn,
    *,
    rank: int = 0,
    spoil: Callable[[int], None] = lambda step: None,  # after backward
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        batch = change(step, torch.randn(32, 6, generator=generator))
        target = torch.stack([batch[:, :2].sum(1), batch[:, 2] - batch[:, 3], batch[:, 4]], 1)
        optimizer.scale_loss((model(batch) - target).square().mean()).backward()
        spoil(step)
        optimizer.step()
        optimizer.zero_grad()


def said(*folders: Path) -> str:
    """The text of `why`, with its sentences in one line each."""
    return str(why(*folders)).replace("\n  ", " ")


def recorded(folder: Path, change: Batch = as_drawn, *, steps: int = 30, lr: float = 3e-3, **fields: Any) -> str:
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=lr, **fields), [model])
    optimizer.stats_every(1, directory=folder)
    train(model, optimizer, range(1, steps + 1), change)
    optimizer.recorder.write("end")
    return said(folder)


def poisoned(step: int, batch: Tensor) -> Tensor:
    return batch.index_fill(0, torch.tensor([3]), math.nan) if step == 12 else batch


def of_other_data(step: int, batch: Tensor) -> Tensor:
    return batch * 300 if step == 12 else batch


TOO_HIGH = {"lr": 3.0, "optimizer": "sgd", "clip_grad": 0.0}
RUNS: dict[str, tuple[Batch, dict[str, Any], list[str]]] = {  # batches, fields, what is said
    "healthy": (as_drawn, {}, ["Nothing unusual was found."]),
    "a rate that is too high": (as_drawn, TOO_HIGH, ["First: at step ", "the learning rate is too high"]),
    "a poisoned batch": (
        poisoned, {},
        ["First: at step 12 backward gave NaN in the gradient of all 6 parameters; 1 step was skipped",
         "and the next was applied: a bad batch of data."],
    ),
    "a batch of other data": (
        of_other_data, {},
        ["First: at step 12 the gradient norm was ", "it came back in the next steps: a bad batch of data."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_what_changed_first_is_said(name: str, tmp_path: Path) -> None:
    batches, fields, sentences = RUNS[name]
    text = recorded(tmp_path, batches, **fields)
    assert [sentence for sentence in sentences if sentence not in text] == []


@pytest.mark.parametrize("bad", [0.0, 1e3, math.nan], ids=str)
def test_a_bad_rank(tmp_path: Path, bad: float) -> None:
    def rank_main(comm: Comm) -> None:
        model = make()
        optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model], pg_collection=roles_over(comm))
        optimizer.stats_every(1, directory=tmp_path)

        def broken(step: int) -> None:
            for param in model.parameters() if comm.rank == 2 and step >= 9 else ():
                param.grad.mul_(bad)

        train(model, optimizer, range(1, 20), rank=comm.rank, spoil=broken)
        optimizer.recorder.write("end")

    run_threads(4, rank_main)
    text = said(tmp_path)
    assert "First: at step 9 " in text
    assert "rank 2" in text.partition("\n")[2].partition("\n")[0]


def test_an_overflowing_head_in_fp16(tmp_path: Path) -> None:
    model = make().half()
    config = OptimizerConfig(lr=3e-3, fp16=True, initial_loss_scale=2.0**8, loss_scale_window=1000, hysteresis=1)
    optimizer = get_optimizer(config, [model])
    optimizer.stats_every(1, directory=tmp_path)

    def grown(step: int, batch: Tensor) -> Tensor:
        return batch.half() * (1000 if step >= 8 else 1)  # the error, and so the gradient of the head, grows with it

    train(model, optimizer, range(1, 12), grown)
    optimizer.recorder.write("end")
    text = said(tmp_path)
    assert "First: at step 8 " in text
    assert "overflowed in fp16" in text


def test_a_loss_scale_that_finds_its_level_is_no_finding(tmp_path: Path) -> None:
    """Said that the loss was NaN, in every healthy run with the default scale."""
    model = make().half()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3, fp16=True), [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 41), lambda step, batch: batch.half())
    optimizer.recorder.write("end")
    text = said(tmp_path)
    assert " 0 of them skipped" not in text
    assert "Nothing unusual was found." in text


def test_a_scale_far_below_the_last_one_that_fitted_is_a_finding(tmp_path: Path) -> None:
    model = make().half()
    config = OptimizerConfig(lr=3e-3, fp16=True, initial_loss_scale=2.0**8, loss_scale_window=1000, hysteresis=1)
    optimizer = get_optimizer(config, [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 12), lambda step, batch: batch.half() * (1000 if step in (2, 3, 4) else 1))
    optimizer.recorder.write("end")
    assert re.search(
        r"First: at step 2 .* 3 steps were skipped with loss scale 256 to 64: it overflowed", said(tmp_path)
    )


def test_a_constant_scale_that_skips_to_the_end_is_a_finding(tmp_path: Path) -> None:
    """Was taken for one that finds its level."""
    model = make().half()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3, fp16=True, loss_scale=2.0**8), [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 20), lambda step, batch: batch.half() * (1000 if step >= 8 else 1))
    optimizer.recorder.write("end")
    assert re.search(r"First: at step 8 .* 12 steps were skipped .*overflowed in fp16", said(tmp_path))


def test_a_run_that_ended_by_a_refused_step_says_so(tmp_path: Path) -> None:
    """Said that nothing unusual was found; the exit overwrote the error."""
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 4))
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="lr of group"):
        train(model, optimizer, range(4, 5))
    optimizer.recorder.write("exit")
    assert "3 recorded steps, 1 to 3, 0 of them skipped, 1 refused" in said(tmp_path)
    text = said(tmp_path)
    assert "First: step 4 was refused with an error, and the run ended there: " in text
    assert "lr of group" in text


def test_a_stale_checkpoint(tmp_path: Path) -> None:
    """The weights of step 6 with the optimizer's state of step 12."""
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    optimizer.stats_every(1, directory=tmp_path)
    for first, last in ((1, 6), (7, 12)):
        train(model, optimizer, range(first, last + 1))
        save(sharded_state(model, optimizer), tmp_path / f"step-{last}")
    train(model, optimizer, range(13, 16))
    optimizer.recorder.write("end")

    resumed = make(seed=1)
    again = get_optimizer(OptimizerConfig(lr=3e-3), [resumed])
    described = sharded_model(resumed)
    load({"model": described}, tmp_path / "step-6")
    loaded = load({"optimizer": again.sharded_state_dict(described)}, tmp_path / "step-12")
    again.load_state_dict(loaded.state["optimizer"])
    again.stats_every(1, directory=tmp_path)
    train(resumed, again, range(13, 20))
    again.recorder.write("end")
    text = said(tmp_path)
    assert "First: at step 13, the first of the resumed run, the weights of " in text
    assert "they are those after 6 updates, of an earlier checkpoint." in text


def test_weights_of_an_earlier_step_are_named(tmp_path: Path) -> None:
    """Said only that something had written them."""
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 11))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(11, 21))
    model.load_state_dict(kept)
    train(model, optimizer, range(21, 25))
    optimizer.recorder.write("end")
    text = said(tmp_path)
    assert "First: at step 21 the weights of " in text
    assert "they are those after 10 updates, of an earlier checkpoint." in text


def test_negated_weights_are_not_those_of_an_earlier_step(tmp_path: Path) -> None:
    """Their norms are, where updates are small."""
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-9), [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 11))
    with torch.no_grad():
        model[2].weight.neg_()
    train(model, optimizer, range(11, 15))
    optimizer.recorder.write("end")
    text = said(tmp_path)
    assert "First: at step 11 the weights of '2.weight' were not those that the last update had left" in text
    assert "something other than the optimizer wrote them." in text


def test_gradients_that_are_not_cleared_are_named(tmp_path: Path) -> None:
    """Not found with SGD, or where the first steps after it were noisy."""
    model = make()
    optimizer = get_optimizer(OptimizerConfig(optimizer="sgd", lr=1e-3, clip_grad=0.0), [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 31))
    optimizer.zero_grad = lambda: None
    train(model, optimizer, range(31, 50))
    optimizer.recorder.write("end")
    text = said(tmp_path)
    assert re.search("First: at step 3[0-3] all gradients began to grow with the number of steps: they add up", text)


def test_a_run_of_another_model_in_the_directory_is_left_out(tmp_path: Path) -> None:
    """Said that nothing unusual was found: the two had no parameter in common."""
    recorded(tmp_path)
    model = nn.Linear(6, 3)
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    train(model, optimizer, range(1, 4))
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(4, 20), poisoned)
    optimizer.recorder.write("end")
    assert "First: at step 12 backward gave NaN in the gradient of " in said(tmp_path)


def test_a_model_whose_weights_begin_at_zero_is_read(tmp_path: Path) -> None:
    """Raised that the ratios of large parameters were an empty sequence."""
    model = nn.Linear(6, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    optimizer.stats_every(1, directory=tmp_path)
    train(model, optimizer, range(1, 6))
    optimizer.recorder.write("end")
    assert "Nothing unusual was found." in said(tmp_path)


# --- where recordings go, and who reads them --------------------------------------------------------------------------


def test_a_recording_is_written_at_saves_and_after_an_error(tmp_path: Path) -> None:
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    optimizer.stats_every(2, directory=tmp_path)
    file = tmp_path / "recording" / "0001" / "rank0.jsonl"
    manager = CheckpointManager(tmp_path, in_background=False)
    for last in (3, 6):
        train(model, optimizer, range(last - 2, last + 1))
        manager.save(last, sharded_state(model, optimizer))
    head, *lines = map(json.loads, file.read_text().splitlines())
    assert head["end"] == "state was saved"
    assert [line["step"] for line in lines] == [1, 3, 5]
    assert (manager.steps(), manager.latest()) == ([3, 6], 6)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="lr of group"):
        train(model, optimizer, range(7, 8))
    assert "lr of group" in json.loads(file.read_text().partition("\n")[0])["end"]
    file.unlink()
    with pytest.raises(ValueError, match="lr of group"):
        optimizer.prepare_grads()
    assert "3 recorded steps" in str(why(tmp_path))


def test_a_recording_is_written_when_its_optimizer_is_deleted(tmp_path: Path) -> None:
    """Its callback refers to the optimizer, as in a script that trains inside a function."""
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    optimizer.stats_every(1, lambda stats, used=optimizer: None, directory=tmp_path)
    train(model, optimizer, range(1, 4))
    del optimizer
    gc.collect()
    assert "3 recorded steps" in str(why(tmp_path))


def test_a_recording_is_written_at_exit_of_a_forked_process(tmp_path: Path) -> None:
    """The optimizer is deleted before the exit of one of them, and the parent records too."""

    def run(directory: Path, keep: list[Optimizer]) -> None:
        model = make()
        keep.append(get_optimizer(OptimizerConfig(lr=3e-3), [model]))
        keep[0].stats_every(1, directory=directory)
        train(model, keep[0], range(1, 4))

    in_parent: list[Optimizer] = []
    run(tmp_path / "parent", in_parent)
    in_child: list[Optimizer] = []
    child = multiprocessing.get_context("fork").Process(target=run, args=(tmp_path / "child", in_child))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "3 recorded steps" in str(why(tmp_path / "child"))
    assert not list((tmp_path / "parent").rglob("*.jsonl"))


def test_a_recording_is_written_at_exit_after_an_uncaught_error(tmp_path: Path) -> None:
    script = f"""
import torch
from opt_stack import OptimizerConfig, get_optimizer
model = torch.nn.Linear(2, 2)
optimizer = get_optimizer(OptimizerConfig(lr=1e-3), [model])
optimizer.stats_every(1, directory={str(tmp_path)!r})
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
1 / 0
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "ZeroDivisionError" in ran.stderr
    assert "1 recorded steps" in str(why(tmp_path))


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, lambda step, batch: batch * math.nan if step == 3 else batch, steps=5)
    assert main(["why", str(tmp_path), "--plot", str(tmp_path / "plot.svg")]) == 0
    assert "First: at step 3 backward gave NaN in the gradient of all 6 parameters" in capsys.readouterr().out
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
    page = why(tmp_path)._repr_html_()
    assert "at step 3" in page
    assert "<svg" in page
    (tmp_path / "empty.jsonl").write_text("")
    for without in ("other", "empty.jsonl"):
        assert main(["why", str(tmp_path / without)]) == 2
        assert "holds no recording; call optimizer.stats_every(1, directory=" in capsys.readouterr().err


def test_two_recordings_differ_first_in_the_rate(tmp_path: Path) -> None:
    for name, lr in (("first", 3e-3), ("second", 3e-2)):
        recorded(tmp_path / name, steps=5, lr=lr)
    text = said(tmp_path / "first", tmp_path / "second")
    assert "First: after 0 updates (step 1 of the second run) the learning rate of group 'default' is 0.03" in text
    recorded(tmp_path / "third", lambda step, batch: batch * 1.1, steps=5)
    text = said(tmp_path / "first", tmp_path / "third")
    assert "First: after 0 updates (step 1 of the second run) the grad norm of " in text


def test_two_checkpoints_are_compared_by_name_nan_first(tmp_path: Path) -> None:
    model = make()
    save({"model": sharded_model(model)}, tmp_path / "good")
    with torch.no_grad():
        model[0].bias.add_(1)
        model[2].weight[0, 0] = math.nan
    save({"model": sharded_model(model)}, tmp_path / "bad")
    head, first, second = str(why(tmp_path / "good", tmp_path / "bad")).splitlines()
    assert head.endswith("2 of 6 tensors differ, 1 of them in NaN")
    assert first == "model.2.weight: 1 elements differ; 1 NaN only in the second"
    assert second.startswith("model.0.bias: 16 elements differ, by up to 1")


def test_writers_pass_the_numbers_on(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.scalars: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[f"{name} {step}"] = value

        def log(self, values: dict[str, float], step: int) -> None:
            self.scalars |= {f"{name} {step}": value for name, value in values.items()}

    board = Sink()
    run = Sink()
    model = make()
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
    for writer in (TensorBoard(board), WeightsAndBiases(run), JsonLines(tmp_path / "run.jsonl")):
        optimizer.stats_every(1, writer)
        train(model, optimizer, range(1, 2))
    assert {name.rpartition(" ")[0] for name in board.scalars} == {name.rpartition(" ")[0] for name in run.scalars}
    assert run.scalars["update_norm/2.weight 2"] > 0
    assert "1 recorded steps, 3 to 3" in str(why(tmp_path / "run.jsonl"))


def test_a_line_with_an_infinite_setting_is_json(tmp_path: Path) -> None:
    """Programs measure the norm by a clip at infinity, for which JSON has no number."""
    file = tmp_path / "run.jsonl"
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3, clip_grad=0.0), [make()])
    optimizer.stats_every(1, JsonLines(file))
    optimizer.clip_grad_norm_(math.inf)
    optimizer.step()
    line = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert line["settings"][""] == {"clip_grad": "inf"}
    (stats,) = why(file).run
    assert stats.settings == optimizer.stats().settings


def test_what_cannot_be_is_refused() -> None:
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3, clip_grad=0.0), [make()])
    with pytest.raises(RuntimeError, match=r"no step was recorded; call optimizer.stats_every\(1\)"):
        optimizer.stats()
    with pytest.raises(ValueError, match=r"stats_every\(-1\): pass a number of steps"):
        optimizer.stats_every(-1)
    optimizer.stats_every(1)
    with pytest.raises(ValueError, match=r"call stats_every\(0\)"):
        release_gradients(optimizer)
    optimizer.stats_every(0)
    release_gradients(optimizer)
    with pytest.raises(RuntimeError, match="gradients are released in backward"):
        optimizer.stats_every(1)


def test_optimizers_sharing_a_directory_write_to_own_folders(tmp_path: Path) -> None:
    both = []
    for optimizer in ("sgd", "adam"):
        model = make()
        both.append((model, get_optimizer(OptimizerConfig(lr=3e-3, optimizer=optimizer), [model])))
        both[-1][1].stats_every(1, directory=tmp_path)
    for steps, (model, optimizer) in enumerate(both, 1):
        train(model, optimizer, range(steps))
        optimizer.recorder.write("end")
    assert [len(recording.run) for recording in read_recordings(tmp_path)] == [1, 2]


def test_the_last_20_recordings_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    numbers = (1, 2, *range(100, 119))
    for number in numbers:
        (folder / f"{number:04}").mkdir(parents=True)
        (folder / f"{number:04}" / "rank0.jsonl").touch()
    for other in (*range(120, 150), 20260101):  # of runs that ended before their first step, and of another program
        (folder / str(other)).mkdir()
    (folder / "0002" / "notes.txt").touch()
    get_optimizer(OptimizerConfig(lr=3e-3), [make()]).stats_every(1, directory=tmp_path)
    left = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.*"))
    assert left == ["0002/notes.txt", *(f"{number:04}/rank0.jsonl" for number in numbers[2:])]


def test_records_of_one_file_may_be_of_two_models(tmp_path: Path) -> None:
    for model, factor in ((make()[:3], 1), (make(), 1000)):
        optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
        optimizer.stats_every(1, JsonLines(tmp_path / "run.jsonl"))
        for _ in range(4):
            (factor * model(torch.ones(1, 6)).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "times the usual" in said(tmp_path / "run.jsonl")


def test_a_jump_outside_the_parameters_of_all_records_is_read(tmp_path: Path) -> None:
    """Raised ValueError: all that are compared were NaN."""
    for model, factor in ((make()[:3], 1), (make(), 1000)):
        optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
        optimizer.stats_every(1, JsonLines(tmp_path / "run.jsonl"))
        for _ in range(4):
            of_first = model[:3](torch.ones(1, 6))
            result = model[3:](of_first.detach()) if len(model) > 3 else of_first
            (factor * result.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "8 recorded steps" in said(tmp_path / "run.jsonl")


def test_an_unfinished_line_of_a_killed_process_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    model = make()
    for expected in (3, 5):  # the second process goes on in the same file
        optimizer = get_optimizer(OptimizerConfig(lr=3e-3), [model])
        optimizer.stats_every(1, JsonLines(file))
        train(model, optimizer, range(3))
        assert len(why(file).run) == expected
        file.write_text(file.read_text()[:-20])
        assert len(why(file).run) == expected - 1


PICKLED = (  # by an earlier version
    "8002636f70745f737461636b2e646961676e6f7369732e74656e736f725f73746174730a53746570"
    "53746174730a7100298171015d7102284b034b028858000000007103473ff8000000000000473ff0"
    "000000000000473ff00000000000007d71047d71057d71067d71077d71084e680365622e"
)


def test_pickled_numbers_of_an_earlier_version_are_read() -> None:
    """Their state is a list, which a class without `__slots__` refused."""
    stats = pickle.loads(bytes.fromhex(PICKLED))
    assert (stats.step, stats.updates, stats.grad_norm, stats.loss) == (3, 2, 1.5, None)
