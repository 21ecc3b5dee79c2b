"""The command from end to end, on small models."""

import csv
import json

import pytest
import torch
from torch import nn

import accordion_bench as ab
from accordion_bench.advise.__main__ import main
from accordion_bench.advise.subject import composed, subject_of
from accordion_bench.advising.chosen_methods import chosen_arms
from accordion_bench.attaching.own_parameters import trained_parameters
from accordion_bench.attaching.timeline import FORMAT
from accordion_bench.options.checks import ConfigError
from tests.report.test_report import run_folder

TINY = ["model=resnet8", "dataset=digits", "batch_size=4", "device=cpu", "seconds=1"]
SMALL = [*TINY[:4], "--seconds", "1", "--methods", "none", "bf16", "powersgd", "local_sgd"]


def given(capsys, *words):
    status = main([*words])
    said = capsys.readouterr()
    assert status == 0, said.err
    return said


def test_from_a_command_line_to_files(tmp_path, capsys):
    for seed in range(2):
        run_folder(tmp_path / "runs", seed=seed, accuracy=0.9)
        run_folder(tmp_path / "runs", "powersgd", seed=seed, accuracy=0.9 - 0.01 * (1 + seed))
    out = tmp_path / "advice"
    words = ["--out", str(out), "--runs", str(tmp_path / "runs"), "--simulate", "slow=1:3.0", "steps=20"]
    said = given(capsys, *SMALL, "workers=4", "network=100mbit", *words)
    assert said.out.startswith("On THIS CPU, ")
    assert "reading what was asked" in said.err and "timing PowerSGD rank 2" in said.err
    names = [
        "advice.csv",
        "advice.json",
        "advice.txt",
        "simulated.json",
        *(f"speed_up_over_{x}.{y}" for x in ("bandwidth", "workers") for y in ("pdf", "png")),
    ]
    assert sorted(file.name for file in out.iterdir()) == names
    rows = list(csv.DictReader((out / "advice.csv").open()))
    told = json.loads((out / "advice.json").read_text())
    assert [row["method"] for row in rows] == [row["method"] for row in told["rows"]]
    assert {"dense", "bf16", "PowerSGD rank 2", "local SGD"} <= {row["method"] for row in rows}
    assert [float(row["step"]) for row in rows] == sorted(row["step"] for row in told["rows"])
    assert told["timed_with"]["threads"] >= 1 and told["machines"] == 4 and told["device"] == "cpu"
    known = {row["method"]: row["accuracy"] for row in rows}
    assert known["PowerSGD rank 2"].startswith("no difference shown: -1.50 ± ") and known["PowerSGD rank 1"] == ""
    (slowed,) = [one for one in json.loads((out / "simulated.json").read_text()) if one["method"] == "dense"]
    assert slowed["step"] > 2 * told["compute"]["value"]


def test_machines_of_several_workers(tmp_path, capsys):
    words = ["machines=2", "workers_per_machine=2", "network=1gbit", "network.inside=pcie4", "--no-figures"]
    given(capsys, *SMALL, *words, "--out", str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert (told["machines"], told["workers_per_machine"], told["workers"]) == (2, 2, 4)
    assert told["network"]["inside"] == "pcie4"
    assert not list((tmp_path / "out").glob("*.png"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=resnet8"], "workers must be given, got none; type workers=16"),
        (["workers=1"], "workers must be an integer of at least 2, got 1"),
        (["workers=4", "network=11gbit"], "network must be a known name, got 11gbit; type network="),
        (["workers=4", "network.bandwidth=10"], "network.bandwidth must be a rate of at least 100kbit"),
        (["workers=4", "network=custom"], "network.bandwidth must be "),
        (["workers=4", "workers_per_machine=2"], "network.inside must be a link where workers_per_machine is above 1"),
        (["workers=4", "model=resnet9"], "model must be a known name, got resnet9"),
        (["workers=4", "--methods", "powersdg"], "--methods must be one of "),
        (["workers=4", "--seconds", "0"], "--seconds must be a number above 0, got 0.0; type --seconds=20"),
        (["workers=4", "--runs", "/nowhere"], "--runs must be a run folder, or a folder of some, got /nowhere"),
        (["workers=4", "--timeline", "/nowhere.json"], "timeline must be a file that comm.timeline() has written"),
        (["workers=4", "--simulate", "slow=9:2.0"], "slow must be about workers from 0 to 3, got 9"),
        (["workers=4", "--simulate", "slow=1"], "slow must be WORKER:VALUE, got 1; type slow=3:2.0"),
        (["workers=4", "--simulate", "sync.quorum=5"], "sync.quorum must be an integer of at most 4, got 5"),
        (["workers=4", "--simulate", "sync.quorum=0.75"], "sync.quorum must be a whole number, got 0.75; type"),
        (["workers=4", "--simulate", "seed=inf"], "seed must be a whole number, got inf; type seed=1"),
        (["workers=4", "--simulate", "sync.grace=1"], "sync.grace must be 0 without a quorum, where everybody"),
        (["workers=4", "sync=diloco"], "sync must be left out, got sync=diloco"),
        (["workers=4", "epocs=3"], "epocs is no option here"),
        (["--probe", "workers=4"], "--probe must stand without overrides"),
        (["--probe"], "probe must run with at least two processes, got none"),
    ],
)
def test_refusals_are_one_sentence_before_anything_is_timed(words, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["device=cpu", *words] if "--probe" not in words else words) == 2
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert last.startswith(sentence) and "Traceback" not in said.err
    assert "timing" not in said.err and said.out == ""


@pytest.mark.sample(2)
@pytest.mark.parametrize("data", ["pydocs_bytes", "wikitext2_bytes"])
def test_a_transformer_with_adamw(data, tmp_path, capsys):
    """Methods that take the step themselves are left out in a sentence; all others are advised on."""
    words = ["model=gpt_nano", f"dataset={data}", "optimizer=adamw", "optimizer.decay_on=matrices"]
    words += ["batch_size=1", "device=cpu", "workers=4", "network=100mbit", "--seconds", "1", "--no-figures"]
    given(capsys, *words, "--methods", "none", "bf16", "powersgd", "signum", "diloco", "--out", str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "advice.json").read_text())
    methods = {row["method"] for row in told["rows"]}
    assert {"dense", "bf16", "PowerSGD rank 2", "DiLoCo"} <= methods and "Signum" not in methods
    assert told["left_out"]["Signum"].startswith("optimizer must be sgd, because this compressor takes the step itself")


