"""Downloads: from a server on this machine; all files or none, once for all who ask, nothing outside of the folder."""

import hashlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from scipy.io import savemat

from accordion_bench.datasets import fetch
from accordion_bench.datasets.cifar import SVHN, Cifar
from accordion_bench.datasets.fetch import Source
from accordion_bench.options.checks import ConfigError
from tests.kit.paths import ROOT

FILES = ["one", "two"]


class Server(ThreadingHTTPServer):
    """Serves bytes by name, and notes who asks."""

    daemon_threads = True

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.pause = 0.0  # seconds between the two halves of a file
        super().__init__(("127.0.0.1", 0), Answer)

    def offer(self, name: str, content: bytes) -> Source:
        self.files[name] = content
        return Source(f"http://127.0.0.1:{self.server_port}/{name}", name, hashlib.md5(content).hexdigest())

    def handle_error(self, request, client_address) -> None:
        """Who asks for encryption, or is gone, is no news."""


class Answer(BaseHTTPRequestHandler):
    server: Server

    def handle(self) -> None:
        if self.connection.recv(1, socket.MSG_PEEK) != b"\x16":  # what begins so asks for encryption, and gets none
            super().handle()

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        time.sleep(self.server.pause)
        self.wfile.write(content[len(content) // 2 :])

    def log_message(self, format: str, *args) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(fetch, "_failed", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def archive(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, bytes):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                tar.addfile(content)
    return written.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


WHOLE = {"words/one": b"1" * 5000, "words/two": b"2", "words/readme": b"words"}


def ensure(root: Path, *sources: Source) -> Path:
    return fetch.ensure(str(root), "words", FILES, lambda: sources, 5.0)


def left(root: Path) -> list[str]:
    """What lies there, but for the lock, which stays."""
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_an_archive_becomes_a_folder_and_nothing_else(tmp_path, server, capsys):
    root = tmp_path / "data"
    folder = ensure(root, server.offer("words.tar.gz", archive(WHOLE)))
    assert folder == root / "words" and left(root) == ["words"]
    assert {f"words/{path.name}": path.read_bytes() for path in folder.iterdir()} == WHOLE
    assert capsys.readouterr().err.splitlines()[1:] == ["downloading words.tar.gz"]
    ensure(root, server.offer("words.tar.gz", b"another"))
    assert server.asked == ["words.tar.gz"]


def test_single_files_come_all_or_none(tmp_path, server):
    one, two = server.offer("one", b"1"), server.offer("two", b"2")
    with pytest.raises(ConfigError, match="two has the md5"):
        ensure(tmp_path, one, Source(two.address, "two", one.md5))
    assert left(tmp_path) == []
    fetch._failed.clear()
    assert sorted(path.name for path in ensure(tmp_path, one, two).iterdir()) == FILES


def test_encryption_is_asked_for_first(monkeypatch, tmp_path):
    asked = []

    def refuse(address: str, name: str, file: Path, timeout: float) -> str:
        asked.append(address.partition(":")[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(fetch, "_read", refuse)
    for scheme, expected in (("http", ["https", "http"]), ("https", ["https"])):
        asked.clear()
        fetch._failed.clear()
        with pytest.raises(ConfigError, match=r"downloading failed \(ConnectionRefusedError\)"):
            ensure(tmp_path, Source(f"{scheme}://127.0.0.1/words.tar.gz", "words.tar.gz", "0"))
        assert asked == expected


EVIL = {
    "a wrong md5": (archive(WHOLE), "words.tar.gz has the md5 [0-9a-f]{32} instead of 0{32}"),
    "half an archive": (archive(WHOLE)[:100], r"words.tar.gz cannot be unpacked \(\w+\)"),
    "no archive": (b"<html>not found</html>", r"words.tar.gz cannot be unpacked \(ReadError\)"),
    "a damaged archive": (archive(WHOLE)[:60] + bytes(60), r"words.tar.gz cannot be unpacked \(\w+\)"),
    "a file beside the folder": (archive({"../evil": b"x", **WHOLE}), "would write outside of its folder"),
    "a file far above": (archive({"words/../../../../../evil": b"x", **WHOLE}), "would write outside of its folder"),
    "an absolute link": (archive({"words/x": link("words/x", "/etc"), **WHOLE}), "would write outside of its folder"),
    "a link outside": (archive({"words/x": link("words/x", "../../x"), **WHOLE}), "would write outside of its folder"),
    "a hard link outside": (
        archive({"words/x": link("words/x", "../../x", tarfile.LNKTYPE), **WHOLE}),
        "would write outside of its folder",
    ),
    "a device": (archive({"words/x": link("words/x", "", tarfile.CHRTYPE), **WHOLE}), "would write outside"),
    "a link for a file": (archive({**WHOLE, "words/one": link("words/one", "two")}), "did not contain one"),
    "a file less": (archive({"words/one": b"1"}), "words.tar.gz did not contain two"),
    "another folder": (archive({"text/one": b"1", "text/two": b"2"}), "words.tar.gz did not contain one, two"),
}


@pytest.mark.parametrize("what", EVIL)
def test_what_is_not_as_it_should_be_is_one_sentence_and_leaves_nothing(tmp_path, server, what):
    content, told = EVIL[what]
    source = server.offer("words.tar.gz", content)
    if what == "a wrong md5":
        source = Source(source.address, source.name, "0" * 32)
    root = tmp_path / "deep" / "data"
    with pytest.raises(ConfigError, match=f"downloading failed .*{told}.*; type paths.data=FOLDER") as refused:
        ensure(root, source)
    assert str(refused.value).isprintable() and "127.0.0.1" not in str(refused.value)
    assert left(root) == [] and [path.name for path in tmp_path.rglob("*") if "evil" in path.name] == []


def test_what_is_there_is_taken_as_it_is(tmp_path, server):
    """A folder from before, an archive that lies in the root, some of the files: what lacks is added."""
    source = server.offer("words.tar.gz", archive(WHOLE))
    (tmp_path / "a" / "words").mkdir(parents=True)
    for name in FILES:
        (tmp_path / "a" / "words" / name).write_text("old")
    assert (ensure(tmp_path / "a", source) / "one").read_text() == "old"

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "words.tar.gz").write_bytes(server.files["words.tar.gz"])
    assert (ensure(tmp_path / "b", source) / "two").read_bytes() == b"2"
    assert server.asked == [] and left(tmp_path / "b") == ["words", "words.tar.gz"]

    (tmp_path / "c" / "words").mkdir(parents=True)
    (tmp_path / "c" / "words" / "mine").write_text("stays")
    ensure(tmp_path / "c", source)
    assert sorted(path.name for path in (tmp_path / "c" / "words").iterdir()) == ["mine", "one", "readme", "two"]

    (tmp_path / "d" / "words").mkdir(parents=True)
    (tmp_path / "d" / "words" / "one").write_bytes(b"1")
    ensure(tmp_path / "d", server.offer("one", b"1"), server.offer("two", b"2"))
    assert server.asked == ["words.tar.gz", "two"] and left(tmp_path / "d" / "words") == FILES


def test_many_who_ask_at_once_download_once(tmp_path, server, capsys):
    server.pause = 0.3
    source, found = server.offer("words.tar.gz", archive(WHOLE)), []
    asking = [threading.Thread(target=lambda: found.append(ensure(tmp_path, source))) for _ in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == [tmp_path / "words"] * 3 and server.asked == ["words.tar.gz"]
    assert capsys.readouterr().err.count(f"waiting for the process that is downloading words into {tmp_path}") == 2


PROCESS = """
import sys
from pathlib import Path
sys.modules["torch"] = None  # takes seconds, and is not needed
from accordion_bench.datasets import fetch
root = Path(sys.argv[1])
with fetch.alone(root, "words"):
    if not (root / "words").exists():
        fetch.fetch(root, "words", ["one", "two"], [fetch.Source(*sys.argv[2:])], 5.0)
"""


def process(root: Path, source: Source) -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, str(root), source.address, source.name, source.md5]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)


def test_a_killed_download_leaves_a_folder_that_the_next_one_removes(tmp_path, server):
    """Two processes: one is killed half way, the other, which has waited, brings the files."""
    server.pause = 0.6
    source = server.offer("words.tar.gz", archive(WHOLE))
    first = process(tmp_path, source)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".words.part-*/words.tar.gz")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = process(tmp_path, source)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir() if path.is_dir()] == [".words.part"]
    assert fetch.find(str(tmp_path), "words", FILES) is None
    assert second.wait(30) == 0
    assert left(tmp_path) == ["words"] and server.asked == ["words.tar.gz"] * 2


def test_a_disk_that_cannot_be_written_is_one_sentence(tmp_path, server):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"downloading failed \((Not a directory|File exists)\)"):
        ensure(tmp_path / "file" / "data", server.offer("words.tar.gz", archive(WHOLE)))


