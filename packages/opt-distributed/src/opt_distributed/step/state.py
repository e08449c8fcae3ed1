"""A piece's state as plain tensors by name, out and in: what `state_dict` holds, in exact dtypes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opt_distributed.step.mains import Numbers
from opt_distributed.step.unit import OwnedPiece

MAIN = "fp32_param"  # the reference's name for main values kept beside a 16-bit parameter
STEP = "step"


class StateError(ValueError):
    """A saved state that does not fit the piece it is loaded into."""


def read_state(piece: OwnedPiece) -> dict[str, Tensor]:
    """`step` (0-d fp32), the rule's state, and the main values where they live beside the parameter.

    Tensors other than `step` are the live ones where they exist as such: copy what must outlast the next step.
    """
    found: dict[str, Tensor] = {STEP: torch.tensor(float(piece.step))}
    found.update(piece.state)
    if piece.main.numbers is not Numbers.DIRECT:
        found[MAIN] = piece.main.value()
    return found


def check_state(piece: OwnedPiece, saved: Mapping[str, Any]) -> None:
    """Raises StateError where `saved` cannot be loaded into `piece`; touches nothing."""
    missing = [name for name in piece.state if name not in saved]
    if missing and saved:
        raise StateError(
            f"state of {piece.id.name!r} lacks {', '.join(missing)} (it has {', '.join(saved)}): "
            "it was saved by another rule, or in other numbers"
        )
    unknown = [name for name in saved if name not in piece.state and name not in (STEP, MAIN)]
    if unknown:
        raise StateError(
            f"state of {piece.id.name!r} has {', '.join(map(str, unknown))}, which its rule does not keep "
            f"({', '.join(piece.state) or 'nothing'}): it was saved by another rule"
        )
    for name, tensor in piece.state.items():
        if name in saved and tuple(saved[name].shape) != tuple(tensor.shape):
            raise StateError(
                f"{name} of {piece.id.name!r} has shape {tuple(saved[name].shape)}, this rank's piece has "
                f"{tuple(tensor.shape)}; use sharded_state_dict to load on another layout"
            )


@torch.no_grad()
def load_state_(piece: OwnedPiece, saved: Mapping[str, Any], *, fresh: Mapping[str, Tensor]) -> None:
    """Sets the piece's whole state: what `saved` holds, `fresh` (as before the first step) for what it lacks.

    Values are converted to the dtype each state is declared in, never to the parameter's.
    """
    piece.step = int(saved.get(STEP, 0))
    for name, tensor in piece.state.items():
        tensor.copy_(saved.get(name, fresh[name]))
    if piece.main.numbers is Numbers.DIRECT:
        return
    if MAIN in saved:
        piece.main.set_(saved[MAIN])
    else:
        piece.main.reload_()
