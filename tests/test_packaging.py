"""What the package says of itself: one version, what the wheel holds, a workflow that calls targets that there are."""

import re
import subprocess
import tomllib

import pytest
import yaml

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


def test_the_workflow_calls_targets_that_there_are():
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = [word for step in steps for word in re.findall(r"make (\S+)", step.get("run", ""))]
    assert {"lint", "test", "test-avx2", "wheel"} <= set(called) <= targets()
    assert not re.search(r"secrets\.|services:|https?://", (ROOT / ".github/workflows/check.yml").read_text())


def test_the_map_for_language_models_leads_somewhere():
    text = (ROOT / "llms.txt").read_text()
    linked = re.findall(r"\]\(([^)]+)\)", text)
    assert all((ROOT / path).is_file() for path in linked)
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} <= set(linked)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_environment_of_its_own():
    """Builds and installs, torch included; needs a package index, or its cache."""
    done = subprocess.run(["bash", "scripts/try_wheel.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"accordion_bench {accordion_bench.__version__}" in done.stdout
    assert "the wheel works" in done.stdout.splitlines()[-1]
