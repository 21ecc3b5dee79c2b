"""A typo is refused before torch is imported, in one sentence, with a hint only where something similar is there."""

import pytest

from accordion_bench.cli.command_line import refuse_unreadable, split_flags
from accordion_bench.options import advice, conf_dir
from accordion_bench.options.advice import explain
from accordion_bench.options.checks import ConfigError, closest, nearest
from tests.kit import composed
from tests.kit.light import light

TYPOS = {
    "compresor=x": "compresor is no option here; type compressor=x",
    "epochs=nan": "epochs must be an integer of at least 1, got nan; type epochs=60",
    "rank=2": "rank is called compressor.rank here; type compressor.rank=2",
    "compressor=powersdg": "compressor must be a known name, got powersdg; type compressor=powersgd",
    "optimizer.lrr=1": "optimizer.lrr is no option here; type optimizer.lr=1",
    "-m optimizer.lrr=1,2": "optimizer.lrr is no option here; type optimizer.lr=1",
    "-m compressor=none,powersdg": "compressor must be a known name, got powersdg; type compressor=powersgd",
    "-m epochs=nan seed=0,1": "epochs must be an integer of at least 1, got nan; type epochs=60",
    "checkpoint.keep=0": "checkpoint.keep must be an integer of at least 1, got 0",
    "seed=${nope}": "seed must be a value, or ${OPTION} for that of another option, got an invalid one",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """By typo, the process that has refused it; and the folder in which it ran."""
    folder = tmp_path_factory.mktemp("typos")
    return dict(zip(TYPOS, light([typed.split() for typed in TYPOS], folder), strict=True)), folder


@pytest.mark.parametrize("typed", TYPOS)
def test_it_costs_no_import_of_torch(typed, refusals):
    refused, folder = refusals
    done = refused[typed]
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(TYPOS[typed]) and done.stderr.count("\n") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "typed, instead",
    [
        ("compressor.powersgd.rank=4", "compressor=powersgd compressor.rank=4"),
        ("compressor={powersgd:{rank:4}}", "compressor=powersgd compressor.rank=4"),
        (
            "compressor={powersgd:{rank:4,levels:[1,2]}}",
            "compressor=powersgd compressor.rank=4 compressor.levels=[1,2]",
        ),
        (
            "compressor={powersgd: {rank: 4, warm_start: false}}",
            "compressor=powersgd compressor.rank=4 compressor.warm_start=false",
        ),
        ("sync.slowmo.period=3", "sync=slowmo sync.period=3"),
        ("compressor=powersgd, adaptive=accordion", "compressor=powersgd adaptive=accordion"),
        ("epochs=3,seed=1", "epochs=3 seed=1"),
        ("adaptive=[]", "adaptive=none"),
        ("compressor=[powersgd]", "compressor=powersgd"),
        ("compressor=zzzzqqq", "--help compressor for all 32"),
        ("-m compressor=none,zzzzqqq", "--help compressor for all 32"),
        ("+experiment=accordion/table1", "+experiment=accordion/table1_resnet18 (nearest of"),
    ],
)
def test_what_to_type_instead(typed, instead):
    words = typed.split(" ", 1) if typed.startswith("-m ") else [typed]
    with pytest.raises(ConfigError) as caught:
        refuse_unreadable(words)
    assert str(caught.value).partition("; type ")[2].startswith(instead)


@pytest.mark.parametrize(
    "typed, instead",
    [
        ("adaptive=accordion_batch adaptive.interval=1", "adaptive.accordion_batch.interval=1"),
        ("adaptive.interval=1 adaptive=accordion_batch", "adaptive.accordion_batch.interval=1"),
        ("eta=0.3 adaptive=accordion_batch", "adaptive.accordion_batch.eta=0.3"),
        ("+adaptive.cap=8 adaptive=grow_batch compressor=powersgd", "adaptive.grow_batch.cap=8"),
        (
            "adaptive=[accordion,accordion_batch] adaptive.eta=0.3",
            "adaptive.accordion.eta=0.3 adaptive.accordion_batch.eta=0.3",
        ),
    ],
)
def test_the_option_is_that_of_the_chosen_policy(typed, instead):
    with pytest.raises(ConfigError) as caught:
        refuse_unreadable(typed.split())
    assert str(caught.value).partition("; type ")[2] == instead


@pytest.mark.parametrize(
    "typed, flags",
    [
        ("epochs=1 --config-dir conf compressor=mine", ["--config-dir", "conf"]),
        ("epochs=1 --config-d=conf compressor=mine", ["--config-d=conf"]),
        ("epochs=1 -cd conf -m compressor=none,mine", ["-cd", "conf", "-m"]),
        ("epochs=1 --cfg job compressor=mine --resolve", ["--cfg", "job", "--resolve"]),
        ("epochs=1 --info defaults", []),
        ("epochs=1 -- --config-dir", []),
        ("--nope epochs=1", []),
    ],
)
def test_flags_may_stand_between_options(typed, flags):
    words = typed.split()
    found, others = split_flags(words)
    assert found == flags and others == [word for word in words if word not in flags]


@pytest.mark.parametrize(
    "content, told",
    [
        ("_target_: topk.TopK\n  density: 0.1\n", "line 2, column 10: mapping values are not allowed here"),
        ("density: [0.1\n", "line 2, column 1"),
        ("- density\n", "a line KEY: VALUE for each option, got \\['density'\\]"),
        (b"# \xff\n", "can't decode byte 0xff"),
    ],
)
def test_a_mistake_in_a_file_of_the_user_is_named(content, told, tmp_path, monkeypatch):
    monkeypatch.setattr(conf_dir, "_own", [])
    file = tmp_path / "compressor" / "mine.yaml"
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    advice.known_keys.cache_clear()
    with pytest.raises(ConfigError, match=f"{file} must .*{told}.*; correct that file") as caught:
        refuse_unreadable(["--config-dir", str(tmp_path), "compressor=mine", "compressor.densty=1"])
    advice.known_keys.cache_clear()
    assert "\n" not in str(caught.value)


def test_a_folder_that_no_run_writes_into_is_refused():
    with pytest.raises(ConfigError, match=r"type paths\.runs=there"):
        refuse_unreadable(["hydra.run.dir=there"])
    refuse_unreadable(["hydra.run.dir=there", "hydra.output_subdir=.hydra"])


def test_an_option_of_a_policy_that_is_not_chosen_names_its_policy():
    with pytest.raises(Exception) as caught:
        composed.cfg("adaptive=accordion_batch", "adaptive.accordion.interval=1")
    assert "type adaptive=accordion adaptive.accordion.interval=1 (" in explain(caught.value)


@pytest.mark.parametrize(
    "typed", ["adaptive.accordion.eta=0.3", "adaptive=[accordion,alq]", "network.kinds={all_to_all:{latency:1}}"]
)
def test_what_is_right_is_left_alone(typed):
    refuse_unreadable([typed])


def test_the_beginning_of_a_name_comes_first():
    names = ["accordion/table4_senet18", "accordion/table1_vgg19", "table1"]
    assert closest("accordion/table1", names) == "accordion/table1_vgg19"
    assert nearest("table1", names * 3)[0] == "table1"
