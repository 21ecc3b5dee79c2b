"""Decode users' picture files to 8-bit RGB, and report broken ones."""

import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from accordion_bench.datasets.fetch import refusal, why

# lower case; of files with several pictures Pillow reads the first one
ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".pgm", ".pbm", ".bmp", ".tif", ".tiff", ".webp", ".gif")
NOT_OURS = ("__MACOSX", "@eaDir")  # folders added by archives of macOS and by Synology disk stations
SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
# end markers of complete files, searched in the last BEHIND bytes, because some programs append data
LAST = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
BEHIND = 64
WHAT = "pictures that can be read"


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
    """Open a picture without decoding it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Pillow still refuses twice that size
        return Image.open(file)


def in_colour(image: Image.Image) -> Image.Image:
    """Convert a picture to 8-bit RGB.

    Raises:
        ValueError: its values have 32 bits, and the file does not state their range.
    """
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
