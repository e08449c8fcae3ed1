"""`Trainer`: what a manager knows as the one trainer of a series, and the saves that it refuses because of another."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from contextlib import suppress

from opt_checkpoint.disk.checkpoint import verify_checkpoint
from opt_checkpoint.errors import CheckpointExistsError
from opt_checkpoint.run.series import Series, named_steps, step_name

logger = logging.getLogger(__name__)


class Trainer:
    """The steps that this run found, loaded and saved. Used on rank 0 only. `CheckpointManager` says what is refused.

    Args:
        series: the steps in the directory.
    """

    def __init__(self, series: Series) -> None:
        self.series = series
        # Steps committed when the series was opened or last loaded, and saved since; None: read at the first save.
        self._known: set[int] | None = None
        self._begun: dict[int, set[str]] = defaultdict(set)  # all saves of each step
        self._may_replace: dict[int, set[str | None]] = {}  # later steps than the loaded one, and saves seen of each
        self._last_save: tuple[int, str] | None = None  # step and save; another trainer may replace or abandon it
        self._resumed: int | None = None  # the step that was loaded last
        self._saved_since_load: set[int] = set()
        with suppress(OSError):  # raised by the first use
            self._known = series.committed()

    @property
    def has_saved(self) -> bool:
        """Whether it has saved a step since the last load."""
        return bool(self._saved_since_load)

    def note_loaded(self, step: int) -> None:
        """Continue from `step`: the later ones may be saved again."""
        self._known = self.series.committed()
        self._may_replace = {known: {self.series.save_of(known)} for known in self._known if known > step}
        self._resumed = step
        self._saved_since_load = set()
        self._last_save = None

    def note_gone_back(self) -> None:
        """Note that this run itself has abandoned later steps other than by a save to this directory."""
        self._last_save = None

    def begin(self, step: int, save_id: str) -> bool:
        """Before a save, refuse a second trainer, record a rollback, and return whether an existing step is replaced.

        Raises:
            CheckpointExistsError: as `check_alone`; or the step exists, and is neither damaged nor this run's to
                replace.
        """
        self.check_alone()
        steps = set(named_steps(self.series.store))
        replace = step in steps and self.series.is_committed(step)
        abandoned = self.series.abandoned()
        is_ours = step in self._may_replace or self.series.is_abandoned(step, abandoned)
        if replace and not is_ours and not self.series.is_damaged(step):
            findings = verify_checkpoint(self.series.path(step))  # all of it, before the save is refused
            replace = bool(findings)
            if replace:
                logger.warning("%s is damaged (%s) and is saved again", self.series.path(step), findings[0])
        if step in steps and not replace:
            self.series.store.check_free(step_name(step))
        if step in self._may_replace:
            self._may_replace[step].add(save_id)
        if self.series.begin(step, save_id):
            self._last_save = None  # which this save may abandon
            later = {found for found in steps - self._saved_since_load if found > step}
            if self._resumed is None and not later <= abandoned.keys():
                warnings.warn(
                    f"{self.series.directory} has later steps, up to {max(later)}, and this manager has loaded none: "
                    f"saving step {step} abandons them, and saves of later steps delete them. Use another directory "
                    f"if they are another run's",
                    stacklevel=2,
                )
        self._begun[step].add(save_id)
        return replace

    def check_alone(self) -> None:
        """Raise CheckpointExistsError if another trainer has saved, or gone back, since the series was opened or last
        loaded."""
        if self._known is None:
            self._known = self.series.committed()
        foreign_steps = []
        for found in sorted(set(named_steps(self.series.store)) - self._known):
            if self.series.is_committed(found) and self.series.save_of(found) not in self._begun.get(found, ()):
                foreign_steps.append(found)
        for later_step, saves in sorted(self._may_replace.items()):
            if self.series.save_of(later_step) not in {*saves, None}:
                foreign_steps.append(later_step)
        if self._last_save is not None:
            last, save_id = self._last_save
            if self.series.save_of(last) not in {save_id, None} or self.series.abandoned().get(last) == save_id:
                foreign_steps.append(last)
        if foreign_steps:
            raise CheckpointExistsError(
                f"step {foreign_steps[0]} in {self.series.directory} was saved by another trainer, or abandoned by it, "
                f"since this manager was opened; a series has one trainer. Stop one of them, and open a new manager to "
                f"continue the series"
            )

    def note_saved(self, step: int, save_id: str) -> None:
        """Note a save that was committed."""
        assert self._known is not None
        self._known = self._known | {step}
        self._saved_since_load.add(step)
        self._last_save = (step, save_id)
        self._may_replace.pop(step, None)

    def loaded_step_to_keep(self, keep: int) -> set[int]:
        """Return the step that was loaded last until `keep` later saves are committed; then nothing."""
        if self._resumed is None or len(self._saved_since_load) >= keep:
            return set()
        return {self._resumed}