def test_a_folder_that_is_not_there_is_told_before_anything_comes(tmp_path, server, capsys):
    source = server.offer("words.tar.gz", archive(WHOLE))
    ensure(tmp_path / "typo", source)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"paths.data={tmp_path / 'typo'} did not exist and was created; words is downloaded into it"
    assert second == "downloading words.tar.gz"


# ---- the addresses are torchvision's


def test_cifar_comes_from_where_torchvision_has_it(tmp_path, server, monkeypatch):
    from torchvision.datasets import CIFAR100

    batch = pickle.dumps({"data": None}, protocol=2)
    members = {f"cifar-100-python/{name}": batch for name in ("train", "test", "meta")}
    source = server.offer(CIFAR100.filename, archive(members))
    monkeypatch.setattr(CIFAR100, "url", source.address)
    monkeypatch.setattr(CIFAR100, "tgz_md5", source.md5)
    Cifar(classes=100, check=False).prepare(str(tmp_path))
    assert left(tmp_path) == ["cifar-100-python"] and (tmp_path / "cifar-100-python" / "meta").is_file()
    with pytest.raises(ConfigError, match="must hold the original files"):
        Cifar(classes=100).prepare(str(tmp_path))


def test_svhn_comes_from_where_torchvision_has_it(tmp_path, server, monkeypatch):
    from torchvision.datasets import SVHN as Theirs

    written = io.BytesIO()
    savemat(written, {"X": [1], "y": [1]})
    sources = {split: server.offer(f"{split}_32x32.mat", written.getvalue()) for split in ("train", "test")}
    monkeypatch.setattr(Theirs, "split_list", {name: [s.address, s.name, s.md5] for name, s in sources.items()})
    SVHN(check=False).prepare(str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "svhn").iterdir()) == ["test_32x32.mat", "train_32x32.mat"]
