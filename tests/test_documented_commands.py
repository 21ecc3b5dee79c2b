"""Every command of the pages is one that its program takes: composed and validated, or read by the program's parser.

A word in capitals (FOLDER, RUN) stands for something of the reader's, `...` for words that are left out.
"""

import argparse
import ast
import importlib.util
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch.distributed.run
from PIL import Image

from accordion_bench import __main__ as program
from accordion_bench.advise import __main__ as advise
from accordion_bench.advising import cluster
from accordion_bench.advising import gpus as asked_gpus
from accordion_bench.cli import advice_command, command_line, demo
from accordion_bench.cli.help import text as help_text
from accordion_bench.config.components import with_counts
from accordion_bench.config.validate import validate
from accordion_bench.forward import trial
from accordion_bench.netlab import __main__ as netlab
from accordion_bench.netlab import options as of_netlab
from accordion_bench.options import advice
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.options.instantiate import build
from accordion_bench.options.override import parts
from accordion_bench.processes import placement
from accordion_bench.run_config import RunConfig
from scripts import site
from tests.kit import composed, pages
from tests.kit.own_data import huggingface_counts, written_tokens
from tests.kit.pages import Command
from tests.kit.paths import ROOT

BLOCKS = [block for page in pages.PAGES for block in pages.blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "bash"]
TYPED = [command for block in SHELL for command in pages.commands(block)]
SAID = [command for page in pages.PAGES for command in pages.inline(page)]
COMMANDS = list({str(command): command for command in [*TYPED, *SAID]}.values())
OWN_PARTS = Path("examples/own_parts/README.md")
INSTALLED = [c for c in COMMANDS if c.page != OWN_PARTS and "--config-dir" not in c.words]
METHODS = [(group, name) for group in site.METHODS for name, *_ in site.options.declared(group)]
OF_OTHERS = ("export", "source", ".", "pip")  # the shell's, and what is tested by scripts/try_wheel.sh


class Parsed(BaseException):
    """Raised where a program has read its command line, and would begin."""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A folder with pictures, arrays and tokens, made once."""
    made = tmp_path_factory.mktemp("material")
    for name, number in itertools.product("ab", range(24)):
        (made / "FOLDER" / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 10 * number).save(made / "FOLDER" / name / f"{number}.png")
    np.savez(made / "FILE.npz", x=np.zeros((40, 8, 8), np.float32), y=np.arange(40) % 2)
    written_tokens(made / "FOLDER")
    return made


@pytest.fixture
def readers(monkeypatch, tmp_path, material):
    """A folder with what a reader may have: pictures, arrays, a hook, a network card."""
    shutil.copytree(material, tmp_path, dirs_exist_ok=True)
    huggingface_counts(monkeypatch)
    for block in BLOCKS:  # a program that says its file's name in its first line
        if block.language == "python" and (named := re.match(r"# (\w+\.py)\b", block.text)):
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
    (tmp_path / "conf" / "compressor").mkdir(parents=True)
    (tmp_path / "conf" / "compressor" / "pool.yaml").write_text("_target_: pool.Pool\nerror_feedback: true\n")
    monkeypatch.setattr(placement, "Interface", lambda name: None)
    monkeypatch.setattr(trial, "slowdown", lambda *_: None)  # which is timed
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", INSTALLED, ids=str)
def test_it_is_taken(command, readers, monkeypatch):
    take(command, monkeypatch)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.page != OWN_PARTS and "--config-dir" in c.words], ids=str)
def test_it_is_taken_beside_the_compressor_of_the_tutorial(command, inside, readers, monkeypatch):
    take(command, monkeypatch)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.page == OWN_PARTS], ids=str)
def test_it_is_taken_beside_parts_of_your_own(command, inside, monkeypatch):
    take(command, monkeypatch)


@pytest.fixture(scope="module")
def of_methods(tmp_path_factory) -> Path:
    """The folder with the site's page of each method."""
    into = tmp_path_factory.mktemp("site")
    assert [heading for heading, _ in site.methods(into)] == list(site.METHODS.values())
    return into / "methods"


