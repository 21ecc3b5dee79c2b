"""Convert an exception to one sentence if the user can fix its cause; other exceptions keep their traceback."""

import re
import traceback
from collections.abc import Mapping

from accordion_bench.options import advice
from accordion_bench.options.checks import ConfigError, ValueRefused, kind_of, show
from accordion_bench.options.units import with_unit

# messages of Python, C++, torch and CUDA when a resource is exhausted; lower case
OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory", "unable to allocate")
OF_THREADS = ("can't start new thread", "thread creation failed", "resource temporarily unavailable")


def explain(error: BaseException) -> str | None:
    """Return the sentence for an error that the user can fix, otherwise None."""
    kind = type(error).__name__
    if isinstance(error, ConfigError) or kind in ("NonFinite", "ChildRefused"):
        return str(error)
    if kind == "InterpolationKeyError" and (found := re.search(r"'setup\.(\S+)'", str(error))):
        return (
            f"arm must be typed with an experiment that defines its {found[1]}, got an arm alone; type "
            "+experiment=accordion/table1_resnet18 +arm=NAME, or another of docs/experiments.md"
        )
    if (sentence := _exhausted(error)) is not None:
        return sentence
    if found := re.search(r"(\S+) does not have a deterministic implementation", str(error)):
        rule = f"false where torch has no other kernel for {found[1]}, which this model or method needs here"
        return str(ValueRefused("deterministic", rule, True, False))
    if "interpolation" in f"{kind} {error}".lower() and (found := re.search(r"full_key: (\S+)", str(error))):
        return _no_interpolation(str(error), found[1], getattr(error, "choices", {}))
    if kind == "MissingConfigException":
        return _unknown_choice(error)
    if any(re.search(r"[/\\](hydra|omegaconf)[/\\]", file) for file in _files(error)[-1:]):
        return _bad_override(error)
    return None


def _no_interpolation(text: str, key: str, choices: Mapping[str, str]) -> str:
    """Explain an invalid interpolation such as `seed=${nope}`."""
    value = advice.default_of(key, choices)
    default = with_unit(key, value) or show(value)
    instead = f"{key}={default}" if "$" not in default else f"{key}=VALUE"
    why = " ".join(text.partition("full_key:")[0].split()).rstrip(":")
    if found := re.search(r"Interpolation key '([^']+)' not found", text):
        why = f"there is no option {found[1]}"
    elif found := re.search(r"Environment variable '([^']+)' not found", text):
        why = f"no environment variable {found[1]} is set"
    elif "Recursive interpolation" in text:
        why = "the options refer to each other in a circle"
    elif found := re.search(r"Unsupported interpolation type (\S+)", text):
        why = f"there is no function {found[1]}"
    rule = "a value, or ${OPTION} for that of another option"
    return f"{key} must be {rule}, got an invalid one: {why}; type {instead}"


def _exhausted(error: BaseException) -> str | None:
    """Explain an error caused by a lack of memory, threads or processes; None for other errors."""
    said = re.sub(r"^\[enforce fail at \S+\] err == 0\. ", "", " ".join(str(error).split()))
    first = (said if len(said) <= 160 else f"{said[:157]}...") or type(error).__name__

    def says(phrases: tuple[str, ...]) -> bool:
        return any(words in said.lower() for words in phrases)

    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError | OSError) and says(OF_MEMORY)):
        return (
            f"memory must hold the model, and a batch of every worker of a process, which ran out ({first}); type "
            "micro_batch_size=N for the same batch in parts, a smaller batch_size, or fewer workers in a process "
            "(comm.workers_per_process)"
        )
    starting = any(re.search(r"[/\\](multiprocessing|subprocess|threading)", file) for file in _files(error))
    if says(OF_THREADS) and (isinstance(error, RuntimeError) or (isinstance(error, OSError) and starting)):
        return (
            f"the machine must let a process start another thread or process, got no more of them ({first}); type "
            "threads=1, fewer comm.processes, or ulimit -u NUMBER for a higher limit"
        )
    return None


def _files(error: BaseException) -> list[str]:
    """Return the files in an error's traceback; the last one raised it."""
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _unknown_choice(error: BaseException) -> str:
    """Explain an unknown name such as `compressor=powersdg`."""
    missing = str(getattr(error, "missing_cfg_file", None) or "")
    group, _, name = missing.lstrip("/").rpartition("/")
    return (group and advice.unknown_choice(group, name)) or _one_line(str(error))


def _bad_override(error: BaseException) -> str:
    """Explain an unknown key, or an override that cannot be parsed."""
    cause = str(error.__cause__ or "")
    text = str(error)
    if override := getattr(error, "override", None):
        key, equals, value = override.partition("=")
        if key and equals and value and value[0] not in "[{\"'":
            return (
                f"{override} cannot be read, because its value contains a special character; type '{key}=\"{value}\"'"
            )
        return f"{override} cannot be read: {text.splitlines()[0]}; type KEY=VALUE, and quote odd values: 'KEY=\"a,b\"'"
    if found := re.search(r"Config group override must be .* Got (\w+)", text):
        groups = ", ".join(advice.groups())
        return f"a config group must be given by name, got {found[1]}; type GROUP=NAME, with GROUP one of {groups}"
    if found := re.search(r"Ambiguous value for argument '([^'=]+)=(.*?)'", text):
        key, values = found.groups()
        as_one = f", or {key}=[{values}]" if advice.takes_list(key) else ""
        if isinstance(advice.known_keys().get(key), str):
            as_one = f", or '{key}=\"{values}\"' for one"
        return f"{key} must be one value, got {values}; type -m {key}={values} to run each{as_one}"
    if found := re.search(r"Multiple values for (\S+?)\.|(\S+) appears more than once", text):
        group = found[1] or found[2]
        return f"{group} is chosen already, got +{group} too; type {group}=NAME without the plus"
    known = advice.known_keys()
    if found := re.search(r"Error merging override ([^=]+)=(.*)", text):
        key, value = found[1].lstrip("+~"), found[2]
        return f"{key} must be {kind_of(known.get(key))}, got {value}; type {key}={show(known.get(key))}"
    if found := re.search(r"Could not override '([^']+)'", text):
        full = re.search(r"full_key: (\S+)", cause)
        value = re.search(r"use \+[^\s=]+=(.*)", text)
        return advice.unknown_key(full[1] if full else found[1], value[1] if value else "...")
    if found := re.search(r"Could not delete from config. (.*)", text):
        return f"~ must be followed by an existing option: {found[1].rstrip('.')}; type KEY=VALUE to change one"
    return _one_line(f"{text} {cause}") + "; type --help all for every option"


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"(object_type|reference_type)=\S+|See https?:\S+.*", "", text).split())
