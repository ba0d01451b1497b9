"""Replicas of several processes, compared with torchrun: restart, launch, memory, a step, a cancel (P1 to P6)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from executors import LocalProcessExecutor, launch
from executors.process import descendants

from .gate import Gate, pss_mib
from .harness import Comparison, Options, interleave
from .launch import PATIENCE_S, Case, command, scratch_folder, state_of_its_own
from .restarts import first_steps, steps_in

FILE = Path(__file__).with_name("members_replica.py")
TASKS = Path(__file__).with_name("replica_tasks.py")
TORCHRUN, OURS = "torchrun", "replicas --procs"
GRACE_S = 5.0
QUIET = subprocess.DEVNULL


def restarts_of_members(options: Options) -> list[Comparison]:
    """P1: a process of a replica is killed, and all processes make their first step again."""
    found = []
    with state_of_its_own():
        _kill_member(1)  # the first launch, which starts the process that forks replicas
        for k in (2,) if options.quick else (1, 2, 4):
            samples = interleave(
                {TORCHRUN: lambda k=k: _kill_of_torchrun(k), OURS: lambda k=k: _kill_member(k)},  # type: ignore[misc]
                options.repetitions(5),
            )
            title = f"SIGKILL of one of {k} processes until the first step of the next attempt"
            note = f"{PATIENCE_S:g} s stand for no step until then"
            found.append(Comparison("P1", title, "s", samples, TORCHRUN, {OURS: 0.15}, note))
    return found


def _kill_member(k: int) -> float:
    with scratch_folder("members-") as folder:
        run = launch("local", f"{FILE}:step_on", 1, args={"folder": folder}, procs=k, restarts=3)
        seconds = _kill_and_wait(Path(folder), k)
        run.wait(PATIENCE_S)
    return seconds


def _kill_of_torchrun(k: int) -> float:
    with scratch_folder("torchrun-") as folder, _torchrun(k, "--max-restarts=3", str(FILE), "step_on", folder):
        try:
            return _kill_and_wait(Path(folder), k)
        except TimeoutError:  # on a loaded machine its processes may use up their restarts without a step
            return PATIENCE_S


@contextlib.contextmanager
def _torchrun(k: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={k}", *words]
    process = subprocess.Popen(runner, stdout=QUIET, stderr=QUIET, start_new_session=True)
    try:
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):  # some of its processes wait for others that have ended
            process.wait(PATIENCE_S)
    finally:
        below = descendants(process.pid)
        process.kill()
        process.wait()
        for pid in below:  # the workers have groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kill_and_wait(folder: Path, k: int) -> float:
    """Kill the last process after all have made a step. Return the seconds until all make one in a later attempt.

    torchrun may need several restarts, because processes that start again may read gloo's addresses of the ended ones.
    """
    try:
        steps = first_steps(folder, {(member, 0) for member in range(k)})
        killed_at = time.monotonic()
        os.kill(steps[k - 1, 0][0], signal.SIGKILL)
        deadline = killed_at + PATIENCE_S
        while time.monotonic() < deadline:
            again = steps_in(folder)
            for attempt in {attempt for _, attempt in again} - {0}:
                if all((member, attempt) in again for member in range(k)):
                    return max(again[member, attempt][1] for member in range(k)) - killed_at
            time.sleep(0.01)
        raise TimeoutError(f"No step of {k} processes in a later attempt within {PATIENCE_S:g} s.")
    finally:
        (folder / "stop").touch()


def launches_of_members(options: Options) -> list[Comparison]:
    """P2 and P3: the first step of a launch, and the memory of its processes."""
    found: list[Comparison] = []
    with state_of_its_own():
        _launch_members(1, [])  # the first launch, which P2 does not count
        for k in (2,) if options.quick else (2, 4):
            memory: dict[str, list[float]] = {TORCHRUN: [], OURS: []}
            samples = interleave(
                {
                    TORCHRUN: lambda k=k, of=memory: _launch_torchrun(k, of[TORCHRUN]),  # type: ignore[misc]
                    OURS: lambda k=k, of=memory: _launch_members(k, of[OURS]),  # type: ignore[misc]
                },
                options.repetitions(5),
            )
            title = f"launch() in a live process, or the command, to the first step of {k} processes"
            found.append(Comparison("P2", title, "s", samples, TORCHRUN, {OURS: 0.15}))
            title = f"memory (PSS) of one of {k} processes at its first step"
            found.append(Comparison("P3", title, "MiB", memory, TORCHRUN))
    return found


def _launch_members(k: int, memory: list[float]) -> float:
    with Gate() as gate:
        began = time.monotonic()
        args = {"arrivals": gate.arrivals, "release": gate.release_path}
        run = launch("local", f"{TASKS}:first_step", 1, args=args, procs=k)
        seconds = gate.last_arrival_s(k, within_s=PATIENCE_S) - began
        memory.append(pss_mib(gate.pids) / k)
        gate.release()
        run.wait(PATIENCE_S)
        gate.wait_until_gone(PATIENCE_S)
    return seconds


def _launch_torchrun(k: int, memory: list[float]) -> float:
    with Gate() as gate:
        began = time.monotonic()
        process = subprocess.Popen(
            command(Case(k, "first_step"), "torchrun", gate),
            stdout=QUIET, stderr=QUIET, start_new_session=True,
        )  # fmt: skip
        try:
            seconds = gate.last_arrival_s(k, within_s=PATIENCE_S) - began
            memory.append(pss_mib(gate.pids) / k)
            gate.release()
            process.wait(PATIENCE_S)
            gate.wait_until_gone(PATIENCE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return seconds


def next_calls(options: Options) -> list[Comparison]:
    """P4: from an exception to the next call of the entrypoint, in the same process and in a forked one."""

    def fail(task: str) -> float:
        with scratch_folder("calls-") as folder:
            restarts = "3,backoff=0s:0s"
            run = launch("local", f"{FILE}:{task}", 1, args={"file": f"{folder}/failed"}, restarts=restarts)
            return float(run.results()[0])

    with state_of_its_own():
        fail("fail_once")
        by_fork, in_process = "by fork", "@restartable"
        samples = interleave(
            {by_fork: lambda: fail("fail_once"), in_process: lambda: fail("fail_once_in_process")},
            options.repetitions(7),
        )
    title = "an exception until the next call of the entrypoint"
    return [Comparison("P4", title, "ms", samples, goals={in_process: 50.0})]


def steps_of_members(options: Options) -> list[Comparison]:
    """P5: a step of DiLoCo that needs no round, in a replica of two processes."""
    steps = 20 if options.quick else 2000
    cpu: dict[str, list[float]] = {}
    wall: dict[str, list[float]] = {}
    with state_of_its_own():
        for _ in range(options.repetitions(5)):
            run = launch(LocalProcessExecutor(), f"{FILE}:count_steps", 1, args={"steps": steps}, procs=2)
            for name, (cpu_ms, wall_ms) in run.results()[0].items():
                cpu.setdefault(name, []).append(cpu_ms)
                wall.setdefault(name, []).append(wall_ms)
    title = "of a step without a round, two processes"
    return [
        Comparison("P5", f"wall time {title}", "ms", wall),
        Comparison("P5", f"processor time {title}", "ms", cpu, goals={"diloco.step()": 0.15}),
    ]


def cancels(options: Options) -> list[Comparison]:
    """P6: a cancel of a command of torchrun whose processes save for one second."""
    k = 2 if options.quick else 4
    n_saved: list[int] = []

    def cancel() -> float:
        with scratch_folder("cancel-") as folder:
            words = ["torchrun", "--standalone", f"--nproc-per-node={k}", str(FILE), "save", folder]
            run = launch(LocalProcessExecutor(term_grace_s=GRACE_S), command=words, n=1)
            _wait_for_files(Path(folder), "ready-*", k)
            began = time.monotonic()
            run.cancel()
            run.wait(PATIENCE_S)
            seconds = time.monotonic() - began
            n_saved.append(len(list(Path(folder).glob("saved-*"))))
        return seconds

    def interrupt() -> float:
        with scratch_folder("cancel-") as folder, _torchrun(k, str(FILE), "save", folder) as process:
            _wait_for_files(Path(folder), "ready-*", k)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
        return time.monotonic() - began

    methods: dict[str, Callable[[], float]] = {"SIGTERM to torchrun": interrupt, "replicas cancel": cancel}
    with state_of_its_own():
        samples = interleave(methods, options.repetitions(3))
    title = f"cancel of a command of torchrun whose {k} processes save for 1 s"
    note = f"processes that saved, in each repetition: {', '.join(f'{n} of {k}' for n in n_saved)}"
    return [Comparison("P6", title, "s", samples, goals={"replicas cancel": GRACE_S}, note=note)]


def _wait_for_files(folder: Path, pattern: str, n: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.glob(pattern))) < n:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Not {n} files {pattern} within {PATIENCE_S:g} s.")
        time.sleep(0.01)
