"""Membership: the processes that a run has, and what they do together."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Undo = Callable[[], None]


def nothing() -> None:
    """There is nothing to put back."""


class Membership:
    """The processes of a run that all stay to its end: a lost one ends the run.

    Class attributes:
        elastic: whether processes may come and go.
    """

    elastic = False

    def together(self, do: Callable[[], T], undo: Undo = nothing) -> T:
        """Do something that all members do at the same point, and that needs all of them.

        Args:
            do: what is done; called again where a member was lost.
            undo: puts back what `do` has changed, before it is called again.
        """
        return do()

    def repeated(
        self, begin: Callable[[], Callable[[], T]], again: Callable[[], T], keep: Callable[[], Undo]
    ) -> Callable[[], T]:
        """Begin the averaging of a round; returns what waits for it, which does it `together`.

        Args:
            begin: begins it, and returns what waits for it.
            again: does it anew, where a member was lost.
            keep: keeps what it changes, as it is before; returns what puts that back.
        """
        return begin()

    def border(self) -> None:
        """Between two steps: a process that waits enters, where a round has just ended."""

    def columns(self) -> dict[str, Any]:
        """For metrics rows."""
        return {}

    def leave(self, over: bool = True) -> None:
        """This process goes.

        Args:
            over: the run has come to its end, so that no process enters any more.
        """


class LeftBehind(RuntimeError):
    """This process cannot go on as a member; the text says why, and what to do."""


class TooFewLeft(LeftBehind):
    """No process can go on."""


class Owner(Protocol):
    """Who has the state of the run that all members share."""

    def resized(self, lost: Sequence[int], before: int) -> None:
        """The number of processes and the rank of this one are others now.

        Args:
            lost: ranks that those who are gone had before.
            before: how many processes there were.
        """

    def averaged(self) -> None:
        """All members have taken part in the averaging of a round, or of a fragment."""

    def shared_state(self) -> dict[str, Any]:
        """What a newcomer needs to go on beside the others; loads with `weights_only=True`."""

    def take_over(self, state: dict[str, Any]) -> None:
        """Go on from another one's `shared_state()`."""
