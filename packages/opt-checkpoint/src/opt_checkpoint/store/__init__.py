"""Storage: where checkpoints are written and read. A directory or a bucket, behind one protocol."""

from __future__ import annotations

from typing import NamedTuple

from opt_checkpoint.store.bucket import Bucket
from opt_checkpoint.store.directory import Directory
from opt_checkpoint.store.paths import AnyPath, Location, ObjectPath, location_of
from opt_checkpoint.store.store import MANIFEST, Store

__all__ = ["MANIFEST", "AnyPath", "Location", "ObjectPath", "Store", "Target", "location_of", "store_at", "target_at"]


class Target(NamedTuple):
    """Where a checkpoint is to be saved: a store, and a name in it."""

    store: Store
    name: str


def store_at(place: Location, *, follow: bool = False) -> Store:
    """Return the store whose root is a place. With `follow`, files in a directory may be symbolic links."""
    return Bucket(place) if isinstance(place, ObjectPath) else Directory(place, follow=follow)


def target_at(place: Location) -> Target:
    """Return the store and the name by which a checkpoint is saved to a place."""
    return Target(Bucket(place), "") if isinstance(place, ObjectPath) else Target(Directory(place.parent), place.name)
