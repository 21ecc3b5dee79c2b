"""CIFAR-10, CIFAR-100 and SVHN (house numbers), read from their original files by a safe reader.

The reader accepts only arrays of bytes, lists, numbers and text.
A malicious file can neither execute code nor use more memory than a few times its own size plus 100 MB. Python's
unpickler guarantees neither, even with an allow-list of classes: five bytes can request a memo of 64 GB, and a million
nested tuples used as a key overflow the stack.
"""

import enum
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets import fetch
from accordion_bench.datasets.fetch import Source
from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options

LARGEST = 200_000_000  # maximum bytes of a file; the originals have 31 and 155 million
MOST_WORDS = 1_000_000  # maximum opcodes of a file; the originals have 30,000 and 250,000
LABELS = 1000  # labels per list chunk in the originals
LONGEST_NAME = 100  # characters of a module or attribute name
PIXELS = 3 * 32 * 32


def read(file: Path, classes: int) -> tuple[np.ndarray, list[int]]:
    """Read the images [n, 3, 32, 32] in uint8 and the n labels, below `classes`, of a file in the CIFAR format.

    The file is a pickled dict: `data` has rows of 1,024 red, green and blue values each; `labels` or `fine_labels`.

    Raises:
        Exception: of any type, if the file is not in this format or cannot be read.
    """
    batch = _Reader(_content(file)).load()
    if not isinstance(batch, dict):
        raise ValueError("it does not contain a dict")
    data, labels = batch.get("data"), batch.get("labels", batch.get("fine_labels"))
    if not isinstance(data, _Array) or len(data.shape) != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"data is not an array of rows of {PIXELS} bytes")
    if len(data.content) != data.shape[0] * PIXELS:
        raise ValueError(f"data has {len(data.content)} bytes, not {data.shape[0]} x {PIXELS}")
    if not isinstance(labels, list) or len(labels) != data.shape[0]:
        raise ValueError(f"labels are not a list of {data.shape[0]} numbers")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise ValueError(f"labels are not all numbers from 0 to {classes - 1}")
    return np.frombuffer(data.content, np.uint8).reshape(-1, 3, 32, 32), labels


def _content(file: Path) -> bytes:
    if not file.is_file():
        raise ValueError("it is not a file")
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > LARGEST:
            raise ValueError(f"it has {size} bytes, more than the originals")
        return stream.read(size)


class _Name(enum.Enum):
    """Names that a pickled array refers to. They are only markers: no function of NumPy is called."""

    ARRAY = "numpy.ndarray"
    KIND = "numpy.dtype"
    MAKE = "numpy.core.multiarray._reconstruct"
    ENCODE = "_codecs.encode"


_NAMES = {name.value: name for name in _Name} | {
    "numpy._core.multiarray._reconstruct": _Name.MAKE
}  # the name in NumPy 2


class _Kind:
    """Placeholder for the dtype uint8."""

    def build(self, state: Any) -> None:
        """Ignore the byte order, which a single byte does not have."""


class _Array:
    """Placeholder for numpy.ndarray: shape and bytes."""

    shape: tuple[int, ...] = ()
    content: bytes | memoryview = b""

    def build(self, state: Any) -> None:
        """Set the state that NumPy pickles: version, shape, dtype, Fortran order, bytes."""
        _, shape, kind, fortran, content = state
        numbers = isinstance(shape, tuple) and all(type(size) is int for size in shape)
        if not numbers or not isinstance(kind, _Kind) or fortran or not isinstance(content, bytes | memoryview):
            raise ValueError("an array is not in NumPy's format")
        self.shape, self.content = shape, content


