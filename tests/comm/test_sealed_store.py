"""The store of a run: what a stranger writes there is not believed, and no error of the run."""

import pytest
import torch.distributed as dist

from accordion_bench.comm.sealed_store import SECRET, SealedStore, shared_secret, whole_number
from accordion_bench.options.checks import ConfigError
from tests.kit.stores import LocalStore

WORDS = "sixteen letters or more"


@pytest.fixture(params=[LocalStore, "tcp", "file"])
def raw(request, tmp_path):
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return dist.FileStore(str(tmp_path / "store"), 1) if request.param == "file" else LocalStore()


@pytest.mark.parametrize("secret", ["", WORDS])
def test_values_arrive(secret, raw):
    store, other = SealedStore(raw, 2, secret), SealedStore(raw.clone(), 2, secret)
    store.set("a", "größe 1")
    assert store.read("a", str) == "größe 1"  # a set of TCPStore waits for no answer: now it has arrived for others too
    assert other.read("a", str) == "größe 1" and other.read("b", str) is None
    assert other.replace("a", "größe 1", "2", int) == 2 and store.replace("a", "1", "3", int) == 2
    assert store.replace("c", "", "7", int) == 7 and store.replace("c", "", "8", int) == 7
    assert store.first("failure", "x", str) == "x" and other.first("failure", "y", str) == "x"
    assert store.read_all(["a", "c"], int) == [2, 7] and store.read_all(["a", "d"], str) is None
    assert store.read_all([], str) == []
    assert store.add("n", 2) == 2 and other.add("n", 0) == 2


def test_a_wrong_seal_counts_as_absent(raw, capsys):
    """Of a stranger, of another secret, of another key, of another launch; each is told once."""
    store = SealedStore(raw, 2, WORDS)
    raw.set("signal", "15")
    SealedStore(raw, 2, WORDS + "!").set("failure", "x")
    store.set("stop", "3")
    raw.set("save", raw.get("stop").decode())
    raw.set("run_folder", "sealed:")
    for key in ("signal", "failure", "save", "run_folder", "signal", "failure"):
        assert store.read(key, str) is None
    told = capsys.readouterr().err.splitlines()
    wrong = [
        f"warning: {key} in the store of the run has a wrong seal, and is" for key in ("signal", "failure", "save")
    ]
    assert len(told) == 4 and all(line.startswith(start) for line, start in zip(told, wrong, strict=False))
    assert all("type export ACCORDION_BENCH_SECRET=WORDS, the same on every machine" in line for line in told)
    assert store.first("failure", "mine", str) == "mine" and store.read("failure", str) == "mine"


def test_a_seal_of_an_earlier_launch_is_worth_nothing(raw):
    """With the same secret: whoever has read that one's values may write them again."""
    first, second = (SealedStore(raw, 2, WORDS).under("job").under(launch) for launch in ("1", "2"))
    first.set("stop", "3")
    raw.set("job/2/stop", raw.get("job/1/stop").decode())
    assert first.read("stop", str) == "3" and second.read("stop", str) is None


def test_sealed_values_where_there_is_no_secret(raw, capsys):
    SealedStore(raw, 2, WORDS).set("plan", "{}")
    assert SealedStore(raw, 2).read("plan", str) is None
    assert "warning: plan in the store of the run is sealed, and is passed over" in capsys.readouterr().err


@pytest.mark.parametrize("value", [b"\xff\xfe", b"1.5", b"", "\u0663".encode(), b"9" * 5000, b"1" * 2_000_000])
def test_values_without_a_meaning_count_as_absent(value, capsys):
    raw = LocalStore()
    raw.values["step"] = value
    store = SealedStore(raw, 2)
    assert store.read("step", whole_number) is None and store.read_all(["step"], whole_number) == [None]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and len(told) < 400


def test_a_secret_that_can_be_guessed():
    assert shared_secret({}) == "" and shared_secret({SECRET: WORDS}) == WORDS
    with pytest.raises(ConfigError, match=r"ACCORDION_BENCH_SECRET must have at least 16 characters, got 5; type"):
        shared_secret({SECRET: "12345"})
