"""Users' own images in .npz or .npy files, found by the usual names of arrays, and held in memory."""

import functools
import hashlib
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets.counted import (
    BY_OWN,
    NULL,
    SHARE,
    CountedImages,
    FileContents,
    held_out,
    name_or_null,
    part_of,
)
from accordion_bench.datasets.dataset import known
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.datasets.images import ImageData
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.tensors import keyed_rng

KINDS = {"x": ("x", "images", "image", "data", "inputs"), "y": ("y", "labels", "label", "targets", "target")}
WHAT = "arrays that can be read"
WANTED = "paths.data must hold an .npz file, or .npy files"
BLOCK = 1 << 24  # bytes per read when computing a checksum


@dataclass(frozen=True)
class Stored:
    """Array in a file that has not been read yet.

    Args:
        name: name of the array in an .npz file, or stem of the .npy file.
        read, checksum: functions that read the array and return a checksum of its bytes.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    checksum: Callable[[], int]

    def load(self) -> np.ndarray:
        """Read the array; an `Unreadable` error names the file and the reason."""
        return _guarded(self.file, self.read)


StoredArrays = Mapping[str, Mapping[str, Stored]]  # by part (train, test, validation) and kind (x, y)


def find(root: Path, file: str | None) -> Path:
    """Return the file, or the folder of files, that contains the arrays; `root` may be the file itself.

    Raises:
        ConfigError: there is no such file, or there are several.
    """
    place = root if file is None else root / file
    if place.is_file() or (file is not None and place.is_dir()):
        return place
    if file is not None or not place.is_dir():
        raise ConfigError(f"{WANTED}, got {place}, which does not exist; type paths.data=FILE.npz")
    packed = sorted(own for own in place.glob("*.npz") if not own.name.startswith("."))
    if len(packed) > 1:
        raise ConfigError(
            f"dataset.file must name one of the {len(packed)} .npz files in {place}, got null; type "
            f"dataset.file={packed[0].name}"
        )
    if not packed and not any(place.glob("*.npy")):
        raise ConfigError(f"{WANTED}, got {place} without one; type paths.data=FILE.npz")
    return packed[0] if packed else place


def arrays_in(place: Path) -> StoredArrays:
    """Return handles of all images and labels in an .npz file, or in a folder of .npy files.

    Raises:
        ConfigError: a file cannot be read, images lack their labels or labels their images, or nothing is found.
    """
    found: dict[str, dict[str, Stored]] = {}
    openers = _openers(place)
    for name, opened in openers.items():
        if (named := _meaning(name)) is not None:  # arrays with other names are ignored
            part, kind = named
            own = opened()
            if other := found.setdefault(part, {}).get(kind):
                raise ConfigError(
                    f"{place} must have one array for each of its parts, got {other.name} and {own.name}; leave one out"
                )
            found[part][kind] = own
    if "train" not in found:
        names = ", ".join([*openers][:9]) or "none"
        rule = "arrays named x_train and y_train (and x_test, y_test), or x and y"
        raise ConfigError(f"{place} must have {rule}, got {names}; rename them")
    for part, kinds in found.items():
        if lacking := {"x", "y"} - {*kinds}:
            own, kind = next(iter(kinds.values())), "labels" if "y" in lacking else "images"
            rule = f"images and labels of each part, got {own.name} without the {kind} of {part}"
            raise ConfigError(f"{place} must have {rule}; add them, or leave that array out")
    return found


def _meaning(name: str) -> tuple[str, str] | None:
    """Parse a name such as `x_train`, `test_labels` or `images` into (part, kind); None for other names."""
    words = name.lower().replace("-", "_").split("_")
    kinds = [kind for word in words for kind, known in KINDS.items() if word in known]
    parts = [part for word in words if (part := part_of(word))]
    if len(kinds) != 1 or len(words) != 1 + len(parts) or len(parts) > 1:
        return None
    return (parts or ["train"])[0], kinds[0]


def _openers(place: Path) -> dict[str, Callable[[], Stored]]:
    """Return functions that open each array of an .npz file, an .npy file, or a folder of .npy files, by array name."""
    if place.is_dir():
        files = [file for file in sorted(place.glob("*.npy")) if not file.name.startswith(".")]
        return {file.stem: functools.partial(_single, file) for file in files}
    if place.suffix == ".npy":
        return {place.stem: functools.partial(_single, place)}

    def members() -> dict[str, Callable[[], Stored]]:
        with zipfile.ZipFile(place) as zipped:
            inside = [info for info in zipped.infolist() if info.filename.endswith(".npy")]
        return {info.filename.removesuffix(".npy"): functools.partial(_member, place, info) for info in inside}

    return _guarded(place, members)


def _single(file: Path) -> Stored:

    def header() -> tuple[tuple[int, ...], np.dtype]:
        with file.open("rb") as stream:
            return _header(stream)

    shape, dtype = _guarded(file, header)
    read = functools.partial(np.load, file, allow_pickle=False)
    return Stored(file, file.stem, shape, dtype, read, functools.partial(_crc, file))


def _member(file: Path, info: zipfile.ZipInfo) -> Stored:

    def within(read: Callable[[Any], Any]) -> Any:
        with zipfile.ZipFile(file) as zipped, zipfile.Path(zipped, info.filename).open("rb") as stream:
            return read(stream)

    def read() -> np.ndarray:
        return within(functools.partial(np.lib.format.read_array, allow_pickle=False))

    shape, dtype = _guarded(file, lambda: within(_header))
    return Stored(file, info.filename.removesuffix(".npy"), shape, dtype, read, lambda: info.CRC)


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Read shape and dtype of an array from the header of its file."""
    version = np.lib.format.read_magic(stream)
    known = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in known:
        raise ValueError(f"its format is {version[0]}.{version[1]}, not 1.0 or 2.0")
    shape, _, dtype = known[version](stream)
    if dtype.hasobject:
        raise ValueError("it contains Python objects, which are never loaded: save arrays of numbers")
    return shape, dtype


