"""Users' picture files: decode them to 8-bit RGB, report broken ones, and crop them to model inputs."""

import hashlib
import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from accordion_bench.datasets.counted import SHARE, CountedImages, FileContents, held_out
from accordion_bench.datasets.dataset import Batches
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.datasets.images import normalised, per_channel
from accordion_bench.datasets.loader import Loader, Upload, Uploaded
from accordion_bench.options.option import option, with_options
from accordion_bench.tensors import keyed_rng

# lower case; of files with several pictures Pillow reads the first one
ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".pgm", ".pbm", ".bmp", ".tif", ".tiff", ".webp", ".gif")
NOT_OURS = ("__MACOSX", "@eaDir")  # folders added by archives of macOS and by Synology disk stations
SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
# end markers of complete files, searched in the last BEHIND bytes, because some programs append data
LAST = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
BEHIND = 64
WHAT = "pictures that can be read"
MEAN = [255 * m for m in (0.485, 0.456, 0.406)]  # constants of torchvision's reference training, in units of uint8
STD = [255 * s for s in (0.229, 0.224, 0.225)]
ATTEMPTS = 10  # number of random crops tried
HELD_OUT = -1  # used as epoch: a training image without augmentation


def is_hidden(name: str) -> bool:
    """Whether a file or folder was added by a program and is not part of the data set."""
    return name.startswith(".") or name in NOT_OURS


def opened(file: Path) -> Image.Image:
    """Decode a picture to 8-bit RGB.

    Of 16-bit values the upper 8 bits are kept, so that white stays white. As in torchvision, transparency is dropped,
    the EXIF orientation is ignored, and of animations and multi-page files the first picture is used.

    Raises:
        Unreadable: the file cannot be decoded; names the file and the reason.
    """
    try:
        with _open(file) as image:
            return in_colour(image)
    except Exception as error:  # a broken file may raise anything
        raise refusal(WHAT, file, reason(file, error)) from error


def _open(file: Path | BinaryIO) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Pillow still refuses twice that size
        return Image.open(file)


def in_colour(image: Image.Image) -> Image.Image:
    """Convert a picture to 8-bit RGB; ValueError for values of 32 bits, whose range the file does not state."""
    bits = _bits(image)
    if bits is None:
        kind = "floats" if image.mode == "F" else "whole numbers"
        raise ValueError(f"its pixels are {kind} of 32 bits, whose range is unknown: save it with 8 or 16 bits")
    if bits > 8:
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> (bits - 8)).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _bits(image: Image.Image) -> int | None:
    """Return the bits per grey value, 8 for other modes; None = unknown."""
    if image.mode in SIXTEEN:
        return int(getattr(image, "tag_v2", {}).get(258, (16,))[0])  # TIFF may have 12 bits
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # these formats have at most 16 bits
        return 16
    return None if image.mode in ("I", "F") else 8


def refuse_broken(files: Iterable[Path]) -> None:
    """Check the beginning and the end of files; files without the expected end marker are decoded.

    Raises:
        Unreadable: a file is not a readable picture; names the first one, and how many others there are.
    """
    first, count = None, 0
    for file in files:
        try:
            _examine(file)
        except Exception as error:  # a broken file may raise anything
            count += 1
            first = first or (file, reason(file, error))
    if first is not None:
        raise refusal(WHAT, *first, count - 1)


def _examine(file: Path) -> None:
    with open(file, "rb") as stream, _open(stream) as image:
        if _bits(image) is None:
            in_colour(image)
        last = LAST.get(image.format or "")
        if last is None:
            return
        size = os.fstat(stream.fileno()).st_size
        stream.seek(max(0, size - BEHIND))
        if last not in stream.read():
            stream.seek(0)
            with _open(stream) as again:
                again.load()


def sides(files: Iterable[Path | BinaryIO]) -> Iterator[int]:
    """Yield the shorter side in pixels of each readable picture."""
    for file in files:
        try:
            with _open(file) as image:
                yield min(image.size)
        except Exception:  # `refuse_broken` reports it
            continue


def reason(file: Path, error: BaseException) -> str:
    """Return the reason why a file is not a readable picture; see `unreadable.why`."""
    if isinstance(error, Image.DecompressionBombError):
        return f"which has more than the {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels that are decoded"
    said = why(file, error)
    if "cannot be read" not in said:
        return said
    if isinstance(error, UnidentifiedImageError):
        return "which is not in a picture format that Pillow supports"
    return f"which is truncated ({error})" if "truncated" in str(error).lower() else said


class Pictures(Protocol):
    """Protocol of a collection of encoded pictures with classes.

    Attributes:
        labels: classes of all pictures, array [n].
    """

    @property
    def labels(self) -> np.ndarray: ...

    def only(self, indices: Tensor) -> Any:
        """Return the pictures with these indices, in this order."""

    def with_others(self, others: Any) -> Any:
        """Append other pictures of the same type."""

    def open(self, index: int) -> Image.Image:
        """Decode one picture in colour; an `Unreadable` error names it and the reason."""

    def sides(self, indices: Sequence[int]) -> Iterator[int]:
        """Yield the shorter side in pixels of those pictures that can be read."""

    def to_examine(self, indices: Sequence[int]) -> Iterable[Path]:
        """Return files to check before a run."""

    def identities(self) -> Iterator[bytes]:
        """Yield the content of a fingerprint."""


