"""The number of the step in errors of its collectives."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from opt_distributed.buffers.wire import CollectiveError


class Counting(Protocol):
    """An object that counts its steps."""

    num_begun: int


C = TypeVar("C", bound=Counting)
P = ParamSpec("P")
R = TypeVar("R")


def naming_the_step(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Let a CollectiveError that `method` raises name the step."""

    def named(self: C, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            return method(self, *args, **options)
        except CollectiveError as error:
            raise CollectiveError(f"step {self.num_begun}, {error}") from error

    return named
