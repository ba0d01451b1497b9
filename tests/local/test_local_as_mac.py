"""Tests of local replicas run once more under the emulation of macOS: the same promises hold on a laptop.

The tests themselves run inside the emulation. `UNLIKE` lists the tests of features that only Linux has, with the
reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.as_mac import as_mac, environment_as_mac, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

TESTS = Path(__file__).parents[1]
SUITES = (
    "contract/test_executor_contract_local.py",
    "local/test_chaos_kills.py",
    "local/test_commands.py",
    "local/test_dead_launchers.py",
    "local/test_fail_fast.py",
    "local/test_hangs.py",
    "local/test_local_endings.py",
    "local/test_local_launcher.py",
    "local/test_local_logs.py",
    "local/test_local_run.py",
    "local/test_members.py",
    "local/test_restarts.py",
    "local/test_same_process.py",
)
"""Contract, chaos, cancels, time limits, hangs with stacks, logs, restarts, and what a replica leaves behind."""
DOES_NOT_EXIT = "test_a_process_that_does_not_exit_after_its_end_is_killed_and_a_failed_rank_gets_a_new_attempt"
HANGS = "local/test_hangs.py::test_"
UNLIKE = {
    f"{HANGS}a_rank_that_waits_is_ended_as_idle[poll]": "macOS does not show that a thread only polls",
    f"{HANGS}work_without_reports_is_not_ended[save_to_a_slow_disk]": "macOS does not show the bytes that are written",
    f"{HANGS}work_without_reports_is_not_ended[upload_from_memory]": "on a loaded machine, an upload looks idle there",
    "local/test_fail_fast.py::test_replicas_without_a_supervisor_end_each_other": "the scene acts a container of Linux",
    f"local/test_restarts.py::{DOES_NOT_EXIT}": "its preload changes the supervisor, which imports none on macOS",
}
"""Tests that cannot hold on macOS, by the suite and the name, each with the reason."""
LIMIT_S = 3000


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("suite", SUITES)
def test_local_replicas_keep_their_promises_as_on_macos(suite: str, tmp_path: Path) -> None:
    left_out = [part for name in UNLIKE if name.startswith(suite) for part in ("--deselect", f"tests/{name}")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not live", *left_out]
    environ = environment_as_mac(os.environ, tmp_path / "proc")
    # By default, pytest removes the folders of earlier runs at its end. A user of the emulation may not remove a folder
    # of another user, so this pytest gets a folder of its own. It is short because the path of a socket is limited.
    with TemporaryDirectory(prefix="as-mac-") as folder:
        done = subprocess.run(
            as_mac([*command, f"--basetemp={folder}/tests", f"tests/{suite}"]),
            cwd=TESTS.parent,
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2000:]}"


def test_each_suite_exists_and_each_exception_is_in_one_of_them() -> None:
    assert [suite for suite in SUITES if not (TESTS / suite).is_file()] == []
    assert [name for name in UNLIKE if name.partition("::")[0] not in SUITES] == []
