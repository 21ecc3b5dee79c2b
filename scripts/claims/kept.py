"""Files of a claim that stay in the repository: tables once, and the pictures that its page shows, with few colours.

All other pictures can be redrawn by `python -m scripts.claims CLAIM --minutes 0 --figures FOLDER`.

    python -m scripts.claims.kept results/demo/README.md    # of another page: few colours, no link to a missing picture
"""

import argparse
import re
from pathlib import Path

from scripts.few_colours import reduce_colours

LINK = re.compile(r"\]\(([^)\s]+\.png)\)")


def keep_shown(claim: Path) -> None:
    """Delete the pictures of a claim's tables to which no page links, and reduce the colours of the others.

    The lines of the tables' reports that show a deleted picture are deleted, too, and table.md, because the report
    contains the same table. If the claim has no page, all pictures are kept.

    Args:
        claim: folder of the claim, such as results/claims/rank; its page is README.md.
    """
    if not (claim / "README.md").is_file():
        return
    pages = [claim / "README.md", Path("README.md"), *Path("docs").glob("*.md"), *Path("results").glob("*.md")]
    shown = {(page.parent / link).resolve() for page in pages if page.is_file() for link in links(page)}
    for picture in sorted(claim.rglob("*.png")):
        if picture.resolve() in shown:
            reduce_colours(picture)
        else:
            picture.unlink()
    for report in claim.glob("*/README.md"):
        _drop_missing(report)
        (report.parent / "table.md").unlink(missing_ok=True)


def links(page: Path) -> list[str]:
    """Return the pictures to which a page links, as written in the page."""
    return LINK.findall(page.read_text(encoding="utf-8"))


def _drop_missing(report: Path) -> None:
    """Delete the paragraphs of a report that show a missing picture."""
    paragraphs = report.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    kept = [one for one in paragraphs if not (one.startswith("![") and not _is_there(report, one))]
    if len(kept) < len(paragraphs):
        report.write_text("\n\n".join(kept) + "\n", encoding="utf-8")


def _is_there(report: Path, paragraph: str) -> bool:
    return all((report.parent / link).is_file() for link in LINK.findall(paragraph))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("scripts.claims.kept", description=__doc__)
    parser.add_argument("page", type=Path, help="README.md of a folder with pictures")
    page: Path = parser.parse_args().page
    _drop_missing(page)
    for picture in sorted(page.parent.glob("*.png")):
        reduce_colours(picture)


if __name__ == "__main__":
    main()
