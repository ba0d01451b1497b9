"""Launchers as separate processes, which tests may kill: `python launchers.py <name> …`.

Each launcher writes the run and its processes into a file, so that the test finds them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from executors import LocalProcessExecutor, Run, launch
from executors.run.run import view_of
from support import restart_tasks, tasks


def executor() -> LocalProcessExecutor:
    return LocalProcessExecutor(preload=(), term_grace_s=0.5)


def say(path: str, **what: object) -> None:
    tasks.mark(Path(path), json.dumps(what))


def say_launched(folder: str, run: Run, **more: object) -> None:
    say(f"{folder}/launched", run_id=run.run_id, handles=[handle.to_json() for handle in run.handles], **more)


def hang_attached(folder: str) -> None:
    """Launch replicas that have helper processes and ignore SIGTERM, and wait."""
    for rank in range(2):
        Path(folder, str(rank)).mkdir()

    def entrypoint(folder: str) -> None:
        from support import tasks

        tasks.hang_with_helpers(f"{folder}/{tasks.rank()}", deaf=True)

    run = launch(executor(), entrypoint, 2, args={"folder": folder})
    say_launched(folder, run)
    run.wait()


def hang_beside_a_helper(folder: str) -> None:
    """Launch such replicas, and fork a helper that inherits all open files and outlives this process."""
    run = launch(executor(), tasks.hang, 2, args={"path": f"{folder}/replica"})
    helper = os.fork()
    if helper == 0:
        while os.getppid() != 1:
            time.sleep(0.01)
        time.sleep(600)
        os._exit(0)
    say_launched(folder, run, helper=helper)
    run.wait()


def hang_while_its_entrypoint_is_imported(folder: str) -> None:
    """Launch a module that starts a helper and hangs when it is imported."""
    lines = [
        "import os, subprocess, sys",
        "from pathlib import Path",
        "from support import tasks",
        "helper = subprocess.Popen([sys.executable, '-c', tasks.SLEEP])",
        "for name, pid in (('import', os.getpid()), ('helper', helper.pid), ('zygote', os.getppid())):",
        f"    tasks.mark(Path({folder!r}, 'importing.' + name), str(pid))",
        "helper.wait()",
        "def main(): ...",
    ]
    Path(folder, "hangs_at_import.py").write_text("\n".join(lines))
    sys.path.insert(0, folder)
    launch(executor(), "hangs_at_import:main", 1)


def hang_in_a_bucket(folder: str, url: str) -> None:
    """Launch replicas that meet in a bucket, and wait."""
    run = launch(executor(), tasks.hang, 4, args={"path": f"{folder}/replica"}, rendezvous=url)
    say_launched(folder, run)
    time.sleep(600)


def restart_attached(folder: str) -> None:
    """Launch replicas. One of them dies, and waits for a long time until its next attempt."""
    args = {"folder": folder}
    run = launch(executor(), restart_tasks.die_and_hang, 2, args=args, restarts="3,backoff=600s:600s")
    say_launched(folder, run)
    run.wait()


def fail_apart(folder: str) -> None:
    """Launch replicas that fail repeatedly, each in another way, and end when the run ends."""
    kinds = ["exit", "exception"]
    run = launch(executor(), restart_tasks.end_always, 2, args={"kinds": kinds}, restarts="3,backoff=0.05s:0.1s")
    say_launched(folder, run)
    run.wait()


def launch_from_a_thread_that_ends(folder: str) -> None:
    """Launch from a thread that ends long before the run. That must not end the replicas."""
    import threading

    launched = []

    def start() -> None:
        launched.append(launch(executor(), tasks.hang, 1, args={"path": f"{folder}/replica"}))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (run,) = launched
    say_launched(folder, run)
    run.wait()


def launch_and_end(folder: str, detach: str = "") -> None:
    """Launch a run, perhaps a detached one, and end without waiting for it."""
    say_launched(folder, launch(executor(), tasks.hang, 2, args={"path": f"{folder}/replica"}, detach=bool(detach)))


def returns_with_the_results(folder: str) -> None:
    """End right after `results()`, while the replicas' processes still run their exit handlers, for longer than any
    grace.
    """

    def entrypoint(folder: str) -> str:
        import atexit
        import time

        from support import tasks

        tasks.mark(Path(f"{folder}/replica.{tasks.rank()}"), str(os.getpid()))
        atexit.register(tasks.mark, Path(f"{folder}/left.{tasks.rank()}"))
        atexit.register(time.sleep, 2)
        return "done"

    run = launch(executor(), entrypoint, 2, args={"folder": folder})
    results = run.results()
    say_launched(folder, run, results=results)


def interrupted_while_waiting(folder: str) -> None:
    """Get Ctrl-C in `wait()`, and then read the state of the run."""
    run = launch(executor(), tasks.hang, 1, args={"path": f"{folder}/replica"})
    say_launched(folder, run)
    try:
        run.wait()
    except KeyboardInterrupt:
        say(f"{folder}/interrupted", status=str(run.status().status))
        run.cancel()
        say(f"{folder}/cancelled", status=str(run.status().status))


def interrupted_while_launching(folder: str) -> None:
    """Get Ctrl-C while `launch()` starts many replicas, and continue, as a notebook does."""
    args = {"path": f"{folder}/replica"}
    with (
        contextlib.suppress(KeyboardInterrupt),
        launch(executor(), tasks.hang, 48, args=args, run_id="interrupted"),
    ):
        time.sleep(600)
    time.sleep(600)


def after_threaded_torch(folder: str) -> None:
    """Launch from a process that already used torch's threads: a fork of it would hang in its first operation."""
    import torch

    torch.set_num_threads(2)
    for _ in range(3):
        tasks.matmul()
    run = launch(LocalProcessExecutor(preload=("torch",)), tasks.matmul, 2)
    say(f"{folder}/launched", results=run.results())


def attach_cancel_and_collect(folder: str, run_id: str) -> None:
    """Find a run that another process launched, cancel one rank, then the others, and collect."""
    from executors import attach

    run = attach(run_id)
    before = str(run.status().status)
    run.cancel(rank=0)
    between = [str(outcome.status) for outcome in run.outcomes()]
    run.cancel()
    run.wait()
    rows = view_of(run).executor.collect(run.handles)
    after = [[row["rank"], row["status"], row["reason"]] for row in rows]
    say(f"{folder}/attached", before=before, between=between, after=after)


def resume_each_that_is_named() -> None:
    """Resume each run that stdin names as soon as its line arrives, and print the result."""
    from executors import attach
    from executors.errors import ReplicasError
    from executors.run.resume import resume

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        said = "resumed"
        try:
            resume(attach(line.strip()), detach=True)
        except (ReplicasError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)


def resume_and_die(run_id: str, dies: str) -> None:
    """Resume a run, and get killed in the middle of the resume: see `dies_while_it_starts`."""
    from executors import attach
    from executors.run.resume import resume

    os.environ["REPLICAS_TEST_DIES"] = dies
    resume(
        Run(
            view_of(attach(run_id)).store,
            run_id,
            executor=LocalProcessExecutor(preload=("support.dies_while_it_starts",)),
        )
    )


def launch_and_die_before_any_replica(run_id: str) -> None:
    """Write a run, and get killed before its first replica is started."""
    import signal
    from typing import Any

    def die(*args: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    LocalProcessExecutor.start_ranks = die  # type: ignore[method-assign,assignment]
    launch(executor(), tasks.rank, 2, run_id=run_id)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
