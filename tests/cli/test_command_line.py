"""What is typed wrongly is answered before Hydra reads it, in one sentence that ends with what to type."""

import re

import pytest

from accordion_bench.cli import command_line
from accordion_bench.options.checks import ConfigError

REFUSED = [
    ("--epochs 3", "epochs must be typed without dashes, got --epochs; type epochs=3$"),
    ("--gpu=h100", "gpu must be typed without dashes, got --gpu=h100; type gpu=h100$"),
    ("--epochs=3", "epochs must be typed without dashes, got --epochs=3; type epochs=3$"),
    ("-m --batch-size 8 seed=0,1", "batch_size must be typed without dashes, .*; type batch_size=8$"),
    ("--experiment smoke", "; type \\+experiment=smoke$"),
    ("--epochs seed=3", "; type epochs=VALUE$"),
    ("--gpus 2", "--gpus is called comm.processes here; type comm.processes=2"),
    ("--nonsense", "--nonsense is no option here; type --help all for every option$"),
    ("--config-dir nowhere", "--config-dir must be a folder .*, got nowhere, .*; type --config-dir=FOLDER"),
    ("-cd nowhere", "--config-dir must be a folder .*, got nowhere"),
    ("--config-dir=nowhere", "--config-dir must be a folder .*, got nowhere"),
    ("--config-dir", "--config-dir must be followed by its value, got nothing; type --config-dir=VALUE$"),
    ("epochs 3", "epochs must be typed in one word with its value; type epochs=3$"),
    ("epochs = 3", "; type epochs=3$"),
    ("epochs= 3", "; type epochs=3$"),
    ("epochs:3", "; type epochs=3$"),
    ("epochs", "epochs must be typed as KEY=VALUE; type epochs=VALUE$"),
    ("powersgd", "; type compressor=powersgd$"),
    ("paths.data=/my data", "data must be KEY=VALUE, .*; type 'paths.data=/my data'$"),
    ("report", "; type python -m accordion_bench.report --help$"),
    ("help", "; type --help$"),
    ("hydra.foo", "hydra.foo must be typed as KEY=VALUE; type "),
    ("+hydra.foo=1", "hydra.foo is no option of Hydra; type --hydra-help"),
    ("seed=0 epochs=3 seed=1", "seed must be typed once, got seed=0 and seed=1; type seed=1$"),
    ("compressor=topk +compressor=topk", "compressor must be typed once, got compressor=topk and \\+compressor=topk"),
    ("seed=0,0", "seed must have each value once, got 0 twice; type seed=0$"),
    ("-m seed=0,1,0", "seed must have each value once, got 0 twice; type -m seed=0,1$"),
    ("adaptive=[accordion,accordion]", "adaptive must have each value once, .*; type adaptive=accordion$"),
    ("adaptive=[alq,qsr,alq]", "; type adaptive=\\[alq,qsr\\]$"),
    ("compressor=[none,topk]", "compressor must be one name, got \\[none,topk\\]; type -m compressor=none,topk to"),
    ("experiment=smoke", "experiment must be added with a plus, .*; type \\+experiment=smoke$"),
    ("experiment=table1_resnt18", "; type \\+experiment=accordion/table1_resnet18$"),
    ("arm=dense", "; type \\+arm=dense$"),
    ("paths.runs=/tmp/\udcff", "names must be text in UTF-8, got paths.runs=/tmp/\\\\xff; type another folder"),
]


@pytest.mark.parametrize("typed, told", REFUSED, ids=[typed.encode("ascii", "replace") for typed, _ in REFUSED])
def test_one_sentence(typed, told):
    with pytest.raises(ConfigError) as refused:
        command_line.refuse_unreadable(typed.split())
    assert re.search(told, str(refused.value)) and "\n" not in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    "typed",
    [
        "compressor=powersgd compressor.rank=2 adaptive=[accordion,alq]",
        "-m compressor=none,topk seed=0,1,2 schedule.milestones=[3,3]",
        "--multirun +experiment=[alq/table1,accordion/faithful] +arm=dense,alq scale=tiny",
        "-cd conf seed=0 --cfg job",
        "~epochs hydra.mode=RUN hydra.sweeper.params={a:1} hydra/launcher=joblib",
        "paths.data= seed=0 'paths.runs=/tmp/a,a'",
        "-- seed=0",
    ],
)
def test_what_hydra_reads_is_left_to_it(typed, monkeypatch):
    from accordion_bench.options.conf_dir import conf_dir

    monkeypatch.chdir(conf_dir().parent)
    command_line.refuse_unreadable(typed.replace("'paths.runs=/tmp/a,a'", 'paths.runs="/tmp/a,a"').split())


def test_a_path_with_a_blank_is_one_word():
    command_line.refuse_unreadable(["paths.data=/my data", "paths.runs=/my results"])


def test_commas_outside_of_brackets_and_quotes():
    assert command_line.parts("a,[b,c],'d,e',{f: g,h: i},choice(1,2)") == [
        *("a", "[b,c]", "'d,e'", "{f: g,h: i}", "choice(1,2)")
    ]
