"""Object stores that fail: requests that raise, time out, arrive twice or lose their answer, and trainers that die."""

import random
import re
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checkpoint_ranks import error_on_all
from failing_calls import WRITES, Calls, error, failing, objects_in, put
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointManager,
    ObjectPath,
    committed_steps,
    load,
    load_optimizer,
    save,
    verify_checkpoint,
)
from opt_checkpoint.run.series import step_name
from opt_checkpoint.store import bucket as bucket_module
from opt_checkpoint.store import paths, store_at
from opt_checkpoint.store.bucket import COMMIT, encode_commit
from opt_checkpoint.store.lease import LEASE

pytest.importorskip("obstore")

pytestmark = pytest.mark.needs_extra


@pytest.fixture
def bucket() -> ObjectPath:
    """An empty store of this process."""
    return ObjectPath.at(f"memory://{uuid.uuid4().hex}/run")


def assert_resumes_from(bucket: ObjectPath, step: int) -> None:
    """The newest committed step is this one, and every committed one is whole."""
    for committed in committed_steps(bucket):
        assert verify_checkpoint(bucket / step_name(committed)) == []
    manager = CheckpointManager(bucket)
    assert manager.latest() == step
    assert_is_step(manager.load(state_at(0, 0, 1, filled=False)).state, step, 0, 1)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module.time, "sleep", lambda seconds: None)


def test_a_request_that_fails_once_is_made_again(bucket: ObjectPath) -> None:
    for kind in ("put", "create", "upload", "head", "listing", "delete", "get", "get_ranges"):
        with Calls(failing(1, lambda name, key, kind=kind: name == kind)):
            save(state_at(1, 0, 1), bucket / kind)
        with Calls(failing(1, lambda name, key, kind=kind: name == kind)):
            assert_is_step(load(state_at(0, 0, 1, filled=False), bucket / kind).state, 1, 0, 1)
        assert verify_checkpoint(bucket / kind) == []


