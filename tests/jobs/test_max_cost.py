"""The limit of a run's cost applies to every replica that is started for it."""

from __future__ import annotations

import json
import threading
import time

import pytest
from support.fake_jobs import FakeExecutor, FakeJobs, Machines, attached, start, wait_until_hanging

from executors import Run
from executors.attempt import Attempt
from executors.backends.jobs.max_cost import used_s
from executors.errors import MaxCostSpentError
from executors.protocol import ReplicaStatus
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.memory import MemoryStore
from executors.store.records import to_bytes
from executors.supervisor import standalone
from executors.testing import eventually

SHARE_S = 3600.0
PRICES = {None: 2.0, "A100": 20.0}


@pytest.fixture(autouse=True)
def _a_price(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeJobs, "price_per_hour", lambda self, gpu: PRICES[gpu])


def limits(machines: Machines) -> list[float]:
    """Return the time limit of each job's replica."""
    return [float(each.job.env["REPLICA_TIMEOUT_S"]) for each in machines.jobs]


def has_run(run: Run, rank: int, number: int, seconds: float) -> None:
    """Move the beginning of an attempt to an earlier time."""
    attempt = Attempt(view_of(run).store, run.run_id, rank, number)
    claim = json.loads(bytes(view_of(run).store.get(attempt.key("started.json"))))
    view_of(run).store.put(attempt.key("started.json"), to_bytes({**claim, "at": time.time() - seconds}))


def preempted(run: Run, machines: Machines, rank: int, number: int, after_s: float) -> None:
    """Take the machine of an attempt back when the attempt hangs."""
    attempt = Attempt(view_of(run).store, run.run_id, rank, number)
    eventually(lambda: attempt.has("handle.json") and "hanging" in run.logs(rank), f"attempt {number} hangs")
    has_run(run, rank, number, after_s)
    machines.end(machines.job_of(attached(), rank), "preempted")


def test_a_replica_that_was_preempted_gets_the_rest_of_max_cost_and_no_more(machines: Machines) -> None:
    run = start(1, "hang", max_cost=2.0, restarts="5,backoff=0s")
    keeper = threading.Thread(target=run.wait, args=(120,))
    keeper.start()
    preempted(run, machines, 0, 0, 2000.0)
    preempted(run, machines, 0, 1, 1590.0)
    keeper.join()
    assert limits(machines) == [SHARE_S, pytest.approx(SHARE_S - 2000, abs=60)]
    # A container costs money while it installs, so the service's limit includes that time.
    assert [each.job.limit_s for each in machines.jobs] == [int(limit_s) for limit_s in limits(machines)]
    (outcome,) = run.outcomes()
    assert (outcome.attempt, outcome.reason) == (2, "timeout")
    spent = "max_cost=2 of run 'otter' is spent: rank 0 ran for the $2.00 that each replica may cost."
    assert spent in str(outcome.error)
    with pytest.raises(MaxCostSpentError, match="replicas resume otter --from-snapshot"):
        resume(attached())
    assert len(machines.jobs) == 2


def test_each_rank_that_is_resumed_gets_the_rest_of_its_own_share(machines: Machines) -> None:
    run = start(3, "hang", max_cost=6.0, timeout=3000.0)
    wait_until_hanging(run)
    for rank, seconds in enumerate((100.0, 1200.0, 3590.0)):
        has_run(run, rank, 0, seconds)
    run.cancel()
    assert run.wait(60)
    with pytest.raises(MaxCostSpentError, match="is spent: rank 2 ran"):
        resume(attached())
    again = resume(attached(), ranks=[0, 1], timeout=9000.0)
    assert sorted(limits(machines)[3:]) == [pytest.approx(2400, abs=60), pytest.approx(3500, abs=60)]
    again.cancel()


