"""A folder of pictures in folders of classes: too large for memory, read file by file."""

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from accordion_bench.datasets import pictures
from accordion_bench.datasets.counted import SHARE, CountedImages, Found, held_out, name_or_null, part_of
from accordion_bench.datasets.picture_views import Files, FolderData, Views
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors import keyed_rng

LARGEST = 224  # image_size, where it is not typed
EXAMINED = 10_000  # pictures that are looked at before a run, spread over all
READERS, MANY = 4, 5_000  # processes that decode, and training pictures from which on they pay
MEASURED = 1_000  # pictures whose sides say how large they are


class ImageFolder(CountedImages):
    """Pictures in a folder for each class, in `train` and a test or validation folder, or without these.

    Names of the parts: train, training; test, testing; val, valid, validation. Where there are both of the last two the
    validation pictures choose the best epoch. Where there is neither, a share of each class is held out. Training:
    random resized crop (8 to 100 % of the area, aspect ratio 3/4 to 4/3) and horizontal flip, keyed by (seed, epoch,
    sample). Evaluation: the shorter side resized to 8/7 of `image_size` (256 for 224), then the central square.

    Args:
        folder: in `paths.data`; null = that folder itself.
        classes, train_size: of the folder; null = counted.
        image_size: height and width in pixels; null = 224, or what the shorter side of most pictures has, if that is
            less.
        augment: false trains on the central squares.
        workers: processes that read and decode, in each training process; 0 = none, decode when needed; null = 4, or
            none where there are so few pictures that starting them takes longer.
        limit_eval: evaluate on so many images, the same for every seed, of all classes; null = all.
        test_share, fingerprint, validation, subset, sharding, alpha: see `CountedImages`.
    """

    in_channels = 3
    counted = (*CountedImages.counted, "image_size")
    instead = ""

    def __init__(
        self,
        folder: str | None = None,
        classes: int | None = None,
        train_size: int | None = None,
        image_size: int | None = None,
        augment: bool = True,
        **options: Any,
    ) -> None:
        workers = options.pop("workers", None)
        super().__init__({"classes": classes, "train_size": train_size, "image_size": image_size}, **options)
        self.folder = name_or_null("folder", folder)
        self.augment = checks.boolean("augment", augment)
        self.workers = None if workers is None else checks.integer("workers", workers, at_least=0, instead=4)

    def wanted(self) -> str:
        """What there must be, in a sentence."""
        return "pictures in a folder for each class, or folders train and test with such"

    def _parts(self, root: str) -> "Parts":
        """Where the pictures are.

        Raises:
            ConfigError: they are not.
        """
        try:
            return parts(Path(root, self.folder or ""))
        except OSError as error:
            why = error.strerror and f"{error.strerror}: {error.filename}"
            raise ConfigError(
                f"paths.data must hold {self.wanted()}, got {root} without them ({why or error}); type "
                f"paths.data=FOLDER{self.instead and f', or {self.instead}'}"
            ) from None

    def look(self, root: str) -> Found:
        here = self._parts(root)
        train = files_of(here.place, here.train)
        for other in (here.test, here.validation):
            if other is not None and (names := classes_of(other)) != classes_of(here.train):
                strange = sorted({*names} ^ {*classes_of(here.train)})[0]
                raise ConfigError(
                    f"{here.place} must have the same classes in {here.train.name} and {other.name}, got {strange} in "
                    f"one only; sort the images of {other.name} into folders of classes"
                )
        chosen_by = len(files_of(here.place, here.validation).labels) if here.validation else 0
        return Found(str(here.place), train.labels, here.test is not None, chosen_by)

    def count(self, root: str) -> dict[str, Any]:
        if self.numbers["image_size"] is None:
            here = self._parts(root)
            files = files_of(here.place, here.train)
            found = sorted(pictures.sides(map(files.path, spread(len(files.labels), MEASURED))))
            self.numbers["image_size"] = min(LARGEST, found[len(found) // 2]) if found else LARGEST
        return super().count(root)

    def fingerprint_of(self, root: str) -> str:
        """Of the names and sizes of all pictures."""
        here, digest = self._parts(root), hashlib.blake2b(digest_size=8)
        place = os.fsencode(here.place)
        for part in filter(None, (here.train, here.test, here.validation)):
            for name in files_of(here.place, part).names:
                try:
                    size = os.stat(os.path.join(place, name)).st_size
                except OSError:  # a link that leads nowhere: `refuse_broken` tells
                    size = -1
                digest.update(b"%s %d\n" % (name, size))
        return digest.hexdigest()

    def prepare(self, root: str) -> None:
        super().prepare(root)
        here = self._parts(root)
        files = [files_of(here.place, part) for part in filter(None, (here.train, here.test, here.validation))]
        paths = [own.path(i) for own in files for i in spread(len(own.labels), EXAMINED)]
        pictures.refuse_broken(paths)

    def load(self, root: str, seed: int, device: torch.device) -> FolderData:
        here = self._parts(root)
        train = files_of(here.place, here.train)
        if here.test is None:
            kept, out = map(torch.from_numpy, held_out(train.labels, self.test_share or SHARE, seed))
            train, test = train.only(kept), train.only(out)
        else:
            test = files_of(here.place, here.test)
        every = torch.arange(len(train.labels))
        (chosen, _), (first, _) = self.cut((every, every), (mixed(test), mixed(test)), seed)
        train = train.only(chosen)
        if here.validation is not None:
            own = files_of(here.place, here.validation)
            self._of_validation = len(own.labels)
            train = train.with_others(own.only(mixed(own)))
        size = self.numbers["image_size"] or self.count(root)["image_size"]
        workers = READERS * (len(train.labels) >= MANY) if self.workers is None else self.workers
        return FolderData(Views(train, test.only(first), size, self.augment, seed), workers, device)


class Parts(NamedTuple):
    """Folders of folders of classes.

    Args:
        place: that they are in, or that is the one for training.
        train: to train on.
        test: to evaluate on; None = a share of those is held out.
        validation: to choose by; None = there is none.
    """

    place: Path
    train: Path
    test: Path | None = None
    validation: Path | None = None


def parts(place: Path) -> Parts:
    """Which folders have which part, whatever usual names they have.

    Raises:
        OSError: there is no such folder, or it has none.
    """
    folders = _folders(place)
    if len(folders) == 1 and part_of(folders[0].name) is None and (inner := _folders(folders[0])):
        place, folders = folders[0], inner  # an archive that was unpacked has a folder of its own
    named: dict[str, Path] = {}
    for folder in folders:
        part = part_of(folder.name)
        if part and part in named:
            raise OSError(f"{named[part].name} and {folder.name} are both there")
        if part and (part == "train" or _folders(folder)):  # a contest keeps the classes of its test to itself
            named[part] = folder
    others = [folder for folder in folders if part_of(folder.name) is None]
    if "train" in named and others and not _folders(named["train"]):
        return Parts(place, place)  # a class of that name, among others: bus, car, train
    if "train" not in named:
        if any(part_of(folder.name) for folder in folders):
            raise OSError(f"there is no folder train in {place}")
        if not folders:
            raise OSError(f"there are no folders in {place}")
        return Parts(place, place)
    if not _folders(named["train"]):
        raise OSError(f"there are no folders of classes in {named['train']}")
    test, validation = named.get("test"), named.get("validation")
    return Parts(place, named["train"], test or validation, validation if test else None)


def _folders(place: Path) -> list[Path]:
    """The folders in a folder, but for those that programs have put there, sorted by name."""
    with os.scandir(place) as entries:
        return sorted(Path(entry.path) for entry in entries if not pictures.is_hidden(entry.name) and entry.is_dir())


def classes_of(part: Path) -> list[str]:
    """The names of the classes, in the order of their numbers."""
    return [folder.name for folder in _folders(part)]


def files_of(place: Path, part: Path) -> Files:
    """All pictures of a folder of folders of classes, in the order of torchvision's ImageFolder.

    Raises:
        ConfigError: a class has none, or a folder cannot be read.
    """
    try:
        folders = _folders(part)
        return _scanned(place, part, tuple((own.name, own.stat().st_mtime_ns) for own in folders))
    except OSError as error:
        raise ConfigError(
            f"paths.data must hold folders that can be read, got {error.filename}: {error.strerror}; type "
            "paths.data=FOLDER"
        ) from None


@functools.lru_cache(maxsize=8)
def _scanned(place: Path, part: Path, versions: Sequence[tuple[str, int]]) -> Files:
    """As `files_of`; a folder that has not changed is not read again in this process."""
    names: list[bytes] = []
    labels: list[int] = []
    class_of: dict[tuple[int, int], str] = {}
    for label, (name, _) in enumerate(versions):
        found = _pictures(part / name, class_of)
        if not found:
            raise ConfigError(
                f"paths.data must hold pictures of each class, got {part / name} without one; type paths.data=FOLDER, "
                f"or remove that folder (names of pictures end in {', '.join(pictures.ENDINGS)})"
            )
        names += [os.fsencode(os.path.relpath(file, place)) for file in found]
        labels += [label] * len(found)
    return Files(place, np.array(names), np.array(labels))


def _pictures(folder: Path, class_of: dict[tuple[int, int], str]) -> list[str]:
    """The pictures of a class, in folders within it, too; a folder that a link leads back to is read once.

    Args:
        folder: of the class.
        class_of: of each folder that was read, by device and number; those of this class are added.

    Raises:
        ConfigError: a folder lies in another class as well, so that its pictures would be of two.
    """
    found: list[tuple[str, list[str]]] = []
    todo = [str(folder)]
    while todo:
        here = todo.pop()
        own = os.stat(here)
        known = class_of.get((own.st_dev, own.st_ino))
        if known == folder.name:
            continue
        if known is not None:
            raise ConfigError(
                f"paths.data must hold each folder of pictures in one class, got {here} in {known} and {folder.name}; "
                "remove the link that leads there"
            )
        class_of[own.st_dev, own.st_ino] = folder.name
        with os.scandir(here) as entries:
            shown = [entry for entry in entries if not pictures.is_hidden(entry.name)]
        inner = {entry.path for entry in shown if entry.is_dir()}
        todo += inner
        files = [e.path for e in shown if e.path not in inner and e.name.lower().endswith(pictures.ENDINGS)]
        found.append((here, sorted(files)))
    return [file for _, files in sorted(found) for file in files]


def spread(count: int, most: int) -> list[int]:
    """So many numbers below `count` at most, evenly apart."""
    return sorted({i * count // min(count, most) for i in range(min(count, most))}) if count else []


def mixed(files: Files) -> torch.Tensor:
    """Numbers of all files in an order that no seed decides: sorted by class, the first few were of a few."""
    return torch.randperm(len(files.labels), generator=keyed_rng.generator("evaluation"))
