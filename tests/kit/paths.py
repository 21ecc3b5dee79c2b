"""Paths of the checkout, and of the data sets next to it, which tests use if they are present."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
