"""The commands that the launch benchmarks start: fresh Python processes that launch N replicas and wait for them.

launchers.py replicas|spawn|forkserver STAGE N ARRIVALS RELEASE [PRELOAD…]
"""

from __future__ import annotations

import sys
from pathlib import Path


def with_replicas(stage: str, n: int, arrivals: str, release: str, preload: list[str]) -> None:
    """Launch with this project's local executor, as a user's script would."""
    from executors import LocalProcessExecutor, launch

    entrypoint = f"{Path(__file__).with_name('replica_tasks.py')}:{stage}"
    run = launch(LocalProcessExecutor(preload=preload), entrypoint, n, args={"arrivals": arrivals, "release": release})
    run.results()


def with_multiprocessing(method: str, stage: str, n: int, arrivals: str, release: str) -> None:
    """Launch with the standard library, as a user's script would."""
    import multiprocessing

    import replica_tasks  # type: ignore[import-not-found]  # beside this script, so found when it runs

    context = multiprocessing.get_context(method)
    task = replica_tasks.STAGES[stage]
    processes = [context.Process(target=task, args=(arrivals, release)) for _ in range(n)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    method, stage, n, arrivals, release, *preload = sys.argv[1:]
    if method == "replicas":
        with_replicas(stage, int(n), arrivals, release, preload)
    else:
        with_multiprocessing(method, stage, int(n), arrivals, release)
