"""Every wrong value stops before data or devices are touched, with one sentence: key, rule, value, what to type."""

import copy
import functools
import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from accordion_bench import __main__ as command
from accordion_bench import train
from accordion_bench.cli import command_line
from accordion_bench.config import components, compose, continuation
from accordion_bench.options import advice, instantiate
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.processes import placement
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training import launch
from scripts import matrix
from tests.kit import composed, tiny
from tests.kit.helpers import yaml_names, yaml_node


@pytest.fixture(autouse=True)
def never_launched(monkeypatch, tmp_path):
    """What is not refused fails here, before a run folder is made."""

    def join_process_group(cfg, where, watch):
        raise AssertionError("not refused")

    monkeypatch.setattr(launch, "join_process_group", join_process_group)
    monkeypatch.setattr(components.Dataset, "prepare", lambda self, root: None)
    monkeypatch.setattr("accordion_bench.datasets.cifar.Cifar.prepare", lambda self, root: None)
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "results").exists()


def sentence(*overrides: str) -> str:
    """What the user reads."""
    with pytest.raises(Exception) as caught:
        train.run(composed.cfg(*overrides), command.typed(list(overrides)))
    text = advice.explain(caught.value)
    assert text, repr(caught.value)
    assert "\n" not in text
    return text


POWERSGD, TOPK, ACCORDION = "compressor=powersgd", "compressor=topk", "adaptive=accordion"
BATCH, BATCH_KEY = "adaptive=accordion_batch", "adaptive.accordion_batch"
DISTEF = "compressor=distefblocksgd"

