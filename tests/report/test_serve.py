"""The served page: it follows runs that go on, for this machine alone, and reads no file that it is asked for."""

import base64
import hashlib
import html
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
import yaml

from accordion_bench.options.checks import ConfigError
from accordion_bench.report import read, serve
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.serve import arm_so_far, beside, live_page
from tests.kit.paths import ROOT
from tests.report.test_report import accordion, run_folder


def goes_on(root, done=4, epochs=6, **options):
    """A run of which so many epochs are over."""
    path = run_folder(root, epochs=epochs, **options)
    (path / "done").unlink()
    (path / "summary.json").unlink()
    rows = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(rows[:done]))
    return path


def one_more(path):
    """The next row of a run."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**rows[-1], "epoch": len(rows)}) + "\n")


def ages(path, seconds):
    """A run that has written nothing for so long."""
    then = time.time() - seconds
    os.utime(path / "metrics.jsonl", (then, then))


@pytest.fixture
def served(tmp_path):
    """The runs' folder, what asks the server: ask(path, method, host) -> (status, headers, text), and its port."""
    (tmp_path / "runs").mkdir()
    server = serve.Server(serve.Followed([str(tmp_path / "runs")]), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def ask(path, method="GET", host=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"localhost:{server.server_port}" if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()

    yield tmp_path / "runs", ask, server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_page_follows_its_runs(served):
    """Running runs are curves and in no mean; what a run writes is on the page, and in another version."""
    root, ask, _ = served
    assert "0 runs in 0 arms" in ask("/")[2]
    path = goes_on(root, compressor="topk")
    assert "No run has finished yet" in ask("/")[2]
    run_folder(root, epochs=6)
    before, page = ask("/version")[2], ask("/")[2]
    assert f'const version = "{before}"' in page
    assert "1 run in 1 arm" in page and "running, epoch 4 of 6" in page
    assert ask("/version")[2] == before
    one_more(path)
    after, page = ask("/version")[2], ask("/")[2]
    assert after != before and f'const version = "{after}"' in page
    assert "1 run in 1 arm" in page and "running, epoch 5 of 6" in page


def test_only_what_has_changed_is_read(tmp_path, monkeypatch):
    still, path, seen = run_folder(tmp_path), goes_on(tmp_path), []
    monkeypatch.setattr(serve, "read_run", lambda path: seen.append(path) or read.read_run(path))
    followed = serve.Followed([str(tmp_path)])
    versions = [followed.version(), followed.version()]
    assert {*seen} == {still, path} and len(seen) == 2 and versions[0] == versions[1]
    one_more(path)
    assert followed.version() != versions[0] and seen[2:] == [path]


def test_a_run_that_is_silent_counts_as_running_no_more(tmp_path):
    """Five minutes, or three of its epochs; without a new row the version is another one all the same."""
    quick, slow = goes_on(tmp_path), goes_on(tmp_path, seconds=6 * 600.0, compressor="topk")
    followed = serve.Followed([str(tmp_path)])
    ages(quick, 60), ages(slow, 1000)
    assert all(map(serve.is_running, read.read_runs([tmp_path])))
    before = followed.version()
    ages(quick, 400), ages(slow, 2000)
    assert not any(map(serve.is_running, read.read_runs([tmp_path])))
    assert followed.version() != before
    assert not serve.is_running(read.read_run(run_folder(tmp_path)))


def test_a_running_run_is_no_stopped_one(tmp_path):
    path = goes_on(tmp_path)
    (path / "summary.json").write_text(json.dumps({"stopped_by": "SIGTERM", "reason": "preempted"}))
    assert not serve.is_running(read.read_run(path))


def test_running_runs_stand_beside_the_arms_that_they_will_be_compared_with(tmp_path):
    """In the same setting, one curve per run; with other epochs in one of their own. Strange ones are lines alone."""
    for seed in (0, 1):
        run_folder(tmp_path, epochs=6, seed=seed)
        goes_on(tmp_path, seed=seed + 2)
    goes_on(tmp_path, epochs=8, compressor="topk")
    torn = goes_on(tmp_path, seed=7)
    config = yaml.safe_load((torn / "config.yaml").read_text())
    (torn / "config.yaml").write_text(yaml.safe_dump({**config, "workers": "many"}))
    runs = read.read_runs([tmp_path])
    parts = settings(group([run for run in runs if run.finished])[0])
    curves = [arm for run in runs if serve.is_running(run) if (arm := arm_so_far(run))]
    assert [[arm.label for arm in arms] for arms in beside(parts, curves)] == [
        ["dense, seed 2: running, epoch 4 of 6", "dense, seed 3: running, epoch 4 of 6"],
        ["TopK 10 %, seed 0: running, epoch 4 of 8"],
    ]
    ended = [run for run in runs if run.finished]
    page = live_page(ended, [run for run in runs if not run.finished])
    assert "2 runs in 1 arm" in page and page.count("): running, epoch 4 of 6") == 3
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    assert [[arm["running"] for arm in setting["arms"]] for setting in data] == [[False, True, True], [True]]


@pytest.mark.parametrize(
    "path, method, host, status",
    [
        ("/", "GET", "127.0.0.1:1", 200),
        ("/", "GET", "LOCALHOST", 200),
        ("/", "GET", "evil.example", 403),
        ("/version", "GET", "localhost.evil.example:80", 403),
        ("/", "GET", "", 403),
        ("/../../etc/passwd", "GET", None, 404),
        ("/%2e%2e/etc/passwd", "GET", None, 404),
        ("//etc/passwd", "GET", None, 404),
        ("http://evil.example/", "GET", None, 404),
        ("/runs/config.yaml", "GET", None, 404),
        ("/?x=1", "GET", None, 404),
        ("/", "POST", None, 501),
        ("/", "PUT", None, 501),
        ("/", "OPTIONS", None, 501),
    ],
)
def test_nothing_else_is_answered(served, path, method, host, status):
    _, ask, _ = served
    found, headers, text = ask(path, method, host)
    assert found == status
    assert "access-control-allow-origin" not in {name.lower() for name in headers}
    assert status == 200 or "root:" not in text


def test_the_page_may_run_its_own_script_alone(served):
    """By its hash; and ask its own server alone."""
    root, ask, _ = served
    run_folder(root, compressor="topk", command="python </script><script>alert(1)</script>")
    _, headers, page = ask("/")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    assert "connect-src 'self'" in policy and "default-src 'none'" in policy
    *_, follow = scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"script-src {allowed};" in policy
    assert "const version" in follow and "alert" not in "".join(scripts[1:])
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'" and headers["Cache-Control"] == "no-store"


def test_what_cannot_be_built_is_a_sentence_and_the_server_goes_on(served, monkeypatch):
    _, ask, _ = served
    with monkeypatch.context() as patch:
        patch.setattr(serve, "live_page", lambda *_: 1 / 0)
        status, _, text = ask("/")
        assert (status, text) == (500, "The page could not be built: ZeroDivisionError: division by zero\n")
    assert ask("/")[0] == 200


def served_apart(root, program: str) -> str:
    """What a program says of its page of the runs in a folder, in a process of its own, where torch is not loaded."""
    begin = f"import sys\nfrom accordion_bench.report import serve\nfollowed = serve.Followed([{str(root)!r}])\n"
    done = subprocess.run([sys.executable, "-c", begin + program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_served_page_loads_no_torch(tmp_path):
    """It would be four fifths of the memory, for as long as the page is served."""
    assert served_apart(tmp_path, "followed.page(); print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_classes_are_looked_at_by_another_process(tmp_path):
    """Once; the page is the one that this process would build."""
    run_folder(tmp_path, "powersgd", adaptive=accordion()), run_folder(tmp_path), goes_on(tmp_path, compressor="topk")
    program = """
from accordion_bench.report import parallel
from accordion_bench.methods import labels
pages = [followed.page()]
known = len(parallel._known)
followed._built = ""
parallel.ProcessPoolExecutor = None  # nobody is asked again
followed._pause = serve.LEAST
pages.append(followed.page())
assert pages[0] == pages[1] and 'torch' not in sys.modules and labels.look is labels.declared_of_class
print(known, len(parallel._known), all(name in pages[0] for name in ("Accordion (PowerSGD rank 2/1)", "TopK 10 %")))
"""
    known, still, named = served_apart(tmp_path, program).split()
    assert known == still and int(known) >= 3 and named == "True"


def test_it_listens_on_this_machine_alone():
    with serve.Server(serve.Followed([]), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "port, told", [(70000, "--port must be a number from 0"), (-1, "--port must be a number from 0")]
)
def test_a_port_that_is_none(tmp_path, port, told):
    with pytest.raises(ConfigError, match=told):
        serve.serve([str(tmp_path)], port)


def test_a_port_that_is_taken_is_one_sentence(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert report_main(["--serve", "--port", str(port), str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        said == f"--port must be a free port of this machine, got {port}: Address already in use; type --port=0 for any"
    )


def test_ctrl_c_ends_it_with_a_sentence(tmp_path, monkeypatch, capsys):
    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve.Server, "serve_forever", interrupted)
    assert report_main(["--serve", "--port", "0", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(r"http://localhost:\d+/ follows the runs; Ctrl-C ends it\n\nstopped: [^\n]*\n", out)


@pytest.mark.parametrize(
    "typed, told",
    [
        (["--serve", "--pdf"], "--serve writes no files, got --pdf; leave it out"),
        (["--serve", "--out", "elsewhere"], "--serve writes no files, got --out; leave it out"),
        (["--port", "1"], "--port must stand beside --serve, got it alone; type --serve --port=1"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path, typed, told, capsys):
    assert report_main([str(tmp_path), *typed]) == 2
    assert capsys.readouterr().err == told + "\n"
