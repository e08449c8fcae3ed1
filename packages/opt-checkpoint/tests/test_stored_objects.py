"""Stored objects of classes that are loaded only in part."""

import argparse
import enum
import io
from typing import Any

import torch

from opt_checkpoint.disk.stored_objects import NotLoaded, load_object, not_loaded_in


class Backend:
    """Of the writing script, and not known where it is read."""


def archive(value: Any) -> bytes:
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


def test_an_object_with_an_attribute_of_an_unknown_class_is_not_loaded() -> None:
    """Importing megatron.core makes argparse.Namespace loadable everywhere; `convert` then failed on the placeholder of
    an enum in it, and `load` returned the placeholder to the caller."""
    raw = archive({"args": argparse.Namespace(lr=0.1, backend=Backend()), "iteration": 3})
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = load_object(raw)
    (name,) = not_loaded_in(loaded)
    assert name.endswith(".Backend")
    assert loaded == {"args": NotLoaded(name), "iteration": 3}


class Mode(enum.Enum):
    FAST = 1


def test_a_member_of_an_allowed_enum_next_to_an_unknown_class_is_loaded() -> None:
    loaded = load_object(archive({"mode": Mode.FAST, "backend": Backend()}), allowed=[Mode])
    assert loaded["mode"] is Mode.FAST
    assert isinstance(loaded["backend"], NotLoaded)


def test_an_object_of_allowed_classes_is_whole() -> None:
    loaded = load_object(archive(argparse.Namespace(lr=0.1, shape=[1, 2])), allowed=[argparse.Namespace])
    assert loaded == argparse.Namespace(lr=0.1, shape=[1, 2])
