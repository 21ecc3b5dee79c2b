"""What a disk or a stranger has changed in a run folder is told, or changes nothing: one digit is enough."""

import functools
import importlib.util
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

import accordion_bench as ab
from accordion_bench import train
from accordion_bench.config import continuation
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.placement import place
from accordion_bench.report.read import read_run
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint, durable, saving, weights
from accordion_bench.runs.folder import APPENDED, REPLACED, RunFolder
from accordion_bench.runs.metrics import wrong_in_rows
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.runs.test_resume import finished_and_stopped


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Configuration and folder of a finished run and of one that was stopped."""
    return finished_and_stopped(
        tmp_path_factory.mktemp, "compressor=topk", "epochs=3", "schedule=constant", "dataset.validation=0.25"
    )


@pytest.fixture
def copied(runs, tmp_path):
    def copy(kind: str) -> tuple[dict, Path]:
        cfg, folder = runs[kind]
        place = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        cfg = {**cfg, "paths": {**cfg["paths"], "runs": str(place)}}
        return cfg, Path(shutil.copytree(folder, place / folder.name))

    return copy


def without_checksums(folder: Path) -> None:
    """As an earlier version has written it."""
    for name in ("summary.json", "environment.json"):
        content = json.loads((folder / name).read_text())
        content.pop(durable.KEY)
        (folder / name).write_text(json.dumps(content))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_rows(folder, [{key: value for key, value in row.items() if key != durable.KEY} for row in rows])


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_rows(folder: Path, rows: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def resumed(cfg: dict, folder: Path, **changes: object) -> None:
    """What `resume=` looks at before it trains."""
    asked, typed = {**cfg, **changes, "resume": str(folder)}, {"resume", *changes}
    config = RunConfig.from_dict(continuation.resumed_config(asked, typed))
    continuation.refuse_changed_history(config, train.validate(config, place(config)))


def flips(file: Path, digits: bool, most: int) -> list[tuple[int, bytes]]:
    """Places in a file with the byte that comes there: another digit for a digit, else one bit turned."""
    data, draw = file.read_bytes(), random.Random(file.name)
    at = [i for i, byte in enumerate(data) if not digits or chr(byte).isdigit()]
    places = sorted(draw.sample(at, min(most, len(at))))
    return [(i, str((data[i] - 48 + 1) % 10).encode() if digits else bytes([data[i] ^ 0x40])) for i in places]


def with_a_flip(file: Path, data: bytes, place: int, byte: bytes) -> None:
    file.write_bytes(data[:place] + byte + data[place + 1 :])


@pytest.mark.parametrize("key", ["crc33", "grc32", "", "c c32"])
def test_a_checksum_whose_name_has_changed_is_one(key):
    """Else one flip in it would make a file of an earlier version, which has none."""
    row = durable.json_text({"epoch": 1, "loss": 2.5}).replace("crc32", key)
    options = durable.yaml_text("seed: 1\n")
    with pytest.raises(durable.Changed):
        durable.checked_json(row, json.loads(row))
    with pytest.raises(durable.Changed):
        durable.check_yaml(options.replace("crc32", key))
    with_a_name = json.dumps({"epoch": 1, "commit": "0a1b2c3d"})
    assert durable.checked_json(with_a_name, json.loads(with_a_name)) == {"epoch": 1, "commit": "0a1b2c3d"}
    durable.check_yaml("commit: 0a1b2c3d\n")


def every_flip_is_told(runs: dict, tmp_path: Path, digits: bool, most: int) -> None:
    """No report takes a number that a flip has changed."""
    _, folder = runs["finished"]
    right = read_run(folder)
    assert right.finished
    copy = Path(shutil.copytree(folder, tmp_path / folder.name))
    for name in ("metrics.jsonl", "summary.json", "config.yaml", "environment.json"):
        data = (copy / name).read_bytes()
        for at, byte in flips(copy / name, digits, most):
            with_a_flip(copy / name, data, at, byte)
            found = read_run(copy)
            same = (found.config, found.summary, [*map(dict, found.rows)]) == (
                right.config, right.summary, [*map(dict, right.rows)],
            )  # fmt: skip
            if name == "environment.json":
                assert found.environment in ({}, right.environment) or "crc32" not in (copy / name).read_text()
            else:
                assert found.problem or same or "crc32" not in (copy / name).read_text(errors="replace"), (name, at)
        (copy / name).write_bytes(data)


@pytest.mark.parametrize("digits", [True, False])
def test_some_flips_are_told(digits, runs, tmp_path):
    every_flip_is_told(runs, tmp_path, digits, most=25)


@pytest.mark.slow
@pytest.mark.parametrize("digits", [True, False])
def test_flips_are_told(digits, runs, tmp_path):
    every_flip_is_told(runs, tmp_path, digits, most=1000)


def test_what_no_run_can_have_written_is_in_no_mean(runs):
    """Also without checksums."""
    rows = [dict(row) for row in read_run(runs["finished"][1]).rows]
    assert not wrong_in_rows(rows)
    changes = [
        (0, "accuracy", 1.7), (1, "accuracy", 7.5), (1, "validation_accuracy", -0.1), (2, "seconds", -5),
        (2, "payload_bytes", rows[1]["payload_bytes"] - 1), (1, "wire_bytes", 0), (2, "rounds", 1), (1, "step", 2),
        (1, "epoch", 0), (0, "epoch", -1), (2, "epoch", 5),
        (1, "compute_seconds", 0.0), (2, "dense_bytes", 7), (0, "lr", -0.1),
    ]  # fmt: skip
    for at, name, value in changes:
        changed = [{**row, name: value} if i == at else row for i, row in enumerate(rows)]
        assert wrong_in_rows(changed), (at, name, value)
    assert wrong_in_rows([rows[0], rows[1], rows[1], rows[2]]) and wrong_in_rows([rows[0], rows[2]])


@pytest.mark.parametrize(
    ("key", "value"),
    [("metric", 0.99), ("best_metric", 0.99), ("best_epoch", 2), ("payload_bytes", 5), ("seconds", 1e-3), ("steps", 1)],
)
def test_a_summary_of_another_end_is_told(key, value, copied):
    _, folder = copied("finished")
    without_checksums(folder)
    assert read_run(folder).finished
    summary = json.loads((folder / "summary.json").read_text())
    if summary[key] == value:
        value = 0
    (folder / "summary.json").write_text(json.dumps({**summary, key: value}))
    assert "summary.json says" in read_run(folder).problem


def test_weights_are_compared_with_what_was_written(copied):
    """Also those of a run that has no summary yet, by torch's own checksums."""
    _, folder = copied("finished")
    file = folder / "weights.pt"
    right, data = ab.load_weights(folder), file.read_bytes()
    assert all(torch.equal(right[name], tensor) for name, tensor in ab.load_weights(file).items())
    for at in range(0, len(data), len(data) // 40):
        with_a_flip(file, data, at, bytes([data[at] ^ 0x40]))
        with pytest.raises(ConfigError, match=r"weights.pt must be as the run has written it, got weights.pt"):
            ab.load_weights(folder)
    file.write_bytes(data)
    (folder / "summary.json").unlink()
    assert ab.load_weights(folder).keys() == right.keys()
    for at in range(0, len(data), len(data) // 40):
        with_a_flip(file, data, at, bytes([data[at] ^ 0x40]))
        try:
            found = ab.load_weights(folder)
        except ConfigError:
            continue
        assert all(torch.equal(right[name], found[name]) for name in right)  # between the entries of the archive
    file.unlink()
    with pytest.raises(ConfigError, match=r"got weights.pt is missing"):
        ab.load_weights(folder)


def test_threads_are_those_of_the_checkpoint(copied):
    """Last bits hang on them: environment.json is where a person would change them."""
    cfg, folder = copied("stopped")
    there = json.loads((folder / "environment.json").read_text())
    first = there["threads"]
    (folder / "environment.json").write_text(json.dumps({**there, "threads": first + 1}))
    assert continuation.resumed_config({**cfg, "resume": str(folder)}, {"resume"})["threads"] == first


@pytest.mark.parametrize("threads", [10**5, 10**9, 0, -1, 10**40])
def test_threads_that_no_machine_starts_are_refused(threads, copied):
    """Before OpenMP is asked, which ends the process."""
    cfg, folder = copied("stopped")
    shutil.rmtree(folder / "checkpoint")
    there = json.loads((folder / "environment.json").read_text())
    del there[durable.KEY]
    (folder / "environment.json").write_text(json.dumps({**there, "threads": threads}))
    with pytest.raises(ConfigError, match="threads must be") as refused:
        continuation.resumed_config({**cfg, "resume": str(folder)}, {"resume"})
    assert len(str(refused.value)) < 400


def changed_manifest(path: Path, change) -> None:
    """A manifest that says something else, with its checksum."""
    content = json.loads((path / saving.FILE).read_text())
    change(content)
    (path / saving.FILE).write_text(durable.json_text(content))


@pytest.mark.parametrize(
    "trained",
    [
        {"steps_per_epoch": 0}, {"steps_per_epoch": -1}, {"step": 10**15}, {"step_in_epoch": 10**15}, {"epoch": 10**12},
        {"epoch": -1}, {"step_in_epoch": -1}, {"step": "x"}, {"step": 6.5}, {"epoch": None},
        {"steps_per_epoch": 10**18},
    ],
)  # fmt: skip
def test_how_far_a_run_has_come_is_bounded(trained, copied):
    """Nothing divides by it, and nothing counts to it."""
    cfg, folder = copied("stopped")
    path = checkpoint.latest(folder)
    changed_manifest(path, lambda content: content["trained"].update(trained))
    rows = [{key: value for key, value in row.items() if key != durable.KEY} for row in rows_of(folder)]
    for step in (10**15, -3, None, "x"):
        write_rows(folder, [{**row, "step": step} for row in rows])
        for changes in ({}, {"epochs": 5}):
            try:
                resumed(cfg, folder, **changes)
            except ConfigError as refused:
                assert "\n" not in str(refused)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_nothing_in_the_place_of_a_file_is_waited_for(kind, copied):
    for name in (*REPLACED, *APPENDED):
        if kind == "folder" and name in ("checkpoint", "tensorboard", "wandb"):
            continue
        cfg, folder = copied("stopped")
        file = folder / name
        if file.is_dir():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        os.mkfifo(file) if kind == "pipe" else file.mkdir()
        with pytest.raises(ConfigError) as refused:
            train.run({**cfg, "resume": str(folder)}, {"resume": None})
        assert name in str(refused.value) and "\n" not in str(refused.value)


def test_rows_that_go_in_mid_run_are_told(tmp_path, capsys, monkeypatch):
    """The run has trained, and its report would be one of fewer epochs."""
    cfg = composed.run(tmp_path, "epochs=3", "schedule=constant")
    end_epoch = Trainer.end_epoch

    def and_lose(self):
        end_epoch(self)
        if self.position.epoch == 1:
            (self.folder.path / "metrics.jsonl").unlink()

    monkeypatch.setattr(Trainer, "end_epoch", and_lose)
    train.run(cfg)
    assert "metrics.jsonl" in capsys.readouterr().err
    assert read_run(tiny.only(tmp_path)).problem


def test_the_files_of_two_workers_are_not_swapped(copied):
    _, folder = copied("stopped")
    path = checkpoint.latest(folder)
    a, b = "worker-0.pt", "worker-1.pt"
    (path / a).rename(path / "x")
    (path / b).rename(path / a)
    (path / "x").rename(path / b)

    def swap(content: dict) -> None:
        files = content["files"]
        files[a], files[b] = files[b], files[a]

    changed_manifest(path, swap)
    with pytest.raises(saving.Damaged, match=r"worker-0.pt belongs to another worker or step"):
        checkpoint._loaded(path / a, saving.read_manifest(path))


def test_tensors_of_another_shape_are_refused(copied):
    """Each of them that `copy_` would broadcast to the right shape; times are any number of numbers."""
    cfg, folder = copied("stopped")
    path = checkpoint.latest(folder)
    for name in ("shared.pt", "worker-0.pt"):
        right = torch.load(path / name, weights_only=True)
        written = (path / name).read_bytes(), (path / saving.FILE).read_text()
        for key, wrong in one_entry({key: value for key, value in right.items() if key != "clock"}):
            found = {name: weights.write(path / name, {**right, **wrong})}
            changed_manifest(path, lambda content, found=found: content["files"].update(found))
            with pytest.raises(ConfigError, match="whose checkpoints this version has written"):
                train.run({**cfg, "resume": str(folder)}, {"resume": None})
            (path / name).write_bytes(written[0])
            (path / saving.FILE).write_text(written[1])
            assert not RunFolder(folder).done, key


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *(("shared.pt", keys) for keys in (["went_dense"], ["looks"], ["clock", "series"])),
        *(("worker-0.pt", [key]) for key in ("waiting_seconds", "rng")),
    ],
)
def test_state_of_an_older_version_is_refused_in_one_sentence(copied, name, keys):
    """It lacks what this version keeps."""
    cfg, folder = copied("stopped")
    path = checkpoint.latest(folder)
    state = torch.load(path / name, weights_only=True)
    *above, last = keys
    functools.reduce(lambda node, key: node[key], above, state).pop(last)
    found = {name: weights.write(path / name, state)}
    changed_manifest(path, lambda content: content["files"].update(found))
    with pytest.raises(ConfigError, match="whose checkpoints this version has written") as refused:
        train.run({**cfg, "resume": str(folder)}, {"resume": None})
    assert "\n" not in str(refused.value) and f"KeyError: '{last}'" in str(refused.value)