class _Reader:
    """Interpreter of the few pickle opcodes that the original files use.

    Strings of Python 2 and bytes longer than 255 are views of `content`. The stack contains numbers, text, bytes, None,
    lists, tuples, dicts, `_Array`, `_Kind` and `_Name`.
    """

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def opcodes(self) -> dict[int, Callable[[], object]]:
        """Return the handler of each opcode. A stored dict would be a reference cycle that keeps the file in memory."""
        push = self.stack.append
        known: dict[bytes, Callable[[], object]] = {
            pickle.PROTO: lambda: self.take(1),
            pickle.FRAME: lambda: self.take(8),
            pickle.MARK: lambda: self.marks.append(len(self.stack)),
            pickle.NONE: lambda: push(None),
            pickle.NEWTRUE: lambda: push(True),
            pickle.NEWFALSE: lambda: push(False),
            pickle.BININT2: lambda: push(self.number(2)),
            pickle.BININT: lambda: push(int.from_bytes(self.take(4), "little", signed=True)),
            pickle.SHORT_BINBYTES: lambda: push(self.take(self.number(1))),
            pickle.BINSTRING: lambda: push(self.look(self.number(4))),
            pickle.BINBYTES: lambda: push(self.look(self.number(4))),
            pickle.SHORT_BINUNICODE: lambda: push(str(self.take(self.number(1)), "utf-8")),
            pickle.BINUNICODE: lambda: push(str(self.look(self.number(4)), "utf-8")),
            pickle.EMPTY_LIST: lambda: push([]),
            pickle.EMPTY_DICT: lambda: push({}),
            pickle.EMPTY_TUPLE: lambda: push(()),
            pickle.TUPLE: lambda: push(tuple(self.since(self.marks.pop()))),
            pickle.TUPLE1: lambda: push(tuple(self.last(1))),
            pickle.TUPLE2: lambda: push(tuple(self.last(2))),
            pickle.TUPLE3: lambda: push(tuple(self.last(3))),
            pickle.APPEND: lambda: self.extend(self.last(1)),
            pickle.APPENDS: lambda: self.extend(self.since(self.marks.pop())),
            pickle.SETITEM: lambda: self.update(self.last(2)),
            pickle.SETITEMS: lambda: self.update(self.since(self.marks.pop())),
            pickle.BINPUT: lambda: self.note(self.number(1)),
            pickle.MEMOIZE: lambda: self.note(len(self.memo)),
            pickle.BINGET: lambda: push(self.memo[self.number(1)]),
            pickle.LONG_BINGET: lambda: push(self.memo[self.number(4)]),
            pickle.GLOBAL: lambda: self.name(self.line(), self.line()),
            pickle.STACK_GLOBAL: lambda: self.name(*self.last(2)),
            pickle.REDUCE: self.call,
            pickle.BUILD: self.build,
        }
        return {opcode[0]: do for opcode, do in known.items()}

    def load(self) -> Any:
        content, memo, stack, known = self.content, self.memo, self.stack, self.opcodes()
        number, text, note, stop = (
            word[0] for word in (pickle.BININT1, pickle.SHORT_BINSTRING, pickle.LONG_BINPUT, pickle.STOP)
        )
        four_bytes = struct.Struct("<I").unpack_from
        at = 0
        for _ in range(MOST_WORDS):
            opcode = content[at]
            # these three occur 30,000 times in the originals: labels, file names, and memo entries of file names
            if opcode == text:
                end = at + 2 + content[at + 1]
                stack.append(content[at + 2 : end])
                at = end
            elif opcode == note:
                memo[four_bytes(content, at + 1)[0]] = stack[-1]
                at += 5
            elif opcode == number:
                opcodes = content[at : at + 2 * LABELS : 2]  # labels are consecutive
                end = at + 2 * (len(opcodes) - len(opcodes.lstrip(pickle.BININT1)))
                stack.extend(content[at + 1 : end : 2])
                at = end
                if len(stack) > MOST_WORDS:
                    break
            elif opcode == stop:
                return stack.pop()
            elif opcode in known:
                self.at = at + 1
                known[opcode]()
                at = self.at
            else:
                raise ValueError(f"the originals do not use opcode {opcode:#04x}, which byte {at} has")
        raise ValueError(f"it has more than {MOST_WORDS} opcodes")

    def take(self, size: int) -> bytes:
        return bytes(self.look(size))

    def look(self, size: int) -> memoryview:
        """Return a view of the next bytes."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.content):
            raise ValueError(f"{size} bytes should follow byte {begin}, and {len(self.content) - begin} do")
        return memoryview(self.content)[begin : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        begin, end = self.at, self.content.find(b"\n", self.at, self.at + LONGEST_NAME)
        if end < 0:
            raise ValueError(f"a name should end within {LONGEST_NAME} bytes after byte {begin}")
        self.at = end + 1
        return str(self.content[begin:end], "ascii")

    def since(self, mark: int) -> list[Any]:
        found = self.stack[mark:]
        del self.stack[mark:]
        return found

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError(f"{count} items should be on the stack before byte {self.at}")
        return self.since(len(self.stack) - count)

    def note(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("items are appended to an object that is not a list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise ValueError("an item is set in an object that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            name = str(key, "latin1") if isinstance(key, bytes) else key  # text of Python 2 is bytes
            if not isinstance(name, str):
                raise ValueError("a key is not text")
            self.stack[-1][name] = value

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is not text")
        text = f"{module}.{name}"
        if text not in _NAMES:
            raise ValueError(f"{ascii(text[:LONGEST_NAME])[1:-1]} is not an array name")
        self.stack.append(_NAMES[text])

    def call(self) -> None:
        name, arguments = self.last(2)
        if name is _Name.MAKE:
            self.stack.append(_Array())
        elif name is _Name.KIND and arguments[0] in ("u1", b"u1"):
            self.stack.append(_Kind())
        elif name is _Name.KIND:
            raise ValueError("data is not an array of bytes")
        elif name is _Name.ENCODE and arguments[1] == "latin1":
            self.stack.append(self.encode(arguments[0]))
        else:
            raise ValueError(f"a function is called that is not {_Name.MAKE.value}")

    def encode(self, text: str) -> bytes:
        """Return the bytes that Python 3 pickled as text for Python 2."""
        self.encoded += len(text)
        if self.encoded > len(self.content):
            raise ValueError("it decodes to more bytes than the file has")
        return text.encode("latin1")

    def build(self) -> None:
        (state,) = self.last(1)
        if not isinstance(self.stack[-1], _Array | _Kind):
            raise ValueError("a state is set on an object that is not an array")
        self.stack[-1].build(state)


TIMEOUT = 10.0  # seconds without data from the server before a download fails
ORIGINAL = "the original files, in paths.data or downloaded to it"
CUTOUT = "side in pixels of a square cut out of each training image; 0 = none"
CHECK = "compare the files with the published md5 sums, once; false = accept modified files"
# published sums; torchvision has the same ones but takes seconds to import
CIFAR_MD5 = {
    10: {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    100: {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
}
# the constants of the Accordion experiments, in units of the uint8 images
NORMAL = {
    10: ([125.3, 123.0, 113.9], [63.0, 62.1, 66.7]),
    100: ([255 * m for m in (0.5071, 0.4865, 0.4409)], [255 * s for s in (0.2673, 0.2564, 0.2762)]),
}
SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}


class _OriginalImages(ImageDataset):
    """Images in a folder of original files, which are downloaded if they are missing."""

    in_channels, image_size = 3, 32
    folder: str
    md5: Mapping[str, str]  # by file name
    check: bool

    def sources(self) -> list[Source]:
        """Return the downloads."""
        raise NotImplementedError

    def prepare(self, root: str) -> None:
        found = fetch.ensure(root, self.folder, [*self.md5], self.sources, TIMEOUT)
        if self.check:
            fetch.refuse_changed(found, self.md5)

    def _splits(self, root: str, seed: int, read: Callable[[Path, str], tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        """Return images and labels of the training and the test split, cut; `read(folder, split)` reads a split."""
        folder = fetch.find(root, self.folder, [*self.md5]) or Path(root, self.folder)
        train, test = read(folder, "train"), read(folder, "test")
        fetch.refuse_size("training", self.train_size, len(train[1]), folder)
        return self.cut(train, test, seed)


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from ImageDataset.description.idle(cls, options, context)
    if options.get("augment") is False:
        yield "rotation", "dataset.augment is false"


@with_options
class Cifar(_OriginalImages):
    """60,000 colour images of 32x32 pixels (Krizhevsky 2009), 50,000 of them for training.

    The safe reader of this module reads the files. Missing files are downloaded from the address that torchvision uses.
    `augment` applies a random crop (padding 4), a horizontal flip, and a rotation to the nearest pixel with black
    corners. Without it only `cutout` changes training images.
    """

    classes: int = option(default=10, choices=(10, 100))
    augment: bool = option("random crop, flip and rotation", default=True)
    rotation: float = option("maximum angle in degrees", default=0, at_least=0, at_most=180, instead=15)
    cutout: int = option(CUTOUT, default=0, at_least=0, at_most=64, instead=16)
    check: bool = option(CHECK, default=True)

    chosen_as = {
        "cifar10": Choice(ORIGINAL),
        "cifar100": Choice(ORIGINAL, {"classes": 100, "rotation": 15}),
    }
    description = replace(ImageDataset.description, idle=_idle)

    train_size = 50_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_classes = self.classes
        self.folder = {10: "cifar-10-batches-py", 100: "cifar-100-python"}[self.classes]
        self.md5 = CIFAR_MD5[self.classes]

    def sources(self) -> list[Source]:
        from torchvision.datasets import CIFAR10, CIFAR100

        theirs = {10: CIFAR10, 100: CIFAR100}[self.num_classes]
        return [Source(theirs.url, theirs.filename, theirs.tgz_md5)]

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
            return batches(
                [folder / name for name in self.md5 if name.startswith("test") == (split == "test")], self.classes
            )

        train, test = self._splits(root, seed, read)
        mean, std = NORMAL[self.num_classes]
        padding, rotation = (4, self.rotation) if self.augment else (0, 0.0)
        return ImageData(train, test, mean, std, padding, self.augment, seed, device, rotation, self.cutout)


def batches(files: list[Path], classes: int) -> tuple[Tensor, Tensor]:
    """Read the images [n, 3, 32, 32] in uint8 and labels [n] of several files in the CIFAR format, concatenated."""
    sizes = [min(file.stat().st_size, LARGEST) for file in files if file.is_file()]
    images = np.empty((sum(sizes) // PIXELS, 3, 32, 32), np.uint8)  # untouched pages use no memory
    labels: list[int] = []
    for file in files:
        try:
            pixels, numbers = read(file, classes)
        except Exception as error:  # a broken file may raise anything
            raise fetch.not_readable(file, error) from error
        images[len(labels) : len(labels) + len(numbers)] = pixels
        labels.extend(numbers)
    return torch.from_numpy(images[: len(labels)]), torch.tensor(labels)


@with_options
class SVHN(_OriginalImages):
    """73,257 training and 26,032 test images of 32x32 pixels, cropped digits in colour (Netzer et al. 2011).

    Read from `train_32x32.mat` and `test_32x32.mat` in the folder `svhn`; missing files are downloaded from the address
    that torchvision uses. The 531,131 easier `extra` images are not used, as in Accordion. `augment` is off by default:
    neither Accordion's code nor Wide ResNets (Zagoruyko & Komodakis 2016, arXiv 1605.07146) nor the cutout paper
    augment these images. Digits are never flipped.
    """

    augment: bool = option("random crop, without flip", default=False)
    cutout: int = option(CUTOUT, default=0, at_least=0, at_most=64, instead=16)
    check: bool = option(CHECK, default=True)

    chosen_as = {"svhn": Choice("train_32x32.mat and test_32x32.mat, in paths.data/svhn or downloaded to it")}
    num_classes, train_size = 10, 73_257
    folder, md5 = "svhn", SVHN_MD5

    def sources(self) -> list[Source]:
        from torchvision import datasets

        return [Source(*datasets.SVHN.split_list[split]) for split in ("train", "test")]

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        train, test = self._splits(root, seed, lambda folder, split: digits(folder / f"{split}_32x32.mat"))
        grey = [127.5] * 3  # scales [0, 255] to [-1, 1], as Accordion's code does
        return ImageData(train, test, grey, grey, 4 * self.augment, False, seed, device, cutout=self.cutout)


def digits(file: Path) -> tuple[Tensor, Tensor]:
    """Read images [n, 3, 32, 32] in uint8 and labels [n] of an SVHN file.

    The file contains `X` [32, 32, 3, n] and `y` [n, 1], where 10 stands for the digit 0.
    """
    from scipy.io import loadmat  # takes a third of a second to import

    try:
        found = loadmat(file)
        images = torch.from_numpy(np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1)))
        return images.view(-1, 3, 32, 32), torch.from_numpy(found["y"].astype(np.int64).ravel() % 10)
    except Exception as error:  # a broken file may raise anything
        raise fetch.not_readable(file, error) from error
