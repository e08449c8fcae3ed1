"""Compares the plain values of a requested state with the stored ones: what fills what, and what is refused by key."""

from __future__ import annotations

import cmath
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint.errors import CheckpointMismatchError
from opt_checkpoint.state.sharded import Path, path_text
from opt_checkpoint.state.tree import ABSENT

_AS_STORED = "pass None in its place to take it as it is stored"


def check_form(path: Path, template: Any, stored: Any) -> None:
    """Check that a stored value may be returned where a state has `template`. None stands for any value.

    Args:
        path: of the value.
        template: not a tensor.
        stored: the plain value, or an empty tensor of the shape of a stored one.

    Raises:
        CheckpointMismatchError: one is a container and the other is not, or they are objects of different classes.
    """
    if template is None or stored is None:
        return
    wanted = _form_of(template)
    found = _form_of(stored)
    is_number = isinstance(template, numbers.Number) and isinstance(stored, Tensor) and stored.numel() == 1
    if wanted != found and not is_number:
        raise CheckpointMismatchError(f"{path_text(path)} is stored as {found}, asked for as {wanted}; {_AS_STORED}")


def _form_of(value: Any) -> str:
    """What a value is, for messages; equal for values that may stand for each other."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, numbers.Number | str | bytes):
        return "a plain value"
    return f"an object of class {type(value).__name__}"


def value_for(path: Path, template: Tensor, stored: Any) -> Tensor:
    """Return the value, a tensor of no axes, with which a tensor of a state is filled where a number is stored.

    Args:
        path: of the tensor.
        template: the tensor, of one element.
        stored: the plain value. A float is rounded to the dtype of the tensor, as `Tensor.fill_` does.

    Raises:
        CheckpointMismatchError: it is not a number, the tensor has several elements, or its dtype cannot hold it.
    """
    where = path_text(path)
    wanted = f"{template.dtype} {list(template.shape)}"
    if not isinstance(stored, numbers.Number) or template.numel() != 1:
        raise CheckpointMismatchError(f"{where} is stored as {_form_of(stored)}, asked for as {wanted}; {_AS_STORED}")
    number = stored if isinstance(stored, int | float | complex) else complex(stored)  # type: ignore[call-overload]
    try:
        value = torch.full((), number, dtype=template.dtype, device="cpu")
        held = value.item()
    except (RuntimeError, OverflowError):
        held = None
    is_rounded = isinstance(number, float | complex) and (template.is_floating_point() or template.is_complex())
    is_held = held is not None and (held == number or (is_rounded and cmath.isfinite(held) == cmath.isfinite(number)))
    if not is_held:
        raise CheckpointMismatchError(f"{where} is stored as {stored!r}, which {wanted} cannot hold; {_AS_STORED}")
    return value


def inner_value(path: Path, inner: Path, template: Any, stored: Any) -> Any:
    """Return the stored value at the place of a tensor in the lists, tuples and dicts of a template.

    Args:
        path: of the template.
        inner: of the tensor in it.
        template: contains the tensor.
        stored: the stored value of the whole.

    Raises:
        CheckpointMismatchError: a list has another length, or nothing is at this place.
    """
    for at, key in enumerate(inner):
        is_list = isinstance(template, list | tuple)
        is_stored_list = isinstance(stored, list | tuple)
        if is_list and not (is_stored_list and len(stored) == len(template)):
            found = f"of {len(stored)} values" if is_stored_list else f"as {_form_of(stored)}"
            raise CheckpointMismatchError(
                f"{path_text(path + inner[:at])} is stored {found}, asked for as a list of {len(template)} with "
                f"tensors; {_AS_STORED}"
            )
        stored = stored[key] if is_list or (isinstance(stored, dict) and key in stored) else ABSENT
        if stored is ABSENT:
            raise CheckpointMismatchError(f"{path_text(path + inner[: at + 1])} is not stored; {_AS_STORED}")
        template = template[key]
    return stored
