"""What an override is about."""

from collections.abc import Collection, Sequence

from accordion_bench.options.checks import ConfigError


def key_of(override: str) -> str:
    """`network.bandwidth` of `+network.bandwidth=1e9`."""
    return override.lstrip("+~").partition("=")[0]


def group_of(override: str) -> str:
    """`network` of `+network.bandwidth=1e9`."""
    return key_of(override).partition(".")[0]


def taken(words: Sequence[str], keys: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """What is typed for these keys, and all other words.

    Raises:
        ConfigError: a key is typed twice.
    """
    own = [word for word in words if word.partition("=")[0] in keys and "=" in word]
    refuse_twice(own)
    return {key_of(word): word.partition("=")[2] for word in own}, [word for word in words if word not in own]


def refuse_twice(overrides: Sequence[str]) -> None:
    """Refuse a key that is typed twice.

    Raises:
        ConfigError: for the first one.
    """
    seen: dict[str, str] = {}
    for override in overrides:
        key = key_of(override)
        if key in seen:
            raise ConfigError(f"{key} must be typed once, got {seen[key]} and {override}; type {override}")
        seen[key] = override


def parts(text: str) -> list[str]:
    """What commas separate, outside of brackets and quotes."""
    found, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        depth += (letter in "[{(") - (letter in "]})") if not quote else 0
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]
