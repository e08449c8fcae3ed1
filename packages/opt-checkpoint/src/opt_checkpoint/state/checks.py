"""What is checked before a state is flattened: that it is a tree of values, and still describes its tensors."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from opt_checkpoint.errors import CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import Path, ShardedTensor, items_of, path_text
from opt_checkpoint.state.tensors import is_dtensor, local_tensor, sharded_like


def check_tree(state: Any) -> None:
    """Check that a state is a tree of values that can be saved or loaded.

    Raises:
        CheckpointValueError: a container contains itself, or a value is an object with a `state_dict` or a stream.
    """
    around: dict[int, Path] = {}  # the paths of the containers around the current value

    def walk(path: Path, value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            if id(value) in around:
                raise CheckpointValueError(
                    f"{path_text(path)} is {path_text(around[id(value)]) or 'the state'} again, which contains it; a "
                    f"state must be a tree: leave out the reference"
                )
            around[id(value)] = path
            for key, inner in items_of(value):
                walk((*path, key), inner)
            del around[id(value)]
        elif isinstance(value, BytesIO):
            raise CheckpointValueError(
                f"{path_text(path)} is a BytesIO, which cannot be stored; pass its getvalue(), and let get_extra_state "
                f"of a module return bytes or a uint8 tensor"
            )
        elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            raise CheckpointValueError(
                f"{path_text(path)} is a {type(value).__name__}, an object with a state_dict, which is neither saved "
                f"nor loaded; pass its state_dict() and give the loaded one to its load_state_dict(), or pass "
                f"sharded_model(model) for a module and sharded_optimizer(model, optimizer) for an optimizer"
            )

    walk((), state)


def read_source_(described: ShardedTensor | ShardedTensorFactory) -> None:
    """Set the data of a description to the local values that its tensor has now. Writes to its data and source.

    Raises:
        CheckpointMismatchError: their dtype, shape or place in the global tensor has changed.
    """
    source = described.source
    if source is None or described.data is not source.local:  # the caller has given other values
        return
    tensor = source.read()
    local = local_tensor(tensor)
    dtype = source.local.dtype
    shape = tuple(source.local.shape)
    offset = None
    if isinstance(described, ShardedTensor):  # the dtype of one tensor may have changed
        dtype = described.dtype
        shape = described.local_shape
        offset = described.global_offset
    is_same_place = local is source.local or not is_dtensor(tensor) or offset is None
    is_same_place = is_same_place or sharded_like(described.key, tensor).global_offset == offset
    if (local.dtype, tuple(local.shape)) != (dtype, shape) or not is_same_place:
        raise CheckpointMismatchError(
            f"{described.key} was described as {dtype} {list(shape)}, and is {local.dtype} {list(local.shape)}"
            f"{'' if is_same_place else ' of another place'} now; describe the state before each save or load, as "
            f"sharded_model(model) and sharded_optimizer(model, optimizer) do"
        )
    described.data = local
    described.source = source._replace(local=local)
