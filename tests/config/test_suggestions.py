"""What a refusal says to type is accepted: for every option of every YAML file and every wrong value."""

import copy
import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from accordion_bench import train
from accordion_bench.config import components
from accordion_bench.options.advice import explain
from accordion_bench.options.units import without_units
from accordion_bench.training import launch
from tests.config.test_bad_input import FREE_TEXT, GROUPS, options, whole_of

WRONG = ["nonsense", True, None, -1, 0, 0.5, 3, 4.5, 1000, [], [-1], {"odd": 1}]
# files and folders, which a sentence cannot know; how many layers there are, which is known when a model is built
NAMED_BY_NOBODY = {*FREE_TEXT, "resume", "sync.fragments"}
SUGGESTED = re.compile(r"; type (.*)$")
WORD = re.compile(r"([a-z_][\w.]*)=(\S+)")


class Accepted(Exception):
    """Nothing was refused."""


@pytest.fixture(autouse=True)
def never_launched(monkeypatch, tmp_path):
    def join_process_group(cfg, where, watch):
        raise Accepted

    monkeypatch.setattr(launch, "join_process_group", join_process_group)
    monkeypatch.setattr(components.Dataset, "prepare", lambda self, root: None)
    monkeypatch.setattr("accordion_bench.datasets.cifar.Cifar.prepare", lambda self, root: None)
    monkeypatch.chdir(tmp_path)


def told(cfg: dict, key: str = "") -> str:
    """The refusal; "" where there is none."""
    try:
        train.run(copy.deepcopy(cfg), {key: None} if key else None)
    except Accepted:
        return ""
    except Exception as error:
        sentence = explain(error)
        assert sentence and "\n" not in sentence, repr(error)
        return sentence
    return ""


def with_value(cfg: dict, key: str, value: object) -> dict:
    """The configuration with another value of one option."""
    cfg = copy.deepcopy(cfg)
    *path, last = key.split(".")
    node = cfg
    for part in path:
        node = node[part]
    node[last] = value
    return cfg


def suggested(sentence: str) -> tuple[str, object] | None:
    """The option that a sentence says to type; None where that is a choice, or something else than an option."""
    found = SUGGESTED.search(sentence)
    first = WORD.match(shlex.split(found[1])[0]) if found else None
    if first is None or first[1] in GROUPS:
        return None
    value = OverridesParser.create().parse_override(f"x={first[2].rstrip(',;')}").value()
    return first[1], without_units({first[1].rpartition(".")[2]: value}).popitem()[1]


def accepted_in_the_end(cfg: dict, key: str, value: object) -> None:
    """One suggestion after the other, each about an option that has had none."""
    tried = with_value(cfg, key, value)
    seen: list[str] = []
    while (sentence := told(tried, key)) and (found := suggested(sentence)):
        assert found[0] not in seen, (key, value, seen, sentence)
        seen.append(found[0])
        try:
            tried = with_value(tried, *found)
        except (KeyError, TypeError):
            return  # an option of a choice that is not made


def every_suggestion_is_accepted(choice: str, every: int) -> None:
    """Each `every`-th pair of an option and a wrong value."""
    cfg = whole_of(choice)
    if told(cfg):
        return  # what needs files, or options that nobody can guess
    wrong = [value for value in WRONG if value != 1000 or not choice.startswith("model=")]  # a model that fits nowhere
    pairs = [(key, value) for key, default in options()[choice] for value in wrong if value != default]
    for key, value in pairs[::every]:
        if key not in NAMED_BY_NOBODY:
            accepted_in_the_end(cfg, key, value)


@pytest.mark.parametrize("choice", list(options())[::17])
def test_some_suggestions_are_accepted(choice):
    every_suggestion_is_accepted(choice, every=7 if choice else 61)


@pytest.mark.slow
@pytest.mark.parametrize("choice", options())
def test_what_is_suggested_is_accepted(choice):
    every_suggestion_is_accepted(choice, every=1)


@pytest.mark.parametrize(
    ("choice", "key", "value", "told_to_type"),
    [
        ("compressor=topk", "compressor.value_bits", 3, "compressor.value_bits=null"),
        ("compressor=powersgd", "compressor.rank", 4.5, "compressor.rank=4"),
        ("compressor=powersgd", "compressor.rank", -1, "compressor.rank=1"),
        ("network=1gbit", "network.bandwidth", "fast", "network.bandwidth=1gbit"),
        ("network=1gbit", "network.bandwidth", -5, "network.bandwidth=1gbit"),
        ("network=1gbit", "network.latency", -1, "network.latency=0.05ms"),
        ("", "epochs", 0, "epochs=60"),
        ("", "seed", True, "seed=0"),
        ("", "scale", "nonsense", "scale=full"),
    ],
)
def test_what_is_said_to_type(choice, key, value, told_to_type):
    cfg = whole_of(choice)
    assert told(with_value(cfg, key, value)).endswith(f"; type {told_to_type}")
    accepted_in_the_end(cfg, key, value)
