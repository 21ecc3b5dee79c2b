"""CIFAR's files: read as their authors meant them, whoever wrote them; of whatever content, never more than data."""

import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from accordion_bench.datasets import cifar
from accordion_bench.datasets.cifar import batches
from accordion_bench.options.checks import ConfigError
from tests.kit.paths import SHARED

ROWS = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
LABELS = [3, 9]
BATCH = {"batch_label": "one", "labels": LABELS, "data": ROWS, "filenames": ["a.png", "b.png"]}


def text(word: str) -> bytes:
    """A text as Python 2 writes it."""
    return b"U" + bytes([len(word)]) + word.encode()


def array(
    rows: bytes = ROWS.tobytes(), shape: bytes = b"K\x02M\x00\x0c\x86", kind: str = "u1", state: bytes = b""
) -> bytes:
    """An array as Python 2 writes it: name, empty array, then version, shape, dtype, order and bytes."""
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(kind)
        + b"K\x00K\x01\x87R(K\x03"
        + text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    return made + (state or b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(rows)) + rows + b"tb")


def old(data: bytes | None = None, labels: bytes = b"](K\x03K\x09e") -> bytes:
    """A small file as the originals are."""
    items = text("labels") + b"q\x01" + labels + text("data") + (array() if data is None else data)
    return b"\x80\x02}q\x00(" + text("filenames") + b"](" + text("a.png") + text("b.png") + b"e" + items + b"u."


GOOD = {"Python 2": old(), **{f"protocol {n}": pickle.dumps(BATCH, protocol=n) for n in (2, 3, 4)}}


def loaded(file: Path, content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    file.write_bytes(content)
    return batches([file], 10)


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD)
def test_small_files_are_read_bit_for_bit(tmp_path, content):
    theirs = pickle.loads(content, encoding="latin1")
    assert np.array_equal(theirs["data"], ROWS)
    images, labels = loaded(tmp_path / "test_batch", content)
    assert images.dtype == torch.uint8 and images.shape == (2, 3, 32, 32)
    assert np.array_equal(images.flatten(1).numpy(), ROWS) and labels.tolist() == LABELS
    images += 1  # may be written


def test_fine_labels_are_the_labels_of_100_classes(tmp_path):
    file = tmp_path / "train"
    file.write_bytes(pickle.dumps({"data": ROWS, "fine_labels": [99, 0], "coarse_labels": [1, 2]}, protocol=2))
    assert batches([file], 100)[1].tolist() == [99, 0]


@pytest.mark.skipif(not (SHARED / "cifar-10-batches-py").is_dir(), reason="no CIFAR-10 beside the checkout")
def test_an_original_is_read_as_pickle_reads_it():
    file = SHARED / "cifar-10-batches-py" / "data_batch_3"
    with file.open("rb") as stream:
        theirs = pickle.load(stream, encoding="latin1")
    images, labels = cifar.read(file, 10)
    assert np.array_equal(images.reshape(-1, 3072), theirs["data"]) and labels == theirs["labels"]


# ---- files that want something else

