"""Where the checkout is, and the data sets beside it, which tests use where they are present."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
