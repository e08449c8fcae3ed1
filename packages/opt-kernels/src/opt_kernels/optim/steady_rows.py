"""Rows whose tensors stay in place: their works are created once, and every step proves that they are still valid."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from opt_kernels.backends.kept.objects import Entries
from opt_kernels.backends.kept.snapshot import Snapshot, are_plain
from opt_kernels.backends.kept.works import is_launched
from opt_kernels.optim.rows import Row
from opt_kernels.optim.state import STEP
from opt_kernels.works import Unchanged, Works


class SteadyRows:
    """The works of all rows, without gradients. The proof takes two passes in C++ over all tensors, which also read the
    gradients."""

    def __init__(self, rows: Sequence[Row], *, with_states: bool) -> None:
        """`with_states`: other code may have moved or replaced states, so that they are compared as well."""
        self.with_states = with_states
        self._params = [param for row in rows for param in row.params]
        self._states = [state for row in rows for state in row.states]
        self._entries = Entries(self._states) if with_states else None
        # Counts that other code moves are noticed by their values, see `Steps`.
        self._others = [state[name] for state in self._states for name in state if with_states and name != STEP]
        self._snapshot = Snapshot(self._params, self._others, reads_grads=True)
        self._rows = [(row.params, row.columns(row.params), Unchanged()) for row in rows]

    def hold(self) -> bool:
        """Whether nothing has changed except the addresses of gradients. Must not be called again after it returned
        False."""
        are_same_states = self._entries is None or self._entries.same(self._states)
        return are_same_states and self._snapshot.holds(self._params, self._others)

    def works(self) -> list[Works]:
        """The works of each row. Sweeps read the gradients only if they have moved."""
        grads_at = self._snapshot.key
        return [
            columns.with_grads(partial(_grads_of, params), unchanged=unchanged, grads_at=grads_at)
            for params, columns, unchanged in self._rows
        ]


def steady_rows(rows: Sequence[Row], *, with_states: bool) -> SteadyRows | None:
    """The rows for the next steps; None if a sweep reads more than addresses, or a tensor is not plain."""
    tensors = [tensor for row in rows for param in row.params for tensor in (param, param.grad) if tensor is not None]
    states = [state for row in rows for state in row.states]
    is_possible = (
        len(rows) > 0
        and all(row.spans is None and is_launched(*row.sweep) for row in rows)
        and all(type(state) is dict for state in states)
        and are_plain([*tensors, *(value for state in states for value in state.values() if with_states)])
    )
    return SteadyRows(rows, with_states=with_states) if is_possible else None


def _grads_of(params: Sequence[Tensor]) -> Sequence[Tensor]:
    grads = [param.grad for param in params]
    return [grad for grad in grads if grad is not None]
