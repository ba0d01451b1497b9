"""Tests how a run with restarts is shown: pending and final ends, the texts, and the exit code."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.hostile_records import local_handle, outcome_json, run_json
from support.new_runs import run_spec

from executors import LocalProcessExecutor
from executors.attempt import replica_key
from executors.backend import PendingReplica, SupervisorStatus
from executors.cli.live import PlainView, follow
from executors.cli.output import Output
from executors.cli.summary import exit_code
from executors.errors import AlreadyResumedError
from executors.protocol import BY_USER, STOPPED, Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.orders import order_resume
from executors.run.resume import _next_attempts as next_attempts
from executors.run.run import Run, manager_of, view_of
from executors.settings.run_spec import StartSpec
from executors.store import Data, Store
from executors.store.memory import MemoryStore
from executors.view.report.uptime import wants_attention

ENDED_LONG_AGO, HOUR_S = 1.7e9, 3600.0
RESTART = Decision(
    kind="restart", rank=0, ended=0, start={0: 1}, charged=True, reason="signal", words="signal, SIGKILL", at=1.7e9
)
GIVEN_UP = Decision(
    kind="give_up", rank=0, ended=0, why="deterministic", reason="exception", words="exception, ValueError: no",
    reached={"step": 812.0},
)  # fmt: skip
STOP = Decision(
    kind="stop", rank=1, ended=0, why="deterministic", reason="exception", words="exception, ValueError: no"
)
ASKED = Decision(kind="stop", why="asked", within_s=600.0, words=STOPPED)
CANCEL = Decision(kind="cancel")


def run_of(
    *ends: dict[str, Any] | None,
    restarts: str | None = "3",
    log: Sequence[Decision] = (),
    store: MemoryStore | None = None,
    **record: Any,
) -> Run:
    """A run whose ranks' first attempts have these outcomes. None: the rank still trains."""
    store = store or MemoryStore("restarts")
    written = run_json(world_size=len(ends), restarts=restarts, **record)
    store.put("wide/run.json", json.dumps(written).encode())
    for rank, end in enumerate(ends):
        write(store, rank, "started", {"nonce": f"n{rank}"})
        if end is not None:
            write(store, rank, "outcome", outcome_json(rank, **{"finished_at": time.time(), **end}))
    run = Run(store, "wide")
    for entry in log:
        add(run, entry)
    return run


def write(store: Store, rank: int, name: str, value: object, attempt: int = 0) -> None:
    store.put(replica_key("wide", rank, attempt, f"{name}.json"), json.dumps(value).encode())


class EndsOfOneProcess(MemoryStore):
    """Rank 1 is found to have ended while the end of rank 0 is decided, because both had the same supervisor."""

    def put_if_absent(self, key: str, data: Data) -> bool:
        if key == "wide/decisions/000000.json":
            write(self, 1, "outcome", outcome_json(1, **failed()))
        return super().put_if_absent(key, data)


def add(run: Run, entry: Decision) -> None:
    """Add an entry to the run's log. Without a time, it is made now."""
    entry = replace(entry, at=entry.at or time.time())
    number = sum(1 for _ in view_of(run).store.list("wide/decisions/"))
    view_of(run).store.put(f"wide/decisions/{number:06d}.json", replace(entry, nonce=f"n{number}").to_bytes())


def failed(reason: str = "signal", **more: Any) -> dict[str, Any]:
    return {"status": "failed", "reason": reason, **more}


DONE = {"status": "succeeded", "result": 7}
CANCELLED = {"status": "cancelled", "reason": "cancelled", "error": "Replica 0 was ended: stopped by the user."}


def test_a_run_has_not_ended_between_an_end_and_the_next_claim() -> None:
    run = run_of(failed(), DONE)
    assert not run.wait(timeout=0), "the run has not ended before a decision about the end"
    add(run, RESTART)
    assert not run.wait(timeout=0), "the restart has not claimed"
    assert [outcome.status for outcome in run.outcomes()] == ["pending", "succeeded"]
    assert (run.status().status, run.status().replicas[0].is_over) == ("running", False)
    write(view_of(run).store, 0, "started", {"nonce": "again"}, attempt=1)
    assert run.status().replicas[0].status == "running"
    write(view_of(run).store, 0, "outcome", outcome_json(0, attempt=1, result=8), attempt=1)
    assert run.results() == [8, 7]
    assert [outcome.attempt for outcome in run.as_completed()] == [1, 0]


