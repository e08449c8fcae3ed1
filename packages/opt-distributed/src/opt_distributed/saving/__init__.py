"""States of pieces as checkpoints have them: read, checked, loaded, and described as sharded tensors."""

from opt_distributed.saving.piece_state import (
    MAIN,
    STEP,
    PieceState,
    check_state,
    decoded,
    kept_states,
    load_state_,
    read_state,
    reset_state_,
)
from opt_distributed.saving.sharded import check_loaded, read_piece

__all__ = [
    "MAIN", "STEP", "PieceState", "check_loaded", "check_state", "decoded", "kept_states", "load_state_", "read_piece",
    "read_state", "reset_state_",
]  # fmt: skip
