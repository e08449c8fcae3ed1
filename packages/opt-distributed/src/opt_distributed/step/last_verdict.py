"""The verdict on the last step: its errors are raised once, or reported if nobody asks for them any more.

On an accelerator a step returns before its errors are known. Reading its result raises them, and so does the next step.
Without a next step, a save warns of them, and so does the end of the process. If the optimizer is deleted before, the
next optimizer that is built or saved warns: garbage may be collected at any time, also while a graph is captured, when
nothing may look at the device.
"""

import atexit
import warnings
from weakref import WeakSet

from opt_distributed.buffers.binding import GradientError
from opt_distributed.step.stats import Sums
from opt_distributed.step.verdict import Findings, Verdict

WAIT_SECONDS = 5.0  # for the statistics of a step at the end; a collective whose peer has died never completes


class LastVerdict:
    """The verdict on the last step, and whether its errors have been raised."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None  # None: before the first step, and after one that an error refused
        self._step = 0
        self._is_unread = False  # whether its errors have not been raised yet
        self._is_reported = False
        _kept.add(self)
        _warn_of_deleted()

    def set(self, verdict: Verdict, *, step: int, is_unread: bool) -> None:
        """Note the verdict on step number `step`. With `is_unread`, its errors are still to be raised."""
        self.verdict, self._step = verdict, step
        self._is_unread, self._is_reported = is_unread, False

    def forget(self) -> Sums | None:
        """Drop the verdict, because another step begins. Raises its errors if nobody has read them.

        Returns the statistics if they were still to be read.
        """
        verdict, is_unread = self.verdict, self._is_unread
        self.verdict, self._is_unread = None, False
        return verdict.check() if verdict is not None and is_unread else None

    def read(self, verdict: Verdict) -> Findings:
        """Return the content of `verdict`. Raises its errors."""
        if verdict is not self.verdict:  # of an earlier step: errors of the last step stay unread
            return verdict.findings
        self._is_unread = False
        try:
            return verdict.findings
        except Exception:
            self.verdict = None  # a step that an error refused has no norms
            raise

    def warn(self, when: str, *, within: float | None = None) -> None:
        """Warn once if an error refused the last step and nobody has read it; the next step still raises it.

        The host waits for the statistics of the step, at most `within` seconds if that is given.
        """
        _warn_of_deleted()
        if self._is_unread and not self._is_reported and self.verdict is not None:
            self._is_reported = _warned(when, self.verdict, self._step, within)

    def __del__(self) -> None:
        if self._is_unread and not self._is_reported and self.verdict is not None:
            _deleted.append((self.verdict, self._step))


_kept: WeakSet[LastVerdict] = WeakSet()
_deleted: list[tuple[Verdict, int]] = []  # unread verdicts on the last steps of deleted optimizers, and these steps


@atexit.register
def _warn_at_exit() -> None:
    for last in list(_kept):
        last.warn("the interpreter exits", within=WAIT_SECONDS)
        last.verdict = None
    _warn_of_deleted()


def _warn_of_deleted() -> None:
    while _deleted:
        _warned("the optimizer was deleted", *_deleted.pop(), within=WAIT_SECONDS)


def _warned(when: str, verdict: Verdict, step: int, within: float | None) -> bool:
    """Warn if an error refused the step. False if its statistics have not arrived in time."""
    if within is not None and not verdict.arrives(within):
        return False
    try:
        verdict.findings  # noqa: B018  # a property that raises
    except (GradientError, ValueError) as error:
        warnings.warn(
            f"{when}: step {step} was refused, and its result has not been read: {error}", RuntimeWarning, stacklevel=4
        )
    return True