CALL = b"cposix\ngetpid\n)R"  # a function without arguments, called
LATIN1 = b"X\x06\x00\x00\x00latin1"
ENCODE = b"c_codecs\nencode\nq\x08X\xe8\x03\x00\x00" + 1000 * b"x" + b"q\x07" + LATIN1 + b"\x86R"
TWICE = b"N" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(2, 200))  # a tree of 2^198 leaves, in 1,000 bytes
HOSTILE: dict[str, tuple[bytes, str]] = {
    "runs a function": (old(CALL), "posix.getpid is not an array name"),
    "runs a function by protocol 4": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system is not an array name"),
    "runs a method of NumPy": (old(b"cnumpy\ndtype.__setstate__\n."), "numpy.dtype.__setstate__ is not an array name"),
    "loads with another unpickler": (old(b"cnumpy\nload\n" + text("x") + b"\x85R"), "numpy.load is not an array name"),
    "escapes in a name": (old(b"cos\nsys\x1b[2J\n"), r"os.sys\\x1b\[2J is not an array name"),
    "a name without an end": (old(b"c" + 4000 * b"x"), "a name should end within 100 bytes"),
    "a tree for a name": (b"\x80\x04" + TWICE + b"\x8c\x01x\x93.", "a name is not text"),
    "makes an object": (old(b"cnumpy\nndarray\n)\x81"), "do not use opcode 0x81"),
    "makes an instance": (old(b"(inumpy\nndarray\n"), "do not use opcode 0x69"),
    "asks for a persistent object": (old(b"Q"), "do not use opcode 0x51"),
    "calls the array itself": (old(b"cnumpy\nndarray\nK\x02M\x00\x0c\x86\x85R"), "a function is called"),
    "calls a text": (old(text("numpy.dtype") + b")R"), "a function is called"),
    "objects in place of bytes": (old(array(kind="O8")), "not an array of bytes"),
    "a dtype that is told to hold objects": (
        old(array(state=b"(K\x01K\x01\x85cnumpy\ndtype\n" + text("V8") + b"K\x00K\x01\x87R")),
        "not an array of bytes",
    ),
    "numbers of two bytes": (pickle.dumps(BATCH | {"data": ROWS.astype("u2")}, 2), "not an array of bytes"),
    "objects, by NumPy 2": (pickle.dumps(BATCH | {"data": ROWS.astype(object)}, 4), "not an array of bytes"),
    "columns first": (pickle.dumps(BATCH | {"data": np.asfortranarray(ROWS)}, 4), "not in NumPy's format"),
    "a state for a list": (old(b"]Nb"), "a state is set"),
    "a state that is none": (old(array(state=b"Nb")), "TypeError"),
    "an array without a state": (old(array(state=b"N0")), "do not use opcode 0x30"),
    "a shape of more than there is": (old(array(shape=b"J\xff\xff\xff\x7fM\x00\x0c\x86")), "not 2147483647 x 3072"),
    "a negative shape": (old(array(shape=b"J\xff\xff\xff\xffM\x00\x0c\x86")), "not -1 x 3072"),
    "a shape of truths": (old(array(shape=b"\x88M\x00\x0c\x86")), "not in NumPy's format"),
    "rows of another length": (old(array(shape=b"M\x00\x0cK\x02\x86")), "not an array of rows of 3072"),
    "text in place of pixels": (old(text("pixels")), "not an array of rows"),
    "no dict": (b"\x80\x02K\x01.", "it does not contain a dict"),
    "labels of another number": (old(labels=b"](K\x03e"), "not a list of 2 numbers"),
    "a label beyond the classes": (old(labels=b"](K\x03K\x0ae"), "not all numbers from 0 to 9"),
    "a label below": (old(labels=b"](K\x03J\xff\xff\xff\xffe"), "not all numbers from 0 to 9"),
    "a truth for a label": (old(labels=b"](K\x03\x88e"), "not all numbers from 0 to 9"),
    "a text for a label": (old(labels=b"](K\x03" + text("cat") + b"e"), "not all numbers from 0 to 9"),
    "4 GB of pixels": (old(b"B\xff\xff\xff\xff"), "4294967295 bytes should follow"),
    "an exabyte of pixels": (old(b"\x8e" + struct.pack("<Q", 1 << 60)), "do not use opcode 0x8e"),
    "an exabyte of text": (old(b"\x8d" + struct.pack("<Q", 1 << 60)), "do not use opcode 0x8d"),
    "an exabyte to write to": (old(b"\x96" + struct.pack("<Q", 1 << 60)), "do not use opcode 0x96"),
    "a frame of an exabyte": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 60), "IndexError: index out of range"),
    "a number of 2 GB": (old(b"\x8b\xff\xff\xff\x7f"), "do not use opcode 0x8b"),
    "a number of many digits": (old(b"I" + 5000 * b"9" + b"\n"), "do not use opcode 0x49"),
    "a note of 64 GB": (old(b"Nr\xff\xff\xff\xff"), "not an array of rows"),
    "a note in digits": (old(b"Np99999999999\n"), "do not use opcode 0x70"),
    "a note that there is none of": (old(b"h\x63"), "KeyError"),
    "a deep key": (old(b"})" + 100_000 * b"\x85" + b"Ns"), "a key is not text"),
    "a deep list": (old(100_000 * b"]" + 99_999 * b"a"), "not an array of rows"),
    "a list in itself": (old(b"]q\x05h\x05a"), "not an array of rows"),
    "a tree of 2^198 leaves": (old(TWICE), "not an array of rows"),
    "a dict in itself": (old(b"}q\x05" + text("x") + b"h\x05s"), "not an array of rows"),
    "a value without a key": (old(b"}(Nu"), "ValueError"),
    "text that grows": (old(ENCODE + 50 * (b"0h\x08h\x07" + LATIN1 + b"\x86R")), "do not use opcode 0x30"),
    "text that grows on the stack": (old(b"(" + ENCODE + 50 * (b"h\x08h\x07" + LATIN1 + b"\x86R")), "more bytes than"),
    "nothing on the stack": (b"\x80\x02.", "IndexError"),
    "more than there is": (b"\x80\x02\x87.", "3 items should be on the stack"),
    "an end without a beginning": (b"\x80\x02e.", "IndexError"),
    "empty": (b"", "IndexError: index out of range"),
    "half a file": (old()[: len(old()) // 2], "bytes should follow"),
    "no end": (old()[:-1], "IndexError: index out of range"),
    "something else": (b"<html>not found</html>", "do not use opcode 0x3c"),
    "a million numbers": (b"\x80\x02" + (cifar.MOST_WORDS + 1) * b"K\x01", "more than 1000000 opcodes"),
    "a million words": (b"\x80\x02" + (cifar.MOST_WORDS + 1) * b"N", "more than 1000000 opcodes"),
}  # fmt: skip


def refused(file: Path) -> str:
    """The one sentence about a file, in letters that a terminal only shows."""
    with pytest.raises(ConfigError) as told:
        batches([file], 10)
    assert str(told.value).isprintable() and str(file) in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("content, told", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_no_original_is_one_sentence(tmp_path, content, told):
    file = tmp_path / "test_batch"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        batches([file], 10)
    refused(file)


@pytest.mark.parametrize("what", [name for name, (content, _) in HOSTILE.items() if len(content) < 20_000])
def test_a_small_file_takes_little_memory(tmp_path, what):
    file = tmp_path / "test_batch"
    file.write_bytes(HOSTILE[what][0])
    tracemalloc.start()
    try:
        refused(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_nothing_is_called_that_the_file_names(tmp_path, monkeypatch):
    """Neither of NumPy nor of anything else: an array without it is read all the same."""
    file = tmp_path / "test_batch"
    file.write_bytes(GOOD["Python 2"])
    with monkeypatch.context() as patched:
        for name in ("ndarray", "dtype"):
            patched.setattr(np, name, None)
        content = cifar._Reader(file.read_bytes()).load()["data"].content
    assert bytes(content) == ROWS.tobytes()


def test_too_large_a_file_is_not_opened(tmp_path):
    file = tmp_path / "test_batch"
    with file.open("wb") as stream:
        stream.truncate(cifar.LARGEST + 1)  # takes no room
    assert "it has 200000001 bytes, more than the originals" in refused(file)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "test_batch")
    assert "it is not a file" in refused(tmp_path / "test_batch")


# ---- files of random bytes


OPCODES = [*b"(.0123BCGIJKLMNQRSTUVX]abcdeghijlopqrstu})", *range(0x80, 0x99)]


def changed(content: bytes, draw: random.Random) -> bytes:
    """With some bytes changed, lost, repeated, put in or cut off, mostly near the beginning and the end."""
    now = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        if not now:
            break
        at = draw.choice([draw.randrange(len(now)), draw.randrange(200), len(now) - draw.randint(1, 100)])
        at = min(max(at, 0), len(now) - 1)
        some = draw.randbytes(draw.randint(1, 9)) if draw.random() < 0.5 else bytes(draw.choices(OPCODES, k=3))
        match draw.randrange(6):
            case 0:
                now[at] = draw.randrange(256)
            case 1:
                now[at : at + len(some)] = some
            case 2:
                now[at:at] = some
            case 3:
                now[at:at] = now[at : at + 40]
            case 4:
                del now[at : at + len(some)]
            case 5:
                del now[max(at, 1) :]
    return bytes(now)


@pytest.mark.parametrize("cases", [150, pytest.param(1500, marks=pytest.mark.slow)])
def test_changed_files_are_read_or_refused(tmp_path, cases):
    """Each a result of the right form, or one sentence."""
    draw, read = random.Random(cases), 0
    for case in range(cases):
        file = tmp_path / "test_batch"
        file.write_bytes(changed(list(GOOD.values())[case % len(GOOD)], draw))
        try:
            images, labels = batches([file], 10)
        except ConfigError as told:
            assert str(told).isprintable()
        else:
            read += 1
            assert images.dtype == torch.uint8 and images.shape[1:] == (3, 32, 32)
            assert labels.shape == images.shape[:1] and 0 <= int(labels.min()) <= int(labels.max()) < 10
    assert 0 < read < cases / 2  # of either kind there are some
