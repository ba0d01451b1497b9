"""Tests ranks that hang, in real processes: the messages, the stored stacks, and their ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.hanging import COMPUTES, HANGS, SHORT, Watched, kill, start, watch

from executors import LocalProcessExecutor, current_replica, launch
from executors.process import CAN_FORK, HANG_SIGNAL, STACKS_SIGNAL, activity
from executors.replica import Replica
from executors.replica.shared_page import SharedPage
from executors.restarts.decision_log import DecisionLog
from executors.run.resume import resume
from executors.run.run import view_of
from executors.supervisor import watchdog
from executors.supervisor.stacks_request import StacksRequest, open_stacks_file
from executors.testing.helpers import eventually
from executors.worker.watched import start_watch

SOFT_S, HARD_S = 4, 7
HELD = "the GIL is held by a call that "
WAITS = "the main thread waits in a call: hanging.py:"
FOUND = {
    "sleep with the GIL": (HELD + "waits", "in sleep_with_the_gil", 3),
    "regular expression": (HELD + "computes", "in search_back_and_forth", 3),
    "lock": (WAITS, "in take_a_lock_twice", 3),
    "mutex with the GIL": (HELD + "waits", "in take_a_mutex_twice", -signal.SIGKILL),
    "mutex": (WAITS, "in take_a_mutex_twice", -signal.SIGKILL),
    "loop": ("the main thread runs Python code: hanging.py:", "in loop_for_ever", 3),
    "recv": (WAITS, "in receive_nothing", 3),
    "stopped": ("stopped by SIGSTOP", "", -signal.SIGKILL),
    "poll": ("the main thread runs Python code: hanging.py:", "in poll_for_ever", 3),
    "fork": (WAITS, "in wait_for_a_child_that_waits", 3),
    "data loader": (WAITS, "in wait_for_a_worker_that_waits", 3),
    "import": ("the main thread waits in a call: waits_at_import.py:2", "in import_a_module_that_waits", 3),
}
"""The message, a frame in the stacks, and the exit code: 3 if HangError was raised."""


def hang_after_two_steps(kind: str, replica: Replica) -> None:
    replica.report(step=811)
    replica.report(step=812)
    HANGS[kind]()


def go_on_slowly(replica: Replica) -> None:
    for step in range(7):
        replica.report(step=step)
        time.sleep(SOFT_S / 4)


def take_long_for_the_first_step(replica: Replica) -> None:
    time.sleep(SOFT_S + 2)
    replica.report(step=0)


def wait_for_others(replica: Replica) -> None:
    replica.report(step=0)
    with replica.section("round", float("inf")):
        time.sleep(SOFT_S + 2)


def compute_in_c(replica: Replica) -> None:
    replica.report(step=0)
    with replica.unwatched():
        left_s = SOFT_S + 2
        while left_s:
            left_s = ctypes.PyDLL(None).sleep(left_s)


def be_slow_where_it_may(replica: Replica) -> None:
    replica.report(step=0)
    with replica.section("evaluate", SOFT_S + 10):
        time.sleep(SOFT_S + 2)


FINE = [go_on_slowly, take_long_for_the_first_step, wait_for_others, compute_in_c, be_slow_where_it_may]


@pytest.fixture(scope="module")
def hung() -> dict[str, Watched]:
    """Run all kinds of hang at the same time, because each takes some seconds."""
    # On a loaded machine, a rank may need seconds to end by its HangError. It must not be killed before.
    ends = {kind: HARD_S if FOUND[kind][2] == -signal.SIGKILL else 60 for kind in HANGS}
    ranks = {kind: start(partial(hang_after_two_steps, kind), f"{SOFT_S}s:{ends[kind]}s") for kind in HANGS}
    ranks |= {task.__name__: start(task, f"{SOFT_S}s:{HARD_S}s") for task in FINE}
    watch(list(ranks.values()))
    return ranks


@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_is_named_and_its_stacks_say_where_before_it_is_ended(kind: str, hung: dict[str, Watched]) -> None:
    rank, (diagnosis, frame, exit_code) = hung[kind], FOUND[kind]
    for report in rank.reports:
        assert report.sentence.startswith("Replica 3 of 8 made no progress for ")
        assert f" after step 812 (limit {SOFT_S} s, --hang-timeout): {diagnosis}" in report.sentence
    dumps = [report.stacks for report in rank.reports if report.stacks]
    assert len(dumps) == (0 if kind == "stopped" else 2), (
        "there are two dumps, so that a user can tell a stuck process from a slow one"
    )
    for dump in dumps:
        first, _, stacks = dump.partition("\n")
        assert diagnosis in first
        assert frame in stacks
    assert rank.exit_code == exit_code
    assert rank.reports[-1].is_kill == (exit_code == -signal.SIGKILL)
    assert ("replicas logs RUN -r 3 --stacks" in rank.reports[-1].sentence) == bool(dumps)


# With shortened defaults: an idle rank is ended after 4 s, and an active rank after 14 s.


def be_known(replica: Replica) -> None:
    """Make enough marks that the limits of a known section count."""
    for step in range(9):
        replica.report(step=step)


def hang(kind: str, replica: Replica) -> None:
    be_known(replica)
    HANGS[kind]()


def hang_at_the_start(kind: str, _: Replica) -> None:
    HANGS[kind]()


def hang_in_a_round(replica: Replica) -> None:
    """Hang in one call of a store that never answers."""
    be_known(replica)
    with replica.section("round", math.inf):
        HANGS["recv"]()


def hang_at_the_end(replica: Replica) -> None:
    be_known(replica)
    replica.finish_training()
    HANGS["recv"]()


EVALUATION_S = SHORT.idle_s + 3


def evaluate(replica: Replica) -> None:
    be_known(replica)
    spin(EVALUATION_S)


def evaluate_in_a_subprocess(replica: Replica) -> None:
    be_known(replica)
    subprocess.run([sys.executable, "-c", f"import time\nend = time.monotonic() + {EVALUATION_S}\n{SPIN}"], check=True)


def evaluate_in_another_thread(replica: Replica) -> None:
    be_known(replica)
    thread = threading.Thread(target=spin, args=(EVALUATION_S,))
    thread.start()
    thread.join()


def upload_from_memory(replica: Replica) -> None:
    be_known(replica)
    here, there = tcp_pair()
    threading.Thread(target=lambda: [None for _ in iter(lambda: there.recv(65536), b"")], daemon=True).start()
    end = time.monotonic() + EVALUATION_S
    while time.monotonic() < end:
        here.sendall(b"x" * 20_000)
        time.sleep(0.05)


def save_to_a_slow_disk(replica: Replica) -> None:
    be_known(replica)
    end = time.monotonic() + EVALUATION_S
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.write(b"x" * 20_000)
            file.flush()
            time.sleep(0.05)


def evaluate_for_long_after_the_end(replica: Replica) -> None:
    be_known(replica)
    replica.finish_training()
    spin(SHORT.active_s + 3)


def wait_for_others_for_long(replica: Replica) -> None:
    be_known(replica)
    end = time.monotonic() + SHORT.active_s + 3
    with replica.section("round", math.inf):
        while time.monotonic() < end:
            time.sleep(0.1)


def sleep_for_ever() -> None:
    time.sleep(600)


def compute_for_ever() -> None:
    while True:
        pass


def compute_and_never_report(_: Replica) -> None:
    spin(SHORT.active_s + 3)


SPIN = "while time.monotonic() < end: pass"


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]


WORK = [
    evaluate, evaluate_in_a_subprocess, evaluate_in_another_thread, upload_from_memory, save_to_a_slow_disk,
    evaluate_for_long_after_the_end, wait_for_others_for_long, compute_and_never_report,
]  # fmt: skip
IN_STATES: dict[str, tuple[Callable[[Replica], None], str]] = {
    "in a round": (hang_in_a_round, "auto"),
    "after the last DiLoCo": (hang_at_the_end, "auto"),
    "after the last DiLoCo, --hang-timeout": (hang_at_the_end, "1s:2s"),
    "at the start": (partial(hang_at_the_start, "import"), "auto"),
    "at the start, --start-timeout": (partial(hang_at_the_start, "poll"), "auto,start=3s"),
    "at the start, computing, --start-timeout": (partial(hang_at_the_start, "loop"), "auto,start=3s"),
}
ENDED_WITHIN_S = {
    "in a round": (SHORT.call_s, 1.5 * SHORT.call_s),
    "after the last DiLoCo": (SHORT.unknown_idle_s, SHORT.unknown_idle_s + SHORT.kill_after_s),
    "after the last DiLoCo, --hang-timeout": (SHORT.unknown_idle_s, SHORT.unknown_idle_s + SHORT.kill_after_s),
    "at the start": (SHORT.unknown_idle_s, SHORT.unknown_idle_s + SHORT.kill_after_s),
    "at the start, --start-timeout": (3.0, 4.5),
    "at the start, computing, --start-timeout": (3.0, 4.5),
}
"""The soft and the hard limit of each section."""


@pytest.fixture(scope="module")
def judged() -> dict[str, Watched]:
    """Run all of them with the default limits, and as many at the same time as this system can measure."""
    scenes: dict[str, tuple[Callable[[Replica], None], str]] = {kind: (partial(hang, kind), "auto") for kind in HANGS}
    scenes |= IN_STATES | {task.__name__: (task, "auto") for task in WORK}
    # Without /proc a sample takes 20 times as long, and with 25 ranks each look would be late.
    n = len(scenes) if CAN_FORK else 4
    ranks: dict[str, Watched] = {}
    for first in range(0, len(scenes), n):
        names = list(scenes)[first : first + n]
        started = {name: start(*scenes[name]) for name in names}
        watch(list(started.values()), for_s=120)
        ranks |= started
    return ranks


@pytest.mark.parametrize("kind", [kind for kind in HANGS if kind not in COMPUTES])
def test_a_rank_that_waits_is_ended_as_idle(kind: str, judged: dict[str, Watched]) -> None:
    rank = judged[kind]
    assert rank.exit_code in (3, -signal.SIGKILL)
    assert re.search(rf"was idle for \d+ s after step 8 \(limit {SHORT.idle_s:g} s\)", rank.reports[0].sentence)
    assert 'replica.section("evaluate", limit_s=' in rank.reports[0].sentence
    assert kind == "stopped" or any(report.stacks for report in rank.reports), "the report has the stacks"


@pytest.mark.parametrize("kind", COMPUTES)
def test_a_rank_that_computes_without_progress_is_ended_later(kind: str, judged: dict[str, Watched]) -> None:
    rank = judged[kind]
    assert rank.exit_code == 3
    expected = rf"worked without progress for \d+ s after step 8 \(limit {SHORT.active_s:g} s\)"
    assert re.search(expected, rank.reports[0].sentence)
    assert rank.reports[0].stacks


@pytest.mark.parametrize("state", IN_STATES)
def test_a_hang_in_any_state_is_ended_with_its_stacks_kept(state: str, judged: dict[str, Watched]) -> None:
    rank, (soft_s, _) = judged[state], ENDED_WITHIN_S[state]
    assert rank.exit_code == 3
    assert f"(limit {soft_s:g} s" in rank.reports[0].sentence
    assert rank.reports[0].stacks


@pytest.mark.parametrize("task", WORK)
def test_work_without_reports_is_not_ended(task: Callable[[Replica], None], judged: dict[str, Watched]) -> None:
    rank = judged[task.__name__]
    assert (rank.reports, rank.exit_code) == ([], 0)


@pytest.mark.parametrize("task", FINE)
def test_work_that_continues_or_may_be_slow_is_not_ended(task: object, hung: dict[str, Watched]) -> None:
    rank = hung[getattr(task, "__name__", "")]
    assert (rank.reports, rank.exit_code) == ([], 0)


def test_an_atomic_part_is_finished_before_the_error_is_raised(tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    def save(replica: Replica) -> None:
        replica.report(step=0)
        with replica.atomic():
            while not replica.page.deferred:  # type: ignore[union-attr]
                time.sleep(0.01)
            saved.write_text("whole")
        time.sleep(60)

    rank = start(save, "1s:60s")
    watch([rank])
    assert (saved.read_text(), rank.exit_code) == ("whole", 3)


def test_a_rank_that_swallows_the_error_is_killed_after_its_grace() -> None:
    def swallow(replica: Replica) -> None:
        replica.report(step=0)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)

    rank = start(swallow, "1s:60s")
    watch([rank])
    assert rank.exit_code == -signal.SIGKILL


def test_an_error_that_python_ignores_in_a_finalizer_is_raised_again() -> None:
    """For example, a data loader joins its processes in its finalizer."""

    class Loader:
        def __del__(self) -> None:
            os.kill(os.getpid(), HANG_SIGNAL)  # as the watchdog does it
            time.sleep(60)

    pid = os.fork()
    if pid == 0:
        found = "no error"
        try:
            page = SharedPage()
            start_watch(page)
            page.note_hang("it hangs")
            loader = Loader()
            del loader
            time.sleep(60)
        except BaseException as error:  # noqa: BLE001 - of a process that ends here
            found = f"{type(error).__name__}: {error}"
        finally:
            os._exit(0 if found == "HangError: it hangs" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_helper_that_a_rank_forks_is_not_watched() -> None:
    def fork_a_helper(replica: Replica) -> None:
        replica.report(step=0)
        pid = os.fork()
        if pid == 0:
            replica.progress(kept=True)
            os._exit(0 if signal.getsignal(HANG_SIGNAL) is signal.SIG_DFL else 1)
        assert os.waitpid(pid, 0)[1] == 0

    rank = start(fork_a_helper, "off")
    watch([rank])
    assert (rank.exit_code, rank.page.progress_marks, rank.page.saved_marks) == (0, 1, 0)


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb")
def test_a_rank_that_is_debugged_is_not_judged() -> None:
    rank = start(partial(hang_after_two_steps, "recv"), "2s")
    gdb = subprocess.Popen(
        ["gdb", "-q", "-nx", "-p", str(rank.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    eventually(lambda: (seen := activity(rank.pid)) is not None and seen.is_traced)
    watch([rank], for_s=3.5)
    kill(rank)
    gdb.kill()
    gdb.communicate()
    os.waitpid(rank.pid, 0)
    assert rank.reports == []


def test_a_rank_that_stays_in_an_atomic_part_is_ended_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ATOMIC_LIMIT_S", 2.0)

    def stay(replica: Replica) -> None:
        replica.report(step=0)
        with replica.atomic():
            time.sleep(600)

    rank = start(stay, "1s:2s")
    watch([rank])
    assert (rank.exit_code, rank.reports[-1].is_kill) == (-signal.SIGKILL, True)


def test_an_outcome_has_the_progress_of_its_attempt_and_a_fingerprint_of_its_failure(
    local: LocalProcessExecutor,
) -> None:
    def fail_at_a_step(step: int) -> None:
        replica = current_replica()
        replica.report(step=step, loss=1.0)
        replica.progress(kept=True)
        raise ValueError(f"nothing at {step}")

    runs = [launch(local, fail_at_a_step, 1, args={"step": step}) for step in (3, 4)]
    ends = [run.outcomes()[0] for run in runs if run.wait()]
    assert [(end.progress_marks, end.saved_marks, end.reached) for end in ends] == [
        (2, 1, {"step": 3}),
        (2, 1, {"step": 4}),
    ]
    assert ends[0].fingerprint == ends[1].fingerprint
    assert ends[0].fingerprint


def test_a_file_that_has_the_number_of_the_stacks_is_left_alone(tmp_path: Path) -> None:
    def close_all_and_open(replica: Replica) -> None:
        os.closerange(3, 1000)
        assert replica.page is not None
        files = [(tmp_path / "0").open("w")]
        while files[-1].fileno() < replica.page.stacks_file:
            files.append((tmp_path / str(len(files))).open("w"))
        replica.report(step=0)
        HANGS["loop"]()

    rank = start(close_all_and_open, "1s:2s")
    watch([rank])
    assert rank.exit_code == 3
    assert [report.stacks for report in rank.reports] == [None, None]
    assert {file.read_text() for file in tmp_path.iterdir()} == {""}


def run_code_in_threads(replica: Replica) -> None:
    def recurse(n: int) -> int:
        return recurse(n - 1) + 1 if n else int(json.loads(json.dumps([n]))[0])

    def work() -> None:
        while True:
            recurse(5)
            exec("def own(n):\n    return n + 1\nown(1)", {})

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(600)


def test_dumps_of_the_stacks_do_not_end_a_process_whose_threads_run_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.worker.watched.BEAT_S", 0.001)
    rank = start(run_code_in_threads, "600s:700s")
    while not rank.page.ready:
        time.sleep(0.01)
    for _ in range(100):
        file = open_stacks_file(rank.page, rank.pid, is_rank=True)
        assert file is not None
        os.ftruncate(file, 0)
        # If each request was a signal, about one in thirty of these dumps would crash the process.
        request = StacksRequest(rank.page, file, time.monotonic(), lambda: os.kill(rank.pid, STACKS_SIGNAL))
        while not request.is_complete(time.monotonic()):
            time.sleep(0.001)
        assert "in run_code_in_threads" in request.read()
        request.close()
    kill(rank)
    os.waitpid(rank.pid, 0)


@pytest.mark.parametrize("task", [sleep_for_ever, compute_for_ever])
def test_a_start_that_never_ends_is_ended_at_its_limit_with_its_stacks_kept(
    task: Callable[[], None], local: LocalProcessExecutor
) -> None:
    limit = 1 if CAN_FORK else 5  # a new Python has no stacks before it has imported our packages
    run = launch(local, task, 1, start_timeout=f"{limit}s")
    assert run.wait(60)
    (end,) = run.outcomes()
    assert (end.status, end.reason, end.progress_marks) == ("failed", "hang", 0)
    assert "made no first progress" in str(end.error)
    assert f"(limit {limit} s, --start-timeout)" in str(end.error)
    assert end.stacks
    stacks = bytes(view_of(run).store.get(f"{run.run_id}/replicas/0000/0/{end.stacks[0]}")).decode()
    assert "most recent call first" in stacks


def test_a_limit_of_the_start_that_a_resume_gives_counts_from_there_on(local: LocalProcessExecutor) -> None:
    run = launch(local, sleep_for_ever, 1, start_timeout="1s", hang_timeout="5m")
    assert run.wait(60)
    again = resume(run, start_timeout="2s")
    assert again.wait(60)
    (end,) = again.outcomes()
    assert (end.attempt, end.reason) == (1, "hang")
    assert "(limit 2 s, --start-timeout)" in str(end.error)
    last = DecisionLog(view_of(again).store, again.run_id).read()
    assert [entry.hang for entry in last if entry.kind == "policy"] == ["300s:450s,start=2s"]
