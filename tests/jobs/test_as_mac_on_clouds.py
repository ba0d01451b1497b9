"""The command and `launch()` on a laptop that is not Linux, with fake clouds.

Only the client emulates macOS. The fake clouds and the containers of their replicas are the same as in every other
test.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from servers.hub.server import HubServer
from servers.modal.server import ModalServer
from servers.s3.server import S3Server
from support.as_mac import MacFolder, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

LAUNCHED_BY_A_SCRIPT = """
from executors import attach, launch

def work(steps):
    from executors import current_replica
    current_replica().report(step=steps, loss=0.5)
    print("worked as rank", current_replica().rank, flush=True)
    return current_replica().rank

if __name__ == "__main__":
    import sys
    assert sys.platform == "darwin"
    run = launch(BACKEND, work, n=2, args={"steps": 5}, run_id="scripted", restarts=1)
    assert run.results() == [0, 1]
    again = attach("scripted")
    assert str(again.status().status) == "succeeded"
    assert "worked as rank 1" in again.logs(rank=1)
    assert [event.kind for event in again.events()][::7] == ["launched", "finished"], again.events()
"""


@pytest.fixture(params=["modal", "hf"])
def backend(request: pytest.FixtureRequest, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cloud that answers on loopback, for the client's SDK."""
    monkeypatch.setenv("REPLICAS_RENDEZVOUS", s3.url("runs"))
    if request.param == "modal":
        server: ModalServer = request.getfixturevalue("modal_cloud")
        assert server is not None
    else:
        hub: HubServer = request.getfixturevalue("hub")
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.fixture
def mac(tmp_path: Path) -> MacFolder:
    (tmp_path / "work").mkdir()
    return MacFolder(tmp_path / "work")


def test_a_run_is_checked_planned_launched_and_followed_and_its_results_come_home(
    mac: MacFolder, backend: str, s3: S3Server
) -> None:
    assert mac.replicas("backends", "--json").code == 0
    found = mac.replicas("doctor", "--backend", backend, "--json", "--rendezvous", s3.url("runs"))
    assert found.code == 0, found
    planned = mac.replicas("plan", "--params", "1M", "--n", 2, "--step", 0.1, "--store", s3.url("runs"), "--json")
    assert planned.code == 0, planned
    dry = mac.replicas("launch", "job.py:keep", "--backend", backend, "--n", 2, "--dry-run")
    assert len(dry.json["request"]["jobs"]) == 2
    told = mac.replicas("launch", "job.py:keep", "--backend", backend, "--n", 2, "--run-id", "otter")
    assert told.code == 0, told
    assert mac.replicas("config").code == 0
    assert "otter" in mac.replicas("ls").stdout
    status = mac.replicas("status", "otter", "--json").json
    assert (status["status"], status["backend"]) == ("succeeded", backend)
    assert sorted(mac.replicas("logs", "otter", "-f").stdout.splitlines()) == ["[0] saved", "[1] saved"]
    assert mac.replicas("events", "otter", "--json").code == 0
    assert mac.replicas("wait", "otter").code == 0
    assert mac.replicas("collect", "otter", "--out", "home").code == 0
    artifacts = sorted(path.relative_to(mac.path / "home") for path in (mac.path / "home").rglob("weights.txt"))
    assert len(artifacts) == 2, artifacts
    assert mac.replicas("report", "otter", "--out", "run.html").code == 0
    assert mac.replicas("export", "otter", "--csv", "run.csv").code == 0
    assert mac.replicas("rm", "otter").code == 0
    assert "otter" not in mac.replicas("ls").stdout


def test_a_rank_that_dies_is_restarted_and_resumed(mac: MacFolder, backend: str) -> None:
    launch = ("launch", "job.py:die", "--backend", backend, "--n", 2, "--run-id", "otter", "--arg", "rank=1")
    told = mac.replicas(*launch, "--restarts", "1,backoff=0.1s:0.2s")
    assert told.code == 1, told
    status = mac.replicas("status", "otter", "--json").json
    assert [replica["attempts"] for replica in status["replicas"]] == [1, 2]
    resumed = mac.replicas("resume", "otter")
    assert resumed.code == 1, resumed
    status = mac.replicas("status", "otter", "--json").json
    assert status["replicas"][1]["attempts"] >= 3


def test_a_detached_run_is_followed_and_cancelled(mac: MacFolder, backend: str) -> None:
    told = mac.replicas("launch", "job.py:hang", "--backend", backend, "--n", 2, "--run-id", "otter", "--detach")
    assert told.code == 0, told
    with mac.started("logs", "otter", "-f", "-r", 0) as command:
        command.prints("hanging")
        assert mac.replicas("status", "otter", "--json").json["status"] == "running"
        assert mac.replicas("cancel", "otter").code == 0
        assert command.ends() == 0
    assert mac.replicas("status", "otter", "--json").json["status"] == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_cancel_the_run_and_wait_for_its_end(
    mac: MacFolder, backend: str, number: signal.Signals
) -> None:
    with mac.started("launch", "job.py:hang", "--backend", backend, "--n", 2, "--run-id", "otter") as command:
        command.prints("running")
        command.interrupt(number)
        assert command.ends() == 130, command.output
        assert "Traceback" not in command.output
    assert mac.replicas("status", "otter", "--json").json["status"] == "cancelled"


def test_a_script_launches_follows_and_attaches(mac: MacFolder, backend: str) -> None:
    (mac.path / "train.py").write_text(LAUNCHED_BY_A_SCRIPT.replace("BACKEND", json.dumps(backend)))
    mac.python("import runpy; runpy.run_path('train.py', run_name='__main__')")
