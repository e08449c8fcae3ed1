"""Converters and the command line: torch state dicts, safetensors, looking, proving, comparing."""

import json
import os
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import save_as_ranks
from small_models import assert_same_state, network, stepped
from states import state_at
from torch import nn
from torch.distributed.checkpoint import save as dcp_save

from opt_checkpoint import (
    ShardedObject,
    differences,
    load_optimizer,
    read_index,
    save,
    sharded_like,
    sharded_optimizer,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.torch_files import checkpoint_to_torch_file, torch_file_to_checkpoint


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    model = network()
    return model, stepped(model)


def test_a_checkpoint_becomes_a_state_dict_that_torch_loads(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    save({"optimizer": sharded_optimizer(model, optimizer)}, tmp_path / "x")
    checkpoint_to_torch_file(tmp_path / "x", tmp_path / "x.pt")
    state_dict = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_same_state(state_dict["state"], optimizer.state_dict()["state"])
    assert state_dict["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]
    again = torch.optim.AdamW(model.parameters(), lr=5.0)
    again.load_state_dict(state_dict)
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "x.pt"]
    largest = max(v.nbytes for states in state_dict["state"].values() for v in states.values())
    torch_file_to_checkpoint(tmp_path / "x.pt", tmp_path / "y")
    assert list(differences(read_index(tmp_path / "x"), read_index(tmp_path / "y"))) == []
    assert (tmp_path / "x.pt").stat().st_size < 60 * (largest + 400)  # every tensor has a storage of its own


def test_states_without_elements_become_a_file_that_torch_loads(tmp_path: Path) -> None:
    """It refuses a storage that is longer than its tensor."""
    model = nn.ParameterDict({"empty": nn.Parameter(torch.ones(0, 2)), "w": nn.Parameter(torch.ones(3))})
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cat([model["empty"].flatten(), model["w"]]).sum().backward()
    optimizer.step()
    save({"optimizer": sharded_optimizer(model, optimizer)}, tmp_path / "x")
    checkpoint_to_torch_file(tmp_path / "x", tmp_path / "x.pt")
    for mmap in (False, True):
        state_dict = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
        assert_same_state(state_dict["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("named", [True, False])
def test_a_state_dict_converts_for_every_sharding(tmp_path: Path, trained: Any, named: bool) -> None:
    model, _ = trained
    optimizer = stepped(model, named=named, lr=0.25)
    optimizer.state[model[0].weight]["calls"] = 3
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    names = None if named else [n for n, _ in model.named_parameters()]
    torch_file_to_checkpoint(tmp_path / "x.pt", tmp_path / "x", names=names)
    again = torch.optim.AdamW(model.parameters())
    load_optimizer(model, again, tmp_path / "x")
    assert [of.state[model[0].weight].pop("calls") for of in (again, optimizer)] == [3, 3]
    assert_same_state(again.state_dict()["state"], optimizer.state_dict()["state"])
    assert again.param_groups[0]["lr"] == 0.25


def test_a_file_stays_until_its_successor_is_whole(tmp_path: Path, trained: Any, monkeypatch: Any) -> None:
    save({"optimizer": sharded_optimizer(*trained)}, tmp_path / "x")
    (tmp_path / "x.pt").write_text("before")

    def fail(content: Any, file: Any) -> None:
        Path(file).write_text("torn")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint_to_torch_file(tmp_path / "x", tmp_path / "x.pt", force=True)
    assert (tmp_path / "x.pt").read_text() == "before"


# ----- the command line


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for number, size in ((1, 1), (2, 3)):
        save_as_ranks([state_at(1, rank, size) for rank in range(size)], folder / f"step-{number}")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """The exit code of a command, and what it prints."""

    def call(*arguments: object) -> tuple[int, str]:
        code = main([str(a) for a in arguments])
        out = capsys.readouterr()
        return code, out.out + out.err

    return call


def test_ls_says_what_is_whole_and_what_is_not(steps: Path, run: Any) -> None:
    temporary = f".opt-checkpoint-tmp-{'0' * 32}"
    for name in (temporary, "other"):
        (steps / name).mkdir()
    (steps / "step-2" / "__1_0.distcp").unlink()
    code, text = run("ls", steps)
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert code == 0
    assert "committed" in lines["step-1"]
    assert "damaged: __1_0.distcp" in lines["step-2"]
    assert "temporary directory" in lines[temporary]
    assert "not a complete checkpoint" in lines["other"]
    assert "no checkpoints in" in run("ls", steps / "other")[1]
    code, text = run("ls", steps / "step-1")
    assert (code, text.startswith(f"{steps / 'step-1'} is a checkpoint: ")) == (0, True)
    (steps / "step-1" / "manifest.bin").write_bytes(b"no manifest")
    code, text = run("ls", steps / "step-1")
    assert (code, "is a damaged checkpoint" in text) == (1, True)


def test_show_lists_chooses_and_computes(steps: Path, run: Any) -> None:
    code, text = run("show", steps / "step-2", "--tensor", "w", "--stats", "--chunks")
    assert code == 0
    assert "w  float32  12x40" in text
    assert "min 1000  max 1479  mean 1239.5  non-finite 0" in text
    assert "[0:4, 0:40]  __0_0.distcp" in text
    assert "\nb " not in text
    save({"w": torch.zeros(256)}, steps / "small")
    assert "1 tensors, 1.0 KiB\n" in run("show", steps / "small")[1]


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_verify_and_diff_tell_by_their_exit_code(steps: Path, run: Any) -> None:
    code, text = run("verify", steps / "step-1")
    assert code == 0
    assert text.endswith("step-1: every byte is as it was saved\n")
    dcp_save({"w": torch.ones(3)}, checkpoint_id=steps / "stock")
    code, text = run("verify", steps / "stock")
    assert code == 0
    assert "no damage was found, but archives of torch.distributed.checkpoint may lack checksums" in text
    assert run("diff", steps / "step-1", steps / "step-2") == (0, "equal\n")
    save({**state_at(1, 0, 1), "w": sharded_like("w", torch.arange(480.0).view(12, 40) + 1000.5)}, steps / "step-9")
    assert run("diff", steps / "step-1", steps / "step-9") == (1, "w: 480 elements differ, by up to 0.5\n")
    assert run("diff", steps / "step-1", steps / "step-9", "--rtol", "1e-3")[0] == 0
    file = steps / "step-1" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    code, text = run("verify", steps / "step-1")
    assert (code, "__0_0.distcp: has" in text) == (1, True)


NAN = float("nan")
INF = float("inf")
NUMBERS = [
    ([1.0, NAN, 3.0], [1.0, 2.0, 3.0], "w: 1 elements differ; 1 NaN only in the first"),
    ([1.0, 2.0, 3.5], [1.0, NAN, 3.0], "w: 2 elements differ, by up to 0.5; 1 NaN only in the second"),
    ([1.0, INF, 3.0], [1.0, 2.0, 3.0], "w: 1 elements differ, by up to inf"),
    ([NAN, INF], [NAN, INF], "equal"),
    ([1 + 2j, 3j], [1 + 2j, 0j], "w: 1 elements differ, by up to 3"),
]


def test_diff_sees_nonfinite_values_missing_keys_and_shapes(tmp_path: Path, run: Any) -> None:
    for number, (first, second, text) in enumerate(NUMBERS):
        a = tmp_path / f"{number}a"
        b = tmp_path / f"{number}b"
        save({"w": torch.tensor(first)}, a)
        save({"w": torch.tensor(second)}, b)
        for rtol in ("0", "1e-6"):
            assert run("diff", a, b, "--rtol", rtol) == (int(text != "equal"), text + "\n")
    save({"a": sharded_like("a", torch.zeros(2)), "b": sharded_like("b", torch.zeros(2)), "v": 1}, tmp_path / "1")
    save({"b": sharded_like("b", torch.zeros(3)), "c": sharded_like("c", torch.zeros(0)), "v": 2}, tmp_path / "2")
    code, text = run("diff", tmp_path / "1", tmp_path / "2")
    assert (code, text.splitlines()) == (
        1,
        [
            "a: only in the first",
            "b: torch.float32 [2] and torch.float32 [3]",
            "c: only in the second",
            "common_state/shard_0_1: the stored objects differ",
        ],
    )


@pytest.mark.parametrize(("side", "step"), [("first", "step-1"), ("second", "step-2")])
def test_diff_sees_damage(steps: Path, run: Any, side: str, step: str) -> None:
    """Both had the same bit flipped in a value that was then reported as equal: checksums were not compared."""
    file = steps / step / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[raw.index(torch.arange(1000.0, 1004.0).numpy().tobytes()) + 2] ^= 1
    file.write_bytes(raw)
    code, text = run("diff", steps / "step-1", steps / "step-2")
    assert (code, f"w: damaged in the {side}: " in text) == (1, True)
    file.write_bytes(raw[:-1])
    assert f"__0_0.distcp: damaged in the {side}: has" in run("diff", steps / "step-1", steps / "step-2")[1]


def test_an_export_names_what_is_no_tensor(tmp_path: Path, run: Any) -> None:
    lists = {"mixed": [torch.ones(1), 5], "t": [torch.ones(1)]}
    state = {"w": torch.ones(2), "step": 7, "cfg": {"a": "x"}, "lists": lists}
    save({**state, "o": ShardedObject("o", {"k": 1}, (1,), (0,))}, tmp_path / "x")
    text = run("convert", tmp_path / "x", tmp_path / "s", "--to", "safetensors")[1]
    assert text.endswith("left out, as safetensors files hold tensors only: cfg.a, lists.mixed, o/shard_0_1, step\n")
    text = run("convert", tmp_path / "x", tmp_path / "w", "--to", "safetensors", "--tensor", "w*")[1]
    assert "left out" not in text


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


OPTIMIZER = object()  # stands for the state dict of one
TORCH = ("x.pt", "--from", "torch")
NAMES = ("x.pt", "--from", "torch", "--names", "given.json")
SLOTS = ("step-1", "--from", "megatron", "--slots", "given.json")
EXPORT = ("step-1", "--to", "safetensors", "--tensor")
REFUSED: list[tuple[tuple[str, ...], Any, str]] = [
    (NAMES, ["a"], "1 names are given, but the file has parameter 1"),
    (NAMES, ["a", "a", "b", "c", "d", "e"], "a names several parameters"),
    (NAMES, ["a", "b", "c", "d", "e", "f", "g"], "7 names are given for 4 parameters"),
    (NAMES, {"a": 1}, "holds a dict, not a JSON list of names"),
    (NAMES, [1, 2], "is not a JSON list of names"),
    (TORCH, OPTIMIZER, "names no parameters"),
    (TORCH, b"junk" * 100, "x.pt cannot be read by torch.load"),
    (TORCH, {"state": {}, "param_groups": Hostile()}, "nothing of it was run"),
    (TORCH, [[1]], "holds no optimizer state dict"),
    (SLOTS[:3], OPTIMIZER, "was not written by Megatron-Core"),
    (SLOTS, [{"nome": "w"}], "given.json: entry 0"),
    (SLOTS, ["w"], "given.json is not a JSON list of objects"),
    (SLOTS, {"name": "w"}, "given.json holds a dict"),
    ((*TORCH, "--at", "optim"), OPTIMIZER, "--at does nothing with --from torch, which takes"),
    ((*SLOTS[:3], "--dtype", "bfloat16"), OPTIMIZER, "--dtype does nothing with --from meg"),
    ((*EXPORT, "nothing*"), OPTIMIZER, "holds no tensor that matches 'nothing*'"),
]


def test_what_cannot_be_converted_is_refused_in_a_sentence(
    steps: Path, trained: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(steps)
    for (source, *options), content, message in REFUSED:
        is_json = "given.json" in options
        Path("given.json").write_text(json.dumps(content) if is_json else "")
        if isinstance(content, bytes):
            Path("x.pt").write_bytes(content)
        else:
            optimizer = torch.optim.AdamW(trained[0].parameters()).state_dict()
            torch.save(optimizer if is_json or content is OPTIMIZER else content, "x.pt")
        assert main(["convert", source, "new", *options]) == 2, message
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert message in printed.err
        assert "it ran" not in printed.out
        assert not Path("new").exists()


FORMATS = [("x", "--to", "torch"), ("x", "--to", "dcp"), ("x", "--to", "safetensors")]
FORMATS += [("x.pt", "--from", "torch"), ("hf", "--from", "safetensors")]


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize(("source", "direction", "form"), FORMATS)
def test_a_conversion_replaces_nothing_unless_forced(
    tmp_path: Path, run: Any, trained: Any, source: str, direction: str, form: str, is_file: bool
) -> None:
    """`--to torch` replaced an existing file."""
    save({"optimizer": sharded_optimizer(*trained)}, tmp_path / "x")
    checkpoint_to_torch_file(tmp_path / "x", tmp_path / "x.pt")
    run("convert", tmp_path / "x", tmp_path / "hf", "--to", "safetensors")
    kept = tmp_path / "old" if is_file else tmp_path / "old" / "file"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("precious")
    command = ("convert", tmp_path / source, tmp_path / "old", direction, form)
    code, text = run(*command)
    assert (code, kept.read_text()) == (2, "precious"), text
    assert "exists" in text
    code, text = run(*command, "--force")
    if (direction, form, is_file) == ("--to", "torch", True):
        assert code == 0, text
        assert torch.load(tmp_path / "old")["param_groups"]
    else:
        assert (code, kept.read_text()) == (2, "precious"), text


def test_gc_removes_directories_without_a_writer_on_request_only(
    steps: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("gc", steps) == (0, f"nothing to delete in {steps}\n")
    old = steps / f".opt-checkpoint-tmp-{'a' * 32}"
    new = steps / f".opt-checkpoint-tmp-{'b' * 32}"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    code, text = run("gc", steps)
    assert (code, f"{old}\n" in text) == (0, True)
    assert re.search(rf"{new}: kept, an unknown process, which wrote \d+ s ago may still write to it", text)
    assert "nothing was deleted; --yes deletes without asking" in text
    run("gc", steps, "--yes", "--dry-run")
    assert old.exists()
    run("gc", steps, "--yes")
    assert sorted(p.name for p in steps.iterdir()) == [new.name, "step-1", "step-2"]
    # The clock of the file system counts: with a client's clock ahead, the live save of another host was deleted.
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 700)
    assert f"{new}: kept" in run("gc", steps, "--yes")[1]
    assert new.exists()


def test_extract_writes_one_tensor(tmp_path: Path, run: Any) -> None:
    values = torch.arange(6.0).view(2, 3)
    extract = ("extract", tmp_path / "x")
    save({"layer": {"weight": values}}, tmp_path / "x")
    assert run(*extract, "layer.weight", tmp_path / "w.pt") == (0, f"{tmp_path / 'w.pt'}\n")
    assert torch.equal(torch.load(tmp_path / "w.pt"), values)
    assert run(*extract, "layer.weight", tmp_path / "w.pt")[0] == 2  # it is there already
    file = tmp_path / "x" / "__0_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(values.numpy().tobytes(), torch.ones(6).numpy().tobytes()))
    assert run(*extract, "layer.weight", tmp_path / "again.pt")[0] == 2
    file.write_bytes(raw)
    assert run(*extract, "layer.weight", tmp_path / "again.pt")[0] == 0  # the failed one left nothing in its way
    code, text = run(*extract, "layer.wieght", tmp_path / "v.pt")
    assert code == 2
    assert "holds no tensor 'layer.wieght'; similar: layer.weight" in text


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_errors_are_sentences_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["optckpt", "show", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("opt_checkpoint", run_name="__main__")
    assert re.fullmatch("error: .* is not a distributed checkpoint.*\n", capsys.readouterr().err)
