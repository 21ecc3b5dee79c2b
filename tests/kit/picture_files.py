"""Image files of kinds that Pillow can read but not write, and folders of small images."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

OF_CHANNELS = {1: 0, 2: 4, 3: 2, 4: 6}  # colour type of a PNG by number of channels


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG of pixels [H, W, C] in uint8 or uint16."""
    height, width, channels = pixels.shape
    big = pixels.astype(pixels.dtype.newbyteorder(">"))
    head = struct.pack(">IIBBBBB", width, height, 8 * pixels.itemsize, OF_CHANNELS[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in big)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def claimed(width: int, height: int) -> bytes:
    """Return a PNG whose header declares this size."""
    small = bytearray(png(np.zeros((1, 1, 1), np.uint8)))
    small[16:24] = struct.pack(">II", width, height)
    small[29:33] = struct.pack(">I", zlib.crc32(bytes(small[12:29])))
    return bytes(small)


def tiff(pixels: np.ndarray, order: str = "<", bits: int = 0, signed: bool = False) -> bytes:
    """Return a TIFF of pixels [H, W, C]; with 12 bits, two values are packed into three bytes."""
    height, width, channels = pixels.shape
    bits = bits or 8 * pixels.itemsize
    if bits == 12:
        flat = pixels.reshape(height, -1).astype(np.uint32)
        pairs = flat[:, ::2] << 12 | flat[:, 1::2]
        body = b"".join(int(pair).to_bytes(3, "big") for pair in pairs.ravel())
    else:
        body = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    kind = {"f": 3, "i": 2}.get(pixels.dtype.kind, 2 if signed else 1)
    count, at = 11, 8 + 2 + 12 * 11 + 4
    many = struct.pack(f"{order}{channels}H", *[bits] * channels)
    kinds = struct.pack(f"{order}{channels}H", *[kind] * channels)
    data = at + 2 * len(many)

    def entry(tag: int, values: bytes, number: int, of: int = 3, place: int = 0) -> bytes:
        here = struct.pack(f"{order}I", place) if place else values.ljust(4, b"\0")
        return struct.pack(f"{order}HHI", tag, of, number) + here

    def short(value: int) -> bytes:
        return struct.pack(f"{order}H", value)

    entries = [
        entry(256, short(width), 1),
        entry(257, short(height), 1),
        entry(258, many, channels, place=at if channels > 2 else 0),
        entry(259, short(1), 1),
        entry(262, short(2 if channels > 2 else 1), 1),
        entry(273, struct.pack(f"{order}I", data), 1, 4),
        entry(277, short(channels), 1),
        entry(278, short(height), 1),
        entry(279, struct.pack(f"{order}I", len(body)), 1, 4),
        entry(284, short(1), 1),
        entry(339, kinds, channels, place=at + len(many) if channels > 2 else 0),
    ]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    return head + short(count) + b"".join(entries) + b"\0" * 4 + many + kinds + body


def folder(place: Path, layout: dict[str, int], side: int = 12, ending: str = "png", seed: int = 0) -> Path:
    """Write folders of classes, each with a number of images of noise around its own grey value."""
    generator = np.random.default_rng(seed)
    greys: dict[str, int] = {}
    for name, count in layout.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        grey = greys.setdefault(Path(name).name, 60 + 60 * len(greys))
        for i in range(count):
            pixels = (grey + generator.integers(-20, 20, (side, side, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / name / f"{i}.{ending}")
    return place