def test_a_rank_that_is_resumed_at_another_price_gets_the_rest_of_its_money(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs(usd_per_hour: float) -> None:
        monkeypatch.setattr(FakeJobs, "price_per_hour", lambda self, gpu: usd_per_hour)

    def resumed() -> Run:
        """Resume the rank after its end, for the time that the remaining money allows."""
        run.cancel()
        assert run.wait(60)
        return resume(attached(), timeout=36000.0)

    costs(20.0)
    run = start(1, "hang", max_cost=20.0)
    wait_until_hanging(run)
    has_run(run, 0, 0, 1800.0)
    costs(2.0)
    run = resumed()
    eventually(lambda: Attempt(view_of(run).store, run.run_id, 0, 1).has("started.json"), "attempt 1 begins")
    has_run(run, 0, 1, 9000.0)  # five of the remaining ten dollars
    costs(20.0)
    run = resumed()
    assert limits(machines) == [SHARE_S, pytest.approx(18000, abs=600), pytest.approx(900, abs=60)]
    run.cancel()


@pytest.mark.parametrize(("gpu", "timeout", "limit_s"), [(None, 36000.0, SHARE_S), ("A100", None, 360.0)])
def test_a_new_run_from_a_snapshot_costs_no_more_than_its_max_cost(
    machines: Machines, gpu: str | None, timeout: float | None, limit_s: float
) -> None:
    run = start(1, "hang", max_cost=2.0)
    wait_until_hanging(run)
    run.cancel()
    assert run.wait(60)
    new = resume(attached(), gpu=gpu, timeout=timeout, from_snapshot=True)
    assert limits(machines) == [SHARE_S, limit_s]
    assert (view_of(new).record.settings.max_cost, view_of(new).record.placements[0].timeout_s) == (2.0, limit_s)
    new.cancel()


def test_an_addition_is_not_covered_by_max_cost_and_that_is_reported(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(1, "hang", max_cost=2.0)
    assert run.add(FakeExecutor(), 1) == [1]
    assert "max_cost=2 of run 'otter' does not limit the cost of added replicas" in capsys.readouterr().err
    assert limits(machines) == [SHARE_S, SHARE_S]
    run.cancel()


def test_the_cost_of_a_rank_counts_the_time_of_its_containers_and_not_the_time_until_a_look() -> None:
    first = Attempt(MemoryStore(), "otter", 0)

    def attempt(number: int, at: float, beat_at: float, finished_at: float, host: str, *, is_launched: bool) -> None:
        its = first.at(number)
        claim = {"nonce": "x", "pid": 1, "host": "node", "at": 1e9 + at}
        its.store.put(its.key("started.json"), to_bytes(claim))
        its.store.put(its.key("heartbeat.json"), to_bytes({"at": 1e9 + beat_at}))
        its.record(its.new_outcome(ReplicaStatus.FAILED, "lost", host=host, finished_at=1e9 + finished_at))
        if is_launched:
            its.store.put(its.key("intent.json"), b"{}")

    attempt(0, 0, 90, 100, "node", is_launched=True)
    attempt(1, 110, 190, 200, "node", is_launched=False)  # one process after another in the same container
    attempt(2, 1000, 1050, 9000, "laptop", is_launched=True)  # the end was found much later
    assert [sum(used_s(first.at(number)).values()) for number in range(4)] == [0, 100, 200, 250]


def test_the_installation_of_a_container_is_part_of_its_time() -> None:
    first = Attempt(MemoryStore(), "otter", 0)
    for name, record in {
        "boot.json": {"at": 1e9 - 300, "doing": "installing"},
        "started.json": {"nonce": "x", "pid": 1, "host": "node", "at": 1e9},
        "heartbeat.json": {"at": 1e9 + 100},
        "intent.json": {},
    }.items():
        first.store.put(first.key(name), to_bytes(record))
    assert used_s(first.at(1)) == {0: 400}


@pytest.mark.parametrize(("installed_s", "left_s"), [(0.0, 990.0), (300.0, 690.0), (5000.0, 1.0)])
def test_a_replica_may_run_for_the_part_of_max_cost_that_its_installation_has_left(
    installed_s: float, left_s: float
) -> None:
    environ = {"REPLICA_TIMEOUT_S": "1000", "REPLICA_BOOTSTRAP_S": str(installed_s)}
    assert standalone._time_limit(environ) == 1000, (
        "without max_cost, the time of the installation does not reduce the limit"
    )
    assert standalone._time_limit({**environ, "REPLICA_SETTINGS": '{"n": 1, "max_cost": 2.0}'}) == left_s
