"""Picture files of every kind have the right pixels, or are named with what is wrong with them."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from accordion_bench.datasets import pictures
from accordion_bench.datasets.fetch import Unreadable
from tests.kit.picture_files import claimed, png, tiff

SHAPE = 6, 4
GREY = np.random.default_rng(0).integers(0, 65536, SHAPE, dtype=np.uint16)
GREY[0, :3] = 0, 65535, 256
COLOUR = np.random.default_rng(1).integers(0, 65536, (*SHAPE, 4), dtype=np.uint16)
SMALL = np.random.default_rng(2).integers(0, 256, (*SHAPE, 3), dtype=np.uint8)
TWELVE = GREY >> 4


def grey(values: np.ndarray) -> np.ndarray:
    """The same in three channels."""
    return np.repeat(values.astype(np.uint8)[:, :, None], 3, 2)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def of(mode: str, **options) -> Image.Image:
    """SMALL in another mode of Pillow's."""
    return Image.fromarray(SMALL).convert(mode, **options)


def with_alpha(mode: str) -> Image.Image:
    image = of(mode)
    image.putalpha(Image.fromarray(SMALL[:, :, 0]))
    return image


def pgm(values: np.ndarray, most: int) -> bytes:
    return b"P5 %d %d %d\n" % (SHAPE[1], SHAPE[0], most) + values.astype(">u2").tobytes()


