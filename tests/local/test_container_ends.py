"""The end of a replica in a container, and its restart there."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from servers.s3.server import S3Server
from support.processes import is_alive
from support.standalone_replicas import (
    NOTICE,
    StandaloneScene,
    cloud,
    ended,
    outcome_of,
    shared,
    ship,
    site,
    wait_for_line,
    workspace,
)

from executors import attach, open_store
from executors.attempt import Attempt
from executors.process import descendants
from executors.replica import NOTICE_S, SERVICE
from executors.restarts.decision_log import DecisionLog
from executors.settings.run_spec import RunSpec
from executors.store.url import address_of
from executors.task.command import Command

__all__ = ["cloud", "shared", "site", "workspace"]  # fixtures


def reported(spec: RunSpec) -> list[object]:
    """Return the reported numbers in the run's segments."""
    return [row.values for row in attach(address_of(spec.store_url, spec.run_id)).metrics().numbers]


def test_an_exception_leaves_its_traceback_and_the_end_of_the_output_and_an_exit_code_is_kept(
    site: StandaloneScene,
) -> None:
    spec, process = site.start("fails")
    code, out, err = ended(process)
    outcome = outcome_of(spec)
    assert (code, outcome.exit_code, outcome.reason) == (1, 1, "exception")
    assert outcome.headline == "ValueError: the user's own words"
    assert outcome.error_place == "tasks_of_user.py:10"
    assert str(outcome.error).rstrip() in out
    assert "executors/" not in str(outcome.error)
    assert out.startswith("about to fail\n")
    assert (outcome.output_tail, err) == (out, "")
    spec, process = site.start("leaves", run_id="leaves")
    assert ended(process)[0] == 5
    assert (outcome_of(spec).reason, outcome_of(spec).exit_code) == ("no_result", 5)
    assert outcome_of(spec).headline.endswith("a result. It printed: job.py: error: no --lr")


def test_the_last_64_kib_of_both_streams_are_kept_and_all_of_it_continues(site: StandaloneScene) -> None:
    spec, process = site.start("talks")
    code, out, err = ended(process)
    outcome = outcome_of(spec)
    assert (code, outcome.result) == (0, "")  # stdin must have no data
    assert out == "x" * 100_000 + "\nas bytes\non stderr: \N{OTTER}\nno newline", (
        "both streams are in one output, in order"
    )
    assert err == ""
    assert outcome.output_tail.endswith("xx\nas bytes\non stderr: \N{OTTER}\nno newline")
    assert len(outcome.output_tail.encode()) == 64 << 10


@pytest.mark.parametrize(("how", "number", "code"), [("kill", signal.SIGKILL, 137), ("segfault", signal.SIGSEGV, 139)])
def test_a_replica_that_dies_leaves_an_outcome_with_all_that_it_printed(
    site: StandaloneScene, how: str, number: signal.Signals, code: int
) -> None:
    spec, process = site.start("dies", args={"how": how})
    exit_code, out, _ = ended(process)
    outcome, error = outcome_of(spec), f"Replica 0 of 1 was ended by signal {number:d} ({number.name})."
    assert (exit_code, outcome.exit_code, outcome.reason, outcome.signal) == (code, -number, "signal", number.name)
    assert outcome.error == error
    assert outcome.output_tail == f"the last words\nhalf a line\n{error}\n"
    assert out.startswith("the last words\n")
    assert out.endswith(f"\n{error}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_notice_of_the_containers_end_runs_finally_and_is_in_the_outcome(
    site: StandaloneScene, number: signal.Signals
) -> None:
    spec, process = site.start("waits", 1, n=4)
    wait_for_line(process, "waiting")
    process.send_signal(number)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec, 1)
    assert (site.cloud.folder / "cleaned up").exists()
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", "signal", 143)
    assert (outcome.signal, outcome.notice) == (number.name, number.name)
    assert outcome.error == f"Replica 1 of 4 was terminated by {number.name}, not sent by `replicas`."
    assert outcome.output_tail == f"waiting\n{outcome.error}\n"
    assert reported(spec) == [{"step": 7}]


def test_a_service_that_signals_every_process_is_named_in_the_outcome(site: StandaloneScene) -> None:
    spec, process = site.start("waits", within=["env", f"{SERVICE}=Slurm", f"{NOTICE_S}=25"])
    wait_for_line(process, "waiting")
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGTERM)
    assert ended(process)[0] == 143
    assert outcome_of(spec).error == "Replica 0 of 1 was terminated by SIGTERM, sent by Slurm or its administrators."


def test_a_replica_that_holds_the_gil_leaves_an_outcome_at_its_time_limit(site: StandaloneScene) -> None:
    spec, process = site.start("holds_the_gil", timeout_s=3)
    assert ended(process)[0] == 124
    outcome = outcome_of(spec)
    assert (outcome.status, outcome.reason) == ("failed", "timeout")
    assert outcome.error == "Replica 0 of 1 ran into its time limit of 3 s."
    assert outcome.output_tail == f"holding\n{outcome.error}\n"


