"""64 replicas on a real Ray head (E4): the bytes of its list of jobs, and its requests. The jobs wait for room."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from .harness import Comparison, Options
from .launch import state_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1]))  # the servers of the tests

from servers.ray import WHY_NOT, is_installed, ray_head

from .looking import users_folder, variables

N = 64
CPUS = 1000.0  # more cores than the node has, so that no job starts
OURS = "replicas"


def ray_jobs(options: Options) -> list[Comparison]:
    """E4."""
    if not is_installed():
        print(f"E4 is left out: {WHY_NOT}", file=sys.stderr)
        return []
    import executors
    from executors.backends.ray_client import RayClient

    n, seconds = (2, 2.0) if options.quick else (N, 60.0)
    asked: list[str] = []

    class Counting(RayClient):
        def _send(self, method: str, path: str, *more: Any) -> tuple[int, bytes]:
            asked.append(f"{method} {path}")
            return super()._send(method, path, *more)

    def count(act: Any) -> float:
        before = len(asked)
        act()
        return float(len(asked) - before)

    with state_of_its_own(), users_folder(), ray_head() as head, variables(head.environment):
        executor: Any = executors.RayExecutor(cpus=CPUS, shared_disk=True)
        executor.service._client = Counting(head.address, str(head.token_file))
        empty = len(head.ask("GET", "/api/jobs/"))
        run: Any = None

        def launch() -> None:
            nonlocal run
            run = executors.launch(executor, "job.py:main", n, run_id=f"many-{n}", detach=True)

        def watch() -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                run.status()
                time.sleep(0.1)

        requests = {"launch": count(launch), "a look": count(run.status), "a minute": count(watch) * 60 / seconds}
        size = len(head.ask("GET", "/api/jobs/")) - empty
        run.cancel()
        run.wait(60)
    return [
        Comparison("E4", f"ray, N={n}: the list of all jobs", "bytes", {OURS: [float(size)]}, goals={OURS: 100e3}),
        Comparison("E4", f"ray, N={n}: requests", "requests", {what: [count] for what, count in requests.items()},
                   goals={"launch": n + 3.0, "a look": 1.0, "a minute": 30.0}),
    ]  # fmt: skip
