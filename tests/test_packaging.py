"""What the package says of itself: one version, what the wheel holds, a workflow that calls targets that there are."""

import contextlib
import re
import subprocess
import tomllib
from collections import defaultdict
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement

import accordion_bench
from accordion_bench.options.conf_dir import package_dir
from tests.kit.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def targets():
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))


def test_one_version_everywhere():
    changelog = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert PROJECT["version"] == accordion_bench.__version__ == CITATION["version"]
    assert PROJECT["version"].startswith(changelog)


def test_licence_and_authors_agree():
    contributors = "accordion_bench contributors"
    assert PROJECT["license"] == CITATION["license"] == "MIT"
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    assert f" {contributors}\n" in (ROOT / "LICENSE").read_text()
    assert PROJECT["authors"] == CITATION["authors"] == [{"name": contributors}]


def test_the_wheel_takes_configurations_and_the_mark_of_types_along():
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["accordion_bench"], "force-include": {"conf": "accordion_bench/conf"}}
    assert (package_dir() / "py.typed").is_file()


def test_python_versions_agree():
    low, high = (tuple(map(int, bound.split("."))) for bound in re.findall(r"[\d.]+", PROJECT["requires-python"]))
    named = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert named == {f"3.{minor}" for minor in range(low[1], high[1])}
    workflow = (ROOT / ".github/workflows/check.yml").read_text()
    assert set(re.findall(r'"(3\.\d+)"', workflow)) == named


def test_every_paper_of_the_algorithms_is_cited():
    said = (ROOT / "docs/algorithms.md").read_text()
    cited = {str(paper.get("url")).rpartition("/")[2] for paper in CITATION["references"]}
    assert set(re.findall(r"arXiv (\d{4}\.\d{5})", said)) <= cited
    for paper in CITATION["references"]:
        assert paper["title"] and 2010 < paper["year"] < 2030
        assert all(set(author) in ({"family-names"}, {"name"}) for author in paper["authors"])


def test_the_workflows_call_targets_that_there_are():
    called = set()
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        text = file.read_text()
        steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
        called |= {word for step in steps for word in re.findall(r"make (\S+)", step.get("run", ""))}
        assert not re.search(r"secrets\.|services:|https?://", text)
    assert {"lint", "test", "test-slow", "test-integrations", "test-avx2", "wheel"} <= called <= targets()


def test_the_map_for_language_models_leads_somewhere():
    text = (ROOT / "llms.txt").read_text()
    linked = re.findall(r"\]\(([^)]+)\)", text)
    assert all((ROOT / path).is_file() for path in linked)
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} <= set(linked)


# ---- what make install installs

LOCKS = ("constraints.txt", "build-tools.txt")


def locked(name: str) -> dict[str, list[tuple[Requirement, list[str]]]]:
    """The lines of a lock by name of package: each pinned requirement, for some Pythons or machines, and its hashes."""
    found = defaultdict(list)
    for line in (ROOT / name).read_text().replace("\\\n", " ").splitlines():
        pinned, *hashes = line.split("--hash=")
        requirement = Requirement(pinned)
        found[requirement.name].append((requirement, [one.strip() for one in hashes]))
    return found


def direct() -> list[Requirement]:
    """What `make install` is asked for: dependencies, and the extra dev with the extras that it names."""
    extras, wanted = PROJECT["optional-dependencies"], [Requirement(text) for text in PROJECT["dependencies"]]
    named = [Requirement(text) for text in extras["dev"]]
    for requirement in named:
        own = requirement.name == PROJECT["name"]
        wanted += (
            [Requirement(text) for extra in requirement.extras for text in extras[extra]] if own else [requirement]
        )
    return wanted


@pytest.mark.parametrize("name", LOCKS)
def test_every_pinned_file_has_hashes_and_no_address(name):
    lines = [entry for entries in locked(name).values() for entry in entries]
    assert len(lines) >= 8
    for requirement, hashes in lines:
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)) and requirement.url is None
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), requirement
    text = (ROOT / name).read_text()
    assert not re.search(r"://|--[a-gi-z]|#|@", text)  # no options but hashes, no comments


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("system, machine", [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")])
def test_what_is_asked_for_is_pinned_once_on_every_machine(python, system, machine):
    names = {"linux": "Linux", "darwin": "Darwin"}
    here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": system}
    here |= {"platform_machine": machine, "platform_system": names[system], "extra": ""}
    for name in LOCKS:
        for package, entries in locked(name).items():
            holding = [pin for pin, _ in entries if pin.marker is None or pin.marker.evaluate(here)]
            assert len(holding) <= 1, package
    pinned = {package: entries for package, entries in locked("constraints.txt").items()}
    for wanted in direct():
        (pin,) = [pin for pin, _ in pinned[wanted.name] if pin.marker is None or pin.marker.evaluate(here)]
        assert wanted.specifier.contains(str(pin.specifier).removeprefix("==")), (wanted, pin)


def test_build_tools_are_pinned_and_agree_with_the_rest():
    tools, rest = (locked(name) for name in LOCKS[::-1])
    named = {Requirement(text).name for text in PYPROJECT["build-system"]["requires"]}
    assert named | {"uv", "hatchling", "editables", "setuptools"} <= set(tools)
    for name in tools.keys() & rest.keys():
        assert [str(pin) for pin, _ in tools[name]] == [str(pin) for pin, _ in rest[name]]


def test_what_is_installed_here_is_what_is_pinned():
    """All that our dependencies ask for, and what these ask for, stands in the lock."""
    pinned, seen, left = locked("constraints.txt"), set(), [wanted.name for wanted in direct()]
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        assert name in pinned, name
        with contextlib.suppress(metadata.PackageNotFoundError):
            asked = [Requirement(text) for text in metadata.requires(name) or []]
            left += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert len(seen) > 80


def test_a_run_needs_no_telemetry():
    assert "wandb" not in {Requirement(text).name for text in PROJECT["dependencies"]}
    assert "wandb" in {wanted.name for wanted in direct()}
    imported = [path for path in (ROOT / "accordion_bench").rglob("*.py") if "import wandb" in path.read_text()]
    assert imported == [ROOT / "accordion_bench" / "trackers" / "services.py"]
    assert not re.search("^import wandb|^from wandb", imported[0].read_text(), re.M)  # where it is asked for only


def test_the_audit_reads_what_is_installed():
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    runs = " ".join(step.get("run", "") for step in jobs["audit"]["steps"])
    assert re.search(r"pip install pip-audit==\d+\.\d+\.\d+", runs)
    assert all(f"--requirement {name}" in runs for name in LOCKS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_environment_of_its_own():
    """Builds and installs, torch included; needs a package index, or its cache."""
    done = subprocess.run(["bash", "scripts/try_wheel.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"accordion_bench {accordion_bench.__version__}" in done.stdout
    assert "the wheel works" in done.stdout.splitlines()[-1]