def test_a_replica_that_dies_comes_back_in_its_container(site: StandaloneScene) -> None:
    spec, process = site.start("comes_back", args={"times": 2}, restarts="2,backoff=0s")
    assert ended(process)[0] == 0
    ends = [outcome_of(replace(spec, attempt=number)) for number in range(3)]
    assert [(end.reason, end.result) for end in ends] == [("signal", None), ("signal", None), (None, 2)]
    assert [end.output_tail.splitlines()[0] for end in ends] == ["attempt 0", "attempt 1", "attempt 2"]
    assert attach(address_of(spec.store_url, spec.run_id)).results() == [2]
    assert len({end.pid for end in ends}) == 3


def test_a_restartable_entrypoint_is_called_again_by_the_same_process_of_its_container(site: StandaloneScene) -> None:
    spec, process = site.start("goes_on", args={"times": 2}, restarts="2,backoff=0s")
    assert ended(process)[0] == 0
    ends = [outcome_of(replace(spec, attempt=number)) for number in range(3)]
    assert [(end.reason, end.result) for end in ends] == [
        ("exception", None),
        ("exception", None),
        (None, "ValueError: boom"),
    ]
    assert [end.output_tail.splitlines()[0] for end in ends] == ["attempt 0", "attempt 1", "attempt 2"]
    assert [end.how for end in ends] == [None, "process", "process"]
    assert len({end.pid for end in ends}) == 1


def test_a_container_whose_replica_is_given_up_has_the_exit_code_of_its_last_end(site: StandaloneScene) -> None:
    spec, process = site.start("comes_back", args={"times": 9}, restarts="1,backoff=0s")
    assert ended(process)[0] == 137
    log = DecisionLog(open_store(spec.store_url), spec.run_id).read()
    assert [(entry.kind, entry.ended, entry.how, entry.why) for entry in log] == [
        ("restart", 0, "fork", ""),
        ("give_up", 1, None, "budget"),
    ]


def test_a_hang_is_ended_and_the_replica_comes_back_in_its_container(site: StandaloneScene) -> None:
    spec, process = site.start("holds_the_gil", restarts="1,backoff=0s", hang_timeout="1s:2s")
    code, out, _ = ended(process)
    first, second = (outcome_of(replace(spec, attempt=number)) for number in (0, 1))
    assert (code, second.result) == (0, "came back")
    assert (first.reason, first.reached, first.progress_marks) == ("hang", {"step": 7}, 1)
    assert "made no progress for" in str(first.error)
    assert "the GIL is held by a call" in str(first.error)
    assert "in holds_the_gil" in out, "the stacks"


def test_a_replica_that_the_kernel_killed_for_lack_of_memory_reports_that(
    site: StandaloneScene, small_memory: Path
) -> None:
    join = f'echo $$ > {small_memory}/cgroup.procs && exec "$@"'
    spec, process = site.start("takes_memory", within=("sh", "-c", join, "sh"))
    assert ended(process)[0] == 137
    outcome = outcome_of(spec)
    assert (outcome.reason, outcome.exit_code) == ("oom", -signal.SIGKILL)
    assert outcome.output_tail == f"taking\n{outcome.error}\n"


def test_the_kernel_takes_the_replica_before_its_supervisor(site: StandaloneScene) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    spec, process = site.start("shows")
    assert ended(process)[0] == 0
    assert outcome_of(spec).result[0] == str(min(1000, own + 500))


def test_a_replica_runs_and_restarts_even_if_processes_and_control_groups_are_hidden(
    site: StandaloneScene, s3: S3Server
) -> None:
    hide = 'mount -t tmpfs none /proc && mount -t tmpfs none /sys && exec "$@"'
    sandbox = ("unshare", "-rm", "sh", "-c", hide, "sh")
    if subprocess.run([*sandbox, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this process cannot mount file systems")
    spec = ship(s3.url("runs"), site.workspace, "tasks_of_user:comes_back", {"times": 1})
    spec = spec.with_settings(restarts="1,backoff=0s")
    code, out, err = ended(site.cloud.start(spec, within=sandbox))
    assert code == 0, out + err
    assert outcome_of(spec).reason == "signal"
    assert outcome_of(replace(spec, attempt=1)).result == 1


def test_an_attached_run_that_no_process_watches_ends(site: StandaloneScene) -> None:
    spec, process = site.start("waits", lease_s=1.0)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec)
    assert (outcome.status, outcome.reason) == ("cancelled", "cancelled")
    assert outcome.error == (
        "Replica 0 was ended: no process watched this attached run for 0.0167 min; launch with --detach for a run that "
        "continues alone."
    )


def test_after_a_notice_nothing_comes_back(site: StandaloneScene) -> None:
    spec, process = site.start("waits", restarts="3")
    wait_for_line(process, "waiting")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert outcome_of(spec).notice == "SIGTERM"
    assert DecisionLog(open_store(spec.store_url), spec.run_id).read() == []


def test_a_second_sigterm_does_not_cost_the_outcome(site: StandaloneScene) -> None:
    spec, process = site.start("cleans_slowly")
    for line in ("waiting", "cleaning"):
        wait_for_line(process, line)
        process.send_signal(signal.SIGTERM)
    (site.cloud.folder / "go on").touch()
    assert ended(process)[0] == 143
    assert outcome_of(spec).reason == "signal"


def test_a_cancel_marker_makes_sigterm_a_cancellation_and_keeps_a_late_replica_from_starting(
    site: StandaloneScene,
) -> None:
    spec, process = site.start("waits")
    wait_for_line(process, "waiting")
    Attempt(open_store(site.shared), spec.run_id, 0).request_cancel()
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec)
    assert (outcome.status, outcome.reason) == ("cancelled", "cancelled")
    assert outcome.error == "Replica 0 was ended: cancelled by the user."
    assert reported(spec) == [{"step": 7}]
    spec = ship(site.shared, site.workspace, "tasks_of_user:waits", run_id="late")
    Attempt(open_store(site.shared), spec.run_id, 0).request_cancel()
    assert ended(site.cloud.start(spec)) == (143, "", "")
    assert outcome_of(spec).status == "cancelled"


