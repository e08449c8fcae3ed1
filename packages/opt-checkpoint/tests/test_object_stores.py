"""Checkpoints in object stores: the public functions with URLs in place of paths."""

import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from failing_calls import WRITES, Calls, bucket_in, get, objects_in, put
from small_models import assert_same_weights, network, stepped
from states import LARGE_NUMEL, assert_is_step, state_at, whole_at

from opt_checkpoint import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    ObjectPath,
    ShardedObject,
    ShardedTensor,
    TieredCheckpointManager,
    load,
    load_optimizer,
    load_safetensors,
    read_index,
    save,
    save_safetensors,
    sharded_like,
    sharded_model,
    sharded_optimizer,
    verify_checkpoint,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.run.series import step_name
from opt_checkpoint.store import store_at
from opt_checkpoint.store.bucket import COMMIT

pytest.importorskip("obstore")

pytestmark = pytest.mark.needs_extra


@pytest.fixture
def bucket() -> ObjectPath:
    """An empty store of this process."""
    return ObjectPath.at(f"memory://{uuid.uuid4().hex}/runs")


def test_files_in_a_store_are_those_of_a_directory(bucket: ObjectPath, tmp_path: Path) -> None:
    """A checkpoint that was downloaded, or a directory that was uploaded, is read as it is."""
    save(state_at(4, 0, 1), bucket / "one")
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    place = read_index(bucket / "one").path
    assert isinstance(place, ObjectPath)
    for name in objects_in(place):
        (downloaded / name).write_bytes(get(place / name))
    assert verify_checkpoint(downloaded) == []
    assert_is_step(load(state_at(0, 0, 1, filled=False), downloaded).state, 4, 0, 1)
    uploaded = bucket / "uploaded"
    for file in downloaded.iterdir():
        put(uploaded / file.name, file.read_bytes())
    assert_is_step(load(state_at(0, 0, 1, filled=False), uploaded).state, 4, 0, 1)
    with pytest.raises(CheckpointExistsError):
        save(state_at(5, 0, 1), uploaded)


def converted(*arguments: Any) -> int:
    return main(["convert", *map(str, arguments)])


