"""Senders of notifications are killed again and again, at any moment: no message is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.webhooks import Webhook, webhook

from executors.attempt import Attempt
from executors.notices.notifier import HEIR_S, Notifier, NotifierSpec
from executors.protocol import ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog
from executors.store import Store, open_store
from executors.task.create import create_run
from executors.task.launch_request import LaunchRequest
from executors.task.notice_record import NoticeClaim, notices_prefix, parse_name
from executors.task.record import find_run_record

EVENTS = {"hang-1-0", "given_up-0", "end-0"}
STORM_S = 1.5


def ended_run(store: Store, run_id: str) -> None:
    """Write the records of a run in which rank 1 hung, rank 2 was given up, and rank 0 succeeded."""
    create_run(LaunchRequest.of("train.py:main", n=3, restarts=0), run_id, store, {"backend": "local"})
    for rank, reason in ((0, None), (1, "hang"), (2, "exception")):
        status = ReplicaStatus.SUCCEEDED if reason is None else ReplicaStatus.FAILED
        attempt = Attempt(store, run_id, rank, 0)
        error = None if reason is None else "ValueError: boom"
        attempt.record(attempt.new_outcome(status, reason, error=error, finished_at=time.time()))  # type: ignore[arg-type]
    log = DecisionLog(store, run_id)
    log.append(lambda _: Decision(kind="give_up", rank=2, ended=0, why="budget", words="exception", at=time.time()))
    log.append(lambda _: Decision(kind="stop", rank=1, ended=0, why="asked", within_s=0.0, at=time.time()))


def covered(store: Store, run_id: str, hook: Webhook) -> set[str]:
    """Return the events that arrived, by a message of their own or counted by another message."""
    arrived = {each["event"] for each in hook.messages if each["run_id"] == run_id}
    for entry in store.list(notices_prefix(run_id)):
        name = parse_name(store.url, run_id, entry.key)
        if name is not None and not name[2] and name[0] in arrived:
            arrived |= {*NoticeClaim.parse(store.get(entry.key)).also}
    return arrived


def storm(store: Store, run_id: str, hook: Webhook, chance: random.Random) -> int:
    """Let two processes send the notices of a run, kill them at random moments, and return the number of kills."""
    spec = NotifierSpec(store.url, run_id, (hook.url,))
    senders = [Notifier(spec), Notifier(spec)]
    for sender in senders:
        sender.start()
    n_kills, until = 0, time.monotonic() + STORM_S
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.0, 0.4))
        sender = chance.choice(senders)
        if sender.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(sender.pid, signal.SIGKILL)
                n_kills += 1
            with contextlib.suppress(ChildProcessError):
                os.waitpid(sender.pid, 0)  # a process that is still dying looks as if it lived
        for each in senders:
            each.keep()
    for sender in senders:
        sender.close()
        sender.wait(HEIR_S + 30.0)
    return n_kills


@pytest.mark.timeout(1800)
def test_no_message_is_lost_while_any_process_lives(tmp_path: Path) -> None:
    n_runs = int(os.environ.get("STORMS", "8"))
    store, chance, lost, n_kills = open_store(tmp_path / "runs"), random.Random(7), {}, 0
    with webhook() as hook:
        for number in range(n_runs):
            run_id = f"otter-{number}"
            ended_run(store, run_id)
            assert find_run_record(store, run_id) is not None
            hook.answers = [chance.choice(["ok", "ok", "slow", "500"]) for _ in range(4)]
            n_kills += storm(store, run_id, hook, chance)
            if missing := EVENTS - covered(store, run_id, hook):
                lost[run_id] = missing
        times = Counter((each["run_id"], each["event"]) for each in hook.messages)
    twice = sum(count - 1 for count in times.values())
    print(f"{n_runs} runs, {n_kills} kills, {len(times)} messages, {twice} duplicates, {len(lost)} losses")
    assert lost == {}
    assert n_kills > n_runs
