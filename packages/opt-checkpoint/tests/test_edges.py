"""Edges of saving and loading: file URLs, lists with tensors, stock directories, states of other shapes, bad values."""

from __future__ import annotations

import copy
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import RankPool, save_as_ranks
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from opt_checkpoint import (
    CheckpointingException,
    CheckpointKeyError,
    CheckpointMismatchError,
    ShardedTensor,
    TieredCheckpointManager,
    load,
    load_optimizer,
    read_common,
    read_index,
    save,
    sharded_model,
    sharded_optimizer,
    verify_checkpoint,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# ----- file:// URLs


def test_a_file_url_is_synced_like_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or fsync(fd))
    save({"w": torch.ones(3)}, tmp_path / "path")
    by_path = len(synced)
    save({"w": torch.ones(3)}, f"file://{tmp_path}/a%20url")
    assert len(synced) == 2 * by_path > 0
    assert {p.name for p in (tmp_path / "a url").iterdir()} == {p.name for p in (tmp_path / "path").iterdir()}
    assert torch.equal(load({"w": None}, f"file://localhost{tmp_path}/path").state["w"], torch.ones(3))
    monkeypatch.chdir(tmp_path)
    with TieredCheckpointManager(f"file://{tmp_path}/local%20tier", "durable", durable_every=2) as manager:
        manager.save(1, {"w": torch.ones(3)})
    assert {path.name for path in tmp_path.iterdir()} == {"a url", "path", "local tier", "durable"}
    for url in ("file://host/run", "file://run", "file:///run?x=1", "file:///run#x"):
        with pytest.raises(CheckpointingException, match=r"names a host|has a query or fragment"):
            save({"w": torch.ones(3)}, url)


# ----- stock directories


def test_big_endian_archives_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    values = torch.arange(1.0, 5.0)
    dcp_save({"w": values}, checkpoint_id=tmp_path / "x")
    (file,) = (tmp_path / "x").glob("*.distcp")
    raw, swapped = file.read_bytes(), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            content = b"big" if name.endswith("/byteorder") else old.read(name)
            new.writestr(name, values.numpy().byteswap().tobytes() if "/data/" in name else content)
    file.write_bytes(swapped.getvalue().ljust(len(raw), b"\0"))
    ours, stock = torch.zeros(4), torch.zeros(4)
    load({"w": ours}, tmp_path / "x")
    dcp_load({"w": stock}, checkpoint_id=tmp_path / "x")
    assert torch.equal(ours, values)
    assert torch.equal(stock, values)


STATE = {"m": {"w": torch.ones(2), "l": [1, 2, {"a": torch.zeros(1)}], "k": 5, "betas": [0.9, 0.95]}, "s": "text"}


@pytest.mark.parametrize("write", [lambda path: dcp_save(STATE, checkpoint_id=path), lambda path: save(STATE, path)])
def test_none_loads_everything_from_stock_directories_as_from_ours(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "x")
    for wanted, expected in (
        (None, STATE),
        ({"m": None}, {"m": STATE["m"]}),
        ({"m": {"l": None, "betas": None}}, {"m": {"l": STATE["m"]["l"], "betas": [0.9, 0.95]}}),
        ({"s": None}, {"s": "text"}),
    ):
        report = load(wanted, tmp_path / "x", strict="return_all")
        assert sorted_text(report.state) == sorted_text(expected)
        assert report.missing == ()
        assert wanted is not None or report.unexpected == ()
    with pytest.raises(CheckpointKeyError, match="nothing"):
        load({"nothing": None}, tmp_path / "x")


def sorted_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {sorted_text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(sorted_text, value)) + "]"
    return repr(value)


# ----- tensors in lists and tuples


def test_tensors_in_lists_stay_tensors_for_stock_readers_and_come_back_in_lists(tmp_path: Path) -> None:
    state = {
        "lst": [1, torch.ones(2), [torch.arange(3), "a"], (torch.zeros(1), 5)],
        "groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 0.95)}, {"lr": 0.1}],
        "tup": (torch.full((2,), 3.0), "b"),
        "plain": [1, 2],
    }
    save(state, tmp_path / "x")
    assert {"lst.1", "lst.2.0", "lst.3.0", "groups.0.lr", "tup.0"} == set(read_index(tmp_path / "x").tensors)
    assert read_common(read_index(tmp_path / "x"))["lst"] == [1, None, [None, "a"], (None, 5)]
    for wanted in (None, dict.fromkeys(state), copy.deepcopy(state), {key: torch.zeros(1) for key in state}):
        report = load(wanted, tmp_path / "x", strict="raise_all")
        assert sorted_text(report.state) == sorted_text(state)
    zeros = [0, torch.zeros(2), [torch.zeros(3, dtype=torch.int64), ""], (torch.ones(1), 0)]
    target = {"lst": zeros, "groups": [{"lr": torch.tensor(0.0), "betas": ()}, {"lr": 0.0}], "tup": (), "plain": []}
    dcp_load(target, checkpoint_id=tmp_path / "x")
    assert sorted_text(target) == sorted_text(state)
    assert verify_checkpoint(tmp_path / "x") == []


