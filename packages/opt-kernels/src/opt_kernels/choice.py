"""`NamedChoice`: an enumeration of options, whose error for an unknown value lists the allowed ones."""

from enum import StrEnum


class NamedChoice(StrEnum):
    """An option of a configuration. `NamedChoice("unknown")` raises ValueError with the allowed values."""

    @classmethod
    def _missing_(cls, value: object) -> "NamedChoice":
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{value!r} is not a {cls.__name__}; pass one of {allowed}")
