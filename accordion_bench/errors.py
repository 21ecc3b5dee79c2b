"""What a user reads when something is wrong: one sentence for what they can mend, a traceback for what they cannot."""

import re

from accordion_bench.check import ConfigError, closest
from accordion_bench.config_dir import conf_dir


def explain(error: BaseException) -> str | None:
    """The sentence for an error that the user can act on, or None."""
    kind = type(error).__name__
    if isinstance(error, ConfigError) or kind in ("NonFinite", "ChildRefused"):
        return str(error)
    if kind == "MissingConfigException":
        return _unknown_choice(error)
    if kind in ("ConfigCompositionException", "ConfigKeyError", "OverrideParseException"):
        return _bad_override(error)
    return None


def _unknown_choice(error: BaseException) -> str:
    """`compressor=powersdg`: the name is unknown; list the choices."""
    missing = str(getattr(error, "missing_cfg_file", None) or "")
    group, _, name = missing.strip("/").rpartition("/")
    choices = sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))
    if not group or not choices:
        return " ".join(str(error).split())
    return f"{group} must be one of {', '.join(choices)}, got {name}; type {group}={closest(name, choices)}"


def _bad_override(error: BaseException) -> str:
    """An unknown key or a line that does not parse."""
    text = "\n".join(filter(None, (str(error), str(error.__cause__ or ""))))
    unknown = re.search(r"Could not override '([^']+)'", text)
    group = re.search(r"Could not override '([^'/]+(?:/[^'/]+)*)'.*?No match in the defaults list", text, re.DOTALL)
    if group:
        word = group[1].split("=")[0]
        return f"{word} is no group of options; type {word} as one of {', '.join(_groups())}, or a key such as epochs=10"
    if unknown:
        key = unknown[1]
        known = _known_keys()
        if key not in known:
            return f"{key} is no option here; type {closest(key, known)}, or --help for all options"
    return " ".join(text.split())


def _groups() -> list[str]:
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def _known_keys() -> list[str]:
    """Every key of every YAML file, with its group in front."""
    import yaml

    keys: list[str] = []

    def collect(node: object, prefix: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                if name not in ("_target_", "defaults", "hydra"):
                    collect(value, f"{prefix}{name}.")
        if prefix:
            keys.append(prefix[:-1])

    for file in conf_dir().rglob("*.yaml"):
        parts = file.relative_to(conf_dir()).parts[:-1]
        prefix = "".join(f"{part}." for part in parts)
        if parts == ("adaptive",):
            prefix += f"{file.stem}."
        collect(yaml.safe_load(file.read_text()), prefix)
    return sorted(set(keys))
