"""Find arrays of images and labels in .npz or .npy files by their usual names, and read them."""

import functools
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accordion_bench.datasets.counted import part_of
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.options.checks import ConfigError

KINDS = {"x": ("x", "images", "image", "data", "inputs"), "y": ("y", "labels", "label", "targets", "target")}
WHAT = "arrays that can be read"
WANTED = "paths.data must hold an .npz file, or .npy files"
BLOCK = 1 << 24  # bytes per read when computing a checksum


@dataclass(frozen=True)
class Stored:
    """Handle of an array in a file that has not been read yet.

    Args:
        file: path of the file.
        name: name of the array in an .npz file, or stem of the .npy file.
        shape, dtype: shape and dtype of the array.
        read: function that reads the array.
        checksum: function that returns a checksum of the array's bytes.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    checksum: Callable[[], int]

    def load(self) -> np.ndarray:
        """Read the array.

        Raises:
            Unreadable: the file cannot be read; names the file and the reason.
        """
        return _guarded(self.file, self.read)


Arrays = Mapping[str, Mapping[str, Stored]]  # by part (train, test, validation) and kind (x, y)


def find(root: Path, file: str | None) -> Path:
    """Return the file, or the folder of files, that contains the arrays.

    Args:
        root: `paths.data`, which may be the file itself.
        file: name of the file in `root`; None = the only .npz file, or .npy files.

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


def arrays_in(place: Path) -> Arrays:
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
    """Return functions that open each array of an .npz file, an .npy file, or a folder of .npy files, by array name.

    Raises:
        Unreadable: the .npz file cannot be read.
    """
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
            reason = "which is truncated" if _begins_as_zip(file) else "which is not an .npz file"
        raise refusal(WHAT, file, reason) from error


def _begins_as_zip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(2) == b"PK"


def _crc(file: Path) -> int:
    def read() -> int:
        found = 0
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                found = zlib.crc32(block, found)
        return found

    return _guarded(file, read)
