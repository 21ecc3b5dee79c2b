"""Letters that Hydra's grammar does not know: quoted for the user where text is free, named where a word is needed."""

import re
import unicodedata
from collections.abc import Sequence

from accordion_bench.options import advice
from accordion_bench.options.checks import ConfigError, closest, for_hydra
from accordion_bench.options.override import key_of

# keys whose values are anybody's names, or have units such as µs
FREE = re.compile(
    r"paths\.(data|runs)|label|resume|dataset\.(folder|file)|tracker\.project|network\.\w*(latency|jitter|bandwidth)|comm\.interface"
)
LABEL = "label"
PLAIN = re.compile(r"[A-Za-z0-9_./:@%+\\ -]*")
DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))


def quoted(arguments: Sequence[str]) -> list[str]:
    """The arguments, with free text quoted for Hydra where that is needed: folders with brackets, or of any language.

    What a comma separates is a sweep, but of a label; what is quoted already stays as it is.
    """
    return [_quoted(word) for word in arguments]


def _quoted(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals or not value or not FREE.fullmatch(key_of(key)) or value[0] in "'\"":
        return word
    if key_of(key) == LABEL:  # 4 and true are text, too
        return word if value == "null" else f"{key}={for_hydra(value)}"
    if value[0] == "~" or "${" in value or "," in value or re.match(r"[a-z]+\(", value) or PLAIN.fullmatch(value):
        return word
    return f"{key}={for_hydra(value)}"


def refuse_strange(word: str) -> None:
    """Refuse a word with a letter that looks like another one, or like none.

    Raises:
        ConfigError: names the letter.
    """
    key, _, value = word.partition("=")
    if FREE.fullmatch(key_of(key)):
        if value == "~" or value.startswith("~/"):
            raise ConfigError(f"{key} must be a folder written out, got {value}; type {key}=$HOME{value[1:]}")
        return
    strange = [letter for letter in word if ord(letter) > 126 and not "\udc80" <= letter <= "\udcff"]
    plain = _plain(word)
    of_a_flag = word.startswith("-") or not ("=" in plain or plain.startswith("-"))  # a folder, which may be anything
    if not strange or of_a_flag or "'" in value or '"' in value:
        return
    letter = strange[0]
    called = f"U+{ord(letter):04X}, {unicodedata.name(letter, 'without a name').lower()}"
    raise ConfigError(f"{_shown(word)} must be typed in ASCII, got {called}; type {_meant(plain)}")


def _plain(word: str) -> str:
    """The word without what is strange in it."""
    return unicodedata.normalize("NFKD", word.translate(DASHES)).encode("ascii", "ignore").decode()


def _shown(word: str) -> str:
    """The word, with invisible letters as their numbers."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in word)


def _meant(plain: str) -> str:
    """A word without what was strange in it, and with the nearest key and choice."""
    if plain.startswith("-"):
        return f"--{plain.lstrip('-')}"
    key, equals, value = plain.partition("=")
    plus, name = key[: len(key) - len(key.lstrip("+~"))], key_of(key)
    name = closest(name, list(advice.known_keys()) if "." in name else advice.groups(), cutoff=0.8) or name
    if name in advice.groups():
        known = advice.experiments() if name == "experiment" else advice.choices(name)
        value = closest(value, known, cutoff=0.6) or value
    return f"{plus}{name}{equals}{value.strip()}"
