"""Interface to the set of processes of a run, which is fixed or elastic."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Undo = Callable[[], None]


def nothing() -> None:
    """Do nothing: an `Undo` of an operation that changes nothing."""


class Membership:
    """Fixed set of processes: a lost process ends the run.

    Class attributes:
        elastic: whether processes may be lost and others may enter during the run.
        changed: whether a process has been lost or has entered since the run started.
    """

    elastic = False
    changed = False

    def together(self, do: Callable[[], T], undo: Undo = nothing) -> T:
        """Run a collective operation, which all members call at the same point, and return its result.

        Args:
            do: the operation; called again if a member was lost.
            undo: reverts the changes of `do` before it is called again.
        """
        return do()

    def repeated(
        self, begin: Callable[[], Callable[[], T]], again: Callable[[], T], keep: Callable[[], Undo]
    ) -> Callable[[], T]:
        """Start an exchange of all members; return a function that waits for it and returns its result.

        Args:
            begin: starts the exchange, and returns a function that waits for it.
            again: runs the exchange again if a member was lost.
            keep: copies the state that the exchange changes, and returns the function that restores it.
        """
        return begin()

    def border(self) -> None:
        """Let waiting processes enter between two steps, if an exchange of all members has just ended."""

    def columns(self) -> dict[str, Any]:
        """Return columns for metrics rows."""
        return {}

    def leave(self, over: bool = True) -> None:
        """Leave the run.

        Args:
            over: whether the run has ended, so that no process may enter any more.
        """


class LeftBehind(RuntimeError):
    """This process cannot continue as a member; the message gives the reason and what to do."""


class TooFewLeft(LeftBehind):
    """No process can continue, because too few are left."""


class Owner(Protocol):
    """Owner of the state that is equal on all members."""

    def resized(self, lost: Sequence[int], before: int) -> None:
        """Adapt to a new number of processes and a new rank.

        Args:
            lost: previous ranks of the lost processes.
            before: previous number of processes.
        """

    def averaged(self) -> None:
        """Note that an exchange of all members is complete, of all tensors or of a fragment."""

    def shared_state(self) -> dict[str, Any]:
        """Return the state that an entering process needs; loads with `weights_only=True`."""

    def take_over(self, state: dict[str, Any]) -> None:
        """Restore the `shared_state()` of another process."""
