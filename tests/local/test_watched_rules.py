"""Rules of real runs: each is judged by the supervisor of its rank, recorded, reported and acted on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import Folder
from support.ended_attempts import decisions, ends, over, supervisor_of
from support.hostile_records import NO_OBJECTS
from support.processes import is_alive
from support.runs import pid_of
from support.webhooks import webhook

from executors import LocalProcessExecutor, Run, launch
from executors.restarts.decision_log import DecisionLog
from executors.restarts.orders import order_policy
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings.rule_finding import RuleFinding
from executors.store.inventory import Inventory
from executors.testing import eventually

QUICK = "backoff=0.05s:0.1s"
TASKS = """
import threading, time
from executors import current_replica, restartable

def wait_for_end(replica):
    while replica.ending_s is None:
        time.sleep(0.01)

def report(numbers, then="end", attempts=1):
    replica = current_replica()
    for name, values in numbers.items():
        for value in values if replica.attempt < attempts else ():
            replica.report(**{name: value if isinstance(value, (int, float)) else float(value)})
    replica.progress(kept=True)
    print(f"CUDA error in attempt {replica.attempt}", flush=True)
    if then == "wait" and replica.attempt < attempts:
        wait_for_end(replica)
    if then == "hang" and replica.attempt < attempts:
        threading.Event().wait()
    return replica.attempt

@restartable()
def again():
    replica = current_replica()
    replica.report(step=replica.attempt + 1, loss=9.0 if replica.attempt == 0 else 1.0)
    if replica.attempt < 2:
        raise ValueError(f"boom {replica.attempt}")

