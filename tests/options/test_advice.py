"""The answer stands first, and long lists are cut to what looks like the word that was typed."""

import pytest

from accordion_bench.options import advice, checks
from accordion_bench.options.checks import ConfigError


def test_the_answer_stands_before_five_names():
    told = advice.unknown_choice("compressor", "powersdg")
    assert told is not None
    answer, _, names = told.partition("; type compressor=powersgd (nearest of ")
    assert answer == "compressor must be a known name, got powersdg" and len(names.split(": ")[1].split(", ")) == 5


@pytest.mark.parametrize(
    "group, name, instead",
    [
        ("compressor", "PowerSGD", "type compressor=powersgd "),
        ("dataset", "cifar-10", "type dataset=cifar10 "),
        ("optimizer", "SGD", "type optimizer=sgd (there are adamw, lion, muon, sgd, sgd_plus_gradient)"),
        ("compressor", "dense", "type compressor=none "),  # the name of its class
        ("compressor", "accordion", "type adaptive=accordion"),
        ("adaptive", "powersgd", "type compressor=powersgd"),
        ("model", "cifar10", "type dataset=cifar10"),
        ("experiment", "smok", "type +experiment=smoke "),
        ("experiment/accordion", "tabel1_resnet18", "type +experiment=accordion/table1_resnet18 "),
        ("arm", "dens", "type +arm=dense "),
    ],
)
def test_a_name(group, name, instead):
    assert instead in str(advice.unknown_choice(group, name))


@pytest.mark.parametrize(
    "key, value, instead",
    [
        ("epocs", "3", "type epochs=3, or --help"),
        (
            "gpu",
            "h100",
            "behind python -m accordion_bench.advise, got a run, which computes on what is here; type --dry-run",
        ),
        ("rank", "4", "type compressor.rank=4 (an option of compressor=acpsgd, atomo, dion, gradiveq, powersgd)"),
        ("compressor.rank", "4", "type compressor=powersgd compressor.rank=4 "),
        ("eta", "0.3", "type adaptive.accordion.eta=0.3 "),
        ("learning_rate", "1", "type optimizer.lr=1"),
        ("sync.H", "4", "type sync.period=4 (an option of sync="),
        ("num_epochs", "4", "type epochs=4"),
        ("scheduler", "cosine", "type schedule=cosine"),
        ("hydra.foo", "4", "type --hydra-help"),
        ("loss", "mse", "loss is no option here; type --help all for every option"),
    ],
)
def test_a_key(key, value, instead):
    assert instead in advice.unknown_key(key, value)


def test_long_lists_of_values_are_cut():
    with pytest.raises(ConfigError, match=r"x must be one of a5, .*, \.\.\. \(9 in all\), got a55; type x=a5"):
        checks.choice("x", "a55", [f"a{i}" for i in range(9)])
    with pytest.raises(ConfigError, match="x must be one of a, b, got c; type x="):
        checks.choice("x", "c", ["a", "b"])