def test_a_time_limit_ends_the_replica_and_its_finally_blocks_run(site: StandaloneScene) -> None:
    spec, process = site.start("waits", 1, n=4, timeout_s=2.5)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec, 1)
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", "timeout", 143)
    assert outcome.error == "Replica 1 of 4 ran into its time limit of 2.5 s."


def test_a_replica_that_ignores_sigterm_is_ended_with_all_it_started(site: StandaloneScene) -> None:
    helper = site.cloud.folder / "helper"
    # the shortest time in which a replica on this machine reaches the point at which it ignores SIGTERM
    for timeout_s in (2, 8, 32):
        spec, process = site.start("ignores", timeout_s=timeout_s, run_id=f"limit-{timeout_s}")
        code, out, _ = ended(process)
        if helper.exists():
            break
    outcome = outcome_of(spec)
    assert (code, outcome.reason, outcome.exit_code) == (124, "timeout", -signal.SIGKILL)
    assert outcome.error == f"Replica 0 of 1 ran into its time limit of {timeout_s} s."
    assert outcome.output_tail == out == f"ignoring\n{outcome.error}\n"
    assert reported(spec) == [{"step": 7}]
    assert not is_alive(int(helper.read_text()))


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_the_outcome_of_a_replica_out_of_time_has_all_that_it_printed_and_how_it_ended_last(
    site: StandaloneScene, ignores_sigterm: bool
) -> None:
    args = {"ignores_sigterm": ignores_sigterm}
    spec = ship(site.shared, site.workspace, "tasks_of_user:half_a_line", args)
    _, out, _ = ended(site.cloud.start(spec, timeout_s=3))
    outcome, how = outcome_of(spec), "Replica 0 of 1 ran into its time limit of 3 s."
    assert outcome.error == how
    assert outcome.output_tail == f"a line\nhalf a line\n{how}\n"
    assert ignores_sigterm or out == outcome.output_tail


def test_the_time_limit_counts_from_the_start_of_the_entrypoint(site: StandaloneScene) -> None:
    spec = ship(site.shared, site.workspace, "tasks_of_user:talks")
    process = site.cloud.start(spec, timeout_s=1000.0, environ={"REPLICA_BOOTSTRAP_S": "999.999"})
    assert ended(process)[0] == 0, "the replica succeeds, although the installation took as long as the limit"


def test_the_outcome_of_a_command_in_a_container_has_the_end_of_its_output(site: StandaloneScene) -> None:
    # The process that is left behind keeps the pipe of the output open.
    script = "sleep 600 & head -c 100000 /dev/zero | tr '\\0' x; echo; echo 'Error: too few apples' >&2; exit 7"
    spec = ship(site.shared, site.workspace, Command.of(["sh", "-c", script]))
    process = site.cloud.start(spec, environ=NOTICE)
    code, out, _ = ended(process)
    outcome = outcome_of(spec)
    assert (code, outcome.exit_code, outcome.reason) == (7, 7, "no_result")
    assert outcome.headline.endswith("ended with exit code 7. It printed: Error: too few apples")
    assert out.startswith("x" * 100_000 + "\nError: too few apples\n")
    assert "xx\nError: too few apples\n" in outcome.output_tail


def test_a_notice_ends_all_processes_of_a_replica_and_names_none_as_the_cause(site: StandaloneScene) -> None:
    spec, process = site.start("waits", procs="2")
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[1] waiting\n", "waiting\n"]
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    outcome = outcome_of(spec)
    assert (outcome.reason, outcome.exit_code, outcome.notice, outcome.member) == ("signal", 143, "SIGTERM", None)
    assert outcome.error == "Replica 0 of 1 was terminated by SIGTERM, not sent by `replicas`."
    assert [end.exit_code for end in outcome.members] == [143, 143]
