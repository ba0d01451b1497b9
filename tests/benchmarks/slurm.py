"""Launching on a Slurm cluster on loopback: the time of a launch compared with plain jobs, and the number of requests
to the cluster.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from executors import SlurmExecutor, launch

from .harness import Comparison, Options, interleave
from .launch import scratch_folder, state_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1]))  # the servers of the tests

from servers.slurm.cluster import INSTALL, Cluster, missing_programs, running_cluster
from servers.slurm.commands import Commands

TASK = "executors.testing.tasks:hang"
OWN = "#!/bin/sh\necho hanging\nexec sleep 600\n"
SETTLES_S = 15.0  # after this time, the pauses between two looks have their full length
PATIENCE_S = 120.0


def slurm(options: Options) -> list[Comparison]:
    """E1, E2 and E3. Nothing is measured if Slurm is not installed."""
    if missing := missing_programs():
        print(f"E1 E2 E3 are skipped: there is no {missing[0]}. On Debian: {INSTALL}", file=sys.stderr)
        return []
    before = dict(os.environ)
    with (
        state_of_its_own(),
        running_cluster() as cluster,
        scratch_folder("slurm-") as scratch,
        scratch_folder("work-") as workspace,
        contextlib.chdir(workspace),  # the Python that replicas get
    ):
        os.environ.update(cluster.environment)
        os.environ["TMPDIR"] = scratch
        try:
            return [_returns(options), _first_lines(options, cluster), _looks(options, Path(scratch))]
        finally:
            for name in (*cluster.environment, "TMPDIR"):
                os.environ.pop(name)
            os.environ.update({name: value for name, value in before.items() if name not in os.environ})


def _returns(options: Options) -> Comparison:
    """E1: the time until a launch returns, without the check at its beginning."""

    def beyond_the_check(n: int) -> float:
        executor = SlurmExecutor(sbatch=["--hold"])
        began = time.monotonic()
        executor.service.check_account(None, None, ())
        checked = time.monotonic()
        run = launch(executor, TASK, n, detach=True)
        returned = time.monotonic()
        run.cancel()
        return returned - checked - (checked - began)

    numbers = (1, 2) if options.quick else (3, 64)
    beyond_the_check(1)  # the first launch also imports modules, so it is not counted
    samples = interleave({f"N={n}": lambda n=n: beyond_the_check(n) for n in numbers}, options.repetitions(5))  # type: ignore[misc]
    goals = {"N=3": 0.2, "N=64": 0.3}
    return Comparison("E1", "launch at Slurm returns, beyond sbatch --test-only", "s", samples, goals=goals)


def _first_lines(options: Options, cluster: Cluster) -> Comparison:
    """E2: the time from the launch until each replica has printed a line, compared with plain jobs that print a line at
    once.
    """
    n = 1 if options.quick else 3

    def own() -> float:
        with scratch_folder("own-") as folder:
            began = time.monotonic()
            output = f"--output={folder}/%a"
            command = ("sbatch", "--parsable", f"--array=0-{n - 1}", output, "--chdir=/")
            done = subprocess.run(command, input=OWN, capture_output=True, text=True, check=True)
            _until(lambda: sum("hanging" in path.read_text() for path in Path(folder).iterdir()) == n)
            took = time.monotonic() - began
            cluster.run("scancel", done.stdout.strip())
            cluster.end_jobs()
        return took

    def ours() -> float:
        began = time.monotonic()
        run = launch("slurm", TASK, n, detach=True)
        _until(lambda: all("hanging" in run.logs(rank=rank) for rank in range(n)))
        took = time.monotonic() - began
        run.cancel()
        run.wait(PATIENCE_S)
        cluster.end_jobs()
        return took

    samples = interleave({"sbatch": own, "replicas": ours}, options.repetitions(5))
    beyond = [mine - its for mine, its in zip(samples["replicas"], samples["sbatch"], strict=True)]
    samples["replicas, beyond sbatch"] = beyond
    goals = {"replicas, beyond sbatch": 0.3}
    return Comparison("E2", f"launch at Slurm to the first line of {n} replicas", "s", samples, goals=goals)


def _looks(options: Options, scratch: Path) -> Comparison:
    """E3: the number of requests to the cluster about a run that continues."""
    n, settles_s, seconds = (2, 0.5, 1.0) if options.quick else (64, SETTLES_S, options.seconds or 60.0)
    run = launch(SlurmExecutor(sbatch=["--hold"]), TASK, n, detach=True)
    with _counted(scratch) as commands:
        waiting = threading.Thread(target=run.wait, args=(settles_s + seconds,))
        waiting.start()
        time.sleep(settles_s)
        before = len(commands.calls("squeue"))
        waiting.join()
        looks = (len(commands.calls("squeue")) - before) * 60.0 / seconds
    run.cancel()
    goals = {f"N={n}": 12.0}
    return Comparison("E3", "looks at a run's jobs", "a minute", {f"N={n}": [looks]}, goals=goals)


@contextlib.contextmanager
def _counted(scratch: Path) -> Iterator[Commands]:
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{scratch / 'commands'}:{before}"
    try:
        yield Commands(scratch / "commands")
    finally:
        os.environ["PATH"] = before


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"No first line within {PATIENCE_S:g} s.")
        time.sleep(0.01)
