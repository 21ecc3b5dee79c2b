"""The served page in a real browser: it shows what a run has written, and stays as its reader has set it."""

import shutil

import pytest

from tests.report.test_report import run_folder
from tests.report.test_serve import goes_on, one_more, served  # noqa: F401

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
POINTS = "plot => plot.data.filter(trace => trace.meta === 'curve').map(trace => [trace.name, trace.x.length])"


@pytest.fixture
def tab():
    if CHROMIUM is None:
        pytest.skip("no chromium and no chrome on PATH; on Debian type apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM)
        yield browser.new_page(viewport={"width": 1400, "height": 900})
        browser.close()


def test_a_page_follows_its_runs_and_stays_as_it_was_set(tab, served):  # noqa: F811
    root, _, port = served
    for seed in (0, 1):
        run_folder(root, epochs=6, seed=seed)
        run_folder(root, "powersgd", epochs=6, seed=seed, payload=300)
    path, complaints = goes_on(root, compressor="topk"), []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(f"http://localhost:{port}/")
    tab.wait_for_selector("#setting-1 .js-plotly-plot")
    plot = tab.locator("#setting-1 .js-plotly-plot").first
    assert plot.evaluate(POINTS) == [
        ["dense", 6],
        ["PowerSGD rank 2", 6],
        ["TopK 10 %, seed 0: running, epoch 4 of 6", 4],
    ]

    tab.locator(".legend").get_by_role("button", name="PowerSGD rank 2", exact=True).click()
    tab.get_by_role("radio", name="payload").check()
    tab.get_by_text("What the numbers are").click()
    tab.evaluate("scrollTo(0, 300)")
    one_more(path)
    tab.get_by_role("button", name="running, epoch 5 of 6").wait_for(timeout=60_000)
    tab.wait_for_selector("#setting-1 .js-plotly-plot")
    assert plot.evaluate(POINTS) == [["dense", 6], ["TopK 10 %, seed 0: running, epoch 5 of 6", 5]]
    assert tab.get_by_role("radio", name="payload").is_checked()
    assert tab.locator("details[open] summary").all_text_contents() == ["What the numbers are"]
    assert tab.evaluate("scrollY") == 300
    assert complaints == []


def test_a_page_says_that_its_server_has_ended(tab, served):  # noqa: F811
    root, _, port = served
    run_folder(root)
    tab.goto(f"http://localhost:{port}/")
    assert tab.locator("#live").text_content().startswith("Live: follows the runs; as of ")
    tab.route("**/version", lambda route: route.abort())
    tab.get_by_text("No longer live: the server has ended").wait_for(timeout=60_000)