def of_members(folder):
    replica = current_replica()
    replica.report(loss=9.0 if replica.member == 1 and replica.attempt == 0 else 1.0)
    if replica.attempt == 0:
        threading.Event().wait()
    return replica.attempt
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Return a file with the functions that replicas run."""
    (tmp_path / "ruled_job.py").write_text(TASKS)
    return str(tmp_path / "ruled_job.py")


def findings(run: Run) -> list[RuleFinding]:
    """Return the records about rules, the broken ones first."""
    return sorted(run.status().rules, key=lambda each: (not each.is_broken, each.index, each.rank, each.attempt))


def lines(run: Run) -> list[str]:
    return [f"{each.rank}.{each.attempt} {each.sentence}" for each in findings(run)]


def test_each_kind_of_rule_is_judged_in_a_run_and_a_rule_that_no_process_can_judge_is_a_warning(
    local: LocalProcessExecutor, job: str
) -> None:
    rules = [
        *("loss nan", "loss > 8 for 2", "gnorm > 10 * median", "no round 1s", "no output 1s", "no progress 1s"),
        *("log /CUDA error/", "log /out of memory/", "los > 8", "loss < 0"),
    ]
    numbers: Any = {"loss": [1.0, 9.0, 10.0, "nan"], "gnorm": [*[1.0] * 20, 11.0]}
    run = launch(local, f"{job}:report", 1, args={"numbers": numbers, "then": "wait"}, rules=rules, detach=True)
    eventually(lambda: len(run.status().rules) >= 7, "each rule that can be broken is broken")
    run.stop()
    over(run)
    assert [
        each.sentence.partition("broken: ")[2].partition(" for ")[0] for each in findings(run) if each.is_broken
    ] == [
        "loss is nan in report 4.",
        "loss is 10 in report 3, after 2 such reports in a row.",
        "gnorm is 11 in report 21, the median is 1.",
        *("no round", "no output", "no progress"),
        "the line 'CUDA error in attempt 0'.",
    ]
    (unjudged,) = [each for each in findings(run) if not each.is_broken]
    words = "The rule 'los > 8' cannot be judged: 'los' was not reported in any of the 25 reports."
    assert unjudged.sentence == words
    assert [each.text for each in run.warnings()] == [words]
    assert run.status().n_warnings == 1
    events = list(run.events())
    assert sum(event.kind == "rule_broken" for event in events) == 7
    assert [event.why for event in events if event.kind == "warning"] == [words]
    assert "replicas: The rule 'loss nan' is broken: loss is nan in report 4." in run.logs(rank=0)
    assert sum("The rule 'loss nan' is broken" in each.line for each in run.status().decided) == 1


def test_a_restart_by_a_rule_ends_the_attempt_and_is_charged_until_its_budget_is_used(
    local: LocalProcessExecutor, job: str
) -> None:
    args: Any = {"numbers": {"loss": [9.0]}, "then": "hang", "attempts": 9}
    rule = "loss > 8 -> restart"
    run = over(launch(local, f"{job}:report", 1, args=args, rules=[rule], restarts=f"5,rule=1,{QUICK}", timeout=120))
    first, second = ends(run, 0)
    assert (first.status, first.reason, second.reason) == ("failed", "rule", "rule")
    assert first.headline == f"The rule {rule!r} is broken: loss is 9 in report 1."
    assert first.error == f"Replica 0 of 1 was ended: {first.headline}"
    restart, given_up = decisions(run)
    assert (restart.kind, restart.reason, restart.charged, restart.words) == (
        "restart",
        "rule",
        True,
        f"rule, {rule!r}",
    )
    assert (given_up.kind, given_up.why) == ("give_up", "budget")
    assert "1 of 1 restarts after rule are used" in run.status().replicas[0].note
    assert [(each.attempt, each.action) for each in findings(run)] == [(0, "restart"), (1, "restart")]
    assert Inventory.of(view_of(run).store, run.run_id).rules == {(0, 0, 0, True), (0, 1, 0, True)}


def test_a_stop_by_a_rule_of_one_rank_stops_the_run_and_a_resume_may_have_other_rules(
    local: LocalProcessExecutor, job: str, folder: Folder
) -> None:
    args: Any = {"numbers": {"loss": [9.0]}, "then": "wait", "attempts": 1}
    run = launch(local, f"{job}:report", 2, args=args, rules=["loss > 8 -> stop"], restarts=f"3,{QUICK}", timeout=120)
    run.wait(60)
    over(run)
    assert {end.reason for rank in range(2) for end in ends(run, rank)} == {"stopped"}
    (stop,) = decisions(run)
    assert (stop.kind, stop.why, stop.within_s) == ("stop", "rule", 60.0)
    assert stop.words.endswith("broke the rule 'loss > 8 -> stop': loss is 9 in report 1")
    (line,) = [each.line for each in run.status().decided if each.line.startswith("stopping")]
    assert line == f"stopping, within 60 s: {stop.words}"
    status = folder.replicas("status", run.run_id)
    assert stop.words in status.stdout
    assert folder.replicas("wait", run.run_id).code == 93, "starting it again without a change does not help"
    assert "rule broken: The rule 'loss > 8 -> stop' is broken" in folder.replicas("events", run.run_id).stdout
    resumed = resume(run, rules=["none"])
    resumed.wait(60)
    over(resumed)
    assert [each.attempt for each in resumed.status().rules] == [0, 0]
    assert resumed.status().status == "succeeded"
    assert "from here on: rules none" in folder.replicas("events", run.run_id).stdout


def test_the_rules_of_a_resume_hold_for_each_later_attempt_also_one_that_another_process_starts(
    local: LocalProcessExecutor, job: str
) -> None:
    # Attempt 0 breaks the rule of the launch. Attempt 1 has the rule of the resume, which restarts it once. So does
    # attempt 3, which another resume starts without rules.
    args: Any = {"numbers": {"loss": [9.0], "acc": [0.1]}, "then": "wait", "attempts": 5}
    run = launch(local, f"{job}:report", 1, args=args, rules=["loss > 8 -> stop"], restarts=f"9,{QUICK}", timeout=120)
    over(run)
    new = ["acc < 0.5 -> restart"]
    resumed = over(resume(run, rules=new, restarts=f"9,rule=1,{QUICK}"))
    over(resume(resumed))
    found = [(each.attempt, each.rule) for each in run.status().rules]
    assert sorted(found) == [(0, "loss > 8 -> stop"), *((attempt, new[0]) for attempt in range(1, 5))]
    with pytest.raises(ValueError, match=r"can restart nothing|needs restarts"):
        resume(resumed, rules=new, restarts="3,rule=0")
    assert [entry.rules for entry in decisions(run) if entry.rules is not None] == [tuple(new)]


def test_a_supervisor_that_restarts_a_rank_applies_the_newest_rules_of_the_log(
    local: LocalProcessExecutor, job: str
) -> None:
    args: Any = {"numbers": {"loss": [9.0]}, "then": "wait", "attempts": 1}
    rules = ["loss > 8", "loss nan"]
    run = launch(local, f"{job}:report", 1, args=args, rules=rules, restarts=f"5,{QUICK}", timeout=120)
    eventually(lambda: run.status().rules, "the rule of the launch is broken")
    order_policy(DecisionLog(view_of(run).store, run.run_id), rules=["log /CUDA error in attempt 1/"])
    os.kill(pid_of(run.handles[0]), signal.SIGKILL)
    over(run)
    found = [(each.attempt, each.rule) for each in findings(run) if each.is_broken]
    assert found == [(0, "loss > 8"), (1, "log /CUDA error in attempt 1/")]


def test_a_process_that_watches_starts_attempts_with_the_newest_rules_of_the_log(job: str, folder: Folder) -> None:
    args: Any = {"numbers": {"loss": [9.0]}, "then": "wait", "attempts": 1}
    run = launch("local", f"{job}:report", 1, args=args, rules=["loss > 8"], restarts=f"5,{QUICK}", detach=True)
    eventually(lambda: run.status().rules, "the rule of the launch is broken")
    order_policy(DecisionLog(view_of(run).store, run.run_id), rules=["log /CUDA error in attempt 1/"])
    os.kill(supervisor_of(run), signal.SIGKILL)
    eventually(lambda: not is_alive(pid_of(run.handles[0])), "the replica ends with its supervisor")
    watched = folder.replicas("watch", run.run_id)
    assert "ranks 0-0 succeeded" in watched.stdout or "rank 0 succeeded" in watched.stdout, (
        watched.stdout + watched.stderr
    )
    found = [(each.attempt, each.rule) for each in findings(run) if each.is_broken]
    assert found == [(0, "loss > 8"), (1, "log /CUDA error in attempt 1/")]


def test_the_last_reports_and_lines_of_an_attempt_count_also_if_it_ends_at_once(
    local: LocalProcessExecutor, job: str
) -> None:
    rules = ["loss > 8", "log /CUDA error in attempt 0$/", "los > 1", "no round 1s"]
    run = launch(local, f"{job}:report", 1, args={"numbers": {"loss": [9.0]}}, rules=rules, timeout=120)
    run.wait(60)
    over(run)
    assert lines(run) == [
        "0.0 The rule 'loss > 8' is broken: loss is 9 in report 1.",
        "0.0 The rule 'log /CUDA error in attempt 0$/' is broken: the line 'CUDA error in attempt 0'.",
        "0.0 The rule 'los > 1' cannot be judged: 'los' was not reported in any of the 1 reports.",
    ]


def test_a_stop_by_the_last_report_of_a_failed_attempt_comes_before_its_restart(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    (tmp_path / "dies.py").write_text(
        "import os\nfrom executors import current_replica\ndef main():\n"
        "    current_replica().report(loss=float('nan'))\n    os._exit(3)\n"
    )
    run = launch(local, f"{tmp_path}/dies.py:main", 1, rules=["loss nan -> stop"], restarts=f"3,{QUICK}", timeout=120)
    run.wait(60)
    over(run)
    assert [end.exit_code for end in ends(run, 0)] == [3], "the rank is not started again"
    assert [(entry.kind, entry.why) for entry in decisions(run)] == [("stop", "rule")]


def test_attempts_in_the_same_process_are_judged_apart(local: LocalProcessExecutor, job: str) -> None:
    rules = ["loss > 8", "loss < 5", "log /boom 1/"]
    run = over(launch(local, f"{job}:again", 1, rules=rules, restarts=f"5,{QUICK}", timeout=120))
    assert [end.how for end in ends(run, 0)] == [None, "process", "process"]
    assert [(each.index, each.attempt) for each in findings(run)] == [(0, 0), (1, 1), (1, 2), (2, 1)]
    assert "loss is 1 in report 1." in findings(run)[1].sentence


def test_each_process_of_a_replica_is_judged_and_the_restart_ends_all_of_them(
    local: LocalProcessExecutor, job: str, tmp_path: Path
) -> None:
    rule, args = "loss > 8 -> restart", {"folder": str(tmp_path)}
    run = launch(local, f"{job}:of_members", 1, args=args, procs=2, rules=[rule], restarts=f"2,{QUICK}", timeout=120)
    run.wait(100)
    over(run)
    first, second = ends(run, 0)
    assert (first.reason, second.status, second.result) == ("rule", "succeeded", 1)
    assert first.headline == f"The rule {rule!r} is broken: in member 1, loss is 9 in report 1."
    assert [(each.attempt, each.member) for each in findings(run)] == [(0, 1)]


def test_the_process_of_a_command_that_reports_is_judged(local: LocalProcessExecutor, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("from executors import current_replica\ncurrent_replica().report(loss=9.0)\n")
    command = [sys.executable, str(tmp_path / "program.py")]
    run = launch(local, command=command, n=1, rules=["loss > 8", "los > 1"], timeout=120)
    run.wait(100)
    over(run)
    assert [each.index for each in findings(run)] == [0, 1]


def test_a_broken_rule_and_an_unjudged_rule_are_one_notification_each(job: str, state_home: Path) -> None:
    with webhook() as hook:
        args: Any = {"numbers": {"loss": [9.0]}}
        rules = ["loss > 8", "los > 1"]
        run = launch("local", f"{job}:report", 2, args=args, rules=rules, notify=[hook.url], notify_on="rule,end")
        run.wait(60)
        hook.of("end")
        store = view_of(run).store
        ids = ["rule-0-0-0", "rule-1-0-0", "rule-unjudged-1"]
        names = {f"{run.run_id}/notices/{each}.sent.json" for each in ids}

        def is_sent() -> bool:
            return {"end-0"} <= {each["event"] for each in hook.messages} and any(
                entry.key in names for entry in store.list(f"{run.run_id}/notices/")
            )

        eventually(is_sent, "the notices are sent")
        told = " ".join(each["text"] for each in hook.messages)
        assert "Rank 0: The rule 'loss > 8' is broken: loss is 9 in report 1." in told
        assert len({each["event"] for each in hook.messages}) == len(hook.messages), "each event comes once"


def test_a_launch_refuses_a_rule_that_it_could_not_obey_before_anything_starts(folder: Folder) -> None:
    for words, message in (
        (["--rule", "loss >> 8"], "Did you mean 'loss > 8'?"),
        (["--rule", "loss > 8 -> restart"], "needs restarts (--restarts)"),
        (["--rule", "loss"], "In a shell, quotes keep > and < from redirecting the output"),
        (["--rule", "loss nan", "--backend", "inline"], "it has no process that supervises a replica"),
    ):
        done = folder.replicas("launch", "--n", "1", *words)
        assert (done.code, message in done.stderr) == (2, True), done.stderr
    assert folder.replicas("ls", "--json").json["runs"] == []


def test_records_about_rules_that_a_stranger_wrote_are_refused_by_name(
    local: LocalProcessExecutor, job: str, state_home: Path
) -> None:
    run = launch(local, f"{job}:report", 1, args={"numbers": {"loss": [9.0]}}, rules=["loss > 8"], timeout=120)
    run.wait(60)
    over(run)
    store = view_of(run).store
    for index, data in enumerate(NO_OBJECTS.values(), 1):
        store.put(f"{run.run_id}/replicas/0000/0/rules/{index}.json", data)
    copy = store.get(f"{run.run_id}/replicas/0000/0/rules/0.json")
    store.put(f"{run.run_id}/replicas/0000/0/rules/30.json", copy)  # its content names another rule
    assert [each.index for each in run.status().rules] == [0]
    assert [event.attempt for event in run.events() if event.kind == "rule_broken"] == [0]
