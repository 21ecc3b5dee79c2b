"""Anybody's text in Markdown, LaTeX and CSV is text."""

import io

import pandas as pd
import pytest

from accordion_bench.report.render import tables
from accordion_bench.report.render.tables import csv
from accordion_bench.runs import untrusted

HONEST = [
    "Accordion (PowerSGD rank 2/1), batch 512 at first, error_feedback=True",
    "milestones=[0.5, 0.75], ranges=[[0, 3, 'weak'], [3, 9, 'strong']]",
    "payload 9.19x less than dense; 95 % interval -0.28 ± 1.31 points (paired by seed, n = 3)",
    "python -m accordion_bench 'adaptive.schedule.ranges=[[0,3,weak]]' compressor=none seed=0,1",
    "one of < 3 and > 2, a & b, 5 % * 2",
]


@pytest.mark.parametrize("text", HONEST)
def test_an_honest_line_of_markdown_is_as_it_was(text):
    assert tables.line(text) == tables.inline(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[x](http://evil.example)", r"\[x]\(http:\//evil.example)"),
        ("a ![x](e.png)", r"a ![x]\(e.png)"),
        ("a [x][y]", r"a [x]\[y]"),
        ("[x]: evil", r"\[x]\: evil"),
        ("<script>", r"\<script>"),
        ("a <!-- b", r"a \<!-- b"),
        (r"\<b>", r"\\\<b>"),
        ("`rm`", r"\`rm\`"),
        ("$x$", r"\$x\$"),
        ("see www.evil.example", r"see www\.evil.example"),
        ("# x", r"\# x"),
        ("~~~", r"\~~~"),
        ("- x", r"\- x"),
    ],
)
def test_a_line_of_markdown_leads_nowhere(text, shown):
    assert tables.line(text) == shown


@pytest.mark.parametrize("marker", ["", "- ", "12. "])
@pytest.mark.parametrize("begins", ["- 2", "+ rounds", "# x", "1. x", "12) x", "> y", "=", "| x", "-0.84", "plain"])
def test_a_folded_page_says_the_same_in_short_lines(marker, begins):
    for length in range(100, 120):
        page = f"{marker}{'w' * (length - 9)} {'w' * 8} {begins} {'word ' * 40}end"
        first, *others = tables.folded(page).splitlines()
        assert " ".join([first, *(row.strip() for row in others)]) == page
        assert first.startswith(marker) and all(row.startswith(" " * len(marker)) for row in others)
        assert max(map(len, [first, *others])) <= 120
        assert not any(tables.BEGINS.match(f" {row.strip()}") for row in others)


def test_tables_headings_and_code_are_not_folded():
    long = "x y " * 50
    page = f"# {long}\n\n| {long} |\n\n```\n{long}\n```\n\n    {long}\n"
    assert tables.folded(page) == page


def test_a_cell_stays_one_cell():
    (_, _, row) = tables.aligned([["arm", "n"], [r"a\| b | `c`", "1"]]).splitlines()
    assert row == r"| a\\\| b \| \`c\` |  1 |"


def test_latex_runs_no_command():
    shown = tables.escaped(r"\input{x} $a_b^c$ 50 % & # ~ <\write18{rm}>")
    assert "\\input" not in shown and "\\write" not in shown
    assert shown.startswith(r"\textbackslash{}input\{x\} \$a\_b\textasciicircum{}c\$ 50 \% \& \#")


def test_a_cell_of_csv_is_no_formula():
    cells = ["=1+1", "+1", "-x", "@sum", "dense", "", "a=b"]
    tables = [pd.DataFrame({"arm": cells, "=name": -1.5, "n": -3, "yes": True, "none": None})]
    found = pd.read_csv(io.StringIO(csv(tables)), keep_default_na=False)
    assert found["arm"].tolist() == ["'=1+1", "'+1", "'-x", "'@sum", "dense", "", "a=b"]
    assert list(found.columns) == ["arm", "'=name", "n", "yes", "none"]
    assert found["'=name"].tolist() == [-1.5] * 7 and found["n"].tolist() == [-3] * 7


def test_honest_tables_are_the_same_csv():
    tables = [pd.DataFrame({"arm": ["dense", "TopK 10 %"], "seeds": ["0 1", "0"], "x": [0.1, -1e-9], "n": [2, 1]})] * 2
    assert csv(tables) == pd.concat(tables).to_csv(index=False)


def test_names_are_printable_lines():
    assert untrusted.printable("a\n\tb\x1b[2J\ud800\u202ec\u00a0d") == "a  b?[2J??c d"
    assert untrusted.printable("TopK 10 %, H 8 µs – ±") == "TopK 10 %, H 8 µs – ±"
    assert untrusted.printable("x" * 300) == "x" * 199 + "…"


def test_values_are_plain():
    odd = {1: {2, 3}, None: b"\x00", "a": [10**30, -(10**400), 2**62, True, None, 1.5]}
    assert untrusted.plain(odd) == {
        "1": "{2, 3}",
        "None": r"b'\x00'",
        "a": [1e30, float("-inf"), 2**62, True, None, 1.5],
    }


@pytest.mark.parametrize("text", ['{"a": "\\n"}', '{"a": "é"}', '{"a": "\x7f"}'])
def test_rows_that_may_hold_something_else_are_looked_through(text):
    assert not untrusted.is_printable_json(text) and untrusted.is_printable_json('{"a": [1.5, null]}')
