"""`Choice`: an enumeration of options, whose error for an unknown value lists the allowed ones."""

from enum import StrEnum


class Choice(StrEnum):
    """An option of a configuration. `Choice("unknown")` raises ValueError with the allowed values."""

    @classmethod
    def _missing_(cls, value: object) -> "Choice":
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{value!r} is not a {cls.__name__}; give one of {allowed}")