@pytest.mark.parametrize("watch", [Run.wait, lambda run: follow(run, PlainView(Output(), run))])
def test_the_process_that_keeps_a_run_answers_ends_that_it_finds_last(watch: Callable[[Run], object]) -> None:
    run = run_of(failed(), None, restarts="0", store=EndsOfOneProcess("restarts"))
    spec = run_spec("wide", view_of(run).store.url, "0" * 64, 2, (0, 1))
    manager_of(run).restart_here([StartSpec(spec, "time:time")], None)
    watch(run)
    assert [(entry.kind, entry.rank) for entry in DecisionLog(view_of(run).store, "wide").read()] == [
        ("give_up", 0),
        ("give_up", 1),
    ]


class CountedLog(MemoryStore):
    """A distant store that counts how often each decision was read."""

    def __init__(self) -> None:
        super().__init__("restarts")
        self._url = "s3://bucket"
        self.n_read = Counter[str]()

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        self.n_read[key] += "/decisions/" in key
        return super().get(key, start=start, size=size)


@pytest.mark.parametrize("is_read_by_its_controller", [True, False])
def test_a_process_that_looks_at_a_run_and_keeps_it_reads_each_decision_once(is_read_by_its_controller: bool) -> None:
    cancels = [replace(CANCEL, rank=1) for _ in range(20)]
    run = run_of(failed(), None, restarts="0", store=(store := CountedLog()), log=[*cancels, GIVEN_UP])
    log = DecisionLog(store, "wide")
    if is_read_by_its_controller:
        log.read()
    controller = manager_of(run).restart_here(
        [StartSpec(run_spec("wide", view_of(run).store.url, "0" * 64, 2, (0, 1)), "time:time")], None, log=log
    )
    controller.advance(run.status().replicas)
    list(run.events())
    assert {store.n_read[f"wide/decisions/{index:06d}.json"] for index in range(21)} == {1}


@pytest.mark.parametrize(
    ("end", "restarts", "log", "is_final"),
    [
        (failed(), "3", [], False),
        (failed(), None, [], True),
        (failed(), None, [Decision(kind="policy", restarts="3")], False),
        (failed(), "0", [], True),
        (failed("preempted"), "0", [], False),
        (failed("timeout"), "3", [], True),
        (failed("oom"), "3,oom=0", [], True),
        (failed("fenced"), "3", [], True),
        (CANCELLED, "3", [], True),
        (failed(), "3", [CANCEL], True),
        (failed(), "3", [RESTART, CANCEL], True),
        (failed(), "3", [STOP], True),
        (failed(), "3", [CANCEL, Decision(kind="resume", start={1: 1})], True),
        (failed(), "3", [GIVEN_UP], True),
        (failed(), None, [Decision(kind="resume", start={0: 1})], False),
        (failed(), None, [Decision(kind="resume", start={0: 1}, at=1.7e9)], True),
        (failed("exception", fingerprint="f"), "0", [], True),
    ],
)
def test_an_end_is_final_unless_another_attempt_is_to_follow(
    end: dict[str, Any], restarts: str | None, log: Sequence[Decision], is_final: bool
) -> None:
    assert run_of(end, restarts=restarts, log=log).wait(timeout=0) is is_final


def test_a_process_that_is_cancelled_between_two_attempts_is_cancelled() -> None:
    run = run_of(failed(), log=[RESTART, replace(CANCEL, words=BY_USER)])
    (outcome,) = run.outcomes()
    assert (outcome.attempt, outcome.status, outcome.error) == (
        1,
        "cancelled",
        "Replica 0 was ended: cancelled by the user.",
    )
    assert exit_code([outcome], decisions=view_of(run).reader.decisions) == 130
    assert run.status().replicas[0].note == ""


def test_an_end_that_may_still_stop_the_run_is_not_final() -> None:
    """All ranks raise alike before their first step. The run is stopped within a second, and its exit code shows it."""
    alike = failed("exception", fingerprint="f")
    run = run_of(alike, alike, restarts="0")
    assert not run.wait(timeout=0)
    add(run, STOP)
    assert run.wait(timeout=0)


