"""Keys, tokens, secrets and passwords are masked; everything else is as it was typed."""

import sys

import pytest
import yaml

from accordion_bench.runs import secrets
from accordion_bench.runs.environment import environment
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
]
SHOWN = [
    "compressor=powersgd 'seed=0,1' adaptive=accordion",
    "network.burst=null max_tokens=512 dataset.min_count=2",
    "model=lstm tokenizer=words keyword=x",
    "api_key=null token= password=",
    "x 'y=\"z",
]


@pytest.mark.parametrize(("typed", "shown"), HIDDEN)
def test_a_secret_in_a_command_is_masked(typed, shown):
    assert secrets.masked_command(f"python -m accordion_bench {typed}") == f"python -m accordion_bench {shown}"


@pytest.mark.parametrize("typed", SHOWN)
def test_a_command_without_secrets_is_as_it_was_typed(typed):
    assert secrets.masked_command(typed) == typed


def test_secrets_in_nested_values_are_masked():
    content = {"versions": {"torch": "2"}, "GITHUB_TOKEN": "x", "a": [{"secret": ["x", "y"]}], "tokens": 512}
    shown = {"versions": {"torch": "2"}, "GITHUB_TOKEN": "***", "a": [{"secret": ["***", "***"]}], "tokens": 512}
    assert secrets.masked(content) == shown


def test_environment_json_holds_no_secret(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "accordion_bench", "tracker.api_key=hunter2", "seed=0"])
    assert environment()["command"] == "python -m accordion_bench 'tracker.api_key=***' seed=0"


def test_no_option_of_ours_is_masked():
    for file in (ROOT / "conf").rglob("*.yaml"):
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        assert secrets.masked(content) == content


@pytest.mark.parametrize("text", ["key" * 5000, "a=" * 5000, "-" * 9999, "key:" * 5000, '"' * 9999, "key = " * 2000])
def test_masking_takes_no_longer_than_reading(text):
    secrets.masked_command(text)
    secrets.masked_command(f"'{text}")  # pytest's own limit is what this would run into
