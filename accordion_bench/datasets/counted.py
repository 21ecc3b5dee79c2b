"""Images in users' own files: what is not typed is counted there, and what they lack of a test is held out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from accordion_bench.datasets.dataset import Dataset, Split
from accordion_bench.datasets.images import ImageDataset
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.option import option, with_options
from accordion_bench.tensors import keyed_rng

NULL = "null = counted"
BY_OWN = {
    "validation": "training samples, a number or a share below 1, held out to choose by; null = by val, or by test"
}
SHARE = 0.2  # of each class, where there is no test
NAMES = {"train": ("train", "training"), "test": ("test", "testing"), "validation": ("val", "valid", "validation")}


@dataclass(frozen=True)
class Found:
    """What files hold.

    Args:
        place: folder or file, for messages.
        labels: of all training samples, before any of them are held out; numbers from 0.
        own_test: whether they have a test of their own.
        validation: samples of a validation split of their own.
        numbers: what else can be counted, by the name of the option.
    """

    place: str
    labels: np.ndarray
    own_test: bool
    validation: int = 0
    numbers: Mapping[str, Any] = field(default_factory=dict)


@with_options
class CountedImages(ImageDataset):
    """Images in users' own files.

    A run notes what was counted in its config.yaml; where it is resumed the files must still be so. Where the files
    have no test of their own, `test_share` of each class is evaluated on, drawn by the seed. Where they have a
    validation split of their own, it chooses the best epoch, and `validation` must be null.

    Class attributes:
        sizes: the numbers that files must have as declared; of `counted` those that are null are counted.
    """

    classes: int | None = option(NULL, default=None, at_least=2)
    train_size: int | None = option(NULL, default=None, at_least=1)  # type: ignore[assignment]
    image_size: int | None = option(NULL, default=None, at_least=1)  # type: ignore[assignment]
    test_share: float | None = option(
        "of each class, evaluated on where there is neither test nor val; null = 0.2 there",
        default=None,
        above=0,
        below=1,
        instead=SHARE,
    )
    fingerprint: str | None = option("of the files, noted by a run; null = whatever they are", default=None)

    sizes: ClassVar[tuple[str, ...]] = ("classes", "train_size", "image_size")
    counted: ClassVar[tuple[str, ...]] = (*sizes, "test_share", "fingerprint")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_no_fingerprint(self.fingerprint)
        self._of_validation = 0  # samples of the files' own, behind those to train on

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        return known(self, "classes")

    @property
    def whole(self) -> int:
        return known(self, "train_size")

    def example(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        known(self, "image_size")
        return super().example(samples)

    def look(self, root: str) -> Found:
        """What the files under `root` hold.

        Raises:
            ConfigError: they are not there, or are not of a form that is read.
        """
        raise NotImplementedError

    def fingerprint_of(self, root: str) -> str:
        """Of the files: another one where they are others."""
        raise NotImplementedError

    def count(self, root: str) -> dict[str, Any]:
        found = self.look(root)
        if self.test_share is None and not found.own_test:
            self.test_share = SHARE
        for key, value in self._counted(found).items():
            if getattr(self, key) is None:
                setattr(self, key, value)
        shares = {} if self.test_share is None else {"test_share": self.test_share}
        sizes = {key: getattr(self, key) for key in self.sizes}
        return {**sizes, **shares, "fingerprint": self.fingerprint or self.fingerprint_of(root)}

    def prepare(self, root: str) -> None:
        found = self.look(root)
        if found.own_test and self.test_share is not None:
            rule = f"null where {found.place} has a test of its own"
            raise ValueRefused("dataset.test_share", rule, self.test_share, None)
        if found.validation and self.validation is not None:
            rule = f"null where {found.place} has a validation split of its own"
            raise ValueRefused("dataset.validation", rule, self.validation, None)
        if self.fingerprint is not None:
            refuse_other_files(found.place, self.fingerprint, self.fingerprint_of(root))
        counted = self._counted(found)
        declared = {key: value for key in counted if (value := getattr(self, key)) is not None}
        if any(counted[key] != value for key, value in declared.items()):
            keys = " and ".join(f"dataset.{key}" for key in declared)
            given = " and ".join(map(str, declared.values()))
            typed = " ".join(f"dataset.{key}={show(counted[key])}" for key in declared)
            raise ConfigError(f"{keys} must be those of {found.place}, got {given}; type {typed}")

    def _counted(self, found: Found) -> dict[str, Any]:
        """Each number that files have, by the name of its option.

        Raises:
            ConfigError: there is one class, or too few samples of one to hold some out.
        """
        if (classes := int(found.labels.max(initial=-1)) + 1) < 2:
            raise ConfigError(
                f"paths.data must hold pictures of 2 classes at least, got {found.place} with {classes}; type "
                "paths.data=FOLDER"
            )
        size = len(found.labels)
        if not found.own_test:
            size -= len(held_out(found.labels, self.test_share or SHARE, 0)[1])
        return {"classes": classes, "train_size": size, **found.numbers}

    def split(self, size: int, seed: int) -> Split:
        if not self._of_validation:
            return super().split(size, seed)
        first = size - self._of_validation
        return Split(torch.arange(first), torch.arange(first, size)[: self.limit_eval])


def held_out(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the samples to train on and of those to evaluate on, both in order: of each class a share.

    Args:
        labels: of all.
        share: of each class, of which one sample at least stays on either side.
        seed: draws them.

    Raises:
        ConfigError: a class has one sample.
    """
    kept, out = [], []
    for label in range(int(labels.max(initial=-1)) + 1):
        own = np.flatnonzero(labels == label)
        if len(own) < 2:
            raise ConfigError(
                "paths.data must hold 2 pictures of each class at least where a share of them is the test, got "
                f"{len(own)} of class {label}; add some, or a test of its own"
            )
        count = min(max(round(share * len(own)), 1), len(own) - 1)
        order = torch.randperm(len(own), generator=keyed_rng.generator(seed, "held out", label)).numpy()
        out.append(own[order[:count]])
        kept.append(own[order[count:]])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(out))


def known(dataset: Dataset, key: str) -> int:
    """What files have of something.

    Raises:
        ConfigError: it is not counted yet.
    """
    if (value := getattr(dataset, key)) is None:
        raise ConfigError(f"dataset.{key} must be counted first, got null; call count(FOLDER), or type a number")
    return value


def refuse_no_fingerprint(fingerprint: Any) -> None:
    """A fingerprint is null, or has 16 digits.

    Raises:
        ValueRefused: it is something else.
    """
    if fingerprint is not None and not re.fullmatch("[0-9a-f]{16}", str(fingerprint)):
        raise ValueRefused("fingerprint", "null, or what a run has noted", fingerprint, None)


def refuse_other_files(place: str, noted: str, now: str) -> None:
    """Files must be those of which a run has noted the fingerprint.

    Raises:
        ConfigError: they are others.
    """
    if now != noted:
        rule = f"that of {place}, {now}, whose files are others than when the run began"
        instead = "restore them, or type the run's own options without resume="
        raise ConfigError(f"dataset.fingerprint must be {rule}, got {noted}; {instead}")


def name_or_null(key: str, value: Any) -> str | None:
    """The name of a file or folder in `paths.data`, or null.

    Raises:
        ValueRefused: it is neither.
    """
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueRefused(key, "a name, or null", value, None)
    return value


def part_of(name: str) -> str | None:
    """`train`, `test` or `validation` for what people call it; None for other names."""
    return next((part for part, names in NAMES.items() if name.lower() in names), None)
