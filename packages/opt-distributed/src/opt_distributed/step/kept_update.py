"""`KeptUpdate`: the launches of a unit's last update, which the next one repeats instead of composing them again.

It applies on an accelerator, if the rule returns launches that may be repeated (`Rule.update_`), and if since then:
nothing has moved, so that `Steady` has returned the same `Ready`; no number of a group is another object; the same
tensors hold the scales and the skip flag. In every other step the unit is updated as in the first one.
"""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from opt_config import ConfigError
from opt_distributed.step.clip import Products
from opt_distributed.step.piece_runs import PieceRun
from opt_distributed.step.ready import Ready
from opt_kernels.rules.base import Repeatable, Rule
from opt_kernels.works import Batch, Hyper


class Inputs(NamedTuple):
    """What an update depends on, compared by identity."""

    rule: Rule
    ready: Ready
    scale_of_slot: Sequence[float | Tensor]
    skip: Tensor | None
    runs: Sequence[PieceRun]  # of all pieces


class KeptUpdate:
    """The launches of an update of all pieces of a unit, on a device that decides whether it is made."""

    def __init__(self, inputs: Inputs, products: Products) -> None:
        self._inputs, self._products = inputs, products
        self._rows: list[tuple[PieceRun, Hyper]] = []
        self._launches: list[Repeatable] = []

    def add(self, runs: Sequence[PieceRun], batches: Sequence[Batch], launches: Sequence[Repeatable]) -> None:
        """Note a call of the rule that may be repeated."""
        if not any(run.opened for run in runs):
            self._rows += [(run, batch.hyper) for run, batch in zip(runs, batches, strict=True)]
            self._launches += launches

    @property
    def is_complete(self) -> bool:
        """Whether these launches are all of the update."""
        return self._inputs.skip is not None and len(self._rows) == len(self._inputs.runs)

    def repeat_(self, inputs: Inputs, groups: Sequence[Mapping[str, Any]], proceeds: Tensor | None) -> bool:
        """Repeat the update and count it. Returns False, and does nothing, if it would be another one."""
        if not all(map(is_, inputs, self._inputs)) or not self._rows_are_same(groups):
            return False
        if not all(one.holds() for one in self._launches):
            return False
        self._products.write_(inputs.scale_of_slot)
        for one in self._launches:
            one.launch()
        for run, _ in self._rows:
            run.count.advance(inputs.skip, proceeds)
        return True

    def _rows_are_same(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        return all(run.hyper.read(groups[run.key.group], step=run.count.next()) is row for run, row in self._rows)


def checked_launches(rule: Rule, returned: Any) -> Sequence[Repeatable]:
    """What `rule.update_` returned, () for None. Raises ConfigError unless it is None or a sequence of `Repeatable`."""
    if returned is None:
        return ()
    wrong = [one for one in returned if not _is_repeatable(one)] if isinstance(returned, Sequence) else [returned]
    if wrong:
        found = "" if wrong[0] is returned else "a sequence with "
        raise ConfigError(
            f"rule {rule.name!r} ({type(rule).__name__}): update_ returned {found}an object of type "
            f"{type(wrong[0]).__name__}; allowed are None, and a sequence of opt_kernels.rules.base.Repeatable, with "
            "holds and launch; return None if the launches cannot be repeated. Weights have been written: load the "
            "last checkpoint"
        )
    launches: Sequence[Repeatable] = returned
    return launches


def _is_repeatable(one: object) -> bool:
    return all(callable(getattr(one, name, None)) for name in ("holds", "launch"))
