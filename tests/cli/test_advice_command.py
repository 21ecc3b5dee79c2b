"""The command from end to end, on small models."""

import csv
import json
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn

import accordion_bench as ab
from accordion_bench.advise.__main__ import main, read
from accordion_bench.advising.arms import chosen_arms
from accordion_bench.attaching.own_parameters import trained_parameters
from accordion_bench.cli.advice_command import checked_options, with_accuracies
from accordion_bench.cli.advice_command import composed as configuration
from accordion_bench.cli.example import subject_of
from accordion_bench.network.timeline_file import FORMAT
from accordion_bench.options.checks import ConfigError
from tests.advising import made_up
from tests.kit import composed
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
        (["workers=4", "--simulate", "steps=0"], "steps must be an integer of at least 1, got 0; type steps=200"),
        (["workers=4", "--simulate", "seed=inf"], "seed must be a whole number, got inf; type seed=1"),
        (["workers=4", "--simulate", "sync.grace=1"], "sync.grace must be 0 without a quorum, where all"),
        (["workers=4", "sync=diloco"], "sync must be left out, got sync=diloco"),
        (["workers=4", "epocs=3"], "epocs is no option here"),
        (["workers=4", "gpu=h1000"], "gpu must be one of a100, h100, h200, l40s, 4090, got h1000; type gpu=h100"),
        (["workers=4", "gpu=h100"], "gpu must stand without device=cpu, got gpu=h100; type one of them"),
        (["workers=4", "gpu=h100", "compute_ms=12"], "gpu must stand without compute_ms, got h100 and 12; type gpu"),
        (["workers=4", "compute_ms=0"], "compute_ms must be a number above 0, got 0.0; type compute_ms=12"),
        (["workers=4", "compute_ms=3", "--simulate", "slow=1:2.0"], "spread must be a number where no single step is"),
        (["workers=4", "workers=8"], "workers must be typed once, got workers=4 and workers=8; type workers=8"),
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
    words = ["model=gpt_nano", f"dataset={data}", "optimizer=adamw", "batch_size=2", "device=cpu", "workers=8"]
    given(capsys, *words, "network=1gbit", "--seconds", "1", "--no-figures", "--out", str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert all("optimizer must be sgd" in why or why.startswith("sync=") for why in told["left_out"].values())
    assert len(told["rows"]) >= 25


def answered(tmp_path, capsys, *words):
    out = tmp_path / "-".join(words).replace("=", "")
    said = given(
        capsys, *SMALL[:3], *SMALL[4:], "workers=16", "network=1gbit", "--no-figures", *words, "--out", str(out)
    )
    return said.out.splitlines()[0], json.loads((out / "advice.json").read_text()), said.err


def test_a_gpu_that_is_not_here(tmp_path, capsys):
    """Its step is counted, not timed; NCCL chooses collectives; links are the same."""
    first, told, err = answered(tmp_path, capsys, "gpu=h100")
    assert first.startswith("On an NVIDIA H100 (estimated), ")
    assert "counting a step" in err and "counting the messages of PowerSGD" in err and "timing" not in err
    assert told["on"] == "an NVIDIA H100 (estimated)" and told["device"] == told["timed_with"]["device"] == "cuda"
    assert told["network"]["algorithm"] == "cheapest" and told["compute"]["low"] == told["compute"]["high"]
    doubts = " ".join(told["doubts"])
    assert "the step is estimated" in doubts and "codecs are estimated: as timed on an NVIDIA H200" in doubts
    again, others, _ = answered(tmp_path, capsys, "gpu=4090")
    assert again.startswith("On an NVIDIA RTX 4090 (estimated), ")
    assert others["network"] == told["network"]


def test_the_answer_flips_at_the_step_time_that_a_cpu_is_told(tmp_path, capsys):
    """What is said of GPUs where a CPU was timed is what compute_ms says."""
    tiny = ["model=vgg16", "model.width=16", "dataset=cifar10", "batch_size=4", "--seconds", "1", "--no-figures"]
    words = [*tiny, "--methods", "none", "bf16", "powersgd", "signsgd", "workers=16", "network=1gbit"]
    here = given(capsys, *words, "device=cpu", "--out", str(tmp_path / "here")).out
    assert here.startswith("On THIS CPU, ")
    told = json.loads((tmp_path / "here" / "advice.json").read_text())["pays"]
    assert told["on"] == "GPUs with codecs as on an NVIDIA H200" and told["below"] > 0
    sentence = next(line for line in " ".join(here.split("\n\n")[0].split("\n")).split(". ") if "starts to pay" in line)
    assert sentence.startswith("On GPUs with codecs as on an NVIDIA H200, compressing starts to pay at 1 Gbit/s where")
    for factor, answer in ((0.8, " compress: "), (1.25, " do not compress: ")):
        asked = f"compute_ms={1000 * factor * told['below']:.4g}"
        said = given(capsys, *words, asked, "--out", str(tmp_path / asked)).out
        assert said.startswith(f"On a GPU with {asked}, ") and answer in said.partition(". ")[0].replace("\n", " ")


def test_a_step_time_of_cpus_has_the_codecs_of_this_one(tmp_path, capsys):
    first, told, _ = answered(tmp_path, capsys, "compute_ms=500", "device=cpu")
    assert first.startswith("On a CPU with compute_ms=500, ") and told["network"]["algorithm"] == "ring"
    assert not any("codecs are estimated" in doubt for doubt in told["doubts"])
    assert told["compute"]["value"] == pytest.approx(0.5, rel=0.05)


def test_a_timeline_of_a_gpu_may_name_it(tmp_path, capsys):
    words = ["--timeline", str(timeline(tmp_path / "timeline.json")), "--no-figures", "--methods", "none", "workers=4"]
    given(capsys, *words, "gpu=a100", "--seconds", "1", "--out", str(tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert told["compute"]["value"] == pytest.approx(0.11) and told["on"] == "the GPU of timeline.json"
    assert any(doubt.endswith("scaled by the memory bandwidth of an NVIDIA A100") for doubt in told["doubts"])
    assert main([*words, "compute_ms=12", "--out", str(tmp_path / "other")]) == 2
    assert "compute_ms must stand without --timeline" in capsys.readouterr().err


def test_the_door_answers_for_other_devices():
    model, batch = (
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        (torch.randn(8, 16), torch.zeros(8).long()),
    )
    options = {"workers": 8, "network": "1gbit", "methods": ["powersgd"], "seconds": 0.5}
    found = ab.advice(model, batch, gpu="l40s", precision="bfloat16", **options)
    assert found.verdict[0].startswith("On an NVIDIA L40S (estimated), ") and found.device == "cuda"
    told = ab.advice(model, batch, compute_ms=7, **options)
    assert told.compute.value == pytest.approx(0.007, rel=0.05) and told.on == "a GPU with compute_ms=7"
    here = ab.advice(model, batch, **options)
    assert here.on == "THIS CPU" and here.pays.on == "GPUs with codecs as on an NVIDIA H200"
    for wrong, sentence in (
        ({"gpu": "h1000"}, "gpu must be one of a100"),
        ({"gpu": "h100", "compute_ms": 3}, "gpu must stand without compute_ms"),
        ({"compute_ms": -1}, "compute_ms must be a number above 0"),
        ({"gpu": "h100", "precision": "int8"}, "precision must be one of float32, bfloat16, float16"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ab.advice(model, batch, **wrong, **options)


MEMORY = """
import re, sys
from accordion_bench.advise.__main__ import main
status = main(sys.argv[1:])
print(status, re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])  # ru_maxrss would be inherited
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ten_thousand_simulated_workers_need_less_than_a_gigabyte(tmp_path):
    words = ["model=resnet8", "dataset=digits", "batch_size=4", "device=cpu", "workers=10000", "network=10gbit"]
    words += [
        "--seconds",
        "0.1",
        "--no-figures",
        "--simulate",
        "slow=3:2.0",
        "outages_per_hour=0.01",
        "outage_seconds=1",
    ]
    words += ["steps=50", "--methods", "powersgd", "topk", "diloco", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", MEMORY, *words], capture_output=True, text=True, timeout=280)
    status, peak = done.stdout.split()[-2:]
    assert status == "0" and 1024 * int(peak) < 1e9, done.stderr


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
    found = subject_of(configuration(["model=resnet8", "dataset=digits", "device=cpu"])[0], workers_each=1)
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


@pytest.mark.parametrize(("asked", "where", "at_hand"), [([], "cpu", True), (["gpu=h100"], "cuda", False)])
def test_a_timeline_that_names_no_device_is_of_the_one_that_is_asked_for(asked, where, at_hand, tmp_path):
    path = timeline(tmp_path / "timeline.json")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "device"}))
    found = checked_options(read(["--timeline", str(path), "workers=4", *asked, "--out", str(tmp_path / "out")]))
    assert (found.where, found.at_hand) == (where, at_hand)


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
    assert "codecs are estimated: as timed on an NVIDIA H200" in doubts and "in a loop of your own" in doubts


def test_a_timeline_of_another_model_is_refused(tmp_path, capsys):
    words = ["--timeline", str(timeline(tmp_path / "timeline.json")), "workers=4", "device=cpu", "model=resnet20"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "timeline must be a file that comm.timeline() has written" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


# ---- what was typed


def test_overrides_stand_anywhere(tmp_path):
    folder = tmp_path / "a=b"
    folder.mkdir()
    words = ["model=lstm", "--methods", "none", "powersgd", "workers=4", "--runs", str(folder), "network=1gbit"]
    words += ["--simulate", "slow=3:2.0", "sync.quorum=3", "seed=1", "batch_size=8", "--out", "x", "precision=bfloat16"]
    args = read(words)
    assert (
        args.methods == ["none", "powersgd"]
        and args.runs == [str(folder)]
        and args.simulate == ["slow=3:2.0", "sync.quorum=3", "seed=1"]
    )
    assert sorted(args.overrides) == sorted(
        ["model=lstm", "workers=4", "network=1gbit", "batch_size=8", "precision=bfloat16"]
    )


def test_without_options_there_are_none():
    args = read(["workers=4"])
    assert (args.methods, args.runs, args.simulate, args.out, args.probe) == ([], [], [], None, False)


def trained(tmp_path, words: str) -> list[str]:
    return checked_options(
        read([*words.split(), "device=cpu", "--methods", "none", "--out", str(tmp_path / "out")])
    ).trained


def test_the_command_trains_what_was_typed(tmp_path):
    """But on whatever machine it runs; where nobody has typed a data set, on the one that was assumed."""
    own = "model=gpt_nano dataset=pydocs_bytes optimizer=adamw optimizer.betas=[0.9,0.95] precision=bfloat16"
    own += " schedule=warmup_cosine dataset.context=128"
    found = trained(tmp_path, f"{own} network=10gbit network.latency=1e-3 threads=1 workers=4")
    assert found == [*own.split(), "workers=4"]
    assert trained(tmp_path, "model=resnet8 workers=2") == ["model=resnet8", "dataset=cifar10", "workers=2"]
    command = with_accuracies(made_up.advice(), {}, found).row("PowerSGD rank 4").command
    cfg = composed.cfg(*shlex.split(command)[3:])
    assert cfg["optimizer"]["betas"] == [0.9, 0.95] and cfg["precision"] == "bfloat16"
