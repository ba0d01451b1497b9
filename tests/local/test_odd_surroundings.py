"""Launches in ten ordinary but very different surroundings."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.processes import MARK

from executors import LocalProcessExecutor, launch

JOB = """
import os, sys
from executors import current_replica

def main(text="\\N{OTTER}"):
    print(text, flush=True)
    with open(f"left by {current_replica().rank}", "w", encoding="utf-8") as file:
        file.write(text)
    return [current_replica().rank, text]
"""
SCRIPT = """
import sys
from executors import LocalProcessExecutor, launch
run = launch(LocalProcessExecutor(preload=(), term_grace_s=0.5), sys.argv[1], 2, run_id="mine")
assert run.results() == [[rank, "\\N{OTTER}"] for rank in range(2)], run.results()
assert "\\N{OTTER}" in run.logs(rank=1), run.logs(rank=1)
"""


class Surroundings:
    """A user's folder, and the surroundings of a launching script there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = dict(os.environ)
        self.before: list[Callable[[], object]] = []
        """Is called in the script's process before Python begins there."""
        self.flags: list[str] = []

    def launch(self) -> subprocess.CompletedProcess[bytes]:
        """Launch two replicas from a script, and check what they return and print."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "job.py").write_text(JOB)
        (self.folder / "script.py").write_text(SCRIPT)

        def prepare() -> None:
            for each in self.before:
                each()

        return subprocess.run(
            [sys.executable, *self.flags, "script.py", "job.py"],
            cwd=self.folder, env=self.environ, preexec_fn=prepare, capture_output=True, check=False,
        )  # fmt: skip


def ascii_locale(here: Surroundings) -> None:
    here.environ = {name: value for name, value in here.environ.items() if not name.startswith(("LC_", "LANG"))}
    here.environ |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def closed_streams(here: Surroundings) -> None:
    here.before.append(lambda: os.closerange(0, 3))


def few_descriptors(here: Surroundings) -> None:
    here.before.append(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)))


def closed_umask(here: Surroundings) -> None:
    here.before.append(lambda: os.umask(0o077))


def odd_folder(here: Surroundings) -> None:
    here.folder = here.folder / 'it\'s "my" folder; $(touch no) %s\n* \N{OTTER}'


def folder_of_no_encoding(here: Surroundings) -> None:
    here.folder = Path(os.fsdecode(os.fsencode(here.folder) + b"/\xff\xfe"))


def empty_environment(here: Surroundings) -> None:
    # HOME and PATH are not set either. The other variables are for the test: the folder of runs, and the owner of
    # processes.
    here.environ = {name: here.environ[name] for name in ("XDG_STATE_HOME", MARK)}


def ignored_signals(here: Surroundings) -> None:
    ignored = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
    here.before.append(lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored])


def modules_of_every_name(here: Surroundings) -> None:
    # Only replicas are tested. The launching script belongs to the user, so Python finds the user's modules first.
    here.flags = ["-P"]
    here.folder.mkdir(parents=True)
    for name in ("logging", "random", "types", "executors", "numpy", "tenacity", "cloudpickle"):
        (here.folder / f"{name}.py").write_text("raise RuntimeError('imported in place of another')")


def optimized_python(here: Surroundings) -> None:
    here.environ |= {
        "PYTHONOPTIMIZE": "2",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
    }


TEN = (
    ascii_locale, closed_streams, few_descriptors, closed_umask, odd_folder, folder_of_no_encoding, empty_environment,
    ignored_signals, modules_of_every_name, optimized_python,
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    return Surroundings(tmp_path / "work")


@pytest.mark.parametrize("change", TEN, ids=[change.__name__ for change in TEN])
def test_replicas_run_return_and_print_wherever_they_are_launched(
    here: Surroundings, change: Callable[[Surroundings], None]
) -> None:
    change(here)
    done = here.launch()
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    for rank in range(2):
        assert (here.folder / f"left by {rank}").read_text(encoding="utf-8") == "\N{OTTER}"


def test_a_launch_from_a_thread_and_one_within_a_replica_run_as_any(local: LocalProcessExecutor) -> None:
    def nested() -> Any:
        return launch(LocalProcessExecutor(preload=(), term_grace_s=0.5), tasks.rank, 2).results()

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(launch(local, nested, 1).results()))
    thread.start()
    thread.join()
    assert found == [[[0, 1]]]
