"""An exception of a rank, as it can be sent between processes and printed."""

import traceback
from dataclasses import dataclass
from threading import BrokenBarrierError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The exception that a rank raised."""

    kind: str
    text: str
    where: str  # the last lines of the traceback
    is_consequence: bool  # of another rank's failure
    is_refusal: bool = False  # a ValueError

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        last = traceback.extract_tb(error.__traceback__)[-4:]
        return cls(
            kind=type(error).__name__,
            text=str(error),
            where=" < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(last)),
            is_consequence=_is_consequence(error),
            is_refusal=isinstance(error, ValueError),
        )

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} ({self.where})"


def _is_consequence(error: BaseException | None) -> bool:
    """Whether it only reports a barrier or a connection that another rank broke."""
    if error is None:
        return False
    is_lost = isinstance(error, BrokenBarrierError) or "onnection closed by peer" in str(error)
    return is_lost or _is_consequence(error.__cause__)
