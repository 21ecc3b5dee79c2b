"""The HTML page: well-formed, self-contained, and shown by a real browser."""

import contextlib
import json
import os
import re
import selectors
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest
import yaml

from accordion_bench.report.read import load
from accordion_bench.report.render import figures, write
from tests.report.test_report import accordion, no_figures, run_folder  # noqa: F401

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VOID = {"meta", "img", "br", "hr", "link", "input"}
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
HOSTILE = "<script>alert(1)</script> \"&amp;' <b>"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with several settings, figures, an unfinished run, a repeat, a folder without a run, and hostile names."""
    root = tmp_path_factory.mktemp("page")
    for seed in (0, 1):
        run_folder(root / "runs", "none", seed=seed, accuracy=0.9 + seed / 100)
        run_folder(root / "runs", "topk", seed=seed, adaptive=accordion(), payload=300, ladder=(0.1, 0.99))
    run_folder(root / "runs", "none", seed=0)
    run_folder(root / "runs", "powersgd", epochs=5, scale="tiny", command=f"python -m accordion_bench {HOSTILE}")
    strange = run_folder(root / "runs", "powersgd", epochs=6)
    config = yaml.safe_load((strange / "config.yaml").read_text())
    config["choices"]["model"] = HOSTILE
    (strange / "config.yaml").write_text(yaml.safe_dump(config))
    (run_folder(root / "runs", seed=7) / "done").unlink()
    runs, draw = load.read_runs([root / "runs"]), figures.draw_one
    with pytest.MonkeyPatch.context() as patch:  # figures of one setting are enough
        patch.setattr(figures, "draw_one", lambda name, arms, *rest: draw(name, arms, *rest) if len(arms) > 1 else None)
        write.write(runs, root / "out", [("lost", "does not exist")])
    return root / "out" / "report.html"


class Page(HTMLParser):
    """Tags in order; complains of what does not nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        assert tag == "html" or self.open, tag
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.seen if name == tag]

    @property
    def text(self):
        return " ".join(self.words)


def test_the_page_is_well_formed(report):
    text = report.read_text()
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"] for attrs in page.all("a")} == {f"#{name}" for name in ids}  # the contents name every section
    assert all(attrs.get("alt") for attrs in page.all("img"))
    assert len(page.all("table")) == len(page.all("caption")) == len(page.all("thead"))
    assert [len(page.all(tag)) for tag in ("title", "h1", "main", "nav")] == [1, 1, 1, 1]
    assert {attrs["scope"] for attrs in page.all("th")} == {"row", "col"}


def test_rows_are_as_long_as_their_heading(report):
    for table in report.read_text().split("<table>")[1:]:
        table = table.partition("</table>")[0]
        head, body = table.split("</thead>")
        assert {row.count("<td>") + 1 for row in body.split("<tr>")[1:]} == {head.count('scope="col"')}


def test_the_page_loads_nothing(report):
    text = report.read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in page.seen}
    assert all(attrs["src"].startswith("data:image/png;base64,") for attrs in page.all("img"))
    assert "url(" not in text and "@import" not in text and not any("style" in attrs for _, attrs in page.seen)
    (policy,) = (attrs["content"] for attrs in page.all("meta") if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none';")


def test_the_page_says_everything(report):
    said = Page(report.read_text()).text
    table = (report.parent / "table.md").read_text()
    for line in table.splitlines():
        if line.startswith("- "):
            assert re.sub(r"\\([^a-z])", r"\1", line[2:]) in said  # without what Markdown escapes
    assert "(scale=tiny: not the full experiment)" in said
    assert "Unfinished, in no mean" in said and "Repeats of a seed" in said and "lost: does not exist" in said
    assert "python -m accordion_bench compressor=topk seed=0" in said
    assert "commit abc" in " ".join(said.split())
    assert HOSTILE in said


def test_figures_are_in_the_page(report):
    shown = [attrs["alt"] for attrs in Page(report.read_text()).all("img")]
    assert len(shown) == len(list(report.parent.glob("*.png"))) > 3
    assert any(alt.startswith("Level of each layer in each epoch: resnet8 on digits") for alt in shown)


def test_a_page_of_nothing(tmp_path, no_figures):  # noqa: F811
    (run_folder(tmp_path / "runs") / "done").unlink()
    write.write(load.read_runs([tmp_path / "runs"]), tmp_path / "out")
    assert "0 runs in 0 arms" in Page((tmp_path / "out" / "report.html").read_text()).text


# ---- a real browser


class Browser:
    """Chromium without a window, asked over its debugging pipe; notes every request, message and error of a page."""

    def __init__(self, profile):
        theirs, ours = os.pipe()
        mine, yours = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-extensions --remote-debugging-pipe"
        shell = f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{theirs} 4>&{yours}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, BROWSER, str(profile)],
            pass_fds=(theirs, yours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(yours)
        self.ours, self.mine, self.count, self.buffer = ours, mine, 0, b""
        self.events, self.session = [], None
        self.selector = selectors.DefaultSelector()
        self.selector.register(mine, selectors.EVENT_READ)

    def message(self, deadline):
        """The next message of the browser."""
        while b"\0" not in self.buffer:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(self.mine, 1 << 16)
            if not chunk:
                raise EOFError("the browser has ended")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def ask(self, method, seconds=60, **params):
        """The answer to one command; what happens meanwhile is noted."""
        self.count += 1
        said = {"id": self.count, "method": method, "params": params}
        if self.session:
            said["sessionId"] = self.session
        os.write(self.ours, json.dumps(said).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            message = self.message(deadline)
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, url):
        """Open a page, and wait until it has loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=url)
        deadline = time.monotonic() + 60
        while not self.named("Page.loadEventFired"):
            self.events.append(self.message(deadline))

    def named(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    def value(self, expression):
        """The value of an expression in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def close(self):
        with contextlib.suppress(BrokenPipeError, EOFError, TimeoutError):
            self.session = None
            self.ask("Browser.close", seconds=10)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.mine)
        self.selector.close()


