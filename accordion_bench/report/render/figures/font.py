"""The figures' letters: DejaVu Sans, cut down to Latin-1."""

import functools
import tempfile
from pathlib import Path

from fontTools import subset, ttLib
from matplotlib import font_manager

WHOLE, LATIN = "DejaVu Sans", "DejaVu Sans Latin"
FAMILY_NAMES = (1, 4, 16)  # in a font's table of names: family, full name, typographic family


@functools.cache
def register() -> tempfile.TemporaryDirectory[str]:
    """Make LATIN known to matplotlib; returns the folder that holds it until the process ends.

    A PDF embeds the letters that it uses. To pick them from the whole font, with its 6000 glyphs and their ligatures,
    takes longer than to draw the figure, and again for every figure.
    """
    options = subset.Options(layout_features=[], notdef_outline=True)
    options.drop_tables += ["GSUB", "GPOS", "GDEF", "FFTM"]
    font = ttLib.TTFont(font_manager.findfont(WHOLE))
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=range(32, 256))
    cutter.subset(font)
    for record in list(font["name"].names):
        if record.nameID in FAMILY_NAMES:
            font["name"].setName(LATIN, record.nameID, record.platformID, record.platEncID, record.langID)
    folder = tempfile.TemporaryDirectory(prefix="accordion_bench-font-")
    path = Path(folder.name) / "latin.ttf"
    font.save(path)
    font_manager.fontManager.addfont(path)
    return folder
