"""Tables, figures and the page, and what they can be written as."""

from dataclasses import dataclass

FORMATS = ("md", "csv", "latex", "html")
FIGURES = ("png", "pdf", "svg")
BANDWIDTHS = (1e8, 1e9, 1e10)  # bit/s
PAPERS = {"one-column": 3.3, "two-column": 7.0}  # width of a figure in inches


@dataclass(frozen=True)
class Print:
    """How figures are written.

    Args:
        paper: one of PAPERS: a figure is as wide as one column, or as both.
        formats: some of FIGURES. A PNG is always there: page and README show it.
        bandwidths: bit/s of the links in the figure of modelled time.
    """

    paper: str = "two-column"
    formats: tuple[str, ...] = ("png",)
    bandwidths: tuple[float, ...] = BANDWIDTHS


AS_PNG = Print()
