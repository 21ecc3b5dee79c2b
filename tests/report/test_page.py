"""The HTML page: well-formed, self-contained, small, and with the numbers of table.csv."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import yaml

from accordion_bench.network.link_model import Network
from accordion_bench.report import read, render
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.render import figures, page, write
from accordion_bench.report.render import page as page_module
from accordion_bench.report.render.page import STOPS, curves, swatch
from tests.report.test_figures import everything, run
from tests.report.test_report import accordion, no_figures, run_folder  # noqa: F401

VOID = {"meta", "img", "br", "hr", "link", "input"}
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
    with pytest.MonkeyPatch.context() as patch:  # one that the page draws itself, and one that it does not
        patch.setattr(figures, "OF_A_SETTING", ("breakdown", "norms"))
        write.write(read.read_runs([root / "runs"]), root / "out", [("lost", "does not exist")])
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
    sections = {f"#{name}" for name in ids if name != "data"}
    assert {attrs["href"] for attrs in page.all("a")} == sections  # the contents name every one
    assert all(attrs.get("alt") for attrs in page.all("img"))
    assert len(page.all("table")) == len(page.all("caption")) == len(page.all("thead"))
    assert [len(page.all(tag)) for tag in ("title", "h1", "main", "nav")] == [1, 1, 1, 1]
    assert {attrs["scope"] for attrs in page.all("th")} == {"row", "col"}


def test_rows_are_as_long_as_their_heading(report):
    for table in report.read_text().split("<table ")[1:]:
        table = table.partition("</table>")[0]
        head, body = table.split("</thead>")
        assert {row.count("<td") + 1 for row in body.split("<tr")[1:]} == {head.count('scope="col"')}


def scripts(text):
    """What runs in a page."""
    return re.findall(r"<script>(.*?)</script>", text, re.DOTALL)


def without_library(text):
    return text.replace(scripts(text)[0], "")


def without_scripts(text):
    for script in scripts(text):
        text = text.replace(script, "")
    return text


def data_of(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def floats(text):
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


def test_the_page_loads_nothing(report):
    text = report.read_text()
    found = Page(text)
    assert not {"link", "iframe", "object", "base", "form"} & {tag for tag, _ in found.seen}
    assert not any("src" in attrs for attrs in found.all("script"))
    assert all(attrs["src"].startswith("data:image/png;base64,") for attrs in found.all("img"))
    own = without_library(text)
    assert "url(" not in own and "@import" not in own and not any("style" in attrs for _, attrs in found.seen)


def test_only_the_scripts_of_the_page_may_run(report):
    text = report.read_text()
    (policy,) = (attrs["content"] for attrs in Page(text).all("meta") if "http-equiv" in attrs)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts(text)]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert len(hashes) == 5
    assert policy == f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def test_numbers_are_those_of_the_csv(report):
    table = pd.read_csv(report.parent / "table.csv", keep_default_na=False, dtype=str)
    found = re.findall(r'<table class="sortable">(.*?)</table>', report.read_text(), re.DOTALL)
    rows = 0
    for text in found:
        keys = re.findall('data-key="([^"]+)"', text)
        assert len(keys) > 8 and "payload_bytes" in keys
        for row in text.split("<tr data-arm")[1:]:
            written = dict(zip(keys, re.findall('data-value="([^"]*)"', row), strict=True))
            expected = table.iloc[rows]
            for key, value in written.items():
                numeric = re.fullmatch(r"[-\d.e+]+|inf", expected[key])
                assert float(value) == float(expected[key]) if numeric else value == expected[key], key
            rows += 1
    assert rows == len(table) == 4


def test_the_page_says_everything(report):
    said = Page(report.read_text()).text
    table = (report.parent / "table.md").read_text()
    for line in table.splitlines():
        if line.startswith("- "):
            assert re.sub(r"\\([^a-z])", r"\1", line[2:]) in said  # without what Markdown escapes
    assert "(scale=tiny: not the full experiment)" in said
    assert "Unfinished, in no mean" in said and "Repeats of a seed" in said and "lost: does not exist" in said
    assert "python -m accordion_bench -m compressor=topk seed=0,1" in said
    assert "commit abc" in " ".join(said.split())
    assert HOSTILE in said


def test_what_the_page_does_not_draw_itself_is_a_picture_in_it(tmp_path):
    for name in ("tradeoff", "norms-digits", "variance"):
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    pngs = sorted(tmp_path.iterdir())
    found = Page(page.page([page.Section(group([run()])[0], pngs)], [tmp_path / "variance.png"], {})).all("img")
    shown = [base64.b64decode(attrs["src"].partition(",")[2]) for attrs in found]
    assert shown == [b"norms-digits", b"variance", b"variance"]
    assert found[0]["alt"].startswith("Norms of the summed gradients: resnet8 on digits")
    drawn = [name for name in figures.NAMES if name not in figures.INTERACTIVE]
    assert drawn == [
        "accuracy_simulated",
        "consensus_distance",
        "norms",
        "variance",
        "codebooks",
        "bits_bucket",
        "period",
        "workers",
    ]


def test_the_page_draws_every_arm(report):
    data = data_of(report.read_text())
    first = data[0]
    assert [arm["label"] for arm in first["arms"]] == ["dense", "Accordion (TopK 99/10 %)"]
    assert [axis["key"] for axis in first["axes"]] == ["epoch", "wire_bytes", "payload_bytes"]
    assert [len(levels["layers"]) for levels in first["levels"]] == [3]
    assert floats(first["curves"][0]["x"]["payload_bytes"]).tolist() == [250, 500, 750, 1000]


def test_a_page_of_nothing(tmp_path, no_figures):  # noqa: F811
    (run_folder(tmp_path / "runs") / "done").unlink()
    write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out")
    assert "0 runs in 0 arms" in Page((tmp_path / "out" / "report.html").read_text()).text


def test_thinning_keeps_both_ends():
    for count in (1, 2, 299, 300, 301, 5000):
        kept = page_module.thinned(count, page_module.POINTS)
        assert kept[0] == 0 and kept[-1] == count - 1 and len(kept) == min(count, page_module.POINTS)
        assert kept == sorted(set(kept))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("arms", "seeds"), [(20, 5), (100, 1)])
def test_a_hundred_long_runs_are_two_megabytes(arms, seeds):
    of_all = []
    for rank in range(1, arms + 1):
        once = run("powersgd", rank=rank, epochs=300, cost=1 / rank)
        of_all += [replace(once, config={**once.config, "seed": seed}) for seed in range(seeds)]
    made, _ = group(of_all)
    assert len(made) == arms
    text = page.page([page.Section(made, [])], [], {})
    assert len(without_library(text)) < 2e6
    curve = data_of(text)[0]["curves"][-1]
    assert len(floats(curve["half"])) == (300 if arms == 20 else 60)
    assert floats(curve["x"]["epoch"])[[0, -1]].tolist() == [1, 300]


@pytest.fixture(scope="module")
def many():
    """Nine arms with two seeds that have everything."""
    return everything()


def test_the_slider_shows_what_runs_have_recorded_and_what_python_models(many):
    found = curves(many, 300)
    own = found["stops"][found["stop"]]
    assert own["bandwidth"] == 1e9 and [stop["bandwidth"] for stop in found["stops"]] == STOPS
    for arm, curve in zip(many, found["curves"], strict=True):
        recorded = np.mean([[row["modelled_seconds"] for row in run.rows] for run in arm.runs], axis=0)
        modelled = curve["x"]["modelled_seconds"]
        assert floats(modelled[found["stop"]]) == pytest.approx(recorded, rel=1e-6)
        row = arm.runs[0].rows[-1]
        sent = row["wire_bytes"] + row["control_wire_bytes"], row["rounds"] + row["control_rounds"]
        for stop, times in zip(STOPS, modelled, strict=True):
            own = row["modelled_seconds"] - row["modelled_comm_seconds"]
            assert floats(times)[-1] == pytest.approx(own + Network(stop, 5e-5).seconds(*sent, 4), rel=1e-6)


def test_a_link_of_its_own_is_a_stop():
    usual = run()
    (arm,) = group([replace(usual, config={**usual.config, "network": {"bandwidth": 3e8, "latency": 1e-5}})])[0]
    found = curves([arm], 300)
    assert found["stops"][found["stop"]] == {"bandwidth": 3e8, "name": "300 Mbit/s"}
    assert "rounds × latency (10 µs)" in found["model"]


def test_an_axis_of_accuracy_is_never_narrower_than_noise(many):
    alike = group([run(), run("fp16", end=0.9001)])[0]
    bottom, top = curves(alike, 300)["limits"]
    assert top - bottom >= 5
    few = [replace(one, summary={**one.summary, "test_size": 50}) for one in (run(), run("fp16"))]
    bottom, top = curves(group(few)[0], 300)["limits"]
    assert top - bottom >= 20  # ten of fifty


def test_one_seed_ranks_nothing():
    single = page.page([page.Section(group([run(), run("fp16")])[0], [])], [], {})
    several = page.page([page.Section(group([run(), run(seed=1)])[0], [])], [], {})
    assert "One seed: nothing is ranked" in Page(without_scripts(single)).text
    assert "One seed: nothing is ranked" not in Page(without_scripts(several)).text


def test_no_label_leaves_its_place():
    strange = run(scale=HOSTILE, workers=4)
    choices = {**strange.config["choices"], "arm": HOSTILE}
    made, _ = group([replace(strange, config={**strange.config, "choices": choices}), strange])
    text = page.page([page.Section(made, [])], [], {HOSTILE: [HOSTILE]})
    assert len(Page(text).all("script")) == 6 and "<b>" not in without_scripts(text)


def test_what_cannot_be_drawn_is_told_and_ends_nothing(monkeypatch):
    """One figure of a stranger's runs, or all of them."""
    for broken in ("levels", "step_times"):
        monkeypatch.setattr(page_module, broken, lambda *_: 1 / 0)
    one = page.page([page.Section(group([run()])[0], [])], [], {page.FAILED: ["norms"]})
    assert data_of(one)[0]["levels"] is None and "levels of resnet8 on digits" in Page(one).text
    monkeypatch.setattr(page_module, "curves", lambda *_: 1 / 0)
    none = Page(page.page([page.Section(group([run()])[0], [])], [], {}))
    assert "curves of resnet8 on digits" in none.text and "ZeroDivisionError" in none.text


def test_a_number_that_is_none_is_no_number():
    """JSON knows neither NaN nor infinity."""
    diverged = run(end=float("nan"))
    made, _ = group([run(), diverged])
    data = data_of(page.page([page.Section(made, [])], [], {}))
    assert "NaN" not in json.dumps(data)


def test_every_look_has_a_picture(many):
    for look in render.looks(many):
        svg = swatch(look)
        assert svg.count("<line ") == 1 and svg.count("<polygon ") == 1 and look.colour in svg


def test_without_the_extra_there_is_all_but_the_page(tmp_path, no_figures, monkeypatch):  # noqa: F811
    run_folder(tmp_path / "runs")
    monkeypatch.setattr(page_module, "NEEDS", ("plotly", "no_such_package"))
    said = write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out").where
    assert said.endswith("no report.html: it needs no_such_package; type pip install 'accordion-bench[report]'")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"README.md", "table.md", "table.csv", "table.tex"}
