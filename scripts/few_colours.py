"""python -m scripts.few_colours PNG...: saves pictures with a palette of 64 colours, a quarter of the bytes."""

import argparse
from pathlib import Path

from PIL import Image

COLOURS = 64  # lines and letters look the same


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("scripts.few_colours", description=__doc__)
    parser.add_argument("pictures", nargs="+", type=Path, metavar="PNG")
    for picture in parser.parse_args().pictures:
        reduce_colours(picture)


def reduce_colours(picture: Path) -> None:
    """Save a picture with a palette of 64 colours; a picture that has a palette is not changed."""
    with Image.open(picture) as drawn:
        if drawn.mode == "P":
            return
        every = drawn.convert("RGB")
    few = every.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE)
    few.save(picture, optimize=True)


if __name__ == "__main__":
    main()
