"""Run folders from strangers: each is an honest one of three epochs, and what somebody has done to it.

A maker gets the folder and changes its files; it may return another path, where the folder has got another name.
"""

import functools
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.report.test_report import run_folder

Maker = Callable[[Path], Path | None]

EPOCHS = 3  # honest runs beside them have four, and so are compared in another table
LINK, SCRIPT = "![x](http://evil.example/x.png)", "<script>alert(1)</script>"
MARKUP = "<a href='http://evil.example'>x</a>"
ESCAPE, NEWLINE = "\x1b]0;owned\x07\x1b[2J", "a\n\n# owned\n\n- b"
MATH, LONG = r"$\frac{$", "x" * 100_000
LAUGHS = "a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12))
LEVELS = {"conv.weight": 1, "stages.0.0.conv1.weight": 2, "fc.weight": 1}


def text(name: str, content: str | bytes) -> Maker:
    """A file has this content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: void((folder / name).write_bytes(data))


def option(key: str, value: Any) -> Maker:
    """An option of config.yaml, by its dotted key."""

    def make(folder: Path) -> None:
        config = yaml.load((folder / "config.yaml").read_text(), yaml.CSafeLoader)
        *above, last = key.split(".")
        node = config
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
        (folder / "config.yaml").write_text(yaml.dump(config, Dumper=yaml.CSafeDumper))

    return make


def of_json(name: str, **values: Any) -> Maker:
    """Values of summary.json or environment.json."""

    def make(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **values}))

    return make


def summary(**values: Any) -> Maker:
    return of_json("summary.json", **values)


def environment(**values: Any) -> Maker:
    return of_json("environment.json", **values)


def rows(**values: Any) -> Maker:
    """Columns of every row of metrics.jsonl."""

    def make(folder: Path) -> None:
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, **values}) + "\n" for row in found))

    return make


def raw_number(name: str, key: str, digits: str) -> Maker:
    """A number that Python itself would not write, in JSON; in every line."""

    def make(folder: Path) -> None:
        lines = [{**json.loads(line), key: "HERE"} for line in one_line_each(folder / name)]
        written = "".join(json.dumps(line).replace('"HERE"', digits) + "\n" for line in lines)
        (folder / name).write_text(written)

    return make


def one_line_each(file: Path) -> list[str]:
    lines = file.read_text().splitlines()
    return lines if file.suffix == ".jsonl" else [json.dumps(json.loads("".join(lines)))]


def pipe(name: str) -> Maker:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def link(name: str, to: str) -> Maker:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return make


def in_place(name: str) -> Maker:
    """A folder in the place of a file."""

    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def sparse(name: str, size: int = 10 << 30) -> Maker:
    return lambda folder: os.truncate(folder / name, size)


def named(name: str | bytes) -> Maker:
    def make(folder: Path) -> Path:
        new = folder.parent / os.fsdecode(name)
        return folder.rename(new)

    return make


def several(*makers: Maker) -> Maker:
    def make(folder: Path) -> Path:
        for maker in makers:
            folder = maker(folder) or folder
        return folder

    return make


def void(_: object) -> None:
    """Nothing, whatever was returned."""


def shown(key: str, value: Any) -> Maker:
    """A text that tables and figures show: of a run that shares its arm, or its setting, with no other."""
    alone = zlib.crc32(f"{key}{value}".encode()) / 2**42
    setting = option("model.alone", alone) if key in ("choices.model", "choices.dataset") else several()
    return several(option(key, value), option("compressor.density", 0.1 + alone), setting)


def target(path: Any, group: str = "compressor") -> Maker:
    """A class that the configuration names."""
    return option(f"{group}._target_", path)


MODELLED = several(
    option("network", {"bandwidth": 1e9, "latency": 5e-5, "jitter": 1e-4}),
    rows(rounds=10, modelled_seconds=1.0, modelled_comm_seconds=0.1, modelled_exposed_seconds=0.1),
    summary(rounds=10, modelled_seconds=1.0, modelled_comm_seconds=0.1),
)
FASTER = rows(seconds_by_phase=[["compute", 32, 30, 0.01]], seconds_by_bucket=[[4, 30, 0.01, [[0, 0, 0, 9, 1]], 0]])

CORPUS: dict[str, Maker] = {
    # code
    "payload": target("hostile_payload.Payload"),
    "payload of a policy": option("adaptive", {"accordion": {"_target_": "hostile_payload.Payload"}}),
    "payload of a scheme": several(target("hostile_payload.Payload", "sync"), option("choices.sync", "mine")),
    "payload inside of a list": option("compressor.parts", [{"_target_": "hostile_payload.Payload"}]),
    "payload as schedule": several(target("hostile_payload.Payload", "schedule"), rows(plan={"levels": LEVELS})),
    "payload as model": several(
        option("adaptive", {"accordion": {"_target_": "accordion_bench.adaptive.accordion.Accordion"}}),
        target("hostile_payload.Payload", "model"),
        rows(plan={"levels": LEVELS}),
    ),
    "tracker as schedule": target("accordion_bench.trackers.services.Wandb", "schedule"),
    "end of the process": target("unittest.__main__.X"),
    "call": target("os.system"),
    "target that is a list": target(["os.system"]),
    "target without a module": target("system"),
    "python tag": text("config.yaml", "choices: !!python/object/apply:os.system ['touch hostile_payload_ran']\n"),
    # depth and size
    "deep lists in YAML": text("config.yaml", "choices: " + "[" * 200_000),
    "deep mappings in YAML": text("config.yaml", "{a: " * 200_000),
    "deep entries in YAML": text("config.yaml", "- " * 200_000 + "x"),
    "deep keys in YAML": text("config.yaml", "? " * 200_000 + "x"),
    "deep environment": text("environment.json", '{"netlab": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    "deep summary": text("summary.json", '{"a": ' * 200_000 + "1" + "}" * 200_000),
    "deep rows": text("metrics.jsonl", '{"epoch": 0, "plan": ' + "[" * 200_000 + "]" * 200_000 + "}\n"),
    "rather deep rows": rows(decisions=json.loads("[" * 900 + "]" * 900)),
    "laughs": text("config.yaml", LAUGHS),
    "laughs that are merged": text("config.yaml", MERGED),
    "list inside itself": text("config.yaml", "choices: &a [*a]\n"),
    "many small values": text("config.yaml", "choices: [" + "1," * 1_000_000 + "]"),
    "sparse metrics": sparse("metrics.jsonl"),
    "sparse config": sparse("config.yaml"),
    "sparse summary": sparse("summary.json"),
    "sparse environment": sparse("environment.json"),
    # no files
    "pipe as config": pipe("config.yaml"),
    "pipe as metrics": pipe("metrics.jsonl"),
    "pipe as summary": pipe("summary.json"),
    "pipe as environment": pipe("environment.json"),
    "folder as config": in_place("config.yaml"),
    "folder as metrics": in_place("metrics.jsonl"),
    "folder as done": in_place("done"),
    "device as metrics": link("metrics.jsonl", "/dev/zero"),
    "device as config": link("config.yaml", "/dev/zero"),
    "link to itself": link("summary.json", "summary.json"),
    "circle of folders": link("inside", ".."),
    # names
    "byte that is no letter": named(b"run-\xff\xfe"),
    "newlines in the name": named(f"run {NEWLINE}"[:200].replace("/", "")),
    "escape sequence in the name": named(f"run {ESCAPE}"),
    "link in the name": named("run [x](http:evil)"),
    "formula in the name": named("=1+1"),
    "long name": named("r" * 255),
    # texts
    "formula of a plot": shown("choices.compressor", MATH),
    "formula of a plot in the model": shown("choices.model", MATH),
    "newlines in the model": shown("choices.model", NEWLINE),
    "escape sequence in the compressor": shown("choices.compressor", ESCAPE),
    "script as data set": shown("choices.dataset", SCRIPT),
    "picture as arm": several(shown("choices.arm", LINK), shown("choices.experiment", LINK)),
    "formula of a spreadsheet": shown("choices.compressor", '=HYPERLINK("http://evil.example")'),
    "minus as arm": shown("choices.compressor", "-x"),
    "macro of LaTeX": shown("choices.compressor", r"\input{/etc/passwd}"),
    "table of Markdown": shown("choices.compressor", "`a` | b\\| **c**"),
    "half a letter": environment(processor="P\ud800", commit="\udfff", host="\ud83d"),
    "half a letter in the metrics": rows(norms={"\ud800": 1.0}, decisions={"\udc00": {"norm": [1.0]}}),
    "letters from right to left": shown("choices.compressor", "abc\u202edef\u2066"),
    "long label": several(shown("choices.compressor", LONG), shown("choices.model", LONG)),
    "long layer": rows(plan={"levels": {LONG: 1, "\n": 2}}, norms={LONG: 1.0}),
    "newlines in the environment": environment(command=f"python -m accordion_bench {NEWLINE}", processor=NEWLINE),
    "secrets": environment(command="python -m accordion_bench tracker.api_key=hunter2", GITHUB_TOKEN="hunter2"),
    "formula as metric": several(rows(**{"=1+1": 0.5}), summary(metric_name="=1+1", metric=0.5)),
    "markup as metric": several(rows(**{MARKUP: 0.5}), summary(metric_name=MARKUP, metric=0.5)),
    "long metric": several(rows(**{LONG: 0.5}), summary(metric_name=LONG)),
    # numbers
    "metric that is none": summary(metric=float("nan")),
    "infinite metric": summary(metric=float("inf")),
    "infinite time": several(summary(seconds=float("inf")), rows(seconds=float("inf"))),
    "time that is none": rows(exposed_seconds=float("nan")),
    "number of 5000 digits": raw_number("summary.json", "test_size", "1" + "0" * 5000),
    "number of 4000 digits": raw_number("summary.json", "test_size", "1" + "0" * 4000),
    "rate of 4000 digits": raw_number("metrics.jsonl", "lr", "1" + "0" * 4000),
    "bytes of 300 digits": raw_number("summary.json", "payload_bytes", "1" + "0" * 300),
    "cores of 4000 digits": raw_number("environment.json", "cpu_cores", "1" + "0" * 4000),
    "seed of 5000 digits": text("config.yaml", "choices: {model: a}\nseed: 0x" + "f" * 5000),
    "workers without end": several(MODELLED, summary(workers=10**15)),
    "workers of an exchange without end": several(
        MODELLED, rows(seconds_by_bucket=[[10**15, 1, 1, [[1, 1, 1, 1, 1]]]], seconds_by_phase=[["compute", 1, 1, 1]])
    ),
    "more processes than workers": several(MODELLED, FASTER, summary(processes=8)),
    "network of another kind": several(MODELLED, FASTER, option("network.magic", 3)),
    "phase that is a list": several(MODELLED, FASTER, rows(seconds_by_phase=[["compute", [1], 1, 1.0]])),
    "no epochs": option("epochs", -1),
    "epochs without end": several(option("epochs", 10**18), summary(epochs=10**18)),
    "period without end": option("sync", {"period": float("inf")}),
    # kinds
    "choices that are a list": option("choices", ["model"]),
    "experiment that is a list": option("choices.experiment", ["a", ["b"]]),
    "adaptive that is text": option("adaptive", "accordion"),
    "policy that is text": option("adaptive", {"accordion": "x"}),
    "policy without meaning": option("adaptive", {"accordion": {"weak": {}, "strong": [], "critical": 7}}),
    "groups without meaning": several(option("choices.sync", "hierarchical"), option("sync", {"groups": [1, "x"]})),
    "target that is a list ": option("target", [0.5]),
    "scale that is a mapping": option("scale", {"full": 1}),
    "subset that is text": option("dataset.subset", "all"),
    "held out that is text": option("dataset.validation", "some"),
    "keys of all kinds": text("config.yaml", "1: a\n2.5: b\nnull: c\n? [a, b]\n: d\nchoices: {1: 2, true: x}\n"),
    "types of YAML": text("config.yaml", "choices: {model: 2001-01-01, a: !!binary aGk=, b: !!set {x}}\n"),
    "value that is not of its type": text("config.yaml", "choices: !!bool x\n"),
    "date that is none": text("config.yaml", "choices: !!timestamp x\n"),
    "UTF-16": text("config.yaml", "choices: {}\n".encode("utf-16")),
    "bytes": text("config.yaml", bytes(range(256)) * 9),
    "list as environment": text("environment.json", "[1, 2]"),
    "versions that are a list": environment(versions=[1], gpus={"a": 1}, threads=[2], load="x", started=3),
    "gpus of all kinds": environment(gpus=[{"a": [1]}, None, 10**30]),
    "lab without meaning": environment(netlab={"rate": "x", "slow_host": [1], "cuts": {"a": 1}, "delay": []}),
    "notes that are lists": summary(went_dense={"a": [1]}, not_learned=["x"], selected_by=3),
    "levels that are text": several(
        option("adaptive", {"accordion": {"_target_": "accordion_bench.adaptive.accordion.Accordion"}}),
        rows(plan={"levels": {"conv.weight": "x", "fc.weight": None, "bn": [1]}}),
    ),
    "norms that are text": rows(norms={"a": "x", "b": None}),
    "decisions without meaning": rows(decisions={"accordion": {"norm": "abc", "names": 3}}),
    "rows that are lists": text("metrics.jsonl", "[0]\n[1]\n[2]\n"),
    "rows of other columns": text("metrics.jsonl", '{"epoch": 0}\n{"epoch": true}\n{"epoch": 2}\n'),
}


def make(root: Path, name: str, number: int = 0) -> Path:
    """A folder of the corpus.

    Args:
        root: where it is to lie.
        name: of the corpus.
        number: its seed, so that none repeats another.
    """
    folder = root / f"{number:03d}-{name.replace(' ', '-')}"
    folder.mkdir(parents=True)
    for file, content in honest().items():
        (folder / file).write_bytes(content.replace(b"seed: 0\n", b"seed: %d\n" % number))
    return CORPUS[name](folder) or folder


@functools.cache
def honest() -> dict[str, bytes]:
    """The files of an honest run of three epochs."""
    with tempfile.TemporaryDirectory() as root:
        folder = run_folder(Path(root), "topk", epochs=EPOCHS)
        return {file.name: file.read_bytes() for file in folder.iterdir()}
