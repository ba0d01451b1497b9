"""Notifications from a container: its supervisor sends them, and the URL is a secret of the job."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from servers.hub.server import HubServer
from support.webhooks import webhook

from executors import launch
from executors.run.run import view_of
from executors.testing import eventually

SECRET = "s3cret-path"
TASK = """
import os, signal
from executors import current_replica

def main(ranks):
    if current_replica().rank in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    return [name for name, value in os.environ.items() if "s3cret-path" in value]
"""


def test_the_containers_of_a_detached_run_report_its_events_once(hf: HubServer, state_home: Path) -> None:
    Path("job.py").write_text(TASK)
    with webhook() as hook:
        policy = "1,backoff=0.05s:0.1s"
        asked: Any = {"args": {"ranks": [1]}, "restarts": policy, "detach": True, "notify": [hook.url]}
        run = launch("hf", "job.py:main", 2, **asked)
        given_up, end = hook.of("given_up"), hook.of("end")
        listed = subprocess.run(["ps", "-eo", "args", "-ww"], capture_output=True, text=True, check=True).stdout
        assert (given_up["rank"], end["rank"]) == (1, None)
        assert "The run has failed" in end["text"]
        store = view_of(run).store

        def is_recorded() -> bool:
            return any(each.key.endswith("end-0.sent.json") for each in store.list(f"{run.run_id}/notices/"))

        eventually(is_recorded, "the result is recorded")
        run.wait(60)
        assert len({each["event"] for each in hook.messages}) == len(hook.messages)
    assert run.outcomes()[0].result == [], "user code does not see the URL"
    assert SECRET not in listed
    assert hf.places_of(hook.url) == [], "the URL was sent to the Hub outside of the secrets"
    assert all("REPLICAS_NOTIFY" in job.spec["secrets"] for job in hf.jobs.newest_first())
    for entry in store.list(""):
        assert SECRET.encode() not in bytes(store.get(entry.key)), entry.key
    for path in state_home.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