# overrides, then what the sentence must say: key, rule, value, what to type instead
REFUSED = [
    (
        ["compressor=powersdg"],
        "compressor must be a known name, got powersdg; type compressor=powersgd \\(nearest of 32: powersgd, ",
    ),
    (["adaptive=[accordion,foo]"], "adaptive must be a known name, got foo; type --help adaptive"),
    (["model=resnet19"], "model must be a known name, got resnet19; type model=resnet"),
    (["model=lstm"], "model=lstm needs a data set of text, got dataset=digits; type dataset=pydocs"),
    (["dataset=pydocs"], "model=resnet8 needs a data set of images, got dataset=pydocs; type dataset=digits"),
    (["model=vgg16"], "model=vgg16 needs images of at least 32 x 32 pixels, got dataset=digits with 8; type"),
    (["clip_norm=0"], "clip_norm must be a number above 0, got 0; type clip_norm=1.0"),
    (["scale=tniy"], "scale must be full without \\+experiment=NAME, .*, got tniy; type scale=full"),
    (["scale=tiny"], "scale must be full without \\+experiment=NAME, .*, got tiny; type scale=full"),
    (
        ["+experiment=acordion/table1_resnt18"],
        "experiment must be a known name, .*; type \\+experiment=accordion/table1_resnet18 ",
    ),
    (["+arm=foo"], "arm must be a known name, got foo; type --help arm"),
    (["+arm=powersgd_weak"], "arm must be typed with an experiment that defines its weak, .*; type \\+experiment="),
    (["+experiment=accordion/base", "hydra.mode=RUN"], "experiment must be a whole one, got accordion/base, a part"),
    (["+setup.foo=1"], "experiment must be a whole one, got none beside setup"),
    (["model=lstm_small", "dataset=synthetic_text", "target=0.9"], "target must be .* at least 1, got 0.9; type"),
    (["measure.norms=1"], "measure.norms must be true or false, got 1"),
    (["measure.foo=true"], "measure.foo is no option here"),
    (["compressor="], "compressor must be a known name, got nothing; type --help compressor"),
    (["compressor=null"], "must be given by name, got NoneType; type GROUP=NAME"),
    ([POWERSGD, "compressor.rnak=1"], "compressor.rnak is no option here; type compressor.rank"),
    (["epocs=3"], "epocs is no option here; type epochs"),
    (["+epocs=3"], "epocs is no option here; type epochs"),
    (["+comm.procesess=3"], "comm.procesess is no option here; type comm.processes"),
    ([POWERSGD, "+compressor.rnak=1"], "compressor.rnak is no option of PowerSGD"),
    (["compresor=none"], "compresor is no option here; type compressor"),
    (["+foo@bar=sgd"], "foo@bar"),
    (["compressor.rank=2"], "compressor.rank is no option of what .*; type compressor=powersgd compressor.rank=2 "),
    ([POWERSGD, "compressor.rank=0"], "compressor.rank must be an integer .* 1, got 0; type compressor.rank=1"),
    ([POWERSGD, "compressor.rank=abc"], "compressor.rank must be a number, got abc; type compressor.rank=2"),
    ([POWERSGD, "compressor.rank=1.5"], "compressor.rank must be an integer of at least 1, got 1.5"),
    ([TOPK, "compressor.density=2"], "compressor.density must be .* at most 1, got 2; .*density=0.1"),
    ([TOPK, "compressor.density=0"], "compressor.density must be .* above 0 .*, got 0; .*density=0.1"),
    ([ACCORDION], "adaptive=accordion needs .*, got compressor=none; type .* compressor=powersgd, "),
    ([POWERSGD, ACCORDION, "adaptive.accordion.weak=1"], "weak must be a rank above strong=1, got 1; .*weak=2"),
    ([TOPK, ACCORDION, "adaptive.accordion.strong=0.995"], "strong must be a density below weak=0.99, got 0.995"),
    ([TOPK, ACCORDION, "adaptive.accordion.weak=2"], "accordion.weak must be .*at most 1, got 2"),
    ([POWERSGD, ACCORDION, "adaptive.accordion.eta=0"], "adaptive.accordion.eta must be a number above 0, got 0"),
    (["+adaptive.accordion=3"], "adaptive.accordion must be a policy's options, got 3"),
    ([POWERSGD, "compressor.residual=loacl"], "residual must be one of local, aggregate, got loacl; .*=local"),
    ([POWERSGD, "compressor.scope=model"], "scope must be tensor, because .*, got model; type compressor.scope=tensor"),
    (["workers=5", "comm.processes=2"], "workers must be a multiple of comm.processes=2, got 5"),
    (["workers=5", "comm.workers_per_process=2"], "workers must be .*, got 5"),
    (["comm=gloo", "workers=5", "comm.workers_per_process=2"], "workers must be a multiple of .*=2, got 5"),
    (["comm=gloo", "workers=8", "comm.processes=2", "comm.workers_per_process=2"], ".* = 2 x 2, got 8; .*=4"),
    (["comm=simulated", "comm.processes=2"], "comm.processes must be 1 with comm=simulated, got 2; .*=1"),
    (["workers=0"], "workers must be an integer of at least 1, got 0"),
    (["comm=nccl"], "comm must be gloo or simulated on .* without a CUDA device, got nccl; type comm=auto"),
    (["comm=nccl", "device=cpu"], "comm must be gloo or simulated with device=cpu, got nccl; type comm=gloo"),
    (["comm.timeout=0"], "comm.timeout must be a number above 0 .*, got 0; type comm.timeout=600"),
    (["device=cuda"], "device must be auto or cpu .*, got cuda; type device=auto"),
    (["device=gpu"], "device must be one of auto, cpu, cuda, got gpu; type device=cpu"),
    (["epochs=-3"], "epochs must be an integer of at least 1, got -3; type epochs=60"),
    (["epochs=2.5"], "epochs must be an integer of at least 1, got 2.5; type epochs=60"),
    (["batch_size=0"], "batch_size must be an integer of at least 1, got 0; type batch_size=32"),
    (["micro_batch_size=0"], "micro_batch_size must be an integer .* 1, got 0; type micro_batch_size=1"),
    (["seed=-1"], "seed must be an integer of at least 0, got -1; type seed=0"),
    (["seed=null"], "seed must be an integer of at least 0, got null; type seed=0"),
    (["label=''"], "label must be text of 1 to 40 printable .*, got ''; type label=NAME"),
    (["label=' '"], "label must be text of 1 to 40 .*, got ' '; type label=NAME"),
    (['label="a\nb"'], r"label must be text of .* in one line, got 'a\\nb'; type label='a b'"),
    ([f"label={41 * 'x'}"], f"label must be text of 1 to 40 .*, got '{41 * 'x'}'; type label={40 * 'x'}$"),
    (["label=7"], "label must be text of 1 to 40 printable characters in one line, got 7; type label='arm 7'"),
    (["bn=pool"], "bn must be one of pooled, .*, got pool; type bn=pooled"),
    (["target=90"], "target must be a number above 0 and at most 1, got 90; type target=0.9"),
    (["target=0.9", "target_every=2"], "target_every must be .* at most 1, got 2; type target_every=0.25"),
    (["checkpoint.every=-1"], "checkpoint.every must be an integer of at least 0, got -1"),
    (["checkpoint.minutes=-1"], "checkpoint.minutes must be a number at least 0, got -1; type checkpoint.minutes=10"),
    (["checkpoint.keep=0"], "checkpoint.keep must be an integer of at least 1, got 0; type checkpoint.keep=1"),
    (["checkpoint.best=1"], "checkpoint.best must be true or false, got 1; type checkpoint.best=false"),
    (["optimizer.lr=-1"], "optimizer.lr must be a number above 0, got -1; type optimizer.lr=0.1"),
    (["optimizer=adamw", "optimizer.lr=-1"], "optimizer.lr must be a number above 0, got -1; type optimizer.lr=0.001"),
    (["optimizer=adamw", "optimizer.lr=${x}"], "optimizer.lr must .*: there is no option x; type optimizer.lr=0.001$"),
    (["optimizer=muon", "optimizer.lr=${x}"], "optimizer.lr must .*; type optimizer.lr=0.02$"),
    (["optimizer.lr=${x}"], "optimizer.lr must .*; type optimizer.lr=0.1$"),
    (["network=10gbit", "network.bandwidth=${x}"], "network.bandwidth must .*; type network.bandwidth=10gbit$"),
    (["network.bandwidth=fast"], "network.bandwidth must be a number, got fast; type network.bandwidth=1gbit$"),
    (["optimizer.lr=nan"], "optimizer.lr must be a number above 0, got nan"),
    (["optimizer.momentum=1.5"], "optimizer.momentum must be .* below 1, got 1.5; type optimizer.momentum=0.9"),
    (["optimizer.nesterov=true", "optimizer.momentum=0"], "optimizer.nesterov must be false .*, got true"),
    (["optimizer.weight_decay=-1"], "optimizer.weight_decay must be a number at least 0, got -1"),
    (
        ["optimizer=adamw", "optimizer.betas=[0.9]"],
        "optimizer.betas must be two numbers .*, got \\[0.9\\]; type optimizer.betas=\\[0.9,0.999\\]",
    ),
    (["optimizer=adamw", "optimizer.betas={a:1}"], "optimizer.betas must be a list, got {a:1}"),
    (["optimizer=muon", "optimizer.betas=[0.9]"], "optimizer.betas must be two numbers .*, got \\[0.9\\]; type"),
    (
        ["optimizer=muon", "optimizer.ns_precision=float16"],
        "optimizer.ns_precision must be null or bfloat16",
    ),
    (["optimizer=muon", "optimizer.momentum=0"], "optimizer.nesterov must be false .*; type optimizer.nesterov=false"),
    (
        ["optimizer=muon", "model._target_=tests.kit.models.OneLayer", "~model.depth"],
        "model must have a matrix besides .* where optimizer=muon, got none; type optimizer=adamw",
    ),
    (["optimizer=muon", "compressor=signum"], "optimizer must be sgd, because .* takes the step itself .*; type opt"),
    (["schedule.gamma=0"], "schedule.gamma must be a number above 0 .*, got 0; type schedule.gamma=0.1"),
    (["schedule.milestones=3"], "schedule.milestones must be a list, got 3; type schedule.milestones=\\["),
    (["schedule.milestones=[a]"], "schedule.milestones must be a number above 0, got a"),
    (["schedule.warmup_epochs=-1"], "schedule.warmup_epochs must be an integer of at least 0, got -1"),
    (["model.depth=9"], "model.depth must be 6n \\+ 2, got 9; type model.depth=8"),
    (["dataset=cifar10", "dataset.classes=20"], "dataset.classes must be 10 or 100, got 20"),
    (["compressor._target_=nonsense"], "compressor._target_ must be .*, got nonsense; type compressor="),
    (
        ["compressor._target_=torch.nonsense"],
        "compressor._target_ must be .*, got torch.nonsense: torch has no nonsense; type compressor=",
    ),
    (
        ["paths.runs=/etc/hosts/x"],
        "paths.runs must be a folder .*, got /etc/hosts/x: /etc/hosts is a file; type paths.runs=",
    ),
    (["paths.runs=''"], "paths.runs must be a folder, got ''; type paths.runs=results/runs"),
    (["paths=x"], "paths must be a group of options, got x; type paths.data="),
    (["~epochs"], "epochs must be there, got ~epochs; type epochs=60"),
    (
        [f"paths.runs={300 * 'x'}"],
        "paths.runs must be a folder that can be written, got x+ in .*: File name too long; type paths.runs=",
    ),
    ([f"resume={300 * 'x'}"], "resume must be a run folder with a config.yaml, got x+; type resume="),
    (["~comm"], "comm must be there, got ~comm; type comm="),
    (["~comm.timeout"], "comm.timeout must be there, got ~comm.timeout; type comm.timeout=600"),
    (["~compressor"], "compressor must be there, got ~compressor; type compressor=NAME"),
    (["~epocs"], "'epocs' does not exist; type"),
    (["epochs"], "epochs cannot be read: .*; type KEY=VALUE"),
    (["epochs=["], "epochs=\\[ cannot be read: .*; type KEY=VALUE"),
    (["=3"], "must be given by name, got int; type GROUP=NAME"),
    (["epochs=1,2"], "epochs must be one value, got 1,2; type -m epochs=1,2"),
    (["seed=0,1"], "seed must be one value, got 0,1; type -m seed=0,1 to run each$"),
    (["paths.data=/a,b"], "paths.data must be one value, got /a,b; type -m .* or 'paths.data=\"/a,b\"' for one"),
    (["paths.data=/a(b)"], "paths.data=/a\\(b\\) cannot be read, .*; type 'paths.data=\"/a\\(b\\)\"'"),
    (["compressor=accordion"], "compressor must be .*, got accordion, .*; type adaptive=accordion$"),
    (["compressor=dense"], "compressor must be a known name, got dense; type compressor=none "),
    (["sync.h=4"], "sync.h is called sync.period here; type sync.period=4 "),
    (["hydra.foo=1"], "hydra.foo is no option of Hydra; type --hydra-help"),
    (["lr=0.2"], "lr is called optimizer.lr here; type optimizer.lr=0.2$"),
    (["+compressor=none"], "compressor is chosen already, got .*; type compressor=NAME"),
    (["seed=${foo}"], "seed must be a value, .* means nothing: there is no option foo; type seed=0$"),
    (
        ["batch_size=${oc.env:NOT_SET}"],
        "batch_size must be .* no environment variable NOT_SET is set; type batch_size=",
    ),
    (["epochs=${epochs}"], "epochs must be .* in a circle; type epochs="),
    (["optimizer.lr=${nofunc:1}"], "optimizer.lr must be .* there is no function nofunc; type optimizer.lr="),
    (["hydra/launcher=foo"], "Could not find 'hydra/launcher/foo'"),
    (["resume=nowhere"], "resume must be a run folder .*, got nowhere; type resume=results/runs/RUN"),
    (["resume=3"], "resume must be a run folder with a config.yaml, got 3"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("overrides, told", REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_one_sentence(overrides, told):
    assert re.search(told, sentence(*overrides)), sentence(*overrides)


def test_more_processes_than_gpus():
    cfg = composed.cfg("comm=nccl", "comm.processes=2")
    with pytest.raises(ConfigError, match=r"comm.processes must be at most 1, .*, got 2; type comm.processes=1"):
        placement.place(RunConfig.from_dict(cfg), environ={}, gpus=1)
    started = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match=r"comm.processes must be at most 2, .*, got 4"):
        placement.place(RunConfig.from_dict(composed.cfg("comm=nccl")), environ=started, gpus=2)


def test_one_experiment_and_one_of_its_arms():
    arms = {"params": {"+arm": "dense,fast"}}
    command_line.refuse_unclear(["+experiment=[a/b,a/faithful]", "+arm=dense"], arms, {"arm": "dense"})
    command_line.refuse_unclear(["epochs=3"], {}, {})
    with pytest.raises(ConfigError, match=r"experiment must be one, .*, got a/b and c/d; type \+experiment=a/b"):
        command_line.refuse_unclear(["+experiment=[a/b,c/d]", "+arm=dense"], arms, {"arm": "dense"})
    with pytest.raises(ConfigError, match=r"arm must be one of dense,fast .*, got none; type \+arm=dense"):
        command_line.refuse_unclear(["+experiment=a/b", "hydra.mode=RUN"], arms, {})


# ---- every option of every YAML file, fed with a value of the wrong kind

# may be called nonsense
FREE_TEXT = {"label", "note", "paths.data", "paths.runs", "dataset.folder", "dataset.file"}
FREE_TEXT |= {"tracker.project", "tracker.uri", "tracker.experiment"}
NOT_HERE = set() if importlib.util.find_spec("mlflow") else {"tracker=mlflow"}  # refused for lack of its package
MAY_BE_TRUE = {"comm.overlap", "channels_last"}  # null = as the backend has it
TEXTS = {f"dataset={name}" for name in ("wikitext2", "ptb", "pydocs", "synthetic_text")}
GROUPS = sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def leaves(node: dict, prefix: str = "") -> dict:
    found = {}
    for name, value in node.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


@functools.cache
def options() -> dict[str, list[tuple[str, object]]]:
    """Choice -> its options and their defaults."""
    root = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    found = {"": list(leaves({k: v for k, v in root.items() if k not in ("defaults", "hydra")}).items())}
    for group in GROUPS:
        for name in yaml_names(group):
            node = {key: value for key, value in yaml_node(group, name).items() if key != "defaults"}
            if ("_target_" in node or group == "comm") and f"{group}={name}" not in NOT_HERE:
                prefix = f"adaptive.{name}." if group == "adaptive" else f"{group}."
                found[f"{group}={name}"] = list(leaves(node, prefix).items())
    return found


def whole_of(choice: str) -> dict:
    """A configuration with that choice which runs."""
    overrides = [choice] if choice else []
    if choice in TEXTS:
        overrides += ["model=lstm_small"]
    if "lstm" in choice:
        overrides += ["dataset=synthetic_text"]
    if "adaptive=" in choice:
        name = choice.partition("=")[2]
        fitting = next(c for c in ("qsgd", "topk") if matrix.of_pair("compressor", c, "adaptive", name) is None)
        overrides += [f"compressor={fitting}"]
    if choice == "network=custom":
        overrides += ["network.bandwidth=1e8"]
    return composed.cfg(*overrides)


def _target_of(cfg: dict, key: str) -> str | None:
    node = cfg
    for part in key.split(".")[:-1]:
        node = node[part]
    return node.get("_target_")


@pytest.mark.sample(11)
@pytest.mark.parametrize("choice", options())
def test_wrong_kind_in_plain_yaml(choice):
    whole = whole_of(choice)
    for key, default in options()[choice]:
        wrong = [{"odd": 1}, [{"odd": 1}]]
        wrong += [] if key in FREE_TEXT else ["nonsense"]
        may_be_null = instantiate._of_several_kinds(_target_of(whole, key)).get(key.rpartition(".")[2])
        wrong += [] if default is None or may_be_null else [None]
        wrong += [] if isinstance(default, bool) or key in MAY_BE_TRUE else [True]
        wrong += [3] if isinstance(default, bool | str | list) else []
        for value in wrong:
            cfg = copy.deepcopy(whole)
            *path, last = key.split(".")
            node = cfg
            for part in path:
                node = node[part]
            assert node[last] == default or key == "network.bandwidth"
            node[last] = value
            with pytest.raises(ConfigError) as caught:
                train.run(cfg)
            told = str(caught.value)
            lacks = told.endswith("; type pip install 'accordion-bench[hf]'")  # a package without which none is right
            assert "\n" not in told and "; type" in told and (last in told or lacks), (key, value, told)


# ---- resume


@pytest.fixture
def stopped(tmp_path) -> RunFolder:
    """The folder of a run that has not finished."""
    cfg = composed.cfg(POWERSGD, "compressor.rank=4", "epochs=7", "comm=gloo", "comm.processes=2")
    return RunFolder.create(str(tmp_path / "runs"), "x", {**cfg, "workers": 4})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "overrides, told",
    [
        (["epochs=8"], "epochs must be 7 for a run without a checkpoint to continue from, got 8; type"),
        (["compressor=topk"], "compressor must be powersgd as .*, got topk"),
        (["compressor=powersgd"], "compressor.rank must be 4 as .*, got 2"),
        (["adaptive=accordion"], "adaptive must be none as .*, got accordion"),
        (["workers=8"], "workers must be 4 as .*, got 8"),
        (["comm=gloo", "comm.processes=3"], "workers must be a multiple of comm.processes=3, got 4"),
        (["comm.bucket_cap_mb=3"], "comm.bucket_cap_mb must be null as in the run that is resumed, got 3; type"),
    ],
)
def test_resume_with_another_configuration(stopped, overrides, told):
    assert re.search(told, sentence(f"resume={stopped.path}", *overrides))


def test_resume_keeps_what_is_saved_and_takes_what_may_differ(stopped):
    typed = [f"resume={stopped.path}", "comm.timeout=5", "checkpoint.every=3", "epochs=7"]
    cfg = continuation.resumed_config(composed.cfg(*typed), set(command.typed(typed)))
    assert (cfg["compressor"]["rank"], cfg["epochs"], cfg["workers"]) == (4, 7, 4)
    kept = {"backend": "gloo", "processes": 2, "workers_per_process": None, "timeout": 5}
    assert {key: cfg["comm"][key] for key in kept} == kept
    assert cfg["checkpoint"]["every"] == 3
    typed = [f"resume={stopped.path}", "comm=simulated"]
    cfg = continuation.resumed_config(composed.cfg(*typed), set(command.typed(typed)))
    assert placement.place(RunConfig.from_dict(cfg), environ={}, gpus=0) == placement.Placement("simulated", 1, 4)
    assert cfg["choices"]["comm"] == "simulated"


def test_resume_of_a_folder_that_cannot_be_written(stopped, monkeypatch):
    def refused(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(compose.os, "access", lambda path, mode: path != stopped.path)
    monkeypatch.setattr(compose.tempfile, "TemporaryFile", refused)
    told = f"resume must be a folder that can be written, got {stopped.path}: Read-only file system; type resume=null"
    assert sentence(f"resume={stopped.path}") == told


def test_resume_of_a_finished_run(stopped):
    stopped.finish({"metric": 0.5})
    told = f"resume must be a run that has not finished, got {stopped.path}, .*; type python -m accordion_bench.report"
    assert re.search(told, sentence(f"resume={stopped.path}"))


# ---- data that is not there


def test_missing_data_without_network(monkeypatch, tmp_path):
    """A network that answers nothing at all: within seconds, and naming what to type."""
    import socket

    from accordion_bench.datasets import cifar

    monkeypatch.undo()
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)  # what an unfinished copy leaves
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(cifar, "TIMEOUT", 0.5)
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        told = sentence("dataset=cifar10", f"paths.data={tmp_path / 'data'}", f"paths.runs={tmp_path / 'runs'}")
    assert re.search("paths.data must hold the folder cifar-10-batches-py, got .*; type paths.data=FOLDER", told)
    assert not (tmp_path / "runs").exists()


# ---- settings without effect


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "overrides, key",
    [
        ([POWERSGD, ACCORDION, "compressor.rank=4"], "compressor.rank"),
        ([TOPK, ACCORDION, "compressor.density=0.3"], "compressor.density"),
        ([POWERSGD, "compressor.error_feedback=false", "compressor.residual=aggregate"], "compressor.residual"),
        ([POWERSGD, "compressor.on_switch=redraw"], "compressor.on_switch"),
        ([POWERSGD, ACCORDION, "compressor.warm_start=false", "compressor.on_switch=redraw"], "compressor.on_switch"),
        ([POWERSGD, "compressor.eps=1e-6"], "compressor.eps"),
        ([POWERSGD, ACCORDION, "adaptive.accordion.interval=60"], "adaptive.accordion.interval"),
        (["schedule.lr_scaling=none", "schedule.warmup_epochs=3"], "schedule.warmup_epochs"),
        (["workers=1", "schedule.warmup_epochs=3"], "schedule.warmup_epochs"),
        (["workers=1", "schedule.lr_scaling=sqrt"], "schedule.lr_scaling"),
        (["schedule.milestones=[]", "schedule.gamma=0.5"], "schedule.gamma"),
        (["schedule.milestones=[3]", "schedule.gamma=1"], "schedule.milestones"),
        (["optimizer.momentum=0", "optimizer.nesterov=false"], "optimizer.nesterov"),
        (["schedule.milestones=[150,250]"], "schedule.milestones"),
        (["workers=1", TOPK, "compressor.reduce=sum"], "compressor.reduce"),
        (["target_every=0.5"], "target_every"),
        (["model=gpt_nano", "dataset=pydocs_bytes", "optimizer=adamw", "bn=local"], "bn"),
        (["paths.data=/data"], "paths.data"),
        (["micro_batch_size=32"], "micro_batch_size"),
        ([BATCH, f"{BATCH_KEY}.large_batch=64", f"{BATCH_KEY}.factor=4"], f"{BATCH_KEY}.factor"),
        ([BATCH, f"{BATCH_KEY}.fixed_switch=4", f"{BATCH_KEY}.eta=0.2"], f"{BATCH_KEY}.eta"),
        ([BATCH, f"{BATCH_KEY}.fixed_switch=4", f"{BATCH_KEY}.statistic=mean"], f"{BATCH_KEY}.statistic"),
        ([BATCH, f"{BATCH_KEY}.fixed_switch=4", f"{BATCH_KEY}.interval=2"], f"{BATCH_KEY}.interval"),
        (["adaptive=adabatch", "adaptive.adabatch.freq=60"], "adaptive.adabatch.freq"),
        (["comm=simulated", "comm.timeout=5"], "comm.timeout"),
        (["comm.timeout=5"], "comm.timeout"),
        (["compressor=signsgd", "compressor.ties=plus"], "compressor.ties"),
        ([DISTEF, "compressor.collective=all_gather", "compressor.server=literal"], "compressor.server"),
        ([DISTEF, "compressor.residual_units=gradient", "compressor.zero_lr=flush"], "compressor.zero_lr"),
        ([DISTEF, "compressor.server=literal", "compressor.align=tensor"], "compressor.align"),
        (["compressor=trn", "compressor.balanced=true", "compressor.bucket_size=null"], "compressor.balanced"),
        (["compressor=qsgd", "compressor.p=0.3"], "compressor.p"),
        (["compressor=threshold", "compressor.threshold=1", "compressor.sample_share=0.1"], "compressor.sample_share"),
        (["compressor=threshold", "compressor.threshold=1", "compressor.least=0.1"], "compressor.least"),
        (["compressor=qsgd", "adaptive=alqn", "adaptive.alqn.num_components=9"], "adaptive.alqn.num_components"),
        (["compressor=qsgd", "adaptive=[accordion,alq]", "compressor.bits=3"], "compressor.bits"),
        (["sync=local_sgd", "sync.period=1000"], "sync.period"),
        (["sync=post_local_sgd", "sync.period=361"], "sync.period"),
        (["adaptive=accordion_sync", "sync.period=4"], "sync.period"),
        (["adaptive=adacomm", "adaptive.adacomm.initial=16", "sync.period=4"], "sync.period"),
        (["adaptive=qsr", "adaptive.qsr.base_period=4", "sync.period=5"], "sync.period"),
        ([DISTEF, "sync=diloco", "compressor.worker_momentum=true"], "compressor.worker_momentum"),
        ([DISTEF, "sync=local_sgd", "compressor.zero_lr=flush"], "compressor.zero_lr"),
        ([DISTEF, "sync=local_sgd", "compressor.weight_decay_mode=decoupled"], "compressor.weight_decay_mode"),
    ],
)
def test_a_setting_without_effect_warns(overrides, key, capsys):
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))
    warnings = capsys.readouterr().err.splitlines()
    assert [w for w in warnings if w.startswith(f"warning: {key} has no effect here: ")] == warnings != []


