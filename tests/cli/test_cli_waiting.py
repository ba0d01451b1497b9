"""Lines of a launch off a terminal: each reason that a replica waits for is printed when it changes."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from executors import Run, launch
from executors.cli.live import PlainView
from executors.cli.output import Output
from executors.protocol import ReplicaStatus
from executors.status import ReplicaState


def test_the_reason_for_a_wait_is_printed_only_when_it_changes(local: Any) -> None:
    run: Run = launch(local, "executors.testing.tasks:echo", 2)
    run.wait(60)
    output = Output()
    output.console = Console(file=io.StringIO(), width=200)
    view = PlainView(output, run)
    done = run.status()

    def look(*words: str) -> list[str]:
        """Show replicas that wait for these reasons, and return the printed lines without the time."""
        output.console.file = io.StringIO()
        waiting = [ReplicaState(rank, 0, ReplicaStatus.PENDING, doing=doing) for rank, doing in enumerate(words)]
        view.update(replace(done, replicas=waiting))
        return [line.partition("] ")[2] for line in output.console.file.getvalue().splitlines()]

    quota = 'FailedCreate: pods "x-0-" is forbidden: exceeded quota: gpus'
    assert look("", "") == ["ranks 0-1 pending"]
    assert look("", "") == []
    assert look(quota, quota) == [f"ranks 0-1 pending ({quota})"]
    assert look(quota, quota) == []
    assert look("ImagePullBackOff: again", quota) == ["rank 0 pending (ImagePullBackOff: again)"]
    assert look("", quota) == []
    assert look("ImagePullBackOff: again", quota) == ["rank 0 pending (ImagePullBackOff: again)"]
