"""Guard: a parameter has left the memory that updates write to."""

from collections.abc import Iterable
from weakref import ref

from opt_distributed.buffers.stored import StorageError
from opt_distributed.pieces.sources import Source
from opt_distributed.step.guards.guard import Refusal


class ParamsInPlace(Refusal):
    """Compares addresses, or dtypes and devices, of all parameters with those that the optimizer was built with."""

    def __init__(self, sources: Iterable[Source]):
        self._sources = [ref(source) for source in sources]  # a guard must not keep the model alive

    def find(self) -> StorageError | None:
        for source in self._sources:
            found = source()
            id = None if found is None else found.moved()
            if id is not None:
                return _error(f"parameter {str(id)!r}")
        return None

    def of_others(self, num_ranks: int) -> Exception:
        return _error(f"a parameter on {num_ranks} other rank(s)")


def _error(which: str) -> StorageError:
    return StorageError(
        f"{which} has left the memory that the optimizer updates: the model was converted or moved, or param.data was "
        "assigned, after the optimizer was built; convert and move the model first, then build the optimizer. Nothing "
        "was updated"
    )
