"""What is printed costs nothing: a reader that goes, a disk that is full, descriptors that were never open."""

import os
import subprocess
import sys
import time

import pytest

from accordion_bench import output
from tests.kit.paths import ROOT
from tests.kit.terminal import Terminal

PROTECTED = "import os, sys; from accordion_bench import output; output.protect(); "
MANY = "[print('line', i) for i in range(20000)]; "
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ENDED = "open(sys.argv[1], 'w').write('ended'); "


def python(code: str, *arguments: object, unbuffered: bool = False, **options) -> subprocess.Popen:
    flags = ["-u"] if unbuffered else []
    command = [sys.executable, *flags, "-c", PROTECTED + code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, **{"env": BUFFERED} | options)


def said(code: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    job = python(code, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    out, err = job.communicate(timeout=60)
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


# ---- streams that are lost


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("statuses, expected", [("0", 0), ("0, *output.ANSWER", 141), ("2, *output.ANSWER", 2)])
def test_a_reader_that_goes(statuses, expected, unbuffered, tmp_path):
    """Nothing is said of it, and the status is what the caller wants."""
    code = MANY + ENDED + f"sys.exit(output.finish({statuses}))"
    job = python(code, tmp_path / "end", unbuffered=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    job.stdout.readline()
    job.stdout.close()
    assert job.stderr.read() == b"" and job.wait(60) == expected
    assert (tmp_path / "end").read_text() == "ended"


@pytest.mark.parametrize("lost, told", [("stdout", "standard output"), ("stderr", "standard error")])
def test_a_full_disk_is_told_once_on_the_other_stream(lost, told):
    code = (
        MANY + f"[print('error', file=sys.stderr) for _ in range(9)]; sys.exit(output.finish(0, {lost == 'stderr'}, 1))"
    )
    other = "stderr" if lost == "stdout" else "stdout"
    with open("/dev/full", "w") as full:
        job = python(code, **{lost: full, other: subprocess.PIPE}, text=True)
        heard = job.communicate(timeout=60)[other == "stderr"]
    sentence = f"warning: {told} can no longer be written (No space left on device)\n"
    assert heard.count(sentence) == heard.count("warning") == 1
    assert job.returncode == (1 if lost == "stdout" else 0)


def test_both_are_full(tmp_path):
    with open("/dev/full", "w") as full:
        job = python(MANY + "print('error', file=sys.stderr); " + ENDED, tmp_path / "end", stdout=full, stderr=full)
        assert job.wait(60) == 0
    assert (tmp_path / "end").read_text() == "ended"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_descriptors_are_nobodys_file(closed, tmp_path):
    """The next file that is opened would have their numbers, and get what is printed; so would those of children."""
    code = (
        "file = open(sys.argv[1], 'w'); print('out'); print('error', file=sys.stderr); "
        "import subprocess; subprocess.run(['sh', '-c', 'echo child; echo child >&2'], check=True); "
        "file.write('whole'); file.close(); sys.exit(output.finish(0))"
    )
    whole = f'exec "$@" {closed}'
    command = ["sh", "-c", whole, "sh", sys.executable, "-c", PROTECTED + code, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, env=BUFFERED, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "whole"
    assert done.stdout == ("" if ">&-" in closed.split() else "child\nout\n")
    assert done.stderr == ("" if "2>&-" in closed else "error\nchild\n")


def test_a_terminal_that_closes(tmp_path):
    terminal = Terminal(80)
    code = "print('first', flush=True); sys.stdin.read(1); " + MANY + ENDED + "sys.exit(output.finish(0))"
    streams = {"stdout": terminal.descriptor, "stderr": terminal.descriptor, "stdin": subprocess.PIPE}
    job = python(code, tmp_path / "end", start_new_session=True, **streams)
    while "first" not in terminal.drawn:
        time.sleep(0.01)
    os.close(terminal._other)
    os.close(terminal.descriptor)
    job.stdin.write(b"x")
    job.stdin.close()
    assert job.wait(60) == 0 and (tmp_path / "end").read_text() == "ended"


def test_a_pipe_that_does_not_block():
    """As other programs leave theirs: what does not fit waits, and nothing is lost."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    job = python(MANY + "sys.exit(output.finish(0))", stdout=write)
    os.close(write)
    time.sleep(0.3)
    with open(read, "rb") as pipe:
        assert pipe.read().split(b"\n") == [*(b"line %d" % i for i in range(20000)), b""]
    assert job.wait(60) == 0


def test_letters_that_a_terminal_does_not_know():
    done = said("print('10 µs'); print('µ', file=sys.stderr)", env={**BUFFERED, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "10 \\xb5s\n", "\\xb5\n")


def test_what_goes_on_is_told_and_logged(tmp_path):
    """Also a loss from before; a reader that has gone concerns nobody but what goes on."""
    code = (
        "import logging; log = logging.getLogger('accordion_bench'); log.addHandler(logging.FileHandler(sys.argv[1])); "
        "sys.stdin.read(1); print('x', flush=True); print('quiet', file=sys.stderr)\n"
        "with output.report_lost_streams('the training'):\n    print('y', flush=True)"
    )
    job = python(
        code, tmp_path / "log", stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    job.stdout.close()
    job.stdin.write("x")
    job.stdin.close()
    sentence = "standard output can no longer be written (Broken pipe); the training continues\n"
    assert job.stderr.read() == f"quiet\nwarning: {sentence}" and job.wait(60) == 0
    assert (tmp_path / "log").read_text() == sentence


def test_streams_of_somebody_else_stay(monkeypatch, capsys):
    before = sys.stdout, sys.stderr
    output.protect()
    assert (sys.stdout, sys.stderr) == before
    print("µ")
    assert output.finish(0, 1, 1) == 0 and capsys.readouterr().out == "µ\n"


@pytest.mark.parametrize("command", ["accordion_bench --help", "accordion_bench.report --help"])
def test_help_that_is_cut_off(command):
    """As others end that are ended by SIGPIPE; on a full disk, as those that could not write."""
    words = [sys.executable, "-m", *command.split()]
    job = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    job.stdout.close()
    assert job.stderr.read() == b"" and job.wait(60) == 141
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "warning: standard output can no longer be written (No space left on device)\n"


# ---- whose line it is


@pytest.mark.parametrize("unbuffered", [False, True])
def test_each_line_says_whose_it_is(unbuffered):
    code = (
        "print('before')\n"
        "with output.named('1 of 2 | '):\n"
        "    print('a', 'b'); print('half', end=' '); print('whole'); print('two\\nlines\\n')\n"
        "    print('e', file=sys.stderr); print('no end', end='')\n"
        "print(' after')"
    )
    done = said(code, unbuffered=unbuffered)
    named = ["a b", "half whole", "two", "lines", "", "no end after"]
    assert done.stdout.splitlines() == ["before", *(f"1 of 2 | {line}" for line in named)]
    assert done.stderr == "1 of 2 | e\n"


def test_lines_of_several_processes_stay_whole():
    read, write = os.pipe()
    code = "\nwith output.named(sys.argv[1] + ' | '):\n    for i in range(2000): print('line', i, 'x' * 60)"
    jobs = [python(code, f"job {number}", stdout=write) for number in range(3)]
    os.close(write)
    with open(read) as pipe:
        lines = pipe.read().splitlines()
    assert [job.wait(60) for job in jobs] == [0] * 3
    for number in range(3):
        own = [line for line in lines if line.startswith(f"job {number} | ")]
        assert own == [f"job {number} | line {i} {'x' * 60}" for i in range(2000)]
    assert len(lines) == 6000


# ---- terminals


def test_width_of_the_terminal(monkeypatch):
    for columns, expected in ((40, 40), (132, 132), (0, 80)):
        terminal = Terminal(columns)
        with open(terminal.descriptor, "w", closefd=False) as stream:
            monkeypatch.setattr("sys.stderr", stream)
            assert output.columns() == expected
        terminal.close()


@pytest.mark.parametrize(
    "term, out, error, bar",
    [
        ("xterm", True, True, True),
        ("dumb", True, True, False),
        ("xterm", False, True, False),
        ("xterm", True, False, False),
    ],
)
def test_where_a_bar_is_drawn(term, out, error, bar, monkeypatch):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stdout.isatty", lambda: out, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: error, raising=False)
    assert output.on_a_terminal() is bar


def test_threads_may_print_at_the_same_time():
    code = (
        "import threading\n"
        "def work(n):\n    for i in range(500): print(f'{n} {i}\\n', end='', flush=True)\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]"
    )
    lines = said(code).stdout.splitlines()
    assert sorted(lines) == sorted(f"{n} {i}" for n in range(4) for i in range(500))
