"""Sentences about options, which speak of a command line, for somebody who has passed arguments."""

import re

import yaml

from accordion_bench.options.checks import ConfigError, ValueRefused

TYPED = re.compile(r"(?<![\w.])([a-z_]\w*(?:\.\w+)*)=(\[[^\]]*\]|[^\s,;)]+)")
OWNED = re.compile(r"\b(?:compressor|sync)\.(?=[a-z_])")
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}  # that methods ask for
VALUES = {"null": "None", "true": "True", "false": "False"}


def in_python(refused: ConfigError) -> ConfigError:
    """The same refusal, with what to pass instead of what to type."""
    if not isinstance(refused, ValueRefused):
        return ConfigError(pass_instead(str(refused)))
    key, rule = OWNED.sub("", refused.key), _values(OWNED.sub("", refused.rule))
    return ConfigError(f"{key} must be {rule}, got {refused.value!r}; pass {_argument(refused.key, refused.instead)}")


def pass_instead(sentence: str) -> str:
    """`...; pass rank=2` for `...; type compressor.rank=2`."""
    what, semicolon, advice = sentence.partition("; type ")
    if not semicolon:
        return sentence
    said = ", or ".join(_advice(alternative) for alternative in advice.split(", or "))
    return f"{what}; {said.replace(', or pass ', ', or ')}"


def _advice(typed: str) -> str:
    """One way out; another synchronisation is another function's argument."""
    found = {key: yaml.safe_load(value) for key, value in TYPED.findall(typed)}
    if "sync" not in found:
        passed = TYPED.sub(lambda one: _argument(one[1], yaml.safe_load(one[2])), typed)
        return f"pass {OWNED.sub('', passed)}"
    scheme = found.pop("sync")
    arguments = ["model", "optimizer", *([] if scheme == "every_step" else [f"sync={scheme!r}"])]
    arguments += [_argument(key, value) for key, value in found.items()]
    return f"call ab.{'attach' if scheme == 'every_step' else 'local'}({', '.join(arguments)})"


def _argument(key: str, value: object) -> str:
    """How an option is passed: by its own name, within that of its policy, or to the optimizer."""
    group, *within = key.split(".")
    option = ".".join(within)
    if group in ("compressor", "sync") and option:
        return f"{option}={value!r}"
    if group == "adaptive" and option:
        policy, _, option = option.partition(".")
        return f"adaptive={{{policy!r}: {{{option!r}: {value!r}}}}}"
    if group == "optimizer" and option:
        return f"{option}={value!r} to the optimizer"
    if group == "optimizer":
        return f"a torch.optim.{OPTIMIZERS[value]}" if value in OPTIMIZERS else f"an optimizer {value}"
    return "another schedule" if key == "schedule" else f"{key}={value!r}"


def _values(rule: str) -> str:
    return re.sub(r"\b(null|true|false)\b", lambda word: VALUES[word[0]], rule)