PALETTE = of("P", palette=Image.Palette.ADAPTIVE)
ONE_BIT = SMALL[:, :, 0] > 127
SEVERAL = [Image.fromarray(np.full((*SHAPE, 3), level, np.uint8)) for level in (255, 0, 128)]
MANY = {"save_all": True, "append_images": SEVERAL[1:]}
WHITE = np.full((*SHAPE, 3), 255, np.uint8)
RIGHT = {
    "16 bits, PNG": (png(GREY[:, :, None]), grey(GREY >> 8)),
    "16 bits, PNG of Pillow": (saved(Image.fromarray(GREY), "PNG"), grey(GREY >> 8)),
    "16 bits, TIFF": (tiff(GREY[:, :, None]), grey(GREY >> 8)),
    "16 bits, TIFF, most significant first": (tiff(GREY[:, :, None], ">"), grey(GREY >> 8)),
    "16 bits, TIFF of Pillow": (saved(Image.fromarray(GREY), "TIFF"), grey(GREY >> 8)),
    "16 bits, TIFF of Pillow, I;16B": (saved(Image.fromarray(GREY.astype(">u2")), "TIFF"), grey(GREY >> 8)),
    "16 bits, PGM": (pgm(GREY, 65535), grey(GREY >> 8)),
    "12 bits, TIFF": (tiff(TWELVE[:, :, None], bits=12), grey(TWELVE >> 4)),
    "12 bits, PGM": (pgm(TWELVE, 4095), grey(np.round(TWELVE / 4095 * 65535).astype(int) >> 8)),
    "16 bits in colour, PNG": (png(COLOUR[:, :, :3]), (COLOUR[:, :, :3] >> 8).astype(np.uint8)),
    "16 bits in colour, TIFF": (tiff(COLOUR[:, :, :3]), (COLOUR[:, :, :3] >> 8).astype(np.uint8)),
    "16 bits in colour, TIFF, most significant first": (
        tiff(COLOUR[:, :, :3], ">"),
        (COLOUR[:, :, :3] >> 8).astype(np.uint8),
    ),
    "16 bits, grey with transparency": (png(COLOUR[:, :, :2]), grey(COLOUR[:, :, 0] >> 8)),
    "16 bits, colour with transparency": (png(COLOUR), (COLOUR[:, :, :3] >> 8).astype(np.uint8)),
    "colour": (png(SMALL), SMALL),
    "grey": (saved(of("L"), "PNG"), grey(np.asarray(of("L")))),
    "palette": (saved(PALETTE, "PNG"), np.asarray(PALETTE.convert("RGB"))),
    "palette with transparency": (saved(PALETTE, "PNG", transparency=0), np.asarray(PALETTE.convert("RGB"))),
    "grey with transparency": (saved(with_alpha("L"), "PNG"), grey(np.asarray(of("L")))),
    "colour with transparency": (saved(with_alpha("RGB"), "PNG"), SMALL),
    "colour with transparency, WebP": (saved(with_alpha("RGB"), "WEBP", lossless=True, exact=True), SMALL),
    "CMYK, TIFF": (saved(of("CMYK"), "TIFF"), SMALL),
    "one bit": (saved(Image.fromarray(ONE_BIT), "PNG"), grey(255 * ONE_BIT)),
    "one bit, TIFF": (saved(Image.fromarray(ONE_BIT), "TIFF"), grey(255 * ONE_BIT)),
    "animated GIF": (saved(SEVERAL[0], "GIF", **MANY), WHITE),
    "animated PNG": (saved(SEVERAL[0], "PNG", **MANY), WHITE),
    "animated WebP": (saved(SEVERAL[0], "WEBP", lossless=True, **MANY), WHITE),
    "TIFF of several pages": (saved(SEVERAL[0], "TIFF", **MANY), WHITE),
    "JPEG in CMYK": (saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), np.full((8, 8, 3), (255, 0, 0))),
}
WHOLE = saved(of("RGB").resize((64, 64)), "JPEG")
WRONG = {
    "32 bits, whole numbers": (tiff(GREY[:, :, None].astype(np.int32)), "whole numbers of 32 bits, whose range"),
    "32 bits, floats": (tiff(GREY[:, :, None].astype(np.float32)), "floats of 32 bits, whose range"),
    "16 bits, signed": (tiff(GREY[:, :, None].astype(np.int16)), "whole numbers of 32 bits, whose range"),
    "cut JPEG": (WHOLE[: len(WHOLE) // 2], "which is truncated (image file is truncated"),
    "cut PNG": (png(SMALL)[:-30], "which is truncated (image file is truncated"),
    "cut in its head": (png(SMALL)[:20], "which is truncated"),
    "empty": (b"", "which is empty"),
    "text": (b"version https://git-lfs.github.com/spec/v1\n", "which is not in a picture format that Pillow supports"),
    "huge": (claimed(40000, 40000), "which has more than the 178,956,970 pixels that are decoded"),
}


def written(folder: Path, content: bytes, name: str = "a.png") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("kind", RIGHT)
def test_pixels_are_right(kind, tmp_path):
    content, expected = RIGHT[kind]
    file = written(tmp_path, content)
    image = pictures.opened(file)
    assert image.mode == "RGB"
    if "JPEG" in kind:
        assert np.abs(np.asarray(image).astype(int) - expected).max() < 8
    else:
        assert np.array_equal(np.asarray(image), expected)
    pictures.refuse_broken([file])


def test_what_has_no_more_than_8_bits_is_as_pillow_converts_it(tmp_path):
    """No transparency, first picture, turned as it is stored: so does torchvision."""
    turned = Image.Exif()
    turned[0x0112] = 6
    for content in (WHOLE, saved(of("RGB"), "JPEG", exif=turned), saved(of("YCbCr"), "JPEG"), saved(of("L"), "JPEG")):
        file = written(tmp_path, content)
        with Image.open(file) as image:
            assert np.array_equal(np.asarray(pictures.opened(file)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_named(kind, tmp_path):
    """When it is decoded, and before."""
    content, reason = WRONG[kind]
    file = written(tmp_path, content)
    for look in (lambda: pictures.opened(file), lambda: pictures.refuse_broken([file])):
        with pytest.raises(Unreadable) as told:
            look()
        sentence = str(told.value)
        assert sentence.startswith(f"paths.data must hold pictures that can be read, got {file}, which ")
        assert reason in sentence and sentence.endswith("; restore or remove that file") and "\n" not in sentence


def test_large_pictures_are_decoded_without_a_warning(tmp_path, recwarn):
    """Of a camera of 100 megapixels; Pillow warns of an attack."""
    file = written(tmp_path, saved(Image.new("1", (11000, 9000)), "PNG"))
    assert pictures.opened(file).size == (11000, 9000)
    pictures.refuse_broken([file])
    assert not recwarn.list


def test_links_and_rights(tmp_path, monkeypatch):
    link, gone = tmp_path / "link.png", tmp_path / "gone.png"
    link.symlink_to(tmp_path / "nowhere.png")
    for file, reason in ((link, "which is a broken link"), (gone, "which no longer exists")):
        for look in (lambda file=file: pictures.opened(file), lambda file=file: pictures.refuse_broken([file])):
            with pytest.raises(Unreadable, match=f"got {file}, {reason}; "):
                look()

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    file = written(tmp_path, png(SMALL))
    monkeypatch.setattr(pictures, "_open", forbidden)
    with pytest.raises(Unreadable, match=f"got {file}, which may not be read by this user; "):
        pictures.opened(file)


def test_several_are_counted(tmp_path):
    """And what programs write behind the end of a picture breaks none."""
    files = [written(tmp_path, WHOLE + b"\0" * 500, "more.jpg"), written(tmp_path, png(SMALL) + b"x" * 500, "more.png")]
    pictures.refuse_broken(files)
    files += [written(tmp_path, WHOLE[:-200], f"{i}.jpg") for i in range(3)] + [written(tmp_path, b"", "e.png")]
    with pytest.raises(
        Unreadable, match=rf"got {tmp_path}/0.jpg, which is truncated \(.*\), and 3 more like it; restore"
    ):
        pictures.refuse_broken(files)


def test_sides_of_those_that_can_be_read(tmp_path):
    files = [written(tmp_path, png(SMALL)), written(tmp_path, b"", "b.png"), written(tmp_path, WHOLE, "c.jpg")]
    assert list(pictures.sides(files)) == [4, 64]