def dtensors_in_lists(rank: int, size: int, path: str) -> None:
    mesh, values = init_device_mesh("cpu", (size,)), torch.arange(20.0).view(5, 4)
    save({"lst": [1, distribute_tensor(values, mesh, [Shard(0)]), torch.ones(2)]}, path)
    target = [0, distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)]), torch.zeros(2)]
    state = load({"lst": target}, path).state["lst"]
    assert state[0] == 1
    assert state[1] is target[1]
    assert torch.equal(target[1].full_tensor(), values)
    assert torch.equal(state[2], torch.ones(2))
    whole = load({"lst": None}, path).state["lst"]
    assert isinstance(whole, list)
    assert torch.equal(whole[1], values)
    with pytest.raises(CheckpointingException, match="'tup' is a tuple that contains sharded values; make it a list"):
        save({"tup": (distribute_tensor(values, mesh, [Shard(0)]),)}, path + "-tuple")


def test_a_dtensor_in_a_list_is_loaded_in_place(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, dtensors_in_lists, str(tmp_path / "x"))


# ----- states of DTensors with another shape than the parameter's


class Factored(torch.optim.Optimizer):
    """Second moments by row and by column, kept and dropped, as Adafactor has them."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        grad, state = 0.5 * p, self.state[p]
        for name, dim, keep in (("row", 1, True), ("col", 0, True), ("row1", 1, False), ("col1", 0, False)):
            mean = (grad * grad).sum(dim=dim, keepdim=keep)
            if isinstance(mean, DTensor):
                mean = mean.redistribute(
                    placements=[q if isinstance(q, Shard) else Replicate() for q in mean.placements]
                )
            state[name] = state[name].lerp(mean, 0.5) if name in state else mean
        p -= 0.1 * grad / (state["row"] * state["col"] + 1).sqrt()


def factored(sharded: bool, steps: int) -> tuple[nn.Module, Factored]:
    model = nn.Linear(4, 9, bias=False)
    weight = torch.arange(36.0).view(9, 4) / 10
    if sharded:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), [Shard(0)])
    model.weight = nn.Parameter(weight)
    optimizer = Factored(model.parameters(), {"lr": 0.1})
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_factored(rank: int, size: int, path: str) -> None:
    model, optimizer = factored(True, 2)
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, path)


def resume_factored(rank: int, size: int, path: Any, sharded: bool = True) -> None:
    model, optimizer = factored(sharded, 0)
    other, made = factored(sharded, 1)  # the layouts that the optimizer makes itself
    load({"model": sharded_model(model)}, path)
    load_optimizer(model, optimizer, path)
    for name, state in made.state[other.weight].items():
        loaded = optimizer.state[model.weight][name]
        assert (type(loaded), loaded.shape) == (DTensor if sharded else torch.Tensor, state.shape), name
        if sharded:
            assert (loaded.placements, loaded.to_local().shape) == (state.placements, state.to_local().shape), name
    optimizer.step()
    optimizer.step()
    alone, reference = factored(False, 4)
    assert torch.allclose(full(model.weight), alone.weight)
    for name, value in reference.state[alone.weight].items():
        assert torch.allclose(full(optimizer.state[model.weight][name]), value), name


def test_factored_states_of_dtensors_reload_as_dtensors_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_factored, str(tmp_path / "x"))
    for size in (3, 2, 1):
        ranks.run(size, resume_factored, str(tmp_path / "x"))
    resume_factored(0, 1, tmp_path / "x", sharded=False)


def test_a_single_element_of_a_larger_tensor_is_stored_and_loaded(tmp_path: Path) -> None:
    """Its stride is that of the larger tensor, though it counts as contiguous."""
    values, target = torch.arange(6.0).view(3, 2), torch.zeros(3, 2)
    save({"w": values[1:2, 1], "v": values[2:, 1:].t(), "m": [values[:1, 1]]}, tmp_path / "x")
    load({"w": target[1:2, 1], "v": target[2:, 1:].t()}, tmp_path / "x")
    assert target.tolist() == [[0, 0], [0, 3], [0, 5]]
    assert load({"m": None}, tmp_path / "x").state["m"][0].tolist() == [1]


def test_none_warns_of_sharded_tensors_that_it_does_not_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    save({"m": sharded_model(model), "step": 3, "ema": model.state_dict()}, tmp_path / "x")
    assert load(None, tmp_path / "x").state.keys() == {"step", "ema"}
    assert "None at the top of the state loads plain values" in caplog.text
    assert "m.bias, m.weight" in caplog.text
    caplog.clear()
    load({"m": sharded_model(model), "step": None, "ema": None}, tmp_path / "x")
    assert caplog.text.count("None at") == 0


# ----- bad values are refused in a sentence that names them


BAD = {
    "an object": ({"x": object()}, {}, r"x is a object that could not be loaded again without running its pickle"),
    "a function": ({"x": lambda: 0}, {}, r"x is a function that could not be loaded again"),
    "an array": ({"rng": {"np": np.zeros(2)}}, {}, r"rng\.np is a ndarray .* it needs numpy"),
    "a numpy number": ({"step": np.int64(5)}, {}, r"step is a int64 .*int\(x\)"),
    "a numpy number in a list": ({"l": {"s": [1, np.float64(2)]}}, {}, r"l\.s is a list"),
    "a numpy detail": ({"a": 1}, {"details": {"step": np.int64(5)}}, r"details\['step'\] is .*int64"),
    "a detail that is NaN": ({"a": 1}, {"details": {"loss": float("nan")}}, r"details\['loss'\] is nan"),
    "a sparse tensor": ({"x": torch.eye(3).to_sparse()}, {}, r"x has layout torch\.sparse_coo.*to_dense"),
    "a sparse tensor in a list": ({"l": [1, (torch.eye(3).to_sparse(),)]}, {}, r"l\.1\.0 has layout torch\.sparse_coo"),
    "a sparse tensor in compressed rows": ({"x": torch.eye(3).to_sparse_csr()}, {}, r"x has layout torch\.sparse_csr"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path, case: str) -> None:
    state, options, message = BAD[case]
    with pytest.raises(CheckpointingException, match=message):
        save(state, tmp_path / "x", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_expanded_target_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save({"w": torch.ones(3, 2), "v": torch.ones(4)}, tmp_path / "x")
    other = torch.zeros(4)
    for expanded in (torch.zeros(2).expand(3, 2), torch.zeros(3, 1).expand(3, 2)):
        with pytest.raises(CheckpointMismatchError, match=r"w: the target of shape \[3, 2\] is expanded .*contiguous"):
            load({"v": other, "w": expanded}, tmp_path / "x")
        assert (other == 0).all()
    save({"w": torch.ones(2).expand(3, 2)}, tmp_path / "y")  # it may be saved
    assert load({"w": None}, tmp_path / "y").state["w"].tolist() == [[1, 1]] * 3


# ----- faults that no test noticed


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_that_overlap_by_one_row_and_leave_one_out_are_refused(tmp_path: Path, axis: int) -> None:
    """As many elements as the tensor has: only the comparison of neighbours sees it."""

    local = (3, 6) if axis == 0 else (6, 3)

    def block(start: int) -> ShardedTensor:
        offset = (start, 0) if axis == 0 else (0, start)
        return ShardedTensor("w", torch.full(local, float(start)), torch.float32, local, (6, 6), offset, None)

    for starts in ((0, 2), (1, 3)):
        with pytest.raises(CheckpointingException, match=r"w: Invalid access pattern: rank 0 holds .* both as main"):
            save_as_ranks([{"w": block(start)} for start in starts], tmp_path / "x")
    save_as_ranks([{"w": block(start)} for start in (0, 3)], tmp_path / "y")


def test_files_are_only_appended_to_and_torch_reads_large_archives_without_a_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(700_001)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda *a: pytest.fail("a written byte is changed"))
        save({"w": values, "turned": values[:700_000].view(700, 1000).t()}, tmp_path / "x")
    target = {"w": torch.zeros_like(values), "turned": torch.zeros(1000, 700)}
    dcp_load(target, checkpoint_id=tmp_path / "x")
    assert torch.equal(target["w"], values)
    assert torch.equal(target["turned"], values[:700_000].view(700, 1000).t())
    assert verify_checkpoint(tmp_path / "x") == []
    (tmp_path / "x" / "manifest.bin").unlink()  # what remains is read as any stock directory is
    for file in (tmp_path / "x").glob("*.distcp"):
        file.write_bytes(b"another program's file".ljust(64) + file.read_bytes()[64:])
    assert verify_checkpoint(tmp_path / "x") == []
    again = torch.zeros_like(values)
    load({"w": again}, tmp_path / "x")
    assert torch.equal(again, values)