@pytest.fixture(scope="module")
def shown(report, tmp_path_factory):
    """The page in a real browser."""
    if BROWSER is None:
        pytest.skip("no chromium and no chrome on PATH")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    try:
        browser.open(report.resolve().as_uri())
        yield browser
    finally:
        browser.close()


def test_a_browser_shows_the_page(shown, report):
    assert shown.value("document.title") == "accordion_bench: 6 runs in 4 arms"
    assert shown.value("document.compatMode") == "CSS1Compat"
    images = shown.value("[...document.images].map(i => [i.complete, i.naturalWidth])")
    assert len(images) == len(list(report.parent.glob("*.png"))) and all(done and width > 0 for done, width in images)
    assert shown.value("document.querySelectorAll('nav a').length") > 4
    assert shown.value("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
    assert shown.value("[...document.querySelectorAll('tbody th')].every(th => th.offsetWidth > 0 || !th.offsetParent)")


def test_a_browser_has_no_complaints_and_asks_nobody(shown, report):
    shown.value("1")  # whatever has happened until here is noted
    assert [shown.named(kind) for kind in COMPLAINTS] == [[], [], []]
    asked = {event["request"]["url"].partition(",")[0] for event in shown.named("Network.requestWillBeSent")}
    assert asked == {report.resolve().as_uri(), "data:image/png;base64"}
    assert shown.value("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0


def test_a_browser_would_complain(shown, tmp_path):
    """The control: what the page must not do is seen where a page does it."""
    (tmp_path / "bad.html").write_text(
        '<!DOCTYPE html><title>bad</title><img src="gone.png"><script>console.error(1); nothing()</script>'
    )
    browser = Browser(tmp_path / "profile")
    try:
        browser.open((tmp_path / "bad.html").as_uri())
        browser.value("1")
        assert all(browser.named(kind) for kind in COMPLAINTS)
        assert any(event["request"]["url"].endswith("gone.png") for event in browser.named("Network.requestWillBeSent"))
        assert browser.value("document.images[0].naturalWidth") == 0
    finally:
        browser.close()


CONTRAST = """
(() => {
  const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = e => { while (e && getComputedStyle(e).backgroundColor === 'rgba(0, 0, 0, 0)') e = e.parentElement;
    return getComputedStyle(e || document.body).backgroundColor; };
  const parts = ['p', 'a', 'td', 'th', '.beside', '.notes li', 'caption', 'figcaption', 'pre', 'dd', 'h2'];
  return Math.min(...parts.map(part => {
    const e = document.querySelector(part);
    const [a, b] = [light(getComputedStyle(e).color), light(seen(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); }));
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_legible_text(shown, scheme):
    """WCAG 2's contrast for small text, 4.5, in both colour schemes."""
    shown.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    dark = shown.value("getComputedStyle(document.body).backgroundColor") == "rgb(22, 22, 22)"
    assert dark is (scheme == "dark")
    assert shown.value(CONTRAST) >= 4.5


@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_need_not_scroll_sideways(shown, width):
    """Wide tables scroll by themselves."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    shown.ask("Emulation.setDeviceMetricsOverride", **size)
    assert shown.value("document.documentElement.scrollWidth") <= width