@dataclass(frozen=True)
class Files:
    """Names and classes of many picture files, in arrays; Python lists would use hundreds of megabytes per process.

    Args:
        folder: folder that the names are relative to.
        names, labels: arrays [n].
    """

    folder: Path
    names: np.ndarray
    labels: np.ndarray

    def only(self, indices: Tensor) -> "Files":
        return Files(self.folder, self.names[indices.numpy()], self.labels[indices.numpy()])

    def with_others(self, others: "Files") -> "Files":
        """Append other pictures of the same folder."""
        both = np.concatenate([self.names, others.names]), np.concatenate([self.labels, others.labels])
        return Files(self.folder, *both)

    def path(self, index: int) -> Path:
        return self.folder / os.fsdecode(self.names[index])

    def open(self, index: int) -> Image.Image:
        return opened(self.path(index))

    def sides(self, indices: Sequence[int]) -> Iterator[int]:
        return sides(map(self.path, indices))

    def to_examine(self, indices: Sequence[int]) -> Iterable[Path]:
        return map(self.path, indices)

    def identities(self) -> Iterator[bytes]:
        """Yield names and sizes."""
        place = os.fsencode(self.folder)
        for name in self.names:
            try:
                size = os.stat(os.path.join(place, name)).st_size
            except OSError:  # a broken link; `refuse_broken` reports it
                size = -1
            yield b"%s %d\n" % (name, size)


class Views(Dataset):
    """Data set of model inputs, indexed by (epoch, sample), or by (None, sample) for test images.

    Args:
        train, test: the pictures.
        size: height and width in pixels.
        augment: whether training images get random crops and flips, keyed by (seed, epoch, sample).
        seed: seed of the run.
    """

    def __init__(self, train: Pictures, test: Pictures, size: int, augment: bool, seed: int) -> None:
        self.train, self.test, self.size, self.augment, self.seed = train, test, size, augment, seed

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[Tensor, int]:
        """Return image [3, size, size] in uint8 and class for a key (epoch, index); epoch None = test image."""
        epoch, sample = key
        files = self.test if epoch is None else self.train
        image = files.open(sample)
        if epoch in (None, HELD_OUT) or not self.augment:
            image = central(image, self.size)
        else:
            draws = torch.rand(ATTEMPTS + 1, 4, generator=keyed_rng.generator(self.seed, "augmentation", epoch, sample))
            image = image.crop(box(*image.size, draws[1:].tolist()))
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
            if draws[0, 0] < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), int(files.labels[sample])


