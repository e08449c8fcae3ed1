"""The name of a run: a small file in its durable directory, which distinguishes its local parts from other runs'."""

from __future__ import annotations

import json
import uuid

from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store import Store

RUN = "run.json"


def run_name(store: Store, *, may_write: bool) -> str | None:
    """Return the name of the run that saves to a directory; None if it has no name.

    Args:
        store: the durable directory of the run.
        may_write: whether to name the run if it has no name yet.

    Raises:
        CheckpointCorruptError: the file does not hold a name.
        OSError: raised by the file system or store.
    """
    if may_write:
        store.create(RUN, json.dumps({"run": uuid.uuid4().hex}).encode())
    try:
        name = json.loads(store.read(RUN))["run"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not name.isalnum():
        raise CheckpointCorruptError(f"{store.path(RUN)} is damaged: it does not name a run")
    return name
