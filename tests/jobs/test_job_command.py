"""The command, at a service that takes its time to start replicas, or refuses some."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import Folder, HereInstead
from support.fake_jobs import Machines

LAUNCH = ("launch", "job.py:main", "--backend", "support.fake_jobs:FakeExecutor", "--run-id", "otter")

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture
def command(machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> HereInstead:
    return HereInstead(Folder(Path.cwd()), monkeypatch, capsys)


def test_a_launch_that_fails_half_way_exits_with_1_and_one_that_starts_nothing_with_2(
    machines: Machines, command: HereInstead
) -> None:
    machines.fail("check_account", "rejected")
    assert command.replicas(*LAUNCH, "--n", 2).code == 2
    machines.fail("start", "rejected", rank=1)
    told = command.replicas(*LAUNCH, "--n", 2)
    assert told.code == 1, told
    assert "'fake' could not start replica 1 of 2" in told.stderr
    assert "See: replicas status otter" in told.stderr
