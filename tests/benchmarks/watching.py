"""Watching replicas: the stacks of a replica that holds the GIL (R3), the cost of marks (R4), false alarms under load
(R5), and the cost of rules (R10).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from executors import LocalProcessExecutor, Run, launch
from executors.replica import Replica
from executors.replica.shared_page import SharedPage
from executors.run.run import view_of
from executors.settings.watch_rules import parse_rules, watched_numbers

from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

FILE = Path(__file__).with_name("watching_replica.py")
STEP_S = 0.005
SOFT_S, LATE_S = 1.0, 1.5
LOAD = 20
EVALUATION_S = 120.0


def stacks(options: Options) -> list[Comparison]:
    """R3: each replica holds the GIL in a C call that waits. The supervisor saves their stacks all the same."""
    n, times = (1, 1) if options.quick else (10, 10)
    late_s: list[float] = []
    with state_of_its_own():
        for _ in range(times):
            with scratch_folder("stacks-") as folder:
                run = launch(
                    LocalProcessExecutor(preload=()), f"{FILE}:hold_gil", n, args={"folder": folder},
                    hang_timeout=f"{SOFT_S:g}s:{SOFT_S + 2:g}s",
                )  # fmt: skip
                run.wait(120)
                marked = {rank: float(Path(folder, str(rank)).read_text()) for rank in range(n)}
            for rank in range(n):
                kept = [path.stat().st_mtime for path in _stacks_of(run, rank)]
                late_s.append(min(kept, default=float("inf")) - marked[rank] - SOFT_S)
    missed = float(sum(each > LATE_S for each in late_s))
    what = f"stacks of {len(late_s)} replicas that hold the GIL"
    name = f"soft limit {SOFT_S:g} s"
    return [
        Comparison("R3", f"{what}: not within {LATE_S:g} s of the soft limit", "", {name: [missed]}, goals={name: 0.0}),
        Comparison("R3", f"{what}: after the soft limit", "s", {name: late_s}, goals={name: LATE_S}),
    ]


def _stacks_of(run: Run, rank: int) -> list[Path]:
    folder = Path(urlsplit(view_of(run).store.url).path, run.run_id, "replicas", f"{rank:04d}", "0", "stacks")
    return [path for path in folder.glob("*.txt") if "most recent call first" in path.read_text()]


def marks(options: Options) -> list[Comparison]:
    """R4: the processor time of a mark at every step, of a section at every step, and of beats and ticks.

    The beats wake a thread four times a second. What that costs depends on the machine more than on the code: 180 to
    770 us a second were measured. The goal is a thousandth of a core.
    """
    replica = Replica(0, 8, "run", 0, "memory:", page=SharedPage())
    n = 2000 if options.quick else 200_000
    samples: dict[str, list[float]] = {"progress()": [], "section()": []}
    for _ in range(options.repetitions(5)):
        began = time.process_time()
        for _ in range(n):
            pass
        empty_s = time.process_time() - began
        began = time.process_time()
        for _ in range(n):
            replica.progress()
        samples["progress()"].append(1e6 * (time.process_time() - began - empty_s) / n)
        began = time.process_time()
        for _ in range(n):
            with replica.section("evaluate"):
                pass
        samples["section()"].append(1e6 * (time.process_time() - began - empty_s) / n)
    ticks = [_ticking_us(0.5 if options.quick else 20.0) for _ in range(options.repetitions(3))]
    per_step = [
        mark + section + tick * STEP_S
        for mark, section, tick in zip(samples["progress()"], samples["section()"], ticks, strict=False)
    ]
    share = {"all": [100 * each / (1e6 * STEP_S) for each in per_step]}
    return [
        Comparison("R4", "a mark, a section", "us", samples, goals={"progress()": 1.0, "section()": 3.0}),
        Comparison("R4", "beat and tick, a second", "us", {"all": ticks}, goals={"all": 1000.0}),
        Comparison("R4", f"all three at every step of {1e3 * STEP_S:g} ms", "% of a step", share, goals={"all": 0.2}),
    ]


def _ticking_us(seconds: float) -> float:
    """Return the processor time, in us a second, that a process spends on its beats and ticks, compared with a process
    without them.
    """

    def used(is_watched: bool) -> float:
        done = subprocess.run(
            [sys.executable, str(FILE), str(seconds), str(int(is_watched))], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    return max(0.0, 1e6 * (used(True) - used(False)) / seconds)


def rules(options: Options) -> list[Comparison]:
    """R10: the processor time that ten rules about ten numbers add to a report at every step, in the process of a rank.

    The reports with and without rules alternate in one process, so that the load of the machine affects both alike.
    """
    names = ["loss", "gnorm", *(f"metric_{index}" for index in range(8))]
    watched = watched_numbers(parse_rules([f"{name} > 10 * median for 50" for name in names]))
    without, with_rules = (
        Replica(0, 8, "run", 0, "memory:", page=page) for page in (SharedPage(), SharedPage(watched=watched))
    )
    numbers, n = dict.fromkeys(names, 2.5), 500 if options.quick else 20_000
    added: list[float] = []
    for _ in range(options.repetitions(20)):
        used = []
        for replica in (without, with_rules):
            began = time.process_time()
            for step in range(n):
                replica.report(step=step, **numbers)
            used.append(1e6 * (time.process_time() - began) / n)
        added.append(max(0.0, used[1] - used[0]))
    share = {"all": [100 * each / (1e6 * STEP_S) for each in added]}
    return [
        Comparison("R10", "ten rules about ten reported numbers, a report", "us", {"all": added}, goals={"all": 5.0}),
        Comparison("R10", f"ten rules at every step of {1e3 * STEP_S:g} ms", "% of a step", share, goals={"all": 0.1}),
    ]


def false_alarms(options: Options) -> list[Comparison]:
    """R5: replicas that make steps, and evaluate or wait in between, on a machine with much other work.

    Runs for an hour unless `--seconds` shortens it.
    """
    seconds = 1.0 if options.quick else options.seconds or 3600.0
    n, load = (1, 1) if options.quick else (4, LOAD)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        with state_of_its_own():
            args = {"seconds": seconds, "evaluation_s": 0.2 if options.quick else EVALUATION_S}
            run = launch(LocalProcessExecutor(preload=()), f"{FILE}:step_for", n, args=args, restarts=3)
            run.wait(seconds + EVALUATION_S + 600)
            alarms = sum(len(_stacks_of(run, rank)) for rank in range(n))
            ends = sum(outcome.status != "succeeded" for outcome in run.outcomes())
    finally:
        for process in busy:
            process.kill()
            process.wait()
    title = f"false alarms and ends of {n} replicas in {seconds:g} s beside {load} busy processes, --hang-timeout auto"
    return [Comparison("R5", title, "", {"all": [float(alarms + ends)]}, goals={"all": 0.0})]
