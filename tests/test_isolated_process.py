"""What the local stand-ins for a vendor's containers promise: nothing of the launcher gets in, no process gets out."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from pathlib import Path

import pytest
from processes_of_tests import is_alive
from servers.isolated_process import IsolatedProcess, container_environment
from servers.isolated_python import shared_python

from executors.testing.processes import heard, python_process

ESCAPE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, {options})
print(child.pid, flush=True)
"""


def run(code: str, directory: Path, **options: object) -> tuple[int, list[tuple[str, str]]]:
    heard: list[tuple[str, str]] = []
    process = IsolatedProcess(
        ["python", "-c", code],
        container_environment(shared_python(), directory),
        directory,
        on_line=lambda stream, line: heard.append((stream, line)),
        merged=bool(options.get("merged")),
    )
    return process.wait(60), heard


def test_a_command_finds_nothing_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_LAUNCHER", "1")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    home = tmp_path / "a home"
    code, heard = run("import os, json; print(json.dumps([dict(os.environ), os.listdir(), os.getcwd()]))", home)
    assert code == 0
    environment, files, directory = json.loads(heard[0][1])
    assert set(environment) - {"LC_CTYPE"} == {"PATH", "HOME"}  # Python itself adds LC_CTYPE
    assert environment["HOME"] == directory == str(home)
    assert files == []


def test_a_command_has_the_packages_but_not_the_project(tmp_path: Path) -> None:
    names = ["torch", "numpy", "boto3", "cloudpickle", "executors", "diloco", "tests", "servers"]
    code, heard = run(f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])", tmp_path / "home")
    assert (code, heard) == (0, [("stdout", "['torch', 'numpy', 'boto3', 'cloudpickle']")])


def test_the_project_cannot_be_found_by_its_distribution_either(tmp_path: Path) -> None:
    code, heard = run(
        "from importlib.metadata import packages_distributions as p; print('executors' in p())", tmp_path / "home"
    )
    assert (code, heard) == (0, [("stdout", "False")])


def test_both_streams_are_heard_to_their_ends(tmp_path: Path) -> None:
    code, heard = run(
        "import sys; print('out'); sys.stderr.write('err\\nno line feed'); sys.exit(7)", tmp_path / "home"
    )
    assert code == 7
    assert sorted(heard) == [("stderr", "err"), ("stderr", "no line feed"), ("stdout", "out")]


def test_merged_streams_keep_their_order(tmp_path: Path) -> None:
    lines = "import sys; [print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True) for i in range(50)]"
    code, heard = run(lines, tmp_path / "home", merged=True)
    assert (code, heard) == (0, [("stdout", str(i)) for i in range(50)])


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    code, heard = run("import sys; sys.stdout.buffer.write(b'a\\xffb\\n')", tmp_path / "home")
    assert (code, heard) == (0, [("stdout", "a\N{REPLACEMENT CHARACTER}b")])


@pytest.mark.parametrize("options", ["", "env={**os.environ, 'HOME': '/'}", "cwd='/'"])
def test_what_a_command_leaves_running_ends_with_it(tmp_path: Path, options: str) -> None:
    code, heard = run(ESCAPE.format(options=options), tmp_path / "home")
    assert code == 0
    assert not is_alive(int(heard[0][1]))


def test_a_command_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ready = threading.Event()
    process = IsolatedProcess(
        ["python", "-c", "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"],
        container_environment(shared_python(), home),
        home,
        on_line=lambda stream, line: ready.set(),
    )
    assert ready.wait(60)
    assert process.stop(0.05) == 137
    assert not is_alive(process.pid)


def test_a_command_that_heeds_the_request_to_stop_ends_by_itself(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = IsolatedProcess(["sleep", "600"], container_environment(shared_python(), home), home)
    assert process.stop(60) == 143


def test_a_command_that_does_not_exist_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        IsolatedProcess(["no-such-command"], container_environment(shared_python(), tmp_path), tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which processes live in a directory")
def test_a_command_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(f"""
import signal
from pathlib import Path
from servers.isolated_process import IsolatedProcess
process = IsolatedProcess(["/bin/sleep", "600"], {{}}, Path({str(tmp_path / "home")!r}))
print(process.pid, flush=True)
signal.pause()
""")
    with python_process(script) as launcher:
        command = os.pidfd_open(heard(launcher))
    assert select.select([command], [], [], 60)[0]
    os.close(command)