def test_an_upload_is_read_again_from_its_start(bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a file was sent when obstore gave up and closed the generator of its parts: the bytes and checksums of
    the last attempt count."""
    real = bucket_module.obstore.put
    broken = list[bytes]()

    def put_or_break(store: Any, key: str, parts: Any, **options: Any) -> Any:
        if options.get("use_multipart") and len(broken) < 2:
            broken.append(next(parts))
            parts.close()
            raise bucket_module.exceptions.GenericError("a part was refused")
        return real(store, key, parts, **options)

    monkeypatch.setattr(bucket_module.obstore, "put", put_or_break)
    values = torch.arange(2_000_000.0)
    save({"w": values, "turned": values.view(1000, 2000).t(), "step": 1}, bucket)
    assert len(broken) == 2
    loaded = {"w": torch.zeros(2_000_000), "turned": torch.zeros(2000, 1000)}
    load(loaded, bucket)
    assert torch.equal(loaded["w"], values)
    assert torch.equal(loaded["turned"], values.view(1000, 2000).t())
    assert verify_checkpoint(bucket) == []


def test_a_save_of_4096_files_survives_sporadic_failed_requests(bucket: ObjectPath) -> None:
    """Simulated: each file is uploaded in 40 requests. Without a repeated upload, all but one in 10^7 saves failed."""
    rng = random.Random(0)
    store = store_at(bucket)
    save_id = uuid.uuid4().hex
    failed = []

    def fail(name: str, key: str) -> None:
        if any(rng.random() < 1e-4 for _ in range(40 if name == "upload" else 1)):
            failed.append(key)
            raise ConnectionResetError(104, "connection reset", key)

    with Calls(fail):
        folder = store.folder("x", save_id)
        store.begin("x", folder)
        sizes = {}
        for rank in range(4096):
            name = f"__{rank}_0.distcp"
            store.write(f"{folder}/{name}", lambda rank=rank: [b"rank", str(rank).encode()])
            sizes[name] = 4 + len(str(rank))
        store.write_small(folder, {"manifest.bin": b"manifest"})
        store.check_files(folder, sizes | {"manifest.bin": 8})
        store.commit("x", folder)
    assert len(failed) > 5
    assert store.committed("x") == folder


def test_a_request_that_keeps_failing_leaves_no_checkpoint(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    with Calls() as counted:
        save(state_at(2, 0, 1), bucket / "counted")
    written = [(name, key.rpartition("/")[2]) for name, key in counted.made if name in ("put", "create", "upload")]
    assert len(written) > 4
    for name, file in written:
        broken = failing(9, lambda *call, one=name, file=file: call[0] == one and call[1].endswith(file))
        with Calls(broken), pytest.raises(CheckpointFailedError, match="Input/output error"):
            save(state_at(2, 0, 1), bucket / step_name(2))
        assert_resumes_from(bucket, 1)
        if name != "create":  # of an unknown commit, the files stay
            assert not objects_in(bucket / step_name(2))


def test_a_store_that_does_not_answer_is_not_an_empty_one(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    for kind in ("folders", "get", "listing", "get_ranges"):
        silent = Calls(failing(1000, lambda name, key, kind=kind: name == kind))
        with silent, pytest.raises(CheckpointFailedError, match="Input/output error"):
            CheckpointManager(bucket).load(state_at(0, 0, 1, filled=False))
    closed = Calls(failing(1000, lambda name, key: name == "get", 13))
    with closed, pytest.raises(CheckpointFailedError, match="Permission denied"):
        CheckpointManager(bucket).latest()


@pytest.mark.parametrize("answered", [True, False])
def test_a_commit_whose_answer_was_lost_is_a_commit(bucket: ObjectPath, answered: bool) -> None:
    """With another attempt it is found; if no other is answered, the error says so, and the checkpoint stays."""
    again = lambda name, key: error(110) if name == "create" and "create" in calls.names[:-1] else None
    with Calls(after=failing(1, lambda name, key: name == "create", 110)) as calls:
        if answered:
            save(state_at(1, 0, 1), bucket / step_name(1))
        else:
            calls.before = again
            with pytest.raises(CheckpointFailedError, match="whether the checkpoint was committed is unknown"):
                save(state_at(1, 0, 1), bucket / step_name(1))
    assert_resumes_from(bucket, 1)


@pytest.mark.parametrize("kind", ["put", "upload", "all of them twice"])
def test_writes_with_lost_answers_or_duplicates_change_nothing(bucket: ObjectPath, kind: str) -> None:
    with Calls(after=failing(2, lambda name, key: name == kind), times=1 if kind in WRITES else 2):
        save(state_at(1, 0, 1), bucket / step_name(1))
    assert_resumes_from(bucket, 1)


def test_a_commit_that_arrives_after_removal_is_not_a_checkpoint(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    put(bucket / step_name(2) / COMMIT, encode_commit(uuid.uuid4().hex))
    with pytest.warns(UserWarning, match=r"step-000000002 is damaged and is skipped: .*manifest\.bin is gone"):
        assert_is_step(CheckpointManager(bucket).load(state_at(0, 0, 1, filled=False)).state, 1, 0, 1)
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.bin is gone"):
        load(state_at(0, 0, 1), bucket / step_name(2))


def test_a_stale_listing_hides_the_newest_and_damages_nothing(bucket: ObjectPath) -> None:
    for step in (1, 2):
        save(state_at(step, 0, 1), bucket / step_name(step))
    with Calls() as calls:
        calls.hidden = lambda key: step_name(2) in key
        assert_resumes_from(bucket, 1)
        assert_is_step(load(state_at(0, 0, 1, filled=False), bucket / step_name(2)).state, 2, 0, 1)  # asked for by name
        with pytest.raises(CheckpointExistsError):
            save(state_at(3, 0, 1), bucket / step_name(2))
    with Calls() as calls, CheckpointManager(bucket, keep=1) as manager:
        calls.hidden = lambda key: True
        manager.save(3, state_at(3, 0, 1))  # removing old steps failed with an IndexError on rank 0 alone
    assert_resumes_from(bucket, 3)


def test_a_listing_older_than_the_commit_makes_no_save_look_dead(
    bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are listed and the commit is not: whether it is there is asked for by its name."""
    save(state_at(1, 0, 1), bucket / step_name(1))
    monkeypatch.setattr(bucket_module, "holder_of", lambda lease, folder, age: None)
    with Calls() as calls:
        calls.hidden = lambda key: key.endswith((COMMIT, LEASE))
        assert store_at(bucket).leftovers([step_name(1)]) == []


def test_files_that_disappear_before_the_commit_are_noticed(bucket: ObjectPath) -> None:
    """A trainer that slept for longer than its lease was taken for dead."""

    def take(name: str, key: str) -> None:
        if name == "put" and key.endswith("manifest.bin"):
            for data in [file for file in store_at(bucket).sizes() if file.endswith(".distcp")]:
                store_at(bucket).remove(data)

    missing = pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp is missing or has another size; nothing was")
    with Calls(take), missing:
        save(state_at(1, 0, 1), bucket / step_name(1))
    assert committed_steps(bucket) == []


def test_retention_removes_no_save_of_another_trainer(bucket: ObjectPath) -> None:
    live = bucket / step_name(9) / uuid.uuid4().hex
    put(live / LEASE, b'{"host": "other", "boot": "another", "namespace": 1, "pid": 1, "started": "1"}')
    put(live / "__0_0.distcp", b"half")
    CheckpointManager(bucket, in_background=False).save(1, state_at(1, 0, 1))
    assert set(objects_in(live)) == {LEASE, "__0_0.distcp"}


def test_objects_of_others_below_a_step_are_not_left_by_a_save(bucket: ObjectPath) -> None:
    """They would be removed by the next save of the step."""
    dead = uuid.uuid4().hex
    of_others = ("notes.txt", "plots/loss.png", uuid.uuid4().hex)
    for name in (f"{dead}/__0_0.distcp", *of_others):
        put(bucket / step_name(1) / name, b"content")
    assert [left.folder for left in store_at(bucket).leftovers([step_name(1)])] == [f"{step_name(1)}/{dead}"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"save_id": 3}', b'{"save_id": "../../other"}', b"[]"])
def test_a_damaged_commit_removes_nothing_and_can_be_replaced(bucket: ObjectPath, content: bytes) -> None:
    for step in (1, 2):
        save(state_at(step, 0, 1), bucket / step_name(step))
    put(bucket / step_name(2) / COMMIT, content)
    with pytest.raises(CheckpointCorruptError, match="is damaged"):
        load(state_at(0, 0, 1), bucket / step_name(2))
    before = objects_in(bucket / step_name(2))
    with CheckpointManager(bucket, keep=1) as manager:
        with pytest.warns(UserWarning, match="step-000000002 is damaged"):
            manager.load(state_at(1, 0, 1))
        manager.save(3, state_at(3, 0, 1))
        manager.wait()
        assert objects_in(bucket / step_name(2)) == before
    with CheckpointManager(bucket) as manager:
        manager.save(2, state_at(2, 0, 1))
    assert_is_step(load(state_at(0, 0, 1, filled=False), bucket / step_name(2)).state, 2, 0, 1)


def test_a_rank_that_cannot_open_a_url_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(paths, "_has_obstore", lambda: here.rank != 1)
    calls: tuple[Callable[..., object], ...] = (
        lambda url, **group: save(state_at(1, 0, 2), url, **group),
        lambda url, **group: load(state_at(1, 0, 2), url, **group),
        lambda url, **group: CheckpointManager(url, **group),
        lambda url, **group: load_optimizer(model, torch.optim.SGD(model.parameters()), url, **group),
    )

    def act(ranks: Any, call: Callable[..., object]) -> None:
        here.rank = ranks.rank
        call("memory://bucket/run", process_group=ranks)

    for call in calls:
        assert re.search(r"rank 1: .*need obstore, which cannot", str(error_on_all(2, partial(act, call=call))))
