"""Several processes in one replica: the member to blame, the number of members, their port and their lines."""

from __future__ import annotations

import io
import signal
import socket

import pytest
from support.new_runs import run_spec

from executors.attempt.outcome import encode_outcome, parse_outcome
from executors.protocol import MemberEnd, Outcome, ReplicaStatus
from executors.replica.shared_page import SharedPage
from executors.settings import Settings
from executors.settings.policy import HangLimits
from executors.supervisor.members import Member, NoGpuToCountError, count_members, find_cause, merge_ends, reserve_port
from executors.supervisor.watchdog import Watchdog
from executors.worker.process_group import LineWriter

ABORTED, KILLED = -signal.SIGABRT, -signal.SIGKILL


def member(number: int, code: int, at: float, raised_at: float = 0.0, *, asked: bool = False) -> Member:
    page = SharedPage()
    page.raised_at = raised_at
    spec = run_spec("run", "memory:", "", 1, (0,))
    watchdog = Watchdog(page, 1, HangLimits(), ends=True, term_grace_s=1.0, spec=spec, rank=0)
    return Member(number, 1, page, watchdog, exit_code=code, ended_at=at, was_asked=asked)


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ([member(0, 1, 2.0, raised_at=1.5), member(1, KILLED, 2.1)], 1),
        ([member(0, 1, 2.0, raised_at=1.5), member(1, 1, 1.9, raised_at=1.6)], 0),
        ([member(0, ABORTED, 1.0), member(1, 1, 2.0, raised_at=0.5)], 1),
        ([member(0, 1, 2.0, raised_at=1.5), member(1, 7, 2.1)], 1),
        ([member(0, 143, 1.0, asked=True), member(1, 7, 2.1, raised_at=0.9)], 1),
        ([member(0, 0, 1.0), member(1, 0, 2.1)], None),
    ],
)
def test_the_member_that_vanished_is_the_cause_and_else_the_one_that_raised_first(
    members: list[Member], cause: int | None
) -> None:
    found = find_cause(members)
    assert (None if found is None else found.number) == cause


def test_the_outcome_names_members_that_had_ended_with_0_before_a_collective_of_the_others_failed() -> None:
    """The error of the collective says only that a connection was closed."""
    failed, early, late = member(0, 1, 2.0, raised_at=1.5), member(1, 0, 2.1), member(2, 0, 1.9)
    early.page.left_at = 1.4
    line = "RuntimeError: Connection closed by peer"
    failed.end = Outcome(0, 0, ReplicaStatus.FAILED, "exception", error=f"Traceback\n{line}", error_line=line)
    found = merge_ends([failed, early, late], failed)
    assert found is not None
    assert found.error_line == f"Member 0 of 3 (after member 1 ended with exit code 0): {line}"
    first = "Member 0 of 3 failed first, after member 1 ended with exit code 0.\nTraceback\n"
    assert str(found.error).startswith(first)


def test_the_line_of_a_member_that_left_by_an_exit_code_names_the_member() -> None:
    failed = member(1, 3, 2.0, raised_at=1.5)
    failed.end = Outcome(0, 0, ReplicaStatus.FAILED, "no_result", error="It ended with exit code 3.\nIt printed: x")
    found = merge_ends([member(0, 143, 2.1, asked=True), failed], failed)
    assert found is not None
    assert found.error_line == "Member 1 of 2: It ended with exit code 3."


@pytest.mark.parametrize(
    ("procs", "gpu", "devices", "n"),
    [
        (None, "H100:8", None, 1),
        ("3", None, None, 3),
        ("gpu", "H100:8", "", 8),
        ("gpu", None, "0,1", 2),
        ("auto", None, "", 1),
        ("auto", None, "-1", 1),
        ("auto", "H100", "3", 1),
    ],
)
def test_the_members_are_counted_from_the_setting_or_from_the_gpus(
    procs: str | None, gpu: str | None, devices: str | None, n: int
) -> None:
    assert count_members(procs, gpu, devices) == n


def test_procs_by_gpu_without_a_gpu_is_an_error() -> None:
    with pytest.raises(
        NoGpuToCountError, match=r"^procs=gpu: this replica sees no GPU; give a number \(--procs 2\), or auto$"
    ):
        count_members("gpu", None, "")


@pytest.mark.parametrize("value", [0, -1, 1025, "two", "", "1.5", True, 2.0])
def test_a_number_of_processes_that_cannot_be_is_refused(value: object) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"^procs \(--procs\) must be a number from 1 to 1024, 'gpu' or 'auto'"
    ):
        Settings.of(n=1, procs=value)


def test_only_a_program_that_asks_for_the_reserved_port_gets_it() -> None:
    reserved = reserve_port()
    port = reserved.getsockname()[1]
    with reserved, socket.socket(reserved.family) as of_torch, socket.socket(reserved.family) as strange:
        with pytest.raises(OSError, match="in use"):
            strange.bind(("", port))
        of_torch.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        of_torch.bind(("", port))
        of_torch.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_each_line_gets_the_prefix_once_however_it_was_written() -> None:
    written = io.BytesIO()
    lines = LineWriter(written.write, b"[1] ")
    for part in (b"a", b" b\nc\n", b"\n", b"10%\r20%"):
        lines.write(part)
    assert written.getvalue() == b"[1] a b\n[1] c\n[1] \n", "half a line is printed when its rest has come"
    lines.flush()
    lines.write(b"\r30%\nd\n")
    assert written.getvalue() == b"[1] a b\n[1] c\n[1] \n[1] 10%\r20%\r30%\n[1] d\n"


def test_an_outcome_keeps_the_ends_of_all_members_and_one_process_leaves_no_trace_of_them() -> None:
    ends = (MemberEnd(11, 1, None, "ValueError: no luck"), MemberEnd(12, KILLED, "SIGKILL"))
    outcome = Outcome(0, 0, ReplicaStatus.FAILED, "signal", member=1, members=ends)
    assert parse_outcome(encode_outcome(outcome)) == outcome
    assert b"member" not in encode_outcome(Outcome(0, 0, ReplicaStatus.SUCCEEDED))
