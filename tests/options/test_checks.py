"""What sentences tell to type can be typed."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from accordion_bench.options.checks import as_typed


@pytest.mark.parametrize(
    "path", ["/jürgen/x", "/x/lr=0.1", "/x/runs (1)", "a,b", "it's", "a\\'b", "end\\", "[a]", "{a}"]
)
def test_a_path_comes_through_shell_and_grammar(path):
    (word,) = shlex.split(as_typed("resume", path))
    assert OverridesParser.create().parse_override(word).value() == path


def test_a_plain_path_stays_as_it_is():
    assert as_typed("resume", "results/runs/20250101-x_y-s0") == "resume=results/runs/20250101-x_y-s0"
