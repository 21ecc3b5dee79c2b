"""Users' picture files: decoded in colour with 8 bits, or named with what is wrong with them."""

import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from accordion_bench.datasets.unreadable import refusal, why

# in small letters; what Pillow reads of several pictures in one file is the first one
ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".pgm", ".pbm", ".bmp", ".tif", ".tiff", ".webp", ".gif")
NOT_OURS = ("__MACOSX", "@eaDir")  # folders that an archive of macOS, or a disk station, adds
SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
# with which whole files end, and how far from the end that is looked for: some programs write more behind it
LAST = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
BEHIND = 64
WHAT = "pictures that can be read"


def is_hidden(name: str) -> bool:
    """Whether a file or folder was put there by a program, not by who has made the data set."""
    return name.startswith(".") or name in NOT_OURS


def opened(file: Path) -> Image.Image:
    """A picture, decoded, in RGB with 8 bits.

    Of 16 bits the upper 8 are taken, so that white stays white. As in torchvision, transparency is dropped, a camera's
    note that it was turned is passed over, and of animations and files of several pages the first picture is taken.

    Raises:
        Unreadable: names the file and the reason.
    """
    try:
        with _open(file) as image:
            return in_colour(image)
    except Exception as error:  # a broken file may raise anything
        raise refusal(WHAT, file, reason(file, error)) from error


def _open(file: Path | BinaryIO) -> Image.Image:
    """A picture, not decoded yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large ones are decoded, huge ones refused
        return Image.open(file)


def in_colour(image: Image.Image) -> Image.Image:
    """The picture in RGB with 8 bits.

    Raises:
        ValueError: its values have a range that the file does not say.
    """
    bits = _bits(image)
    if bits is None:
        kind = "floats" if image.mode == "F" else "whole numbers"
        raise ValueError(f"its pixels are {kind} of 32 bits, whose range it does not say: save it with 8 or 16 bits")
    if bits > 8:
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> (bits - 8)).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _bits(image: Image.Image) -> int | None:
    """Bits of a grey value, 8 of everything else; None = not known."""
    if image.mode in SIXTEEN:
        return int(getattr(image, "tag_v2", {}).get(258, (16,))[0])  # of TIFF, which may say 12
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # they have no more than 16
        return 16
    return None if image.mode in ("I", "F") else 8


def refuse_broken(files: Iterable[Path]) -> None:
    """Look at the beginning and the end of files; one that does not end as it should is decoded.

    Raises:
        Unreadable: names the first that is no picture, and how many others there are.
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
    """The shorter side of each picture in pixels, of those that can be read."""
    for file in files:
        try:
            with _open(file) as image:
                yield min(image.size)
        except Exception:  # told by `refuse_broken`
            continue


def reason(file: Path, error: BaseException) -> str:
    """What is wrong with a file that should be a picture; see `unreadable.why`."""
    if isinstance(error, Image.DecompressionBombError):
        return f"which has more than the {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels that are decoded"
    said = why(file, error)
    if "cannot be read" not in said:
        return said
    if isinstance(error, UnidentifiedImageError):
        return "which is no picture that Pillow knows"
    return f"which is cut off ({error})" if "truncated" in str(error).lower() else said
