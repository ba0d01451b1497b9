"""Measures real processes from outside: every kind of work counts as active, and waiting does not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from executors.process import ActivitySample, ThreadTimes, kill_descendants, linux_activity, take_sample
from executors.supervisor import activity
from executors.supervisor.activity import ActivityMeter, ProcessActivity, usage_between

SPIN = "while True: pass"
SPAN_S = 1.0


@contextlib.contextmanager
def process(code: str, *arguments: str) -> Iterator[int]:
    """Run Python code in a process that has printed a line when it begins."""
    text = f"import os, socket, subprocess, sys, threading, time\nprint(flush=True)\n{code}"
    running = subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid
    finally:
        kill_descendants(running.pid)
        running.kill()
        running.communicate()


@pytest.fixture
def sink() -> Iterator[int]:
    """The port of a server that reads everything."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=read, args=(connection,), daemon=True).start()

        def read(connection: socket.socket) -> None:
            with connection:
                while connection.recv(1 << 16):
                    pass

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def usage_of(pid: int, n: int = 5) -> ProcessActivity:
    samples = []
    for number in range(n):
        if number:
            time.sleep(SPAN_S / (n - 1))
        sample = take_sample(pid, time.monotonic())
        assert sample is not None
        samples.append(sample)
    return usage_between(samples)


WORK = {
    "computes": SPIN,
    "computes in another thread": f"def f():\n  {SPIN}\nthreading.Thread(target=f).start(); threading.Event().wait()",
    "waits for a process that computes": f"subprocess.run([sys.executable, '-c', '{SPIN}'])",
    "has a grandchild that computes": (
        "subprocess.run([sys.executable, '-c', 'import subprocess, sys; '\n"
        f'                \'subprocess.run([sys.executable, "-c", "{SPIN}"])\'])'
    ),
    "starts one short process after the other": "while True: subprocess.run(['sh', '-c', 'for i in 1 2; do :; done'])",
    "writes a file": (
        "f = open(sys.argv[2], 'wb', 0)\nwhile True: f.seek(0); f.write(b'x' * 20_000); time.sleep(0.05)"
    ),
    "uploads from memory": (
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "while True: s.sendall(b'x' * 20_000); time.sleep(0.05)"
    ),
    "opens a connection for each part of an upload": (
        "while True:\n with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as s: s.sendall(b'x' * 40_000); "
        "time.sleep(0.1)"
    ),
}
WAITING = {
    "sleeps": "time.sleep(600)",
    "polls": "while True: time.sleep(0.05)",
    "waits for a lock": "l = threading.Lock(); l.acquire(); l.acquire()",
    "waits for an answer": "s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)",
    "waits while it holds the GIL, which another thread wants": (
        "import ctypes\nthreading.Thread(target=lambda: [time.sleep(0.1) for _ in iter(int, 1)], daemon=True).start()\n"
        "time.sleep(0.3)\nctypes.PyDLL(None).sleep(600)"
    ),
    "waits for a child that waits": "subprocess.run(['sleep', '600'])",
    "waits for a child that it forked and that waits for a lock": (
        "l = threading.Lock(); l.acquire(); pid = os.fork()\nl.acquire() if pid == 0 else os.waitpid(pid, 0)"
    ),
}


@pytest.mark.parametrize("code", WORK.values(), ids=WORK)
def test_work_is_active(code: str, sink: int, tmp_path: object) -> None:
    with process(code, str(sink), f"{tmp_path}/file") as pid:
        usage_of(pid)  # leaves out the work of the start
        assert usage_of(pid).is_active


@pytest.mark.parametrize("code", WAITING.values(), ids=WAITING)
def test_waiting_is_idle(code: str, sink: int) -> None:
    with process(code, str(sink)) as pid:
        usage_of(pid)
        assert not usage_of(pid).is_active


