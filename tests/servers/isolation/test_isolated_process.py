"""Tests the stand-in for a vendor's container: nothing of the launcher's environment is in it, and no process survives
it.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from pathlib import Path

import pytest
from support.processes import is_alive

from executors.testing.helpers import python_process, receive
from servers.isolation.process import IsolatedProcess, container_environment
from servers.isolation.python import shared_python

ESCAPE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, {options})
print(child.pid, flush=True)
"""


def run(code: str, directory: Path) -> tuple[int, list[str]]:
    """Run Python code, and return its exit code and its output."""
    heard: list[str] = []
    environment = container_environment(shared_python(), directory)
    process = IsolatedProcess(["python", "-c", code], environment, directory, on_line=heard.append)
    return process.wait(60), heard


def test_a_command_has_no_variables_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_LAUNCHER", "1")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    home = tmp_path / "a home"
    code, heard = run("import os, json; print(json.dumps([dict(os.environ), os.listdir(), os.getcwd()]))", home)
    assert code == 0
    environment, files, directory = json.loads(heard[0])
    assert set(environment) - {"LC_CTYPE"} == {"PATH", "HOME"}  # Python itself adds LC_CTYPE
    assert environment["HOME"] == directory == str(home)
    assert files == []


def test_a_command_has_the_packages_but_not_the_project(tmp_path: Path) -> None:
    names = ["torch", "numpy", "boto3", "cloudpickle", "executors", "diloco", "tests", "servers"]
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    assert run(code, tmp_path / "home") == (0, ["['torch', 'numpy', 'boto3', 'cloudpickle']"])
    code = "from importlib.metadata import packages_distributions as p; print('executors' in p())"
    assert run(code, tmp_path / "home") == (0, ["False"])


def test_both_streams_are_read_to_their_ends_in_order(tmp_path: Path) -> None:
    lines = "import sys; [print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True) for i in range(50)]"
    rest = "sys.stdout.buffer.write(b'a\\xffb\\nno line feed'); sys.exit(7)"
    expected = [*map(str, range(50)), "a\N{REPLACEMENT CHARACTER}b", "no line feed"]
    assert run(f"{lines}; {rest}", tmp_path / "home") == (7, expected)


def test_processes_that_a_command_leaves_running_end_with_it(tmp_path: Path) -> None:
    for options in ("", "env={**os.environ, 'HOME': '/'}", "cwd='/'"):
        code, heard = run(ESCAPE.format(options=options), tmp_path / "home")
        assert code == 0
        assert not is_alive(int(heard[0])), options


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ready = threading.Event()
    process = IsolatedProcess(
        ["python", "-c", "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"],
        container_environment(shared_python(), home),
        home,
        on_line=lambda line: ready.set(),
    )
    assert ready.wait(60)
    assert process.stop(0.05) == 137
    assert not is_alive(process.pid)


def test_a_command_that_handles_sigterm_ends_by_itself(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = IsolatedProcess(["sleep", "600"], container_environment(shared_python(), home), home)
    assert process.stop(60) == 143


def test_a_command_that_does_not_exist_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        IsolatedProcess(["no-such-command"], container_environment(shared_python(), tmp_path), tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux can a test find the processes of a directory")
def test_a_command_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(f"""
import signal
from pathlib import Path
from servers.isolation.process import IsolatedProcess
process = IsolatedProcess(["/bin/sleep", "600"], {{}}, Path({str(tmp_path / "home")!r}))
print(process.pid, flush=True)
signal.pause()
""")
    with python_process(script) as launcher:
        command = os.pidfd_open(receive(launcher))
    assert select.select([command], [], [], 60)[0]
    os.close(command)
