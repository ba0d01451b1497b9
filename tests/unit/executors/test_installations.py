"""Tests the lines of a launch while containers install packages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executors.attempt import Attempt, Boot
from executors.protocol import ReplicaStatus
from executors.status import INSTALLING, Installation, ReplicaState, RunStatus
from executors.store import MemoryStore
from executors.view.installations import Installations

LAUNCHED_AT, BEGAN_AT = 1000.0, 1020.0
PENDING = ReplicaState(0, 0, ReplicaStatus.PENDING, doing=INSTALLING)


def shown(boot: dict[str, Any] | bytes, *, at: float = BEGAN_AT + 40, state: ReplicaState = PENDING) -> ReplicaState:
    """Return the state, at a time of the reader's clock, of a container that has written this record."""
    attempt = Attempt(MemoryStore(), "otter", 0, 0)
    attempt.store.put(attempt.key("boot.json"), boot if isinstance(boot, bytes) else json.dumps(boot).encode())
    return Installations(lambda: 0.0, lambda: at).over(state, attempt, launched_at=LAUNCHED_AT)


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        ({"what": "torch==2.13.0", "n_bytes": 1_200_000_000, "of_bytes": 2_700_000_000}, "torch, 1.2 of 2.7 GB, 40 s"),
        ({"what": "torch==2.13.0"}, "torch, 40 s"),
        ({"what": "einops[torch]>=1 ; python_version > '3'"}, "einops, 40 s"),
        ({"what": "einops @ https://example.com/einops.whl"}, "einops, 40 s"),
    ],
)
def test_a_pending_replica_shows_the_package_that_it_installs_and_its_progress(
    noted: dict[str, Any], words: str
) -> None:
    state = shown({"at": BEGAN_AT, "doing": "installing", **noted})
    assert state.note == f"installing {words}"
    assert state.to_json()["note"] == state.note


@pytest.mark.parametrize("what", ["./wheel_of_user-1.5.whl", "https://example.com/a.whl", "git+https://x/y", ""])
def test_a_path_or_url_is_not_a_packages_name(what: str) -> None:
    assert shown({"at": BEGAN_AT, "what": what}).note == "installing, 40 s"


@pytest.mark.parametrize(
    ("began_at", "words"), [(LAUNCHED_AT + 600, "0 s"), (LAUNCHED_AT - 900, "2:00"), (BEGAN_AT, "1:40")]
)
def test_a_container_with_a_wrong_clock_installs_neither_in_the_future_nor_since_before_the_launch(
    began_at: float, words: str
) -> None:
    assert shown({"at": began_at, "what": "torch"}, at=LAUNCHED_AT + 120).note == f"installing torch, {words}"


@pytest.mark.parametrize("boot", [b"\xff", b"{}", {"at": 1.0, "n_bytes": -1}, {"at": 1.0, "what": "x" * 5000}])
def test_a_note_that_cannot_be_read_hides_nothing_else(boot: Any) -> None:
    assert shown(boot).note == "installing"


def test_a_replica_that_has_started_or_ended_installs_nothing() -> None:
    for state in (ReplicaState(0, 0, ReplicaStatus.RUNNING), ReplicaState(0, 0, ReplicaStatus.CANCELLED, doing="x")):
        assert shown({"at": BEGAN_AT, "what": "torch"}, state=state) == state


def test_a_line_of_progress_names_the_slowest_of_those_that_install() -> None:
    def installing(rank: int, n_bytes: int) -> ReplicaState:
        found = Installation("torch", 40.0, n_bytes, 2_000_000_000)
        return ReplicaState(rank, 0, ReplicaStatus.PENDING, doing=found.what, installation=found)

    states = [installing(0, 1_500_000_000), installing(1, 500_000_000), ReplicaState(2, 0, ReplicaStatus.RUNNING)]
    status = RunStatus("otter", "hf", states)
    assert status.describe_progress() == ("2 pending, 1 running: ranks 0-1 installing torch, 0.5 of 2.0 GB, 40 s")


def test_a_record_of_an_earlier_bootstrap_is_read() -> None:
    boot = Boot.parse(b'{"at": 1020.0, "doing": "installing"}', "boot.json")
    assert (boot.package, boot.n_bytes, boot.of_bytes) == ("", None, None)
