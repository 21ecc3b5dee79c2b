"""Pictures that are decoded when they are needed: too large for memory, read one by one."""

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accordion_bench.datasets import pictures
from accordion_bench.datasets.counted import SHARE, CountedImages, Found, held_out
from accordion_bench.datasets.picture_views import FolderData, Pictures, Views
from accordion_bench.options.option import option, with_options
from accordion_bench.tensors import keyed_rng

WORKERS = "processes that decode, per training process; 0 = none"
LARGEST = 224  # image_size, where it is not typed
EXAMINED = 10_000  # pictures that are looked at before a run, spread over all
READERS, MANY = 4, 5_000  # processes that decode, and training pictures from which on they pay
MEASURED = 1_000  # pictures whose sides say how large they are
SIZE = {"image_size": "pixels; null = 224, or the shorter side of most pictures where that is less"}


class Sorted(NamedTuple):
    """Pictures of each part.

    Args:
        place: that they are in.
        train: to train on.
        test: to evaluate on; None = a share of those is held out.
        validation: to choose by; None = there are none.
        told: what else says their classes; a fingerprint holds it.
    """

    place: Path
    train: Pictures
    test: Pictures | None = None
    validation: Pictures | None = None
    told: bytes = b""

    @classmethod
    def of(cls, place: Path, parts: Mapping[str, Pictures], told: bytes = b"") -> "Sorted":
        """By part: without a test the validation pictures are evaluated on."""
        test, validation = parts.get("test"), parts.get("validation")
        return cls(place, parts["train"], test or validation, validation if test else None, told)

    def parts(self) -> list[Pictures]:
        """Those that there are."""
        return [part for part in (self.train, self.test, self.validation) if part is not None]


@with_options
class DecodedImages(CountedImages):
    """Pictures of any sizes, in colour.

    Training: random resized crop (8 to 100 % of the area, aspect ratio 3/4 to 4/3) and horizontal flip, keyed by (seed,
    epoch, sample). Evaluation: the shorter side resized to 8/7 of `image_size` (256 for 224), then the central square.
    Without `augment` it trains on the central squares. `limit_eval` images are the same for every seed, of all classes.
    """

    augment: bool = option("random resized crop and flip", default=True)
    workers: int | None = option(f"{WORKERS}; null = 4, or none of few pictures", default=None, at_least=0, instead=4)

    in_channels = 3

    def sorted(self, root: str) -> Sorted:
        """The pictures of each part.

        Raises:
            ConfigError: they are not there, or a part has other classes.
        """
        raise NotImplementedError

    def look(self, root: str) -> Found:
        here = self.sorted(root)
        chosen_by = 0 if here.validation is None else len(here.validation.labels)
        return Found(str(here.place), here.train.labels, here.test is not None, chosen_by)

    def count(self, root: str) -> dict[str, Any]:
        if self.image_size is None:
            files = self.sorted(root).train
            found = sorted(files.sides(spread(len(files.labels), MEASURED)))
            self.image_size = min(LARGEST, found[len(found) // 2]) if found else LARGEST
        return super().count(root)

    def fingerprint_of(self, root: str) -> str:
        """Of all pictures."""
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
    """So many numbers below `count` at most, evenly apart."""
    return sorted({i * count // min(count, most) for i in range(min(count, most))}) if count else []


def mixed(files: Pictures) -> torch.Tensor:
    """Numbers of all files in an order that no seed decides: sorted by class, the first few were of a few."""
    return torch.randperm(len(files.labels), generator=keyed_rng.generator("evaluation"))
