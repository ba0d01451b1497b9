"""How many cores a process may use: by affinity, control groups, and a variable that its service sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.process import cpu_quotas, usable_cores
from executors.testing.helpers import environment

QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
SAY = "from executors.process import usable_cores; print(usable_cores())"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "quotas"),
    [
        ("0::/box/job", {"box/job/cpu.max": "250000 100000", "box/cpu.max": "max 100000"}, [2.5]),
        ("0::/box/job", {"box/job/cpu.max": "max 100000", "box/cpu.max": "400000 100000"}, [4.0]),
        ("0::/", {"cpu.max": "200000 100000"}, [2.0]),  # a container's own group
        ("0::/docker/abc", {"cpu.max": "200000 100000"}, [2.0]),  # the group as the host names it
        ("0::/", {"unified/cpu.max": "100000 100000"}, [1.0]),
        ("4:cpu,cpuacct:/a\n0::/", {f"cpu,cpuacct/a/{QUOTA}": "50000", f"cpu,cpuacct/a/{PERIOD}": "100000"}, [0.5]),
        ("1:cpu:/", {f"cpu/{QUOTA}": "-1", f"cpu/{PERIOD}": "100000"}, []),
        ("3:cpuset:/\n5:memory:/", {f"cpu/{QUOTA}": "1000", f"cpu/{PERIOD}": "100000"}, []),
        ("0::/", {"cpu.max": "something else"}, []),
        ("0::/", {}, []),
    ],
)  # fmt: skip
def test_the_quotas_of_control_groups_are_found(
    own: str, files: dict[str, str], quotas: list[float], tmp_path: Path
) -> None:
    write(tmp_path / "own", own + "\n")
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert cpu_quotas(tmp_path / "groups", tmp_path / "own") == quotas


def test_the_services_number_of_cores_counts_if_it_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPU_CORES", raising=False)
    here = usable_cores()
    for said, cores in (("1", 1), ("1.5", 1), ("0.25", 1), ("10000", here), ("", here), ("many", here), ("-3", here)):
        monkeypatch.setenv("CPU_CORES", said)
        assert usable_cores() == cores, said


@pytest.fixture
def one_core() -> Iterator[Path]:
    """A control group with a quota of one core."""
    for root, name, quota in (
        ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "100000"),
        ("/sys/fs/cgroup", "cpu.max", "100000 100000"),
    ):
        group = Path(root, f"replicas-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).exists():
                (group / name).write_text(quota)
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("only root can create a control group for processors, and only if the controller is mounted")


def test_a_quota_of_this_machines_kernel_counts(one_core: Path) -> None:
    join = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(one_core)]
    command = [*join, sys.executable, "-c", SAY]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