@pytest.mark.parametrize("scheme", ["slowmo", "local_sgd", "post_local_sgd", "diloco"])
def test_a_scheme_typed_by_both_of_its_names(scheme, capsys):
    for overrides in ([f"sync={scheme}", f"adaptive={scheme}"], [f"adaptive={scheme}"], [f"sync={scheme}"]):
        with pytest.raises(AssertionError, match="not refused"):
            train.run(composed.cfg(*overrides), command.typed(overrides))
        told = f"adaptive={scheme} is another name of sync={scheme}, which is typed too; it is applied once"
        assert (told in capsys.readouterr().err) == (len(overrides) == 2)


@pytest.mark.parametrize("overrides", [["sync=diloco", "epochs=2"], ["sync=slowmo", "sync.period=1000"]])
def test_a_run_without_an_outer_step_warns(overrides, capsys):
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))
    assert re.fullmatch(r"warning: sync=\w+ takes no outer step here: .*\n", capsys.readouterr().err)


def test_periods_with_an_effect_do_not_warn(capsys):
    overrides = ["sync=post_local_sgd", "sync.period=360", "adaptive=adacomm", "adaptive.adacomm.max_period=360"]
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("option", ["levels=[-1,-0.2,0.1,1]", "bucket_size=null"])
def test_options_of_several_kinds_are_taken_from_the_command_line(option, capsys):
    overrides = ["compressor=qsgd", f"compressor.{option}", *(["compressor.bits=null"] if "levels" in option else [])]
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))