def test_a_rank_that_failed_twice_alike_counts_as_given_up_before_that_is_written() -> None:
    run = run_of(failed(), DONE, log=[replace(RESTART, fingerprint="f", reached={"step": 7.0})])
    write(view_of(run).store, 0, "started", {"nonce": "again"}, attempt=1)
    end = failed("exception", attempt=1, fingerprint="f", reached={"step": 7}, error="ValueError: no")
    write(view_of(run).store, 0, "outcome", outcome_json(0, **end), attempt=1)
    assert run.wait(timeout=0)
    assert run.status().replicas[0].note == "given up: failed twice in the same way at step 7 (ValueError: no)"
    assert view_of(run).reader.is_permanent


@pytest.mark.parametrize(
    ("end", "log", "note"),
    [
        (failed(signal="SIGKILL", reached={"round": 4}), [], "ended: signal, SIGKILL, after round 4"),
        (failed("timeout"), [], "given up: the policy has no restart after timeout: timeout"),
        (failed(finished_at=ENDED_LONG_AGO), [], "waits for a controller: replicas watch memory://restarts/wide"),
        (failed(), [replace(RESTART, at=0.0, not_before=time.time() + 9000)], "restarts in "),
        (failed(), [RESTART], "waits for a controller: replicas watch memory://restarts/wide"),
        (failed(), [replace(RESTART, at=0.0)], "restarts now: signal, SIGKILL"),
        (failed(), [GIVEN_UP], "given up: failed twice in the same way at step 812 (ValueError: no)"),
        (failed("exception", error="ValueError: no"), [CANCEL], "exception: ValueError: no"),
    ],
)
def test_the_note_of_an_ended_replica_names_the_reason_for_its_wait(
    end: dict[str, Any], log: Sequence[Decision], note: str
) -> None:
    assert run_of(end, None, log=log).status().replicas[0].note.startswith(note)


def test_a_rank_that_is_just_found_lost_waits_for_a_controller_at_once_if_no_process_watches() -> None:
    notes = [run_of(failed("lost"), None, detach=alone).status().replicas[0].note for alone in (False, True)]
    assert [note.partition(":")[0] for note in notes] == ["ended", "waits for a controller"]


