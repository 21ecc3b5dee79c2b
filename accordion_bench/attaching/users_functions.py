"""Functions that were passed to an attachment: an error of theirs is a refusal, which all processes learn of."""

from collections.abc import Callable
from typing import Any

from accordion_bench.options.checks import ConfigError


def answer(argument: str, function: Callable[..., Any], *given: Any) -> Any:
    """What a function says.

    Args:
        argument: as which it was passed.
        function: the user's.
        given: what it is called with.

    Raises:
        ConfigError: it has raised an error.
    """
    try:
        return function(*given)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"{argument} must be a function that takes what it is called with, got one that raises "
            f"{type(error).__name__} ({said}) for {given[0]!r}; pass another {argument}"
        ) from None