def one_entry(state, path: str = ""):
    """A state for each of its floating tensors of several entries, with the first of them alone in its place."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and state.numel() > 1:
            yield path, state.flatten()[:1].clone()
    elif isinstance(state, dict):
        for key, value in state.items():
            for where, wrong in one_entry(value, f"{path}.{key}"):
                yield where, {**state, key: wrong}
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            for where, wrong in one_entry(value, f"{path}.{i}"):
                yield where, type(state)([*state[:i], wrong, *state[i + 1 :]])


def test_weights_as_safetensors(tmp_path):
    """The same tensors as torch's file, tied ones too; checked in the same way."""
    pytest.importorskip("safetensors")
    runs = [tmp_path / name for name in ("a", "b")]
    for root, words in zip(runs, ([], ["checkpoint.safetensors=true", "checkpoint.best=true"]), strict=True):
        train.run(tiny.cfg(root, "epochs=1", *words))
    plain, folder = map(tiny.only, runs)
    wanted, found = ab.load_weights(plain), ab.load_weights(folder)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], x) for name, x in wanted.items())
    assert not list(folder.glob("*.pt")) and ab.load_weights(folder / "best.safetensors").keys() == wanted.keys()
    file = folder / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"got weights\.safetensors is not as it was written"):
        ab.load_weights(folder)
    x = torch.arange(6.0).reshape(2, 3)
    weights.save_weights(tmp_path / "tied.safetensors", {"a": x, "b": x, "c": x.T, "n": torch.tensor(3)})
    tied = ab.load_weights(tmp_path / "tied.safetensors")
    assert torch.equal(tied["b"], x) and torch.equal(tied["c"], x.T) and tied["n"] == 3


def test_safetensors_that_are_not_there(tmp_path, monkeypatch):
    here = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "safetensors" else here(name, *_))
    with pytest.raises(ConfigError, match=r"type pip install 'accordion-bench\[safetensors\]', or checkpoint.safe"):
        train.run(tiny.cfg(tmp_path / "runs", "checkpoint.safetensors=true"))
    assert not (tmp_path / "runs").exists()