def _guarded(file: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # a broken file may raise anything
        reason = why(file, error)
        if "not a zip file" in reason:
            with file.open("rb") as stream:
                reason = "which is truncated" if stream.read(2) == b"PK" else "which is not an .npz file"
        raise refusal(WHAT, file, reason) from error


def _crc(file: Path) -> int:
    def read() -> int:
        found = 0
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                found = zlib.crc32(block, found)
        return found

    return _guarded(file, read)


CHANNELS = (1, 2, 3, 4)
PADDING = 4  # pixels on each side for random crops
CHUNK = 4096  # images that are summed at once


@with_options
class Arrays(CountedImages):
    """Square images and their labels in an .npz file or in .npy files.

    Array names are x_train, y_train, x_test, y_test, or images and labels, data and targets, in any order and case. A
    validation part (val, valid, validation) chooses the best epoch. If there are only x and y, they are split by
    `test_share`. Images are [n, H, W], [n, H, W, C] or [n, C, H, W], integers or floats; each channel is normalised by
    its mean and standard deviation over the training images. Labels are integers, text or one-hot rows; classes are
    numbered in sorted order. Random crops of `augment` use a padding of 4 pixels.
    """

    file: str | None = option(
        "file in paths.data; null = its only .npz file, its .npy files, or paths.data itself", default=None
    )
    layout: str | None = option(
        "nhwc or nchw; null = from the number of channels", default=None, choices=("nhwc", "nchw")
    )
    channels: int | None = option(NULL, default=None, at_least=1)
    augment: bool = option("random crop and flip", default=False)

    sizes = ("classes", "train_size", "channels", "image_size")
    counted = (*sizes, "test_share", "fingerprint")
    chosen_as = {
        "arrays": Choice(
            "your own images as arrays: paths.data=FILE.npz with x_train, y_train, x_test, y_test or similar names, or "
            ".npy files",
            comments={**BY_OWN, "image_size": "pixels; null = that of the images"},
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        name_or_null("file", self.file)

    @property
    def in_channels(self) -> int:  # type: ignore[override]
        return known(self, "channels")

    def look(self, root: str) -> FileContents:
        place = find(Path(root), self.file)
        arrays = arrays_in(place)
        first = arrays["train"]["x"]
        _, channels, size = self._form(first)
        for kinds in arrays.values():
            x, y = kinds["x"], kinds["y"]
            if self._form(x)[1:] != (channels, size):
                both = f"{_shown(first)} and {_shown(x)}"
                raise ConfigError(f"{place} must have equal images in all parts, got {both}; change one of them")
            if (x.dtype.kind == "f") != (first.dtype.kind == "f"):
                both = f"{_shown(first)} and {_shown(x)}"
                raise ConfigError(
                    f"{place} must have integers, or floats of one range, as images of all parts, got {both}; scale "
                    "one of them"
                )
            if x.shape[0] != (y.shape or (0,))[0]:
                both = f"{_shown(x)} and {_shown(y)}"
                raise ConfigError(f"{place} must have a label for each image, got {both}; change one of them")
        labels = self._labels(place, arrays)
        own_test = "test" in labels or "validation" in labels
        chosen_by = len(labels["validation"]) if "test" in labels and "validation" in labels else 0
        names = list(map(str, np.unique(_plain_labels(arrays["train"]["y"]))))
        return FileContents(
            str(place), labels["train"], own_test, chosen_by, {"channels": channels, "image_size": size}, names
        )

    def _form(self, x: Stored) -> tuple[str, int, int]:
        """Return layout (`nhw` without channels), number of channels and side length of images."""
        if x.dtype.kind not in "buif" or len(x.shape) not in (3, 4) or not all(x.shape):
            rule = "images [n, H, W], [n, H, W, C] or [n, C, H, W] of numbers"
            raise ConfigError(f"{x.file} must have {rule}, got {_shown(x)}; change that array")
        rest = x.shape[1:]
        if len(rest) == 2 and self.layout is not None:
            raise ValueRefused(
                "dataset.layout", f"null where images have no channels, as {_shown(x)}", self.layout, None
            )
        forms = {"nhw": (1, *rest)} if len(rest) == 2 else {"nhwc": (rest[2], *rest[:2]), "nchw": rest}
        fits = [name for name, (channels, *sides) in forms.items() if channels in CHANNELS and len({*sides}) == 1]
        fits = [name for name in fits if self.layout in (None, name)]
        if len(fits) > 1:
            raise ValueRefused("dataset.layout", f"nhwc or nchw, since {_shown(x)} may be either", None, "nhwc")
        if not fits:
            rule = "square images of 1 to 4 channels" + (f" in dataset.layout={self.layout}" if self.layout else "")
            raise ConfigError(f"{x.file} must have {rule}, got {_shown(x)}; cut or pad them")
        channels, side, _ = forms[fits[0]]
        return fits[0], channels, side

    def _labels(self, place: Path, arrays: StoredArrays) -> dict[str, np.ndarray]:
        """Return the labels of each part, as integers from 0."""
        raw = {part: _plain_labels(kinds["y"]) for part, kinds in arrays.items()}
        classes = np.unique(raw["train"])
        for part, own in raw.items():
            if (strange := own[~np.isin(own, classes)]).size:
                own_place = f"{strange[0]} in {arrays[part]['y'].name} alone"
                rule = "the classes of its training part in all parts"
                raise ConfigError(f"{place} must have {rule}, got {own_place}; leave those samples out")
        return {part: np.searchsorted(classes, own) for part, own in raw.items()}

    def fingerprint_of(self, root: str) -> str:
        """Return the fingerprint of all arrays that are read."""
        arrays = arrays_in(find(Path(root), self.file))
        parts = [
            (part, kind, own.shape, own.checksum()) for part, kinds in arrays.items() for kind, own in kinds.items()
        ]
        return hashlib.blake2b(repr(sorted(parts)).encode(), digest_size=8).hexdigest()

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        place = find(Path(root), self.file)
        arrays = arrays_in(place)
        labels = {part: torch.from_numpy(own) for part, own in self._labels(place, arrays).items()}
        whole = {part: (self._images(kinds["x"]), labels[part]) for part, kinds in arrays.items()}
        train, test, chosen_by = whole["train"], whole.get("test"), whole.get("validation")
        if test is None and chosen_by is None:
            kept, out = map(torch.from_numpy, held_out(labels["train"].numpy(), self.test_share or SHARE, seed))
            train, test = _some(train, kept), _some(train, out)
        elif test is None:
            test, chosen_by = chosen_by, None
        assert test is not None
        mean, std = moments(train[0])
        train, test = self.cut(train, _some(test, self._order(test)), seed)
        if chosen_by is not None:
            self._of_validation = len(chosen_by[1])
            more = _some(chosen_by, self._order(chosen_by))
            train = torch.cat([train[0], more[0]]), torch.cat([train[1], more[1]])
        return ImageData(train, test, mean, std, PADDING * self.augment, self.augment, seed, device)

    def _order(self, part: tuple[Tensor, Tensor]) -> Tensor:
        """Return sample indices; shuffled if `limit_eval` is set, because samples may be sorted by class."""
        count = len(part[1])
        if self.limit_eval is None:
            return torch.arange(count)
        return torch.randperm(count, generator=keyed_rng.generator("evaluation"))

    def _images(self, x: Stored) -> Tensor:
        """Return images [n, C, H, W], in uint8 if all values are integers from 0 to 255, otherwise in float32."""
        layout, channels, side = self._form(x)
        values = x.load()
        small = values.dtype.kind in "bui" and values.min() >= 0 and values.max() <= 255
        with np.errstate(over="ignore"):  # the next lines report it
            values = np.ascontiguousarray(values, dtype=np.uint8 if small else np.float32)
        if not small and not np.isfinite(values).all():
            rule = "finite images, also as float32"
            raise ConfigError(f"{x.file} must have {rule}, got NaN or infinity in {x.name}; change that array")
        images = torch.from_numpy(values)
        images = images.permute(0, 3, 1, 2).contiguous() if layout == "nhwc" else images
        return images.view(-1, channels, side, side)


def _some(pair: tuple[Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
    return pair[0][indices], pair[1][indices]


def _plain_labels(y: Stored) -> np.ndarray:
    """Return labels [n] as integers or text."""
    labels = y.load()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and np.isin(labels, (0, 1)).all() and (labels.sum(1) == 1).all():
        return labels.argmax(1)
    whole = labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == labels.round()).all()
    missing = labels.dtype.kind in "US" and not np.strings.str_len(np.strings.strip(labels)).all()
    if labels.ndim == 1 and (whole or labels.dtype.kind in "buiUS") and not missing:
        return labels.astype(np.int64) if whole else labels
    rule = "one class for each image: whole numbers, text or one-hot rows"
    got = f"{_shown(y)} with an empty text" if missing else _shown(y)
    raise ConfigError(f"{y.file} must have {rule}, got {got}; change that array")


def _shown(own: Stored) -> str:
    """Format name, shape and dtype: `x_train [60000, 28, 28] uint8`."""
    return f"{own.name} [{', '.join(map(str, own.shape))}] {own.dtype}"


def moments(images: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, in the units of the images; 1 where the deviation is 0."""
    count = images[:, 0].numel()
    total = sum(part.double().sum((0, 2, 3)) for part in images.split(CHUNK))
    mean = total / count
    squares = sum((part.double() - mean[:, None, None]).square().sum((0, 2, 3)) for part in images.split(CHUNK))
    std = (squares / count).sqrt()
    return mean.tolist(), torch.where(std > 0, std, 1.0).tolist()