@pytest.mark.sample(3)
@pytest.mark.parametrize("group, name", METHODS)
def test_the_site_s_page_of_a_method_says_what_is_taken(group, name, of_methods, monkeypatch):
    shell = [block for block in pages.blocks(of_methods / f"{group}-{name}.md") if block.language == "bash"]
    typed = [command for block in shell for command in pages.commands(block)]
    assert len(typed) >= 2
    for command in typed:
        assert f"{group}={name}" in command.words
        take(command, monkeypatch)


def take(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program of a command read it, as far as it goes without work."""
    words = [word for word in command.words if word != "..."]
    match words:
        case [first, *_] if first in OF_OTHERS:
            return
        case ["cd", folder]:
            assert folder.startswith("/shared") or (ROOT / folder).is_dir()
        case ["make", *targets]:
            made = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert {target for target in targets if "=" not in target} <= set(made)
        case ["bash", script, *_]:
            assert (ROOT / script).is_file()
        case ["srun" | "torchrun", *_]:
            _launched(words, monkeypatch)
        case ["accordion-bench", *rest]:
            _run(rest)
        case ["python", "-m", module, *rest]:
            _module(module, rest, {}, monkeypatch)
        case _:
            pytest.fail(f"nobody knows how to check {command}")


def _launched(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of torchrun or Slurm, on a machine without GPUs."""
    each, machines = 4, 2
    at = words.index("-m") if "-m" in words else len(words) - 1
    if words[0] == "torchrun":
        args = torch.distributed.run.get_args_parser().parse_args([*words[1:at], "script.py"])
        each, machines = int(args.nproc_per_node), int(args.nnodes.rpartition(":")[2])
    if words[at] != "-m":
        assert Path(words[at]).is_file()
        return
    size, here = str(each * machines), str(each)
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": here}
    _module(words[at + 1], words[at + 2 :], environ, monkeypatch)


def _module(module: str, rest: Sequence[str], environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    match module:
        case "accordion_bench":
            _run(rest, environ)
        case "accordion_bench.advise" if rest and "--probe" not in rest and "--link" not in rest:
            _advice(rest)
        case "accordion_bench.netlab":
            _behind_links(rest, monkeypatch)
        case _:
            _parsed(module, rest, monkeypatch)


def _parsed(module: str, rest: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads its options by argparse; another one is there."""
    folder = ROOT.joinpath(*module.split("."))
    file = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    if "argparse" not in source and "arguments" not in source:
        return

    def stop(parse):
        def parsed(self, *args, **kwargs):
            parse(self, *args, **kwargs)
            raise Parsed

        return parsed

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop(getattr(argparse.ArgumentParser, name)))
    monkeypatch.setattr(sys, "argv", [module, *rest])
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)  # which runpy would warn of
    with pytest.raises(Parsed):
        runpy.run_module(module, run_name="__main__")


def _behind_links(rest: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = netlab.parser().parse_args(rest)
    number = of_netlab.count(args.hosts)
    assert of_netlab.rate(args.rate) and of_netlab.slow_hosts(args.slow_host, number) is not None
    assert all(of_netlab.cut(text, number) for text in args.cut)
    job = netlab.job_of(args)
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": "1"}
    if args.command is None and not args.probe:
        _run(job[3:], environ)
    elif args.command is not None:
        _parses(args.command)
        words = shlex.split(args.command)
        if "accordion_bench" in words:
            _run(words[words.index("accordion_bench") + 1 :], environ)


def _advice(rest: Sequence[str]) -> None:
    args = advise.read(list(rest))
    _, words = asked_gpus.split(args.overrides)
    machines, overrides = cluster.split(words)
    config, _ = advice_command.composed([*overrides, f"network.workers_per_machine={machines.workers_each}"])
    build(config.network, "network")


def _run(rest: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """A run, or each cell of a sweep: composed and validated as the program does before it trains."""
    if rest[:1] == [command_line.SHOW]:
        assert len(rest) > 1
        return
    if rest[:1] == ["demo"]:
        demo.parser().parse_args(rest[1:])
        return
    command_line.refuse_unreadable(command_line.without_ours(rest))
    if "--help" in rest:
        assert help_text(rest)
        return
    own = command_line.config_dirs(rest)
    words = program.in_order(
        command_line.quoted([word for word in rest if not word.startswith("-") and word not in own])
    )
    if set(command_line.OURS) & set(rest):
        _, words = asked_gpus.split(words)
    if of_hydra := [word for word in words if word.lstrip("+").startswith(("hydra", "search="))]:
        words = [word for word in words if word not in of_hydra]
        _of_hydra([word for word in words if not _swept(word)], of_hydra)
    if any("experiment=" in word for word in words) and "+arm=" not in " ".join(words):
        words = _first_arm(words)
    swept = [[f"{word.partition('=')[0]}={value}" for value in _values(word)] for word in words]
    gpus = 4 if "comm=nccl" in words else 0
    for cell in itertools.product(*swept):
        cfg = composed.cfg(*cell)
        if cfg["resume"] is None and cfg["choices"].get("experiment") != "smoke":
            config = with_counts(RunConfig.from_dict(cfg))
            where = placement.place(config, environ, gpus)
            validate(config, where, set(program.typed(list(cell))))


def _values(word: str) -> list[str]:
    """What is swept over, or the one value; of anything but a group's names seeds and the like decide nothing."""
    key, _, value = word.partition("=")
    values = parts(value)
    return values if key.lstrip("+") in advice.groups() else values[:1]


def _swept(word: str) -> bool:
    return len(parts(word.partition("=")[2])) > 1


def _first_arm(words: Sequence[str]) -> list[str]:
    """With an arm of an experiment that sweeps over arms; test_experiments composes each."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        full = compose("config", [word for word in words if not _swept(word)], return_hydra_config=True)
    arms = str((full.hydra.sweeper.params or {}).get("+arm") or "")
    return [*words, f"+arm={arms.split(',')[0]}"] if arms else list(words)


def _of_hydra(words: Sequence[str], of_hydra: Sequence[str]) -> None:
    """Hydra's own words beside a run's: its launcher's options, a search; what the extras bring is skipped without."""
    from hydra import compose, initialize_config_dir

    search = [word.partition("=")[2] for word in of_hydra if "search=" in word]
    assert set(search) <= set(advice.choices("search"))
    needed = ["optuna"] if search else re.findall(r"joblib|submitit", " ".join(of_hydra))
    if not all(importlib.util.find_spec(extra) for extra in needed):
        return
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        compose("config", [*words, *of_hydra], return_hydra_config=True)


@pytest.mark.parametrize("page", pages.PAGES, ids=str)
def test_commands_and_programs_say_what_they_are(page):
    """Else nobody would check them."""
    text = pages.FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    typed = r"\n    (\$ |python |python3 |torchrun |make |bash |srun |cd |accordion-bench |pip )"
    assert re.findall(rf"\n{typed}", text) == []
    assert {block.language for block in pages.blocks(page)} <= {"bash", "python"}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=lambda b: str(b.page))
def test_a_program_compiles(block):
    ast.parse(block.text)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: str(block.page))
def test_a_shell_takes_it(block):
    _parses(block.text)
    for line in block.text.splitlines():
        assert not re.search(r"\s#|^#(?!!|SBATCH)", line), "interactive zsh knows no comments"
        bare = re.sub(r"'[^']*'|\"[^\"]*\"|\$\(\(.*?\)\)|\$\(.*?\)", "", line)
        assert not re.search(r"[\[\]*?{}]", bare), "zsh and bash read these as patterns"


def _parses(script: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_first_two_commands_do_everything():
    """`make demo` and `make test` set up what they need, and what runs in CI are the same words."""
    first = pages.blocks(Path("README.md"))[0]
    words = first.text.split("\n")[:-1]
    assert words == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert re.search(rf"^{target}: install\b", makefile, re.M)
    assert re.search(r"^install: \.venv/\.installed\b", makefile, re.M)
    assert "make test" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


def test_the_extras_that_pages_name_are_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in pages.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for named in re.findall(r"install '(?:\.|accordion-bench)\[([a-z,]+)\]'", text):
            assert set(named.split(",")) <= set(project["optional-dependencies"])
