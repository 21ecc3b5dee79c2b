"""Keys, tokens, secrets and passwords are masked; everything else is as it was typed."""

import json
import random
import re
import shlex
import sys

import pytest
import yaml

from accordion_bench.runs import untrusted
from accordion_bench.runs.folder import environment
from tests.kit.paths import ROOT

HIDDEN = [
    ("tracker.api_key=hunter2", "'tracker.api_key=***'"),
    ("+tracker.TOKEN='a b,c'", "'+tracker.TOKEN=***'"),
    ("--wandb-token hunter2 seed=1", "--wandb-token '***' seed=1"),
    ("'+tracker={api_key:hunter2,mode:online}'", "'+tracker={api_key:***,mode:online}'"),
    ("WANDB_API_KEY=hunter2", "'WANDB_API_KEY=***'"),
    ("db.password=12345", "'db.password=***'"),
    ("url=https://a.example/?token=hunter2", "'url=https://a.example/?token=***'"),
    ('aws.secret="hunter2', "aws.secret=***"),  # a quotation that does not end
    ("tracker.apikey=1234567890", "'tracker.apikey=***'"),
    ("'+t={secret: [hunter2, hunter3]}'", "'+t={secret: ***}'"),
    ("'+t={token: {value: hunter2}, rate: 3}'", "'+t={token: ***, rate: 3}'"),
    ("'+t={secret: two words, rate: 3}'", "'+t={secret: ***, rate: 3}'"),
    ("""'{"token": "a\\"hunter2", "b": 1}'""", """'{"token": ***, "b": 1}'"""),
    ("url=https://me:hunter2@a.example/x", "'url=https://me:***@a.example/x'"),
    ("url=https://me:hunt@er2@a.example/x?y=1", "'url=https://me:***@a.example/x?y=1'"),
    ("url=https://hunter2@a.example", "'url=https://***@a.example'"),
    ("me:hunter2@a.example:5432/runs", "'me:***@a.example:5432/runs'"),
    ("--header 'Authorization: Bearer hunter2'", "--header 'Authorization: ***'"),
    ("-H 'Authorization: Basic aHVudGVyMg=='", "-H 'Authorization: ***'"),
    ("x='Bearer hunter2.abc'", "'x=Bearer ***'"),
    ("auth=hunter2 db.pw=hunter2 passphrase=hunter2", "'auth=***' 'db.pw=***' 'passphrase=***'"),
]
SHOWN = [
    "compressor=powersgd 'seed=0,1' adaptive=accordion",
    "network.burst=null max_tokens=512 dataset.min_count=2",
    "model=lstm tokenizer=words keyword=x",
    "api_key=null token= password=",
    "+model.num_key_value_heads=8 +model.pad_token_id=0 max_tokens=512 keys=[1,2]",
    "author=me comm.hook=mine.hooks:Hook https://a.example:80/x git@a.example:runs.git adaptive@x=y",
    "x 'y=\"z",
]


@pytest.mark.parametrize(("typed", "shown"), HIDDEN)
def test_a_secret_in_a_command_is_masked(typed, shown):
    assert untrusted.masked_command(f"python -m accordion_bench {typed}") == f"python -m accordion_bench {shown}"


@pytest.mark.parametrize("typed", SHOWN)
def test_a_command_without_secrets_is_as_it_was_typed(typed):
    assert untrusted.masked_command(typed) == typed


def test_secrets_in_nested_values_are_masked():
    content = {"versions": {"torch": "2"}, "GITHUB_TOKEN": "x", "a": [{"secret": ["x", "y"]}], "tokens": 512}
    shown = {"versions": {"torch": "2"}, "GITHUB_TOKEN": "***", "a": [{"secret": ["***", "***"]}], "tokens": 512}
    assert untrusted.masked(content) == shown


NAMES = ("api_key", "apikey", "tracker.token", "GITHUB_TOKEN", "secret", "client-secret", "password", "pw", "auth")
PLAIN = ("rate", "name", "project", "mode", "hook")


def tree(draw, depth: int, secret: bool):
    """A random nested value, and the secrets in it: whatever stands below a name of NAMES."""
    kind = draw.randrange(4 if depth else 2)
    if kind < 2:
        value = draw.choice((f"hunter{draw.randrange(10**9)}", draw.randrange(10**8, 10**9)))
        return value, [str(value)] if secret else []
    if kind == 2:
        parts = [tree(draw, depth - 1, secret) for _ in range(draw.randint(1, 3))]
        return [value for value, _ in parts], [told for _, found in parts for told in found]
    value, found = {}, []
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(NAMES if draw.random() < 0.4 else PLAIN)
        if name not in value:
            value[name], inside = tree(draw, depth - 1, secret or name in NAMES)
            found += inside
    return value, found


def flow(value, draw) -> str:
    """As one types it for Hydra."""
    space = draw.choice(("", " "))
    if isinstance(value, dict):
        return "{" + f",{space}".join(f"{key}:{space}{flow(own, draw)}" for key, own in value.items()) + "}"
    if isinstance(value, list):
        return "[" + f",{space}".join(flow(own, draw) for own in value) + "]"
    quote = draw.choice(("", '"'))
    return f"{quote}{value}{quote}"


def secrets_stay(cases: int) -> None:
    """However deep a secret lies, and however it is written, it is not shown; and everything else is."""
    draw = random.Random(0)
    for _ in range(cases):
        value, hidden = tree(draw, 4, False)
        plain = {text for text in re.findall(r"hunter\d+|\d{9}", json.dumps(value)) if text not in hidden}
        texts = {"json": json.dumps(value), "flow": flow(value, draw)}
        shown = {name: untrusted.masked_text(text) for name, text in texts.items()}
        shown["value"] = json.dumps(untrusted.masked(value))
        shown["text in a value"] = untrusted.masked({"x": texts["json"]})["x"]
        shown["command"] = untrusted.masked_command(shlex.join(["run", f"+t={texts['flow']}", texts["json"]]))
        shown["broken command"] = untrusted.masked_command(f"run '+t={texts['flow']}")
        for where, text in shown.items():
            assert not [one for one in hidden if one in text], (where, text)
            assert all(one in text for one in plain), (where, text)


def test_some_secrets_stay():
    secrets_stay(300)


@pytest.mark.slow
def test_secrets_stay():
    secrets_stay(100_000)


def test_environment_json_holds_no_secret(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "accordion_bench", "tracker.api_key=hunter2", "seed=0"])
    assert environment()["command"] == "python -m accordion_bench 'tracker.api_key=***' seed=0"


def test_no_option_of_ours_is_masked():
    for file in (ROOT / "conf").rglob("*.yaml"):
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        assert untrusted.masked(content) == content


@pytest.mark.parametrize("text", ["key" * 5000, "a=" * 5000, "-" * 9999, "key:" * 5000, '"' * 9999, "key = " * 2000])
def test_masking_takes_no_longer_than_reading(text):
    untrusted.masked_command(text)
    untrusted.masked_command(f"'{text}")  # pytest's own limit is what this would run into
