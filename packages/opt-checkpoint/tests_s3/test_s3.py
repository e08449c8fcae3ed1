"""Checkpoints in a bucket of a server that speaks S3 (moto), over HTTP on this machine."""

from __future__ import annotations

import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from failing_calls import get, objects_in, put
from moto.server import ThreadedMotoServer
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointManager,
    CheckpointNotFoundError,
    ObjectPath,
    load,
    save,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.store.bucket import Bucket


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server on a free port, with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield url
    server.stop()


def place(endpoint: str, key: str) -> ObjectPath:
    """A place on a server without TLS."""
    options: dict[str, Any] = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 1}}
    keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
    return ObjectPath.at(f"s3://bucket/{key}", endpoint=endpoint, **keys, **options)


@pytest.fixture
def bucket(endpoint: str) -> ObjectPath:
    """A new prefix in the bucket."""
    return place(endpoint, f"{uuid.uuid4().hex}/run")


def test_a_series_of_checkpoints_in_a_bucket(bucket: ObjectPath) -> None:
    with CheckpointManager(bucket, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step, 0, 1))
    again = CheckpointManager(bucket)
    assert again.steps() == [2, 3]
    assert_is_step(again.load(state_at(0, 0, 1, filled=False)).state, 3, 0, 1)
    assert verify_checkpoint(bucket / "step-000000003") == []
    assert {name.partition("/")[0] for name in objects_in(bucket)} == {"step-000000002", "step-000000003"}


def test_a_tensor_of_several_parts_is_uploaded_and_read_back(bucket: ObjectPath) -> None:
    values = torch.arange(24 << 20, dtype=torch.float32)  # 96 MB
    save({"w": sharded_like("w", values)}, bucket)
    loaded = torch.zeros_like(values)
    load({"w": sharded_like("w", loaded)}, bucket)
    assert torch.equal(loaded, values)
    assert verify_checkpoint(bucket) == []


def test_a_commit_is_created_once(bucket: ObjectPath) -> None:
    save(state_at(1, 0, 1), bucket)
    with pytest.raises(CheckpointExistsError):
        save(state_at(2, 0, 1), bucket)
    put(bucket / "x", b"first")
    with pytest.raises(FileExistsError):
        Bucket(bucket)._create("x", b"second")
    assert get(bucket / "x") == b"first"


def test_what_is_absent_and_what_fails_differ(endpoint: str, bucket: ObjectPath) -> None:
    assert CheckpointManager(bucket).latest() is None
    with pytest.raises(CheckpointNotFoundError):
        load(state_at(0, 0, 1), bucket)
    nowhere = place("http://127.0.0.1:9", "run")
    with pytest.raises(CheckpointFailedError, match="the object store failed"):
        CheckpointManager(nowhere).latest()


def test_an_upload_that_is_given_up_leaves_no_object(bucket: ObjectPath) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(40 << 20)
        raise RuntimeError("the save failed")

    with pytest.raises(RuntimeError, match="the save failed"):
        Bucket(bucket).write("half", parts)
    assert objects_in(bucket) == {}