STUCK = {
    name: WAITING[name] for name in ("waits for a lock", "waits for a child that it forked and that waits for a lock")
} | {
    "holds the GIL in a lock of C": (
        "import ctypes\nl = ctypes.create_string_buffer(128); c = ctypes.PyDLL(None)\n"
        "c.pthread_mutex_lock(l); c.pthread_mutex_lock(l)"
    ),
    "waits for a thread that waits for a lock": (
        "l = threading.Lock(); l.acquire(); t = threading.Thread(target=l.acquire); t.start(); t.join()"
    ),
}
NOT_STUCK = {
    name: WAITING[name] for name in ("sleeps", "polls", "waits for an answer", "waits for a child that waits")
} | {
    "waits for a lock with a time limit": "threading.Event().wait(600)",
    "waits for a thread that sleeps": "t = threading.Thread(target=time.sleep, args=[600]); t.start(); t.join()",
    "waits for a thread that waits for an answer": (
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "t = threading.Thread(target=s.recv, args=[1]); t.start(); t.join()"
    ),
    "waits for a thread that waits with a time limit": (
        "t = threading.Thread(target=threading.Event().wait, args=[600]); t.start(); t.join()"
    ),
    "computes": SPIN,
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the system call of a thread")
@pytest.mark.parametrize(
    ("code", "is_stuck"), [(STUCK[n], True) for n in STUCK] + [(NOT_STUCK[n], False) for n in NOT_STUCK]
)
def test_a_process_is_stuck_only_if_nothing_outside_can_end_its_wait(code: str, sink: int, *, is_stuck: bool) -> None:
    with process(code, str(sink)) as pid:
        usage_of(pid)
        assert usage_of(pid).waits_inside is is_stuck


def test_a_stopped_process_is_idle_and_not_stuck() -> None:
    with process(SPIN) as pid:
        os.kill(pid, signal.SIGSTOP)
        usage_of(pid)
        found = usage_of(pid)
        assert not found.is_active
        assert not found.waits_inside


def test_threads_of_this_project_do_not_count() -> None:
    code = f"def f():\n  print(threading.get_native_id(), flush=True)\n  {SPIN}\nthreading.Thread(target=f).start()"
    running = subprocess.Popen(
        [sys.executable, "-c", f"import threading\n{code}\nthreading.Event().wait()"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        ours = {int(running.stdout.readline())}
        before = take_sample(running.pid, 0.0, ours)
        time.sleep(SPAN_S)
        after = take_sample(running.pid, SPAN_S, ours)
        assert before is not None
        assert after is not None
        assert not usage_between([before, after]).is_active
    finally:
        running.kill()
        running.communicate()


def sample_at(
    at: float, *, run_s: float = 0.0, wait_s: float = 0.0, cpu_s: float = 0.0, n_turns: int = 0, **more: object
) -> ActivitySample:
    values = {"io_bytes": 0, "tcp_bytes": {}, "can_see_tcp": True, "is_waiting_on_disk": False, "runnable": frozenset()}
    threads = {7: ThreadTimes(int(run_s * 1e9), int(wait_s * 1e9), n_turns)}
    return ActivitySample(at, threads, cpu_s or run_s, **(values | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run_s", "wait_s", "is_active"),
    [
        (10.0, 0.0, True),
        (0.5, 9.49, True),  # the thread computes beside twenty others
        (0.01, 9.98, True),
        (0.0, 10.0, True),  # the thread never gets a processor
        (0.4, 0.0, False),
        (0.02, 5.0, False),  # a loop over sleep that waits for a processor in each turn
        (0.3, 7.0, True),
    ],
)
def test_how_much_a_thread_wants_does_not_depend_on_the_load(run_s: float, wait_s: float, *, is_active: bool) -> None:
    samples = [sample_at(0.0), sample_at(10.0, run_s=run_s, wait_s=wait_s)]
    assert usage_between(samples).is_active is is_active


@pytest.mark.parametrize(("n_turns", "is_stuck"), [(0, False), (10, False), (150, True)])
def test_a_thread_that_waits_for_the_gil_does_not_look_like_one_with_a_timer(n_turns: int, *, is_stuck: bool) -> None:
    samples = [
        sample_at(0.0, waits_inside=True, timed=frozenset([7])),
        sample_at(1.0, run_s=0.001, n_turns=n_turns, waits_inside=True, timed=frozenset([7])),
    ]
    assert usage_between(samples).waits_inside is is_stuck


def test_a_tree_that_is_always_runnable_is_active_although_its_counters_do_not_change() -> None:
    samples = [sample_at(at, runnable=frozenset([7])) for at in range(0, 12, 2)]
    assert usage_between(samples).is_active
    samples[2:4] = [sample_at(4), sample_at(6)]
    assert not usage_between(samples).is_active, "a process that is runnable in a few samples is not active"


@pytest.mark.parametrize(("turn_s", "is_active"), [(0.00002, False), (0.003, True)])
def test_a_thread_that_polls_is_idle_although_a_loaded_machine_leaves_it_runnable(
    turn_s: float, *, is_active: bool
) -> None:
    samples = []
    for number in range(6):
        run_s = number * 10 * turn_s
        waited = sample_at(2.0 * number, run_s=run_s, wait_s=2.0 * number - run_s - 0.001, n_turns=10 * number)
        samples.append(replace(waited, runnable=frozenset([7])))
    assert usage_between(samples).is_active is is_active


def test_a_tree_that_waits_for_the_disk_in_two_samples_is_active() -> None:
    samples = [sample_at(at) for at in range(0, 12, 2)]
    samples[1] = sample_at(2, is_waiting_on_disk=True)
    assert not usage_between(samples).is_active
    samples[3] = sample_at(6, is_waiting_on_disk=True)
    assert usage_between(samples).is_active


def test_sockets_that_could_not_be_seen_before_are_not_counted_from_their_begin() -> None:
    blind = sample_at(0.0, can_see_tcp=False)
    assert usage_between([blind, sample_at(2.0, tcp_bytes={5: 1 << 30})]).bytes_per_s == 0


def test_a_process_that_the_kernel_does_not_show_counts_as_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "take_sample", lambda *_: None)
    assert ActivityMeter(1).look(0.0) is True


def test_an_old_burst_does_not_move_the_time_of_the_last_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([sample_at(0.0)] + [sample_at(float(at), run_s=1.5) for at in range(2, 20, 2)])
    monkeypatch.setattr(activity, "take_sample", lambda *_: next(taken))
    meter = ActivityMeter(1, window_s=10.0)
    answers: list[bool | None] = [meter.look(float(at)) for at in range(0, 20, 2)]
    assert answers == [None] * 5 + [False] * 5


def test_a_kernel_without_queue_times_is_judged_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[[str], bytes] = linux_activity._read
    monkeypatch.setattr(linux_activity, "_read", lambda path: b"" if path.endswith("schedstat") else read(path))
    with process(SPIN) as pid:
        assert usage_of(pid).is_active
    with process(WAITING["polls"]) as pid:
        usage_of(pid)
        assert not usage_of(pid).is_active
