"""--help shows every option of every YAML file with its comment, at once, without torch or Hydra."""

import subprocess
import sys

import pytest

from accordion_bench.cli import help
from accordion_bench.options import advice
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir


def lines(*typed: str) -> dict[str, str]:
    """Option -> what is said of it."""
    found = [line.strip().partition("  ") for line in help.text(["--help", *typed]).splitlines()]
    return {option: told.strip() for option, _, told in found}


@pytest.mark.parametrize("typed", [["all"], ["compressor=powersgd", "adaptive=accordion"]])
def test_the_options_that_people_look_for(typed):
    shown = lines(*typed)
    assert shown["compressor.rank=2"] == "lower rank = more compression"
    assert shown["adaptive.accordion.eta=0.5"].startswith("relative change of the norm")
    assert shown["compressor=powersgd"].startswith("low rank by one power iteration")


def test_every_option_of_every_choice():
    everything = lines("all")
    shown = {option.partition("=")[0] for option in everything}
    files = [conf_dir() / "config.yaml"]
    for group in [group for group in advice.groups() if group not in advice.PRESETS]:
        files += sorted((conf_dir() / group).glob("*.yaml"))
        for name in advice.choices(group):
            assert any(option.startswith(f"{group}={name}") for option in everything)
    for file in files:
        own = {key for key, value in advice.keys_of(file).items() if not isinstance(value, dict) or not value}
        assert own <= shown, file


def test_a_group_and_a_word():
    assert {"compressor=topk", "compressor.density=0.1"} <= set(lines("compressor"))
    assert lines("powersgd") == lines("compressor=powersgd")
    assert set(lines("eta")) >= {"adaptive.accordion.eta=0.5", "adaptive.accordion_sync.eta=0.5"}
    assert "+experiment=NAME, one of" in lines("experiment") and "smoke" in lines("experiment")
    assert lines("+experiment=smoke")["setup.experiment=smoke"] == ""


def test_what_is_not_there():
    with pytest.raises(ConfigError, match="; type compressor=powersgd "):
        help.text(["--help", "compressor=powersdg"])
    for typed, meant in (("epocs", "epochs"), ("rnk", "rank"), ("compresor", "compressor"), ("qqqqzz", "all")):
        with pytest.raises(ConfigError, match=f"{typed} is no option here; type --help {meant}$"):
            help.text(["--help", typed])


def test_a_page_and_everything():
    page, everything = help.text(["-h"]), help.text(["--help", "all"])
    assert len(page.splitlines()) <= 35 and max(map(len, page.splitlines())) <= 120
    assert everything.startswith(page) and len(everything.splitlines()) > 500
    assert all(f"  {group}=" in page for group in advice.groups() if group not in advice.PRESETS)


def test_an_option_says_whose_it_is():
    found = help.text(["--help", "rank"]).splitlines()
    assert "compressor.rank=2   lower rank = more compression (compressor=acpsgd, powersgd)" in found
    assert len(found) == 4
    assert help.text(["--help", "seed"]).splitlines()[0] == "seed=0   (every run)"


def test_it_imports_nothing_heavy():
    code = (
        "import sys; sys.argv[1:] = ['--help']; from accordion_bench import __main__ as m\n"
        "try: m.main()\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=conf_dir().parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compressor=    acpsgd" in done.stdout
