"""Images in users' own files: what is not typed is counted there, and what they lack of a test is held out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from accordion_bench.datasets.base import Split
from accordion_bench.datasets.images import ImageDataset
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.tensors import keyed_rng

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


def _counted(key: str) -> Any:
    """The number of an option, which may be null until the files were counted; in the place of a plain attribute."""
    return property(lambda self: self.number(key))


class CountedImages(ImageDataset):
    """Images in users' own files.

    A run notes what was counted in its config.yaml; where it is resumed the files must still be so.

    Args:
        numbers: options that are counted where they are null, by name; of others the files must hold as many.
        test_share: so much of each class is evaluated on, drawn by the seed, where the files have no test of their own;
            null = 0.2 there.
        fingerprint: of the files; null = whatever they are.
        validation: as in `ImageDataset`; null where the files have a validation split of their own, which chooses then.
        limit_eval, subset, sharding, alpha: see `ImageDataset`.
    """

    counted: tuple[str, ...] = ("classes", "train_size", "test_share", "fingerprint")
    usual: Mapping[str, int] = {}  # what is suggested in the place of a wrong number; else null

    def __init__(
        self,
        numbers: dict[str, int | None],
        test_share: float | None = None,
        fingerprint: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for key, value in numbers.items():
            if value is not None or key not in self.counted:
                self._check_number(key, value)
        if test_share is not None:
            checks.number("test_share", test_share, above=0, below=1, instead=SHARE)
        if fingerprint is not None and not re.fullmatch("[0-9a-f]{16}", str(fingerprint)):
            raise ValueRefused("fingerprint", "null, or what a run has noted", fingerprint, None)
        self.numbers, self.test_share, self.fingerprint = numbers, test_share, fingerprint
        self._of_validation = 0  # samples of the files' own, behind those to train on

    def _check_number(self, key: str, value: Any) -> None:
        try:
            checks.integer(key, value, at_least=2 if key == "classes" else 1)
        except ValueRefused as refused:
            raise ValueRefused(key, refused.rule, value, self.usual.get(key)) from None

    def number(self, key: str) -> int:
        if (value := self.numbers[key]) is None:
            raise ConfigError(f"dataset.{key} must be counted first, got null; call count(FOLDER), or type a number")
        return value

    num_classes, train_size, image_size = map(_counted, ("classes", "train_size", "image_size"))

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
        counted = self._counted(found)
        self.numbers = {key: counted[key] if value is None else value for key, value in self.numbers.items()}
        shares = {} if self.test_share is None else {"test_share": self.test_share}
        return {**self.numbers, **shares, "fingerprint": self.fingerprint or self.fingerprint_of(root)}

    def prepare(self, root: str) -> None:
        found = self.look(root)
        if found.own_test and self.test_share is not None:
            rule = f"null where {found.place} has a test of its own"
            raise ValueRefused("dataset.test_share", rule, self.test_share, None)
        if found.validation and self.validation is not None:
            rule = f"null where {found.place} has a validation split of its own"
            raise ValueRefused("dataset.validation", rule, self.validation, None)
        if self.fingerprint is not None and (now := self.fingerprint_of(root)) != self.fingerprint:
            rule = f"that of {found.place}, {now}, whose files are others than when the run began"
            instead = "restore them, or type the run's own options without resume="
            raise ConfigError(f"dataset.fingerprint must be {rule}, got {self.fingerprint}; {instead}")
        counted = self._counted(found)
        declared = {key: value for key, value in self.numbers.items() if value is not None and key in counted}
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