@pytest.mark.slow
@pytest.mark.parametrize("data", ["pydocs_bytes", "wikitext2_bytes"])
def test_every_method_for_a_transformer(data, tmp_path, capsys):
    words = ["model=gpt_small", f"dataset={data}", "optimizer=adamw", "batch_size=2", "device=cpu", "workers=8"]
    given(capsys, *words, "network=1gbit", "--seconds", "20", "--no-figures", "--out", str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert all("optimizer must be sgd" in why or why.startswith("sync=") for why in told["left_out"].values())
    assert len(told["rows"]) >= 25


def test_the_door_gives_the_command_s_table():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batch = torch.randn(8, 16), torch.randint(4, (8,))
    before = [param.clone() for param in model.parameters()]
    found = ab.advice(model, batch, workers=8, network="10gbit", methods=["powersgd"], seconds=0.5)
    table = found.table()
    assert list(table["method"]) == [row.method for row in found.rows]
    assert len(table) == len(chosen_arms(["powersgd"])) and found.verdict[0].startswith("On THIS CPU, ")
    assert all(map(torch.equal, before, model.parameters()))
    other = ab.advice(
        model, batch, 8, {"bandwidth": "1gbit"}, workers_per_machine=4, inside="pcie4", methods=["none"], seconds=0.5
    )
    assert (other.machines, other.workers_per_machine, other.by_bandwidth.here) == (2, 4, 1e9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 1}, "workers must be an integer of at least 2, got 1; pass workers=16"),
        (
            {"workers": 6, "workers_per_machine": 4, "inside": "pcie4"},
            "workers_per_machine must be a divisor of workers=6, got 4; pass workers_per_machine=1",
        ),
        ({"workers": 4, "network": "11gbit"}, "network must be one of "),
        ({"workers": 4, "network": {"bandwidth": 0}}, "network.bandwidth must be a number above 0, got 0"),
        ({"workers": 4, "methods": ["nothing"]}, "methods must be one of "),
        ({"workers": 4, "seconds": 0}, "seconds must be a number above 0"),
    ],
)
def test_refusals_of_the_door(options, sentence):
    with pytest.raises(ConfigError) as refused:
        ab.advice(nn.Linear(4, 2), (torch.randn(2, 4), torch.tensor([0, 1])), **options)
    assert str(refused.value).startswith(sentence)


@pytest.mark.slow
def test_all_methods(tmp_path, capsys):
    given(capsys, *TINY[:4], "--seconds", "10", "workers=16", "network=10gbit", "--out", str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert {row["method"] for row in told["rows"]} | set(told["left_out"]) == {arm.name for arm in chosen_arms([])}


def timeline(path):
    """What `comm.timeline()` would have written of a loop with the bench's resnet8."""
    found = subject_of(*composed(["model=resnet8", "dataset=digits", "device=cpu"]), workers_each=1)
    named = trained_parameters(found.model)
    tensors = [
        {"name": name, "shape": list(param.shape), "ready_seconds": 0.01 + 0.001 * i}
        for i, (name, param) in enumerate(reversed(named))
    ][::-1]
    said = {
        "format": FORMAT,
        "seconds": {"data": 0.0, "compute": 0.1, "update": 0.01},
        "tensors": tensors,
        "buckets": [],
    }
    path.write_text(json.dumps({**said, "step_seconds": [0.11, 0.112] * 6, "model": "Mine", "device": "cuda"}))
    return path


def test_a_timeline_takes_the_place_of_a_trial(tmp_path, capsys):
    words = [
        "--timeline",
        str(timeline(tmp_path / "timeline.json")),
        "--no-figures",
        "--methods",
        "none",
        "--seconds",
        "1",
    ]
    said = given(capsys, *words, "workers=4", "device=cpu", "--out", str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert told["compute"]["value"] == pytest.approx(0.11)
    assert "timing a step" not in said.err and {row["command"] for row in told["rows"]} == {""}
    assert told["on"] == "the GPU of timeline.json" and told["timed_with"]["device"] == "cuda"
    doubts = " ".join(told["doubts"])
    assert "codecs are estimated: as timed on an NVIDIA H200" in doubts and "of your own loop" in doubts


def test_a_timeline_of_another_model_is_refused(tmp_path, capsys):
    words = ["--timeline", str(timeline(tmp_path / "timeline.json")), "workers=4", "device=cpu", "model=resnet20"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "timeline must be a file that comm.timeline() has written" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
