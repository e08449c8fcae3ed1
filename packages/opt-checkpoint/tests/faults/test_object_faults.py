"""Object stores that fail: requests that raise, time out, arrive twice or lose their answer, and trainers that die."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import RankPool
from processes import start
from states import assert_is_step, state_at
from stores import FaultyClient, failing, faulty

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointingException,
    CheckpointManager,
    ObjectPath,
    committed_steps,
    load,
    load_optimizer,
    read_index,
    save,
    verify_checkpoint,
)
from opt_checkpoint.disk import object_target
from opt_checkpoint.disk.lease import EXPIRED_S, LEASE, Process
from opt_checkpoint.disk.object_target import COMMIT, encode_commit, leftovers_of
from opt_checkpoint.objects import obstore_client
from opt_checkpoint.run.series import step_name

sys.path.insert(0, str(Path(__file__).parent))

from killed_ranks import save_to_store_and_die

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


WRITES = ("put", "create", "upload")


def test_a_request_that_fails_once_is_made_again(bucket: ObjectPath) -> None:
    """Every kind of request except the upload of a rank's data, whose parts obstore itself retries."""
    for kind in ("put", "create", "head", "listing", "delete", "get", "get_spans"):
        place, client = faulty(bucket / kind)
        client.before = failing(1, lambda name, key, kind=kind: name == kind)
        save(state_at(1, 0, 1), place)
        client.before = failing(1, lambda name, key, kind=kind: name == kind)
        assert_is_step(load(state_at(0, 0, 1, filled=False), place).state, 1, 0, 1)


