"""Images in users' own files: count what the options leave open, and hold out a test split if the files have none."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from accordion_bench.datasets.dataset import Split, known
from accordion_bench.datasets.images import ImageDataset
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.option import option, with_options
from accordion_bench.tensors import keyed_rng

NULL = "null = counted in the files"
BY_OWN = {
    "validation": "training samples, a number or a share below 1, held out to choose the best epoch; null = val or test"
}
SHARE = 0.2  # of each class, if there is no test split
NAMES = {"train": ("train", "training"), "test": ("test", "testing"), "validation": ("val", "valid", "validation")}


@dataclass(frozen=True)
class FileContents:
    """Contents of users' files.

    Args:
        place: folder or file, for messages.
        labels: labels of all training samples before any are held out, integers from 0.
        own_test: whether the files contain a test split.
        validation: number of samples in the files' validation split; 0 = none.
        numbers: other counted values, by option name.
        names: names of the classes by label, for messages.
    """

    place: str
    labels: np.ndarray
    own_test: bool
    validation: int = 0
    numbers: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()


@with_options
class CountedImages(ImageDataset):
    """Images in users' own files.

    A run records the counted values in its config.yaml; when it is resumed, the files must still match them. If the
    files have no test split, `test_share` of each class, drawn by the seed, is used for evaluation. If the files have a
    validation split, it chooses the best epoch, and `validation` must be null.

    Class attributes:
        sizes: options that must equal the numbers in the files; those that are null are counted.
    """

    classes: int | None = option(NULL, default=None, at_least=2)
    train_size: int | None = option(NULL, default=None, at_least=1)  # type: ignore[assignment]
    image_size: int | None = option(NULL, default=None, at_least=1)  # type: ignore[assignment]
    test_share: float | None = option(
        "share of each class for evaluation, if there is neither test nor val; null = 0.2",
        default=None,
        above=0,
        below=1,
        instead=SHARE,
    )
    fingerprint: str | None = option("of the files, recorded by a run; null = not checked", default=None)

    sizes: ClassVar[tuple[str, ...]] = ("classes", "train_size", "image_size")
    counted: ClassVar[tuple[str, ...]] = (*sizes, "test_share", "fingerprint")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fingerprint(self.fingerprint)
        self._of_validation = 0  # samples of the files' validation split, appended to the training samples

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        return known(self, "classes")

    @property
    def whole(self) -> int:
        return known(self, "train_size")

    def example(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        known(self, "image_size")
        return super().example(samples)

    def look(self, root: str) -> FileContents:
        """Examine the files under `root`."""
        raise NotImplementedError

    def fingerprint_of(self, root: str) -> str:
        """Return a fingerprint of the files, which changes when the files change."""
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
            rule = f"null where {found.place} has its own test split"
            raise ValueRefused("dataset.test_share", rule, self.test_share, None)
        if found.validation and self.validation is not None:
            rule = f"null where {found.place} has its own validation split"
            raise ValueRefused("dataset.validation", rule, self.validation, None)
        if self.fingerprint is not None:
            check_unchanged_files(found.place, self.fingerprint, self.fingerprint_of(root))
        counted = self._counted(found)
        declared = {key: value for key in counted if (value := getattr(self, key)) is not None}
        if any(counted[key] != value for key, value in declared.items()):
            keys = " and ".join(f"dataset.{key}" for key in declared)
            given = " and ".join(map(str, declared.values()))
            typed = " ".join(f"dataset.{key}={show(counted[key])}" for key in declared)
            raise ConfigError(f"{keys} must be those of {found.place}, got {given}; type {typed}")

    def _counted(self, found: FileContents) -> dict[str, Any]:
        """Return each number counted in the files, by option name."""
        if (classes := int(found.labels.max(initial=-1)) + 1) < 2:
            raise ConfigError(
                f"paths.data must hold pictures of at least 2 classes, got {found.place} with {classes}; type "
                "paths.data=FOLDER"
            )
        size = len(found.labels)
        if not found.own_test:
            size -= len(held_out(found.labels, self.test_share or SHARE, 0, found.names)[1])
        return {"classes": classes, "train_size": size, **found.numbers}

    def split(self, size: int, seed: int) -> Split:
        if not self._of_validation:
            return super().split(size, seed)
        first = size - self._of_validation
        return Split(torch.arange(first), torch.arange(first, size)[: self.limit_eval])


def held_out(labels: np.ndarray, share: float, seed: int, names: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a share of each class; at least one sample of it remains on either side.

    Args:
        labels: integers from 0.
        share: share of each class to hold out.
        seed: seed of the choice.
        names: names of the classes by label, for the error; empty = the labels.

    Returns:
        sorted indices of the samples to train on and to evaluate on.

    Raises:
        ConfigError: a class has only one sample.
    """
    kept, out = [], []
    for label in range(int(labels.max(initial=-1)) + 1):
        own = np.flatnonzero(labels == label)
        if len(own) < 2:
            raise ConfigError(
                "paths.data must hold at least 2 pictures of each class if a share of them is the test split, got "
                f"{len(own)} of class {names[label] if names else label}; add some, or a separate test split"
            )
        count = min(max(round(share * len(own)), 1), len(own) - 1)
        order = torch.randperm(len(own), generator=keyed_rng.generator(seed, "held out", label)).numpy()
        out.append(own[order[:count]])
        kept.append(own[order[count:]])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(out))


def check_fingerprint(fingerprint: Any) -> None:
    """Check that a fingerprint is null or 16 hexadecimal digits."""
    if fingerprint is not None and not re.fullmatch("[0-9a-f]{16}", str(fingerprint)):
        raise ValueRefused("fingerprint", "null, or the value recorded by a run", fingerprint, None)


def check_unchanged_files(place: str, noted: str, now: str) -> None:
    """Check that the fingerprint of files equals the one that the run recorded."""
    if now != noted:
        rule = f"that of {place}, {now}, whose files have changed since the run started"
        instead = "restore them, or type the run's own options without resume="
        raise ConfigError(f"dataset.fingerprint must be {rule}, got {noted}; {instead}")


def name_or_null(key: str, value: Any) -> str | None:
    """Return `value`; raise ValueRefused unless it is None or the name of a file or folder in `paths.data`."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueRefused(key, "a name, or null", value, None)
    return value


def part_of(name: str) -> str | None:
    """Return `train`, `test` or `validation` for a usual name of that part; None for other names."""
    return next((part for part, names in NAMES.items() if name.lower() in names), None)
