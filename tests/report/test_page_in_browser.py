"""The HTML page in a real browser: Debian's chromium, without a window and without a network."""

import itertools
import shutil
from dataclasses import replace

import pytest

from accordion_bench.report.compare.grouping import group
from accordion_bench.report.render import page
from accordion_bench.report.render.figures.layers import level_grid, with_levels
from tests.report.test_figures import everything, run

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (1400, 420)
SHOWN = "plot => plot.data.filter(trace => trace.meta === %r).map(trace => trace.name)"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium and no chrome on PATH; on Debian type apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A page of two settings: ten arms with three seeds that have everything, and two with one seed."""
    single = group([run(workers=2), run("fp16", workers=2, end=0.88)])[0]
    sections = [page.Section(everything(), []), page.Section(single, [])]
    made = tmp_path_factory.mktemp("page") / "report.html"
    made.write_text(page.page(sections, [], {"Unfinished, in no mean": ["lost"]}), encoding="utf-8")
    return made


class Shown:
    """The page in a tab, with everything that it complains of and asks for."""

    def __init__(self, browser, url, width=1400, **options):
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, **options)
        self.complaints, self.asked = [], []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url.partition(",")[0]))
        self.tab.goto(url)
        self.first = self.tab.locator("#setting-1")

    def plots(self, setting="#setting-1"):
        """The drawn figures of a setting."""
        return self.tab.locator(f"{setting} .js-plotly-plot")

    def named(self, kind):
        """The arms in the figure of a kind."""
        return next(filter(None, self.plots().evaluate_all(f"plots => plots.map({SHOWN % kind})")), [])

    def curve(self, number=0):
        """The x values of a curve."""
        found = f"plot => [...plot.data.filter(trace => trace.meta === 'curve')[{number}].x]"
        return self.plots().first.evaluate(found)


@pytest.fixture(params=WIDTHS)
def shown(request, browser, file):
    found = Shown(browser, file.as_uri(), request.param)
    yield found
    found.tab.close()


@pytest.fixture
def wide(browser, file):
    found = Shown(browser, file.as_uri())
    yield found
    found.tab.close()


def test_it_opens_without_a_complaint_and_asks_nobody(shown, file):
    shown.tab.evaluate("drawAll()")
    assert shown.plots().count() == 5 and shown.plots("#setting-2").count() == 3
    assert shown.complaints == [] and set(shown.asked) == {file.as_uri()}
    assert shown.tab.title() == "accordion_bench: 32 runs in 12 arms"


def test_a_browser_would_complain(browser, tmp_path):
    """The control: what the page must not do is seen where a page does it."""
    bad = tmp_path / "bad.html"
    bad.write_text('<!DOCTYPE html><title>bad</title><img src="gone.png"><script>console.error(1); nothing()</script>')
    found = Shown(browser, bad.as_uri())
    assert len(found.complaints) >= 2 and any(url.endswith("gone.png") for url in found.asked)
    found.tab.close()


def test_markup_in_the_name_of_a_metric_stays_text(browser, tmp_path):
    name = "<a href='http://evil.example'>x</a>"
    made = tmp_path / "report.html"
    arms = group([run(metric=name), run("topk", metric=name)])[0]
    made.write_text(page.page([page.Section(arms, [])], [], {}), encoding="utf-8")
    found = Shown(browser, made.as_uri())
    found.tab.evaluate("drawAll()")
    assert name in found.tab.locator(".js-plotly-plot .ytitle").first.text_content()
    assert found.tab.locator(".js-plotly-plot a[*|href*='evil']").count() == 0 and not found.complaints
    found.tab.close()


def test_an_arm_without_times_of_a_step_says_so(browser, tmp_path):
    bench, own = group([run(), run("topk")])[0]
    rows = [{**row, "compute_seconds": None} for row in own.runs[0].rows]
    config = {**own.config, "dataset": {"name": "digits"}}
    own = replace(own, runs=(replace(own.runs[0], attached=True, config=config, rows=rows),))
    made = tmp_path / "report.html"
    made.write_text(page.page([page.Section([bench, own], [])], [], {}), encoding="utf-8")
    found = Shown(browser, made.as_uri())
    found.tab.evaluate("drawAll()")
    assert "not told" in " ".join(found.plots().all_text_contents()) and not found.complaints
    found.tab.close()


def test_what_is_far_away_is_not_drawn_yet(browser, file):
    found = Shown(browser, file.as_uri(), 420)
    assert found.plots("#setting-2").count() == 0
    found.tab.locator("#setting-2").scroll_into_view_if_needed()
    found.tab.wait_for_selector("#setting-2 .js-plotly-plot")
    found.tab.close()


def test_one_legend_switches_an_arm_in_every_figure(shown):
    before = {kind: shown.named(kind) for kind in ("curve", "end")}
    assert all("PowerSGD rank 2" in names and len(names) == 10 for names in before.values())
    bars = "plots => plots.flatMap(plot => plot.data).filter(one => one.type === 'bar').map(one => one.y.length)"
    assert set(shown.plots().evaluate_all(bars)) == {10}
    entry = shown.first.locator(".legend").get_by_role("button", name="PowerSGD rank 2", exact=True)
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    for kind, names in before.items():
        left = shown.named(kind)
        assert len(left) == 9 and "PowerSGD rank 2" not in left and set(left) < set(names)
    assert set(shown.plots().evaluate_all(bars)) == {9}
    assert shown.first.locator("tr.off").count() == 1
    entry.click()
    assert {kind: shown.named(kind) for kind in before} == before and shown.first.locator("tr.off").count() == 0
    shown.first.locator(".legend .none").click()
    assert shown.named("curve") == []
    shown.first.locator(".legend .all").click()
    assert shown.named("curve") == before["curve"]


def test_the_switch_changes_the_axis(shown):
    names = {}
    for key in ("epoch", "payload_bytes", "wire_bytes", "modelled_seconds", "seconds"):
        shown.first.locator(f"input[value={key}]").check()
        names[key] = shown.plots().first.evaluate("plot => plot.layout.xaxis.title.text")
    assert names == {
        "epoch": "training [epochs]",
        "payload_bytes": "payload per worker [bytes, log scale]",
        "wire_bytes": "sent per worker [bytes, log scale]",
        "modelled_seconds": "modelled time [s, log scale]",
        "seconds": "measured time [s]",
    }
    shown.first.locator("input[value=payload_bytes]").check()
    assert shown.curve() == [1e6 * epoch for epoch in range(1, 7)]


def test_the_slider_changes_modelled_time(shown):
    slider, output = shown.first.locator(".slider input"), shown.first.locator(".slider output")
    assert not slider.is_visible()
    shown.first.locator("input[value=modelled_seconds]").check()
    assert slider.is_visible() and output.inner_text() == "1 Gbit/s"
    row = everything()[0].runs[0].rows[-1]
    assert shown.curve()[-1] == pytest.approx(row["modelled_seconds"], rel=1e-6)
    slider.press("Home")
    assert output.inner_text() == "1 Mbit/s"
    computed = row["modelled_seconds"] - row["modelled_comm_seconds"]
    slow = 8 * (row["wire_bytes"] + row["control_wire_bytes"]) / 1e6 + (row["rounds"] + row["control_rounds"]) * 5e-5
    assert shown.curve()[-1] == pytest.approx(computed + slow, rel=1e-6)
    assert "All links: 1 Mbit/s" in shown.first.inner_text()
    slider.press("End")
    assert output.inner_text() == "100 Gbit/s" and shown.curve()[-1] < row["modelled_seconds"]


def test_the_table_is_sorted_and_filtered(shown):
    table = shown.first.locator(".sortable")
    head = table.locator("th[data-key=wire_bytes]")
    values = "rows => rows.map(row => +row.querySelector('td:nth-of-type(%d)').dataset.value)"
    column = head.evaluate("head => head.cellIndex")
    for direction in ("ascending", "descending"):
        head.locator("button").click()
        found = table.locator("tbody tr").evaluate_all(values % column)
        assert head.get_attribute("aria-sort") == direction and len(found) == 10
        assert found == sorted(found, reverse=direction == "descending")
    table.locator("th button").first.click()
    names = table.locator("tbody th").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    shown.first.locator(".filter").fill("qsgd")
    left = table.locator("tbody tr:visible th").all_inner_texts()
    assert len(left) == 4 and all("qsgd" in name.lower() for name in left)
    assert not table.locator("th[data-key=payload_bytes]").is_visible()
    shown.first.locator(".more-columns").check()
    assert table.locator("th[data-key=payload_bytes]").is_visible()


def test_maps_have_the_colours_of_the_files_and_epochs_are_whole(shown):
    """What plotly was given: dense of its own colour, a key beside the map, whole epochs."""
    shown.tab.evaluate("drawAll()")
    found = "plots => plots.map(p => p.data).flat().filter(one => one.type === 'heatmap').map(one => one.colorscale)"
    (scale,) = shown.plots().evaluate_all(found)
    arms = everything()
    (moved,) = with_levels(arms)
    assert list(dict.fromkeys(colour for _, colour in scale)) == list(level_grid(moved, arms).colours)
    key = shown.first.locator("figure", has_text="Levels: Accordion").locator(".key span")
    assert key.all_inner_texts() == list(level_grid(moved, arms).names)
    tick = "plots => plots.map(p => p.layout.xaxis).filter(x => /epochs/.test(x.title.text)).map(x => x.dtick)"
    assert all(step == int(step) >= 1 for step in shown.plots().evaluate_all(tick))


def test_the_toolbar_covers_no_plot_and_is_not_there_without_a_mouse(browser, file):
    for touch in (False, True):
        found = Shown(browser, file.as_uri(), has_touch=touch, is_mobile=touch)
        top = found.plots().first.evaluate("plot => plot._fullLayout.margin.t")
        assert top >= 30
        found.plots().first.hover()
        bars = found.plots().first.locator(".modebar")
        assert touch or (bars.count() and bars.first.bounding_box()["height"] <= top)
        assert not touch or not bars.count()
        found.tab.close()


def test_the_mouse_is_told_value_interval_and_seeds(wide):
    told = wide.plots().first.evaluate("plot => plot.data.find(trace => trace.meta === 'curve').text[5]")
    assert told.startswith("<b>dense</b><br>epoch 6<br>") and "± " in told and "(95 %, n = 3)" in told
    assert "<br>seed 0: " in told and "<br>seed 1: " in told


def test_one_seed_ranks_nothing(wide):
    wide.tab.evaluate("drawAll()")
    assert wide.tab.locator("#setting-2 .note", has_text="One seed: nothing is ranked.").count() == 2
    low, high = wide.plots("#setting-2").nth(1).evaluate("plot => plot.layout.yaxis.range")
    assert high - low >= 5


def test_intervals_that_leave_the_axes_are_marked(browser, tmp_path):
    wild = [run("qsgd", bits=2, seed=seed, end=0.9 - 0.3 * seed) for seed in (0, 1)]
    arms = group([*wild, *(run(seed=seed) for seed in (0, 1))])[0]
    made = tmp_path / "wild.html"
    made.write_text(page.page([page.Section(arms, [])], [], {}), encoding="utf-8")
    found = Shown(browser, made.as_uri())
    symbols = found.plots().nth(1).evaluate("plot => plot.data.map(trace => trace.marker.symbol)")
    assert {"triangle-down", "triangle-up"} & set(symbols)
    assert found.complaints == []
    found.tab.close()


def test_nothing_is_wider_than_the_window(shown):
    """Wide tables scroll by themselves."""
    shown.tab.evaluate("drawAll()")
    assert shown.tab.evaluate("document.documentElement.scrollWidth") <= shown.tab.viewport_size["width"]
    boxes = [plot.bounding_box() for plot in shown.plots().all()]
    assert all(box["width"] > 250 and box["height"] >= 90 for box in boxes)
    beside = any(a["y"] == b["y"] for a, b in itertools.combinations(boxes, 2))
    assert beside is (shown.tab.viewport_size["width"] > 700)  # one column on small screens


CONTRAST = """
() => {
  const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = e => { while (e && getComputedStyle(e).backgroundColor === 'rgba(0, 0, 0, 0)') e = e.parentElement;
    return getComputedStyle(e || document.body).backgroundColor; };
  const parts = ['.answer p', 'a', 'td', 'th', '.beside', '.soft', 'caption', 'figcaption', '.note', '.legend button',
    '.legend .all', '.switch label', 'dd', 'h2', 'summary', '.unit'];
  return Math.min(...parts.map(part => {
    const e = document.querySelector(part);
    const [a, b] = [light(getComputedStyle(e).color), light(seen(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); }));
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(browser, file, scheme):
    """WCAG 2's contrast for small text, 4.5, in both colour schemes."""
    found = Shown(browser, file.as_uri(), color_scheme=scheme)
    dark = found.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 22, 22)"
    assert dark is (scheme == "dark")
    assert found.tab.evaluate(CONTRAST) >= 4.5
    found.tab.close()


def test_paper_has_every_figure_and_no_controls(wide):
    wide.tab.emulate_media(media="print")
    wide.tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert not wide.tab.locator(".controls:visible").count() and not wide.tab.locator("details:visible").count()
    drawn = wide.tab.locator(".js-plotly-plot .main-svg:first-child")
    widths = drawn.evaluate_all("all => all.map(one => +one.getAttribute('width'))")
    assert len(widths) == 8 and set(widths) == {680}
    assert wide.tab.pdf(prefer_css_page_size=True).startswith(b"%PDF")