def test_a_request_that_keeps_failing_is_an_error_and_leaves_no_checkpoint(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    counted, counter = faulty(bucket / "counted")
    save(state_at(2, 0, 1), counted)
    writing = [number for number, (name, _) in enumerate(counter.requests) if name in WRITES]
    for number in writing:
        place, client = faulty(bucket / step_name(2))
        target = client_number(client, number)
        client.before = target
        with pytest.raises(CheckpointFailedError, match="Input/output error"):
            save(state_at(2, 0, 1), place)
        assert_resumes_from(bucket, 1)
        if counter.requests[number][0] != "create":  # of an unknown commit, the files stay
            assert not (bucket / step_name(2)).listing()


def client_number(client: FaultyClient, number: int) -> Callable[[str, str], None]:
    """Fail the request of this number and all that follow with its name and its file."""
    failed: list[tuple[str, str]] = []

    def fail(name: str, key: str) -> None:
        if len(client.requests) - 1 == number:
            failed.append((name, key))
        if (name, key) in failed:
            raise OSError(5, "Input/output error", key)

    return fail


def test_a_store_that_does_not_answer_is_not_an_empty_one(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    for kind in ("folders", "get", "listing", "get_spans"):
        place, client = faulty(bucket)
        client.before = failing(1000, lambda name, key, kind=kind: name == kind)
        with pytest.raises(CheckpointFailedError, match="Input/output error"):
            CheckpointManager(place).latest()
    place, client = faulty(bucket)
    client.before = failing(1000, lambda name, key: name == "get", error=13)
    with pytest.raises(CheckpointFailedError, match="Permission denied"):
        CheckpointManager(place).latest()


@pytest.mark.parametrize("retry", [True, False], ids=["retried", "not retried"])
def test_a_commit_whose_answer_was_lost_is_a_commit(bucket: ObjectPath, retry: bool) -> None:
    """With another attempt it is found; without, the save is an error that says so, and the checkpoint stays."""
    place, client = faulty(bucket / step_name(1), retry=retry)
    client.after = failing(1, lambda name, key: name == "create", error=110)
    if retry:
        save(state_at(1, 0, 1), place)
    else:
        with pytest.raises(CheckpointFailedError, match="whether the checkpoint was committed is unknown"):
            save(state_at(1, 0, 1), place)
    assert_resumes_from(bucket, 1)


def test_a_write_whose_answer_was_lost_is_made_again(bucket: ObjectPath) -> None:
    place, client = faulty(bucket / step_name(1))
    client.after = failing(2, lambda name, key: name == "put")
    save(state_at(1, 0, 1), place)
    assert_resumes_from(bucket, 1)


def test_an_upload_whose_answer_was_lost_is_an_error_and_leaves_nothing(bucket: ObjectPath) -> None:
    place, client = faulty(bucket / step_name(1))
    client.after = failing(1, lambda name, key: name == "upload")
    with pytest.raises(CheckpointFailedError, match="Input/output error"):
        save(state_at(1, 0, 1), place)
    assert not (bucket / step_name(1)).listing()


def test_requests_that_arrive_twice_change_nothing(bucket: ObjectPath) -> None:
    place, _ = faulty(bucket / step_name(1), times=2)
    save(state_at(1, 0, 1), place)
    assert_resumes_from(bucket, 1)


def test_a_commit_that_arrives_after_its_checkpoint_was_removed_is_no_checkpoint(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    late = bucket / step_name(2) / COMMIT
    late.client.put(late.key, encode_commit(uuid.uuid4().hex))
    assert_resumes_from(bucket, 1)
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.bin is gone"):
        load(state_at(0, 0, 1), bucket / step_name(2))


def test_a_listing_that_lags_hides_the_newest_and_damages_nothing(bucket: ObjectPath) -> None:
    for step in (1, 2):
        save(state_at(step, 0, 1), bucket / step_name(step))
    place, client = faulty(bucket)
    client.hidden = lambda key: step_name(2) in key
    assert_resumes_from(place, 1)
    assert_is_step(load(state_at(0, 0, 1, filled=False), place / step_name(2)).state, 2, 0, 1)  # asked for by name
    with pytest.raises(CheckpointExistsError):
        save(state_at(3, 0, 1), place / step_name(2))


def test_a_listing_older_than_the_commit_makes_no_save_look_dead(bucket: ObjectPath) -> None:
    """The files are listed and the commit is not: whether it is there is asked for by its name."""
    save(state_at(1, 0, 1), bucket / step_name(1))
    place, client = faulty(bucket)
    client.hidden = lambda key: key.endswith((COMMIT, LEASE))
    assert leftovers_of(place / step_name(1), time.time() + 10 * EXPIRED_S) == []


def test_a_listing_that_lags_does_not_stop_a_commit(bucket: ObjectPath) -> None:
    place, client = faulty(bucket / step_name(1))
    client.hidden = lambda key: True
    save(state_at(1, 0, 1), place)
    assert_resumes_from(bucket, 1)


@pytest.mark.parametrize("background", [False, True])
def test_a_listing_without_the_step_just_saved_does_not_stop_a_manager(bucket: ObjectPath, background: bool) -> None:
    """Removing old steps failed with an IndexError on rank 0 alone."""
    place, client = faulty(bucket)
    client.hidden = lambda key: True
    manager = CheckpointManager(place, keep=1, in_background=background)
    manager.save(1, state_at(1, 0, 1))
    manager.close()
    assert_resumes_from(bucket, 1)


def test_files_that_disappear_before_the_commit_are_noticed(bucket: ObjectPath) -> None:
    """A trainer that slept for longer than its lease was taken for dead."""
    place, client = faulty(bucket / step_name(1))

    def take(name: str, key: str) -> None:
        if name == "put" and key.endswith("manifest.bin"):
            bucket.client.delete([k.key for k in bucket.client.listing(bucket.key) if k.key.endswith(".distcp")])

    client.before = take
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp is missing or has another size; nothing was"):
        save(state_at(1, 0, 1), place)
    assert committed_steps(bucket) == []


def test_an_overwritten_file_is_never_loaded(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    save(state_at(2, 0, 1), bucket / step_name(2))
    ours, theirs = (read_index(bucket / step_name(step)).path / "__0_0.distcp" for step in (1, 2))
    ours.client.put(ours.key, theirs.read_bytes())
    with pytest.raises(CheckpointCorruptError, match="belongs to a different save"):
        load(state_at(0, 0, 1), bucket / step_name(1))
    raw = bytearray(theirs.read_bytes())
    raw[len(raw) // 2] ^= 1
    theirs.client.put(theirs.key, bytes(raw))
    with pytest.raises(CheckpointCorruptError, match=r"have changed|has changed"):
        load(state_at(0, 0, 1, filled=False), bucket / step_name(2))
    assert any(finding.file == "__0_0.distcp" for finding in verify_checkpoint(bucket / step_name(2)))
    theirs.client.put(theirs.key, bytes(raw[:-1]))
    assert committed_steps(bucket) == []
    theirs.client.delete([theirs.key])
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        load(state_at(0, 0, 1), bucket / step_name(2))


DAMAGED_COMMITS = {
    "empty": b"",
    "not JSON": b"\xff\xfe",
    "another object": b'{"save_id": 3}',
    "a way out": json.dumps({"save_id": "../../other"}).encode(),
    "a list": b"[]",
}


@pytest.mark.parametrize("case", DAMAGED_COMMITS)
def test_a_damaged_commit_is_damage_and_nothing_is_removed(bucket: ObjectPath, case: str) -> None:
    save(state_at(1, 0, 1), bucket / step_name(1))
    save(state_at(2, 0, 1), bucket / step_name(2))
    commit = bucket / step_name(2) / COMMIT
    commit.client.put(commit.key, DAMAGED_COMMITS[case])
    with pytest.raises(CheckpointCorruptError, match="is damaged"):
        load(state_at(0, 0, 1), bucket / step_name(2))
    assert_resumes_from(bucket, 1)
    before = (bucket / step_name(2)).listing()
    with CheckpointManager(bucket, keep=1) as manager:
        manager.save(3, state_at(3, 0, 1))
    assert (bucket / step_name(2)).listing() == before


def test_of_two_saves_of_one_step_one_is_committed_and_the_other_leaves_nothing(bucket: ObjectPath) -> None:
    place, client = faulty(bucket / step_name(1))
    first: list[str] = []

    def overtake(name: str, key: str) -> None:
        if name == "create" and not first:
            first.append(key)
            save(state_at(1, 0, 1), bucket / step_name(1))

    client.before = overtake
    with pytest.raises(CheckpointExistsError):
        save(state_at(2, 0, 1), place)
    assert_resumes_from(bucket, 1)
    assert len({name.partition("/")[0] for name in (bucket / step_name(1)).listing()}) == 2  # its files, its commit


def test_killed_before_any_request_the_newest_is_whole_and_the_next_save_clears_up(tmp_path: Path, full: bool) -> None:
    counted, client = faulty(ObjectPath.at(f"file://{tmp_path}/counted"))
    save(state_at(1, 0, 1), counted)
    writing = [name for name, _ in client.requests if name in (*WRITES, "delete")]
    numbers = range(1, len(writing) + 1)
    for number in numbers if full else (2, writing.index("create") + 1):
        bucket = ObjectPath.at(f"file://{tmp_path}/{number}")
        save(state_at(1, 0, 1), bucket / step_name(1))
        process = start(save_to_store_and_die, f"{tmp_path}/{number}", 2, number)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert_resumes_from(bucket, 1)
        expire(bucket)
        manager = CheckpointManager(bucket, in_background=False)
        manager.save(3, state_at(3, 0, 1))
        assert not (bucket / step_name(2)).listing()
        assert_resumes_from(bucket, 3)


def expire(bucket: ObjectPath) -> None:
    """Files of a save whose lease was never written, or removed just before the commit, count by their age."""
    folder = Path("/") / bucket.key
    if not list(folder.rglob(LEASE)):
        for file in folder.rglob("*"):
            os.utime(file, (0, 0))


def test_a_save_of_another_machine_is_kept_until_its_lease_expires(
    bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bucket / step_name(2) / uuid.uuid4().hex
    elsewhere = Process("node-7", "another boot", 1, 4711, "99")
    place.client.put((place / LEASE).key, json.dumps(elsewhere._asdict()).encode())
    place.client.put((place / "__0_0.distcp").key, b"half")
    manager = CheckpointManager(bucket, in_background=False)
    manager.save(1, state_at(1, 0, 1))
    assert place.listing()
    manager.save(2, state_at(2, 0, 1))
    assert place.listing()
    (left,) = leftovers_of(bucket / step_name(2), time.time())
    assert left.writer is not None
    assert "process 4711 on node-7" in left.writer
    monkeypatch.setattr(object_target, "holder_of", lambda held, name, age: None if age > -60 else "somebody")
    manager.save(3, state_at(3, 0, 1))
    assert not place.listing()
    assert_resumes_from(bucket, 3)


def _fail_on_one_rank(rank: int, size: int, folder: str) -> str:
    place, client = faulty(ObjectPath.at(f"file://{folder}/run"))
    if rank == 1:
        client.before = failing(1000, lambda name, key: name == "upload", error=28)
    with pytest.raises(CheckpointFailedError) as caught:
        save(state_at(1, rank, size), place)
    assert caught.value.causes[1].errno == 28  # type: ignore[attr-defined]
    return str(caught.value)


def test_a_store_that_fails_for_one_rank_is_an_error_on_every_rank(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, _fail_on_one_rank, str(tmp_path))
    assert first == second
    assert "rank 1" in first
    assert not list((tmp_path / "run").rglob("*.distcp"))


def _another_place(rank: int, size: int, folder: str) -> None:
    with pytest.raises(CheckpointingException, match="ranks differ in path"):
        save(state_at(1, rank, size), f"file://{folder}/run-{rank}")


def test_ranks_with_different_urls_are_an_error_everywhere(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(2, _another_place, str(tmp_path))


def _without_obstore(rank: int, size: int, folder: str) -> list[str]:
    url, messages = "memory://bucket/run", []
    model = torch.nn.Linear(2, 2)
    calls: list[Callable[[], object]] = [
        lambda: save(state_at(1, rank, size), url),
        lambda: load(state_at(1, rank, size), url),
        lambda: CheckpointManager(url),
        lambda: load_optimizer(model, torch.optim.SGD(model.parameters()), url),
    ]
    installed = obstore_client._INSTALLED
    obstore_client._INSTALLED = rank != 1
    try:
        for call in calls:
            with pytest.raises(CheckpointingException, match=r"rank 1: .*need obstore, which is not") as caught:
                call()
            messages.append(str(caught.value))
    finally:
        obstore_client._INSTALLED = installed
    return messages


def test_a_rank_that_cannot_open_a_url_is_an_error_on_every_rank(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, _without_obstore, str(tmp_path))
    assert first == second