def box(width: int, height: int, draws: Iterable[list[float]]) -> tuple[int, int, int, int]:
    """Return a random crop (left, top, right, bottom) of an image, as torchvision's RandomResizedCrop draws it.

    Area A = (0.08 + 0.92 u1) width x height, aspect ratio r = (3/4) (16/9)^u2, w = sqrt(A r), h = sqrt(A / r). The
    first crop that fits is placed by u3 and u4. If none fits, the largest central crop with an allowed ratio is used.

    Args:
        width, height: size of the image in pixels.
        draws: [attempts, 4], uniform in [0, 1).
    """
    for u in draws:
        area, ratio = (0.08 + 0.92 * u[0]) * width * height, 0.75 * (16 / 9) ** u[1]
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(u[2] * (width - w + 1)), int(u[3] * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def central(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side of an image to 8/7 of `size` and return the central square."""
    shorter = max(size, round(size * 8 / 7))
    short, long = sorted(image.size)
    longer = shorter * long // short
    width, height = (shorter, longer) if image.width <= image.height else (longer, shorter)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


class FolderData:
    """Images that separate processes read from files ahead of use.

    Args:
        views: model inputs to read.
        workers: number of processes.
        device: destination of batches.
    """

    def __init__(self, views: Views, workers: int, device: torch.device) -> None:
        self.train_size, self.test_size = len(views.train.labels), len(views.test.labels)
        self.train_labels = torch.from_numpy(views.train.labels)
        self.device, self.mean, self.std = device, per_channel(MEAN, device), per_channel(STD, device)
        self.loader = Loader(views, workers, pin=device.type == "cuda")
        self.upload = Upload(device)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        return self._read(epoch, batches)

    def test_batches(self, batches: Iterable[Tensor]) -> Batches:
        return self._read(None, batches)

    def validation_batches(self, batches: Iterable[Tensor]) -> Batches:
        return self._read(HELD_OUT, batches)

    def _read(self, epoch: int | None, batches: Iterable[Tensor]) -> Batches:
        ready = None
        # one batch ahead: copies to a GPU overlap with its work, and the reading pass has ended at the last batch
        for images, labels in self.loader.read([(epoch, i) for i in indices.tolist()] for indices in batches):
            if ready is not None:
                yield self._normalised(ready)
            ready = self.upload.send((images, labels))
        if ready is not None:
            yield self._normalised(ready)

    def _normalised(self, sent: Uploaded) -> tuple[Tensor, Tensor]:
        images, labels = self.upload.receive(sent)
        return normalised(images, self.mean, self.std), labels


WORKERS = "decoding processes per training process; 0 = none"
LARGEST = 224  # upper bound of the default image_size
EXAMINED = 10_000  # maximum pictures per part that are checked before a run, evenly spaced
READERS, MANY = 4, 5_000  # decoding processes, and the number of training pictures from which on they are used
MEASURED = 1_000  # pictures whose sides determine the default image_size
SIZE = {"image_size": "pixels; null = 224, or the median shorter side of the pictures if that is less"}


class PicturesByPart(NamedTuple):
    """Pictures of each part.

    Args:
        place: folder that contains them.
        train: pictures for training.
        test: pictures for evaluation; None = a share of the training pictures is held out.
        validation: pictures that choose the best epoch; None = there are none.
        told: further content that determines the classes, such as a table; part of the fingerprint.
        names: names of the classes by label.
    """

    place: Path
    train: Pictures
    test: Pictures | None = None
    validation: Pictures | None = None
    told: bytes = b""
    names: Sequence[str] = ()

    @classmethod
    def of(
        cls, place: Path, parts: Mapping[str, Pictures], names: Sequence[str], told: bytes = b""
    ) -> "PicturesByPart":
        """Build from a mapping of parts. Without a test part, the validation pictures are the test part."""
        test, validation = parts.get("test"), parts.get("validation")
        return cls(place, parts["train"], test or validation, validation if test else None, told, names)

    def parts(self) -> list[Pictures]:
        """Return the parts that exist."""
        return [part for part in (self.train, self.test, self.validation) if part is not None]


@with_options
class DecodedImages(CountedImages):
    """Colour pictures of any size.

    Training uses a random resized crop (8 to 100 % of the area, aspect ratio 3/4 to 4/3) and a horizontal flip, keyed
    by (seed, epoch, sample). Evaluation resizes the shorter side to 8/7 of `image_size` (256 for 224) and takes the
    central square. Without `augment`, training uses the central squares too. The pictures that `limit_eval` selects are
    a random choice of all classes and do not depend on the seed.
    """

    augment: bool = option("random resized crop and flip", default=True)
    workers: int | None = option(f"{WORKERS}; null = 4, or 0 for few pictures", default=None, at_least=0, instead=4)

    in_channels = 3

    def sorted(self, root: str) -> PicturesByPart:
        """Return the pictures of each part; all parts have the classes of the training part."""
        raise NotImplementedError

    def look(self, root: str) -> FileContents:
        here = self.sorted(root)
        chosen_by = 0 if here.validation is None else len(here.validation.labels)
        return FileContents(str(here.place), here.train.labels, here.test is not None, chosen_by, names=here.names)

    def count(self, root: str) -> dict[str, Any]:
        if self.image_size is None:
            files = self.sorted(root).train
            found = sorted(files.sides(spread(len(files.labels), MEASURED)))
            self.image_size = min(LARGEST, found[len(found) // 2]) if found else LARGEST
        return super().count(root)

    def fingerprint_of(self, root: str) -> str:
        """Return the fingerprint of all pictures."""
        here = self.sorted(root)
        digest = hashlib.blake2b(here.told, digest_size=8)
        for part in here.parts():
            for said in part.identities():
                digest.update(said)
        return digest.hexdigest()

    def prepare(self, root: str) -> None:
        super().prepare(root)
        looked_at = [part.to_examine(spread(len(part.labels), EXAMINED)) for part in self.sorted(root).parts()]
        refuse_broken(itertools.chain(*looked_at))

    def load(self, root: str, seed: int, device: torch.device) -> FolderData:
        here = self.sorted(root)
        train, test = here.train, here.test
        if test is None:
            kept, out = map(torch.from_numpy, held_out(train.labels, self.test_share or SHARE, seed))
            train, test = train.only(kept), train.only(out)
        every = torch.arange(len(train.labels))
        (chosen, _), (first, _) = self.cut((every, every), (mixed(test), mixed(test)), seed)
        train = train.only(chosen)
        if here.validation is not None:
            own = here.validation
            self._of_validation = len(own.labels)
            train = train.with_others(own.only(mixed(own)))
        size = self.image_size or self.count(root)["image_size"]
        workers = READERS * (len(train.labels) >= MANY) if self.workers is None else self.workers
        return FolderData(Views(train, test.only(first), size, self.augment, seed), workers, device)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices below `count`, evenly spaced."""
    return sorted({i * count // min(count, most) for i in range(min(count, most))}) if count else []


def mixed(files: Pictures) -> torch.Tensor:
    """Return the indices of all pictures in a random order independent of the seed: pictures may be sorted by class."""
    return torch.randperm(len(files.labels), generator=keyed_rng.generator("evaluation"))