def test_a_fitted_codebook_leaves_the_bits_alone(capsys):
    overrides = ["compressor=qsgd", "adaptive=alq", "compressor.bits=3", "adaptive.alq.num_components=9"]
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))
    assert capsys.readouterr().err == ""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "compressor, warned",
    [("qsgd", True), ("terngrad", True), ("natural", False), ("randomk", False), ("none", False), ("fp4", False)],
)
def test_error_feedback_is_warned_of_where_more_may_be_lost_than_there_was(compressor, warned, capsys):
    overrides = [f"compressor={compressor}", *(["compressor.error_feedback=true"] if compressor != "none" else [])]
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))
    assert ("may exceed the input of this compressor" in capsys.readouterr().err) == warned


def test_a_batch_that_grows_may_need_micro_batches(capsys):
    overrides = [BATCH, "micro_batch_size=64", f"{BATCH_KEY}.factor=4", f"{BATCH_KEY}.eta=0.2"]
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))
    assert capsys.readouterr().err == ""


def test_settings_with_an_effect_do_not_warn(capsys):
    overrides = [POWERSGD, "compressor.rank=4", "schedule.warmup_epochs=3", "micro_batch_size=16", "comm=gloo"]
    overrides += ["comm.timeout=5", "compressor.residual=aggregate"]
    with pytest.raises(AssertionError, match="not refused"):
        train.run(composed.cfg(*overrides), command.typed(overrides))
    assert capsys.readouterr().err == ""


# ---- the command itself


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrong", [["compressor=powersdg"], [POWERSGD, "compressor.rank=0"]])
def test_command_line(wrong, tmp_path):
    arguments = [sys.executable, "-m", "accordion_bench", *tiny.typed(tmp_path / "runs", *wrong)]
    done = subprocess.run(arguments, cwd=conf_dir().parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "; type compressor" in done.stderr
    assert not (tmp_path / "runs").exists()
