"""The documentation site: its navigation names pages, its links lead somewhere, and mkdocs builds it if it is there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import site


@pytest.fixture(scope="module")
def assembled(tmp_path_factory) -> Path:
    """The folder with all pages and the configuration."""
    return site.assemble(tmp_path_factory.mktemp("site") / "site").parent


def named(nav) -> list[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in named(entry)]


def test_the_navigation_has_every_page_and_no_other(assembled):
    config = yaml.safe_load((assembled / "mkdocs.yml").read_text(encoding="utf-8"))
    there = {str(file.relative_to(assembled / "pages")) for file in (assembled / "pages").rglob("*.md")}
    pages = named(config["nav"])
    assert len(pages) == len(set(pages))
    assert {page for page in there if not page.startswith("repository")} == set(pages)


def test_each_method_has_a_page(assembled):
    for group in site.METHODS:
        for name, cls, choice in site.options.declared(group):
            text = (assembled / "pages" / "methods" / f"{group}-{name}.md").read_text(encoding="utf-8")
            assert choice.told in text and f"{group}={name}" in text and cls.__qualname__ in text


def test_links_lead_to_pages_and_headings(assembled):
    pages = assembled / "pages"
    anchors, broken = {}, []
    for file in pages.rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)
        anchors[file.resolve()] = {site.slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}
    for file in pages.rglob("*.md"):
        for i, part in enumerate(site.CODE.split(file.read_text(encoding="utf-8"))):
            for _, _, target in site.LINK.findall(part) if i % 2 == 0 else ():
                path, _, anchor = target.partition("#")
                if "://" in target:
                    continue
                there = (file.parent / path).resolve() if path else file.resolve()
                if not there.is_file() or (anchor and anchor not in anchors[there]):
                    broken.append((str(file.relative_to(pages)), target))
    assert broken == []


def test_no_page_loads_anything_from_elsewhere():
    config = (site.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in config and "offline" not in config and "://" not in config  # that plugin loads a script


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: the extra docs")
def test_mkdocs_builds_it(assembled):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(assembled / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    pages = {file.relative_to(assembled / "html") for file in (assembled / "html").rglob("*.html")}
    assert Path("index.html") in pages and Path("methods/compressor-powersgd.html") in pages
    for page in pages:
        text = (assembled / "html" / page).read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', text), page
