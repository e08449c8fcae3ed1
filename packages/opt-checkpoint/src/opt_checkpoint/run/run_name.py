"""The name of a run: a small file in its durable directory, which distinguishes its local parts from other runs'."""

from __future__ import annotations

import json
import uuid

from opt_checkpoint.disk.data_file import read_small_file
from opt_checkpoint.disk.files import Files, make_parents, write_file
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.objects.path import Location, ObjectPath

RUN = "run.json"


def run_name(directory: Location, files: Files, *, may_write: bool) -> str | None:
    """Return the name of the run that saves to a directory; None if it has no name.

    Args:
        directory: the durable directory of the run.
        files: the file system.
        may_write: whether to name the run if it has no name yet.

    Raises:
        CheckpointCorruptError: the file does not hold a name.
        OSError: raised by the file system or store.
    """
    place = directory / RUN
    if may_write:
        _create_once(place, json.dumps({"run": uuid.uuid4().hex}).encode(), files)
    try:
        name = json.loads(read_small_file(place))["run"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorruptError(f"{place} is damaged: it does not name a run") from error
    if not isinstance(name, str) or not name.isalnum():
        raise CheckpointCorruptError(f"{place} is damaged: it does not name a run")
    return name


def _create_once(place: Location, content: bytes, files: Files) -> None:
    """Write a small file or object atomically, unless it exists."""
    if isinstance(place, ObjectPath):
        try:
            place.client.create(place.key, content)
        except FileExistsError:
            return
    elif not place.exists():
        make_parents(files, place)
        new = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
        write_file(files, new, content)
        files.rename(new, place)
        files.sync_dir(place.parent)
