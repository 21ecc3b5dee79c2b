"""Pictures that do not fit in memory and are decoded when a batch needs them."""

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accordion_bench.datasets import pictures
from accordion_bench.datasets.counted import SHARE, CountedImages, FileContents, held_out
from accordion_bench.datasets.pictures import FolderData, Pictures, Views
from accordion_bench.options.option import option, with_options
from accordion_bench.tensors import keyed_rng

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
    """

    place: Path
    train: Pictures
    test: Pictures | None = None
    validation: Pictures | None = None
    told: bytes = b""

    @classmethod
    def of(cls, place: Path, parts: Mapping[str, Pictures], told: bytes = b"") -> "PicturesByPart":
        """Build from a mapping of parts. Without a test part, the validation pictures are the test part."""
        test, validation = parts.get("test"), parts.get("validation")
        return cls(place, parts["train"], test or validation, validation if test else None, told)

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
        return FileContents(str(here.place), here.train.labels, here.test is not None, chosen_by)

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
        pictures.refuse_broken(itertools.chain(*looked_at))

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