class Watched(LocalProcessExecutor):
    """A backend that reports whether supervisors are alive."""

    def __init__(self, is_alive: bool) -> None:
        super().__init__(preload=())
        self.is_alive = is_alive

    def supervisors(self, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
        assert [(each.handle.rank, each.attempt) for each in replicas] == [(0, 0)]
        return [SupervisorStatus(self.is_alive)]


def test_a_process_that_has_a_supervisor_waits_for_no_one_else() -> None:
    run = run_of(failed(finished_at=ENDED_LONG_AGO), log=[RESTART])
    write(view_of(run).store, 0, "handle", local_handle(0, run_id="wide", store_url=view_of(run).store.url))
    notes = [
        Run(view_of(run).store, "wide", executor=Watched(alive)).status().replicas[0].note for alive in (True, False)
    ]
    assert notes[0] == "restarts now: signal, SIGKILL", "the rank restarts now: it may wait for a free place"
    assert notes[1].startswith("waits for a controller: replicas watch")


@pytest.mark.parametrize("ahead_s", [-3 * HOUR_S, 0.0, 3 * HOUR_S, 80 * 365 * 24 * HOUR_S])
@pytest.mark.parametrize("is_its_own", [True, False], ids=["by who resumes", "by one before it in the log"])
def test_a_resume_whose_process_died_has_ended_independent_of_the_clock_of_the_log(
    ahead_s: float, is_its_own: bool
) -> None:
    run, at = run_of(failed(), failed(), restarts=None), time.time() - HOUR_S
    DecisionLog(view_of(run).store, "wide", lambda: at + ahead_s).append(
        lambda log: Decision(kind="policy", hang="2m:3m")
    )
    order_resume(DecisionLog(view_of(run).store, "wide", lambda: at + ahead_s * is_its_own), {0: 1, 1: 1}, n_seen=1)
    assert run.wait(timeout=0)
    assert next_attempts(view_of(run), None, {0, 1}) == {0: 1, 1: 1}


@pytest.mark.parametrize("ahead_s", [-30.0, 0.0, 30.0])
def test_a_process_learns_that_another_process_resumes_the_run_even_if_their_clocks_differ(ahead_s: float) -> None:
    run = run_of(failed(), restarts=None)
    order_resume(DecisionLog(view_of(run).store, "wide", lambda: time.time() + ahead_s), {0: 1}, n_seen=0)
    assert not run.wait(timeout=0)
    with pytest.raises(AlreadyResumedError, match="attempt 1, ordered by"):
        next_attempts(view_of(run), None, {0})


@pytest.mark.parametrize("ahead_s", [0.0, 3 * HOUR_S])
@pytest.mark.parametrize("is_answered", [True, False])
def test_a_restart_that_no_one_begins_waits_for_a_controller_even_if_the_log_is_ahead(
    is_answered: bool, ahead_s: float
) -> None:
    at = time.time() - HOUR_S + ahead_s
    log = [replace(RESTART, at=at, not_before=at + 1.0)] if is_answered else []
    run = run_of(failed(finished_at=at), None, log=log)
    status = run.status()
    assert status.replicas[0].note == "waits for a controller: replicas watch memory://restarts/wide"
    assert set(wants_attention(status, view_of(run).reader.records.inventory, view_of(run).newest_attempt)) == {0}


def test_the_document_counts_restarts() -> None:
    run = run_of(failed(), None, log=[RESTART])
    document = run.status().to_json()
    row = document["replicas"][0]
    assert [row[name] for name in ("restarts", "charged", "left")] == [1, 1, 2]
    assert row["next_at"] == RESTART.at
    assert row["decision"] is not None
    assert row["decision"]["kind"] == "restart"
    assert document["restarts_by_reason"] == {"signal": 1}
    assert [each.line for each in run.status().decided] == ["restarting rank 0 as attempt 1 (1 of 3): signal, SIGKILL"]
    assert run.status().used_columns()[:3] == ["rank", "restarts", "status"]
    assert run.status().replicas[0].cell("restarts") == "1/3"


def test_a_log_that_cannot_be_read_is_named_and_hides_nothing() -> None:
    run = run_of(failed(), DONE)
    view_of(run).store.put("wide/decisions/000000.json", b'{"kind": "rest')
    first, second = run.status().replicas
    assert (first.status, second.status) == ("failed", "succeeded")
    assert "wide/decisions/000000.json" in first.note


@pytest.mark.timeout(60)
def test_twenty_thousand_decisions_are_shown_in_time() -> None:
    run = run_of(failed(), DONE)
    for index in range(20_000):
        view_of(run).store.put(f"wide/decisions/{index:06d}.json", RESTART.to_bytes())
    assert run.status().decided[-1].line == "restarting rank 0 as attempt 1 (20000 of 3): signal, SIGKILL"
    assert sum(event.kind == "decided" for event in run.events()) == 20_000


@pytest.mark.parametrize("within_s", [-1, math.nan, math.inf])
def test_a_stop_within_no_time_is_refused_by_name(within_s: float) -> None:
    run = run_of(None)
    with pytest.raises(ValueError, match=rf"within_s must be from 0 to 1e\+08 seconds, got {within_s}"):
        run.stop(within_s=within_s)
    assert view_of(run).reader.decisions == ()


@pytest.mark.parametrize(
    ("ends", "log", "code"),
    [
        ([failed(), DONE], [], 1),
        ([failed(), DONE], [GIVEN_UP], 93),
        ([failed(), DONE], [replace(GIVEN_UP, why="no_progress")], 93),
        ([failed(), DONE], [replace(GIVEN_UP, why="budget")], 1),
        ([failed("timeout"), DONE], [replace(GIVEN_UP, why="budget")], 124),
        ([failed(), DONE], [GIVEN_UP, Decision(kind="resume", start={0: 1}), CANCEL], 1),
        ([CANCELLED, failed("exception")], [STOP], 93),
        ([CANCELLED, failed("exception")], [CANCEL, STOP], 130),
        ([CANCELLED, DONE], [ASKED], 0),
        ([CANCELLED, failed()], [ASKED], 1),
        ([CANCELLED, DONE], [ASKED, CANCEL], 130),
        ([CANCELLED, DONE], [ASKED, replace(CANCEL, words=STOPPED)], 0),
        ([CANCELLED, DONE], [], 130),
    ],
)
def test_the_exit_code_shows_whether_starting_again_helps(
    ends: Sequence[dict[str, Any]], log: Sequence[Decision], code: int
) -> None:
    run = run_of(*ends, log=log)
    outcomes = [
        Outcome(rank, 0, ReplicaStatus(end["status"]), end.get("reason"), error=end.get("error"))
        for rank, end in enumerate(ends)
    ]
    run.status()
    reader = view_of(run).reader
    assert exit_code(outcomes, decisions=reader.decisions, is_permanent=reader.is_permanent) == code
    assert exit_code(outcomes, decisions=reader.decisions, is_permanent=reader.is_permanent, interrupted=True) == 130
