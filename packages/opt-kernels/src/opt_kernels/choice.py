"""Options by name: an enumeration whose unknown names are errors that list the known ones."""

from enum import StrEnum


class Choice(StrEnum):
    """An option by its name in a configuration. `Choice("unknown")` raises ValueError with the names allowed."""

    @classmethod
    def _missing_(cls, value: object) -> "Choice":
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{value!r} is not a {cls.__name__}; give one of {allowed}")
