"""Tensors that always travel dense, because the user says so."""

from collections.abc import Callable

from torch import nn

from accordion_bench.attaching.own_parameters import plain_name
from accordion_bench.attaching.users_functions import answer
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError

Exempt = str | Callable[[str, nn.Parameter], bool] | None
WORDS = ("norm", "bias", "embedding")


def exempt_names(exempt: Exempt, model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are never compressed.

    Args:
        exempt: words, such as `norm,bias`: parameters of normalisation layers, biases, embeddings; or a function of
            name and parameter that says whether one is exempt; None = none.
        model: whose parameters.

    Raises:
        ConfigError: a word is unknown, it is neither, or the function raises an error.
    """
    if exempt is None:
        return frozenset()
    if callable(exempt):
        named = ((plain_name(name), param) for name, param in model.named_parameters())
        return frozenset(name for name, param in named if answer("exempt", exempt, name, param))
    words = [word.strip() for word in exempt.split(",")] if isinstance(exempt, str) else []
    if not words or any(word not in WORDS for word in words):
        unknown = next((word for word in words if word not in WORDS), exempt)
        near = checks.closest(unknown, WORDS, cutoff=0.6) if isinstance(unknown, str) else ""
        raise ConfigError(
            f"exempt must be made of {', '.join(WORDS)}, or be a function of name and parameter, got {unknown!r}; "
            f"pass exempt={near or 'norm,bias'!r}"
        )
    found = {  # a parameter that several modules share has the name that it has in the first one
        id(param)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if any(_is(word, module, name) for word in words)
    }
    return frozenset(plain_name(name) for name, param in model.named_parameters() if id(param) in found)


def _is(word: str, module: nn.Module, name: str) -> bool:
    if word == "bias":
        return "bias" in name
    return word in type(module).__name__.lower()
