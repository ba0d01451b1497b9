"""Replicas are new processes if the process that would fork them has threads that a fork would lose."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest
from servers.isolation.gpu import write_torch

from executors import LocalProcessExecutor, ReplicaStatus, launch
from executors.errors import EntrypointError
from executors.process import threads_lost_by_a_fork
from executors.replica.shared_page import SharedPage
from executors.testing import eventually

PYTHON_THREAD = """
import os, threading
PID = os.getpid()
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
NATIVE_THREAD = """
import ctypes, os
PID = os.getpid()
libc = ctypes.CDLL(None)
thread = ctypes.c_ulong()
# A thread that Python knows nothing of: it waits in pause() for ever.
assert libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.pause, ctypes.c_void_p), None) == 0
"""
JOB = """
import os, signal, threading, time
from pathlib import Path
from executors import current_replica

def main(mode="", steps=3):
    import threaded
    replica = current_replica()
    print("rank", replica.rank, "attempt", replica.attempt, flush=True)
    if mode == "dies" and replica.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "waits":
        replica.report(step=7)
        try:
            threading.Event().wait()
        finally:
            print("cleaned up", flush=True)
    if mode == "hangs":
        replica.report(step=1)
        while True:
            time.sleep(0.01)
    while "until" in mode and not Path("go").exists():
        replica.report(step=1)
        time.sleep(0.02)
    for step in range(steps):
        replica.report(step=step + 1, total_steps=steps)
    return [replica.rank, replica.attempt, threaded.PID == os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")]
"""


@pytest.fixture(params=[PYTHON_THREAD, NATIVE_THREAD], ids=["python", "native"])
def threaded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, and a module that starts a thread when it is imported."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work/threaded.py").write_text(request.param)
    (tmp_path / "work/job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "work")
    return tmp_path / "work"


def executor(**options: object) -> LocalProcessExecutor:
    more: dict[str, object] = {"preload": ("json", "threaded"), "term_grace_s": 0.5, **options}
    return LocalProcessExecutor(**more)  # type: ignore[arg-type]


def test_replicas_do_not_hang_if_a_preloaded_module_starts_a_thread(
    threaded: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = launch(executor(), "job.py", 2)
    assert run.results() == [[0, 0, True, None], [1, 0, True, None]], (
        "each replica has imported the module in its own process"
    )
    assert run.logs(rank=1).splitlines() == ["rank 1 attempt 0"]
    said = [line for line in capfd.readouterr().err.splitlines() if "fork" in line]
    assert len(said) == 1, "the line is printed once for each run"
    assert re.fullmatch(
        r"replicas: importing json, threaded started a thread \(\S+\), which a fork would lose\. So each replica is a "
        r"new process and imports by itself\. To fork them, remove it from the backend's option preload\.",
        said[0],
    )


def test_a_callable_travels_too_and_a_bad_entrypoint_is_refused_before_anything_starts(threaded: Path) -> None:
    assert launch(executor(), lambda: os.getpid(), 2).results() != [os.getpid()] * 2
    with pytest.raises(EntrypointError, match=r"'mian' does not exist in it\. Did you mean 'main'\?"):
        launch(executor(), "job.py:mian", 2)
    (threaded / "raising.py").write_text("def train(): ...\n\nraise RuntimeError('at import')\n")
    with pytest.raises(EntrypointError, match=r"(?s)line 3.*at import"):
        launch(executor(), "raising:train", 2)


def test_a_replica_that_died_is_brought_back_and_its_claim_and_progress_are_seen(threaded: Path) -> None:
    run = launch(executor(), "job.py", 2, args={"mode": "dies"}, restarts=1)
    assert run.results() == [[rank, 1, True, None] for rank in range(2)]
    assert run.logs(rank=0).splitlines()[-1] == "rank 0 attempt 1"
    outcome = run.status().replicas[0].outcome
    assert outcome is not None
    assert (outcome.progress_marks, outcome.how) == (3, "fork")


def test_a_cancelled_replica_has_its_grace(threaded: Path) -> None:
    run = launch(executor(term_grace_s=20.0), "job.py", 2, args={"mode": "waits"})
    eventually(lambda: all(row.reported.get("step") == 7 for row in run.status().replicas), "both replicas wait")
    run.cancel()
    assert {row.status for row in run.status().replicas} == {ReplicaStatus.CANCELLED}
    assert "cleaned up" in run.logs(rank=0)


def test_a_replica_that_hangs_is_ended_and_its_stacks_are_kept(threaded: Path) -> None:
    run = launch(executor(), "job.py", 1, args={"mode": "hangs"}, hang_timeout="1s:30s")
    run.wait(60)
    outcome = run.status().replicas[0].outcome
    assert outcome is not None
    assert (outcome.reason, len(outcome.stacks) > 0) == ("hang", True)


def test_each_gets_a_gpu_that_no_living_one_has(threaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write_torch(threaded.parent / "gpu", sees_gpu=True))
    run = launch(executor(gpus=("4", "5")), "job.py", 2, args={"mode": "waits until it may go"}, gpu="H100")
    eventually(lambda: all(row.reported.get("step") == 1 for row in run.status().replicas), "both replicas run")
    assert run.add(executor(gpus=("4", "5")), 1) == [2]
    eventually(lambda: run.logs(rank=2) != "", "the third replica runs")
    assert "every GPU has a replica of this run already: sharing 4 with another." in run.logs(rank=2)
    (threaded / "go").touch()
    assert [row[3] for row in run.results()] == ["4", "5", "4"]


def test_a_page_that_was_moved_into_a_file_is_the_same_on_both_sides() -> None:
    before = SharedPage()
    before.enter("evaluate")
    before.leave()
    page = SharedPage(before)
    page.n_decisions = 3
    other = SharedPage.open(page.share())
    assert other.n_decisions == 3
    other.progress(step=5)
    other.enter("evaluate")
    other.write_tail(b"words")
    assert (page.progress_marks, page.step, page.section, page.tail()) == (1, 5, "evaluate", "words")
    page.announce(7.0, signal.SIGTERM)
    assert (other.ending_at, other.notice) == (7.0, "SIGTERM")
    other.detach()
    other.progress_marks = 9
    assert page.progress_marks == 1


def test_native_threads_are_counted_and_those_that_a_fork_ends_are_not() -> None:
    before = threads_lost_by_a_fork()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert len(threads_lost_by_a_fork()) == len(before) + 1
    finally:
        release.set()
        thread.join()