def test_conversions_read_from_and_write_to_a_store(bucket: ObjectPath, tmp_path: Path) -> None:
    """`convert` took a URL for a path: pathlib dropped a slash, and a directory `memory:` was written to."""
    model = network()
    optimizer = stepped(model, named=True, lr=0.25)
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, bucket / "one")
    assert converted(bucket / "one", tmp_path / "one.pt", "--to", "torch") == 0
    assert converted(tmp_path / "one.pt", bucket / "two", "--from", "torch") == 0
    again = torch.optim.AdamW(model.named_parameters())
    other = network(2)
    load_optimizer(model, again, bucket / "two")
    assert again.param_groups[0]["lr"] == 0.25
    assert torch.equal(again.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert converted(bucket / "one", tmp_path / "st", "--to", "safetensors", "--prefix", "model.") == 0
    assert converted(tmp_path / "st", bucket / "three", "--from", "safetensors", "--prefix", "model.") == 0
    load({"model": sharded_model(other)}, bucket / "three")
    assert_same_weights(other, model)


def test_formats_of_others_are_refused_in_stores(
    bucket: ObjectPath, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({"model": sharded_model(torch.nn.Linear(3, 2))}, "local")
    place = bucket / "x"
    for command, text in (
        *(
            (("local", place, "--to", form), f"{place} is in an object store; ")
            for form in ("safetensors", "torch", "dcp")
        ),
        ((place, "new", "--to", "dcp"), "a checkpoint whose files are to be linked must be in a mounted file system"),
        ((place, "new", "--from", "safetensors"), "must be in a mounted file system"),
        ((place, "new", "--from", "torch"), "must be in a mounted file system"),
    ):
        assert converted(*command) == 2
        assert text in capsys.readouterr().err
    for call, what in (
        (lambda: save_safetensors({"w": torch.ones(3)}, str(place)), "a folder of safetensors files"),
        (lambda: load_safetensors({"w": torch.ones(3)}, str(place)), "a folder of safetensors files"),
        (lambda: TieredCheckpointManager(str(place), "durable", durable_every=1), "the local tier"),
    ):
        with pytest.raises(CheckpointingException, match=f"is in an object store; {what} must be"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["local"]


def test_a_stock_directory_in_a_store_is_read(tmp_path: Path) -> None:
    values = torch.arange(40_000.0).view(200, 200)
    torch.distributed.checkpoint.save({"w": values, "n": 3}, checkpoint_id=tmp_path / "stock")
    for place in (bucket_in(tmp_path / "stock"), tmp_path / "stock"):
        loaded = {"w": torch.zeros(200, 200), "n": None}
        assert load(loaded, place).state["n"] == 3
        assert torch.equal(loaded["w"], values)
    with pytest.raises(CheckpointNotFoundError, match=r"no manifest\.bin and no \.metadata"):
        read_index(bucket_in(tmp_path / "nothing"))


def test_a_load_on_other_ranks_requests_only_the_bytes_it_needs(bucket: ObjectPath) -> None:
    numel = 24 << 20  # 96 MB, more than one request
    save({"w": sharded_like("w", torch.arange(numel, dtype=torch.float32))}, bucket)
    start = numel // 4
    stop = numel // 2
    part = torch.zeros(stop - start)
    wanted = ShardedTensor("w", part, torch.float32, (numel,), (numel,), (0,), None, flattened_range=slice(start, stop))
    with Calls() as calls:
        report = load({"w": wanted}, bucket)
    assert torch.equal(part, torch.arange(start, stop, dtype=torch.float32))
    ranges = [text.split("-") for detail in calls.details if detail for text in detail.split(",")]
    large = [n for start, end in ranges if (n := int(end) - int(start)) > 4096]  # not headers and the common state
    assert sum(large) == report.bytes_read == 4 * (stop - start)
    assert max(large) <= 8 << 20
    assert len(large) > calls.names.count("get_ranges") - 4  # several requests under way at a time


def test_nearby_small_tensors_and_columns_take_one_request(
    bucket: ObjectPath,
) -> None:
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(200)}
    objects = {f"o{number}": ShardedObject(f"o{number}", {"v": torch.ones(3)}, (1,), (0,)) for number in range(200)}
    save({name: sharded_like(name, tensor) for name, tensor in tensors.items()} | objects, bucket / "small")
    loaded = {name: torch.zeros(100) for name in tensors}
    with Calls() as calls:
        wanted = {name: sharded_like(name, tensor) for name, tensor in loaded.items()}
        report = load(wanted | objects, bucket / "small")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert report.state["o0"]["v"] is not report.state["o1"]["v"]  # equal bytes, but not one object
    assert report.bytes_read > sum(tensor.nbytes for tensor in tensors.values()) + 200 * 12
    assert len(calls.made) < 20
    whole = torch.arange(64 * 65_536, dtype=torch.float32).view(64, -1)  # rows of 256 KiB
    part = torch.zeros(64, 16)
    save({"w": sharded_like("w", whole)}, bucket / "columns")
    columns = ShardedTensor("w", part, torch.float32, (64, 16), tuple(whole.shape), (0, 32), None)
    with Calls() as calls:
        load({"w": columns}, bucket / "columns")
    assert torch.equal(part, whole[:, 32:48])
    assert calls.names.count("get_ranges") < 8


BAD_URLS: list[tuple[Any, dict[str, str], str]] = [
    ("ftp://host/run", {}, "not the URL of an object store"),
    ("s3://", {}, "cannot be opened"),
    ("memory://name/run?versionId=3", {}, "query"),
    (Path("s3://bucket/run"), {}, "pathlib dropped a slash"),
    ("s3://bucket/run", {"regoin": "eu-central-1"}, "cannot be opened"),
    ("memory://bucket/run", {"region": "x"}, "takes no options; given: region"),
    ("file:///run", {"region": "x"}, "not the URL of an object store"),
]


def test_a_url_that_cannot_be_opened_is_refused() -> None:
    for url, options, text in BAD_URLS:
        with pytest.raises(CheckpointingException, match=text):
            save({"step": 1}, ObjectPath.at(url, **options) if options else url)


def test_a_path_sent_to_another_process_drops_its_credentials() -> None:
    path = ObjectPath.at("s3://bucket/run", access_key_id="abc", secret_access_key="hidden", region="x")
    raw = pickle.dumps(path)
    assert b"hidden" not in raw
    again = pickle.loads(raw)
    assert again == path
    with pytest.raises(RuntimeError, match="another process"):
        store_at(again)


def test_the_command_line_takes_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    for step in (1, 2):
        save(state_at(step, 0, 1), f"{url}/{step_name(step)}")
    dead = ObjectPath.at(f"{url}/{step_name(3)}/{uuid.uuid4().hex}/__0_0.distcp")
    put(dead, b"half")
    assert main(["ls", url]) == 0
    listed = capsys.readouterr().out
    assert listed.count("committed\n") == 2
    assert "step-000000003" in listed
    assert main(["show", f"{url}/{step_name(1)}", "--stats"]) == 0
    assert f"large  float32  {LARGE_NUMEL}" in capsys.readouterr().out
    assert main(["verify", f"{url}/{step_name(1)}"]) == 0
    assert main(["diff", f"{url}/{step_name(1)}", f"{url}/{step_name(2)}"]) == 1
    assert main(["extract", f"{url}/{step_name(2)}", "w", str(tmp_path / "w.pt")]) == 0
    assert torch.equal(torch.load(tmp_path / "w.pt"), whole_at(2))
    assert main(["gc", url, "--yes"]) == 0
    assert "may still write to it" in capsys.readouterr().out
    assert objects_in(ObjectPath.at(f"{url}/{step_name(3)}"))
    assert main(["ls", "ftp://nowhere"]) == 2


def test_the_commit_is_the_last_object_written(bucket: ObjectPath) -> None:
    with Calls() as calls:
        save(state_at(1, 0, 1), bucket)
    assert [call for call in calls.made if call[0] in WRITES][-1] == ("create", (bucket / COMMIT).key)
