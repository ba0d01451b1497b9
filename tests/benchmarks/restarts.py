"""Restarts: the time until a killed rank trains again (R1, R2), and the goodput of a run with many kills (R6)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import Seal
from executors import LocalProcessExecutor, Run, launch
from executors.attempt import Attempt, Claim
from executors.restarts.decision_log import DecisionLog
from executors.run.run import view_of

from .harness import Comparison, Options, interleave
from .launch import PATIENCE_S, scratch_folder, state_of_its_own
from .restarts_replica import STEP_S

FILE = Path(__file__).with_name("restarts_replica.py")
OURS, TORCHRUN = "replicas --restarts 3", "torchrun --max-restarts 3"
VICTIM = 1


def restarts(options: Options) -> list[Comparison]:
    """R1 and R2: one of four ranks is killed, and the others continue. With torchrun they do not."""
    n = 2 if options.quick else 4
    delays: dict[str, list[float]] = {"outcome": [], "decision": []}

    def ours() -> float:
        with scratch_folder("restarts-") as folder:
            run = launch("local", f"{FILE}:step_on", n, args={"folder": folder}, restarts=3)
            seconds = _kill_and_wait(Path(folder), n)
            run.wait(PATIENCE_S)
        for name, delay_s in _delays(run).items():
            delays[name].append(1e3 * delay_s)
        return seconds

    with state_of_its_own():
        ours()  # the first launch, which starts the process that forks replicas
        for found in delays.values():
            found.clear()
        samples = interleave({TORCHRUN: lambda: _with_torchrun(n), OURS: ours}, options.repetitions(5))
    mine = {OURS: samples[OURS]}
    title = f"SIGKILL of one of {n} local ranks until the first optimizer step of its next attempt"
    return [
        Comparison("R2", "outcome to decision, a directory", "ms", {OURS: delays["outcome"]}, goals={OURS: 20.0}),
        Comparison("R2", "decision to claim, a directory", "ms", {OURS: delays["decision"]}, goals={OURS: 150.0}),
        Comparison("R1", title, "s", mine, goals={OURS: 0.5}),
        Comparison("R1", title, "s", samples, TORCHRUN, {OURS: 0.1}),
    ]


def _with_torchrun(n: int) -> float:
    with scratch_folder("torchrun-") as folder, Path(folder, "said").open("wb") as said:
        runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "--max-restarts=3"]
        command = [sys.executable, *runner, str(FILE), folder]
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            seconds = _kill_and_wait(Path(folder), n)
            process.wait(PATIENCE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers, which have groups of their own
                process.wait(PATIENCE_S)
    return seconds


def _kill_and_wait(folder: Path, n: int) -> float:
    """Kill a rank after all ranks have made a step. Return the seconds until its next attempt makes one, and stop
    all.
    """
    try:
        steps = first_steps(folder, {(rank, 0) for rank in range(n)})
        killed_at = time.monotonic()
        os.kill(steps[VICTIM, 0][0], signal.SIGKILL)
        stepped_at = first_steps(folder, {(VICTIM, 1)})[VICTIM, 1][1]
    finally:
        (folder / "stop").touch()
    return stepped_at - killed_at


def first_steps(folder: Path, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, float]]:
    """Wait for the first steps of attempts, and return the pid and the time of each step, by rank and attempt."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = steps_in(folder)
        if wanted <= found.keys():
            return found
        time.sleep(0.01)
    raise TimeoutError(f"No first step of rank and attempt {wanted - found.keys()} within {PATIENCE_S} s.")


def steps_in(folder: Path) -> dict[tuple[int, int], tuple[int, float]]:
    """Return pid and time of the first steps so far, by rank and attempt."""
    text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
    lines = (list(map(int, line.split())) for line in text.splitlines())
    return {(rank, attempt): (pid, at_ns / 1e9) for rank, attempt, pid, at_ns in lines}


def _delays(run: Run) -> dict[str, float]:
    """Return the seconds from outcome to decision, and from decision to claim, by the times in these records."""
    log = DecisionLog(view_of(run).store, run.run_id)
    log.read()
    outcome = Attempt(view_of(run).store, run.run_id, VICTIM, 0).outcome()
    claim = Attempt(view_of(run).store, run.run_id, VICTIM, 1).find("started.json", Claim.parse)
    assert outcome is not None
    assert claim is not None
    decided_at = log.entries[0].at
    return {"outcome": decided_at - outcome.finished_at, "decision": (claim.at or 0.0) - decided_at}


def goodput(options: Options) -> list[Comparison]:
    """R6: eight replicas, of which a random one is killed every few seconds; `--seconds` shortens it."""
    cases = [(8, 2.0, 5.0, 600.0, 0.05), (8, 40.0, 60.0, 1200.0, 0.08)]
    if options.quick:
        cases = [(2, 0.3, 1.5, 1.5, 1.0)]
    found = []
    with state_of_its_own():
        for n, round_s, every_s, usual_s, goal in cases:
            seconds = usual_s if options.quick else options.seconds or usual_s
            samples = [_lost_share(n, round_s, every_s, seconds) for _ in range(options.repetitions(1))]
            title = f"share of counted steps lost: {n} replicas, rounds of {round_s:g} s, SIGKILL every {every_s:g} s"
            name = f"for {seconds:g} s"
            notes = "; ".join(f"goodput {1 - lost:.4f}, {said}" for lost, said in samples)
            found.append(
                Comparison("R6", title, "", {name: [lost for lost, _ in samples]}, goals={name: goal}, note=notes)
            )
    return found


def _lost_share(n: int, round_s: float, every_s: float, seconds: float) -> tuple[float, str]:
    """Return the share of steps that this run lost compared with an undisturbed run, and the causes."""
    rounds = max(2, round(seconds / round_s))
    run = launch(
        LocalProcessExecutor(), f"{FILE}:train", n, args={"rounds": rounds, "round_s": round_s},
        chaos=[f"kill:every={every_s:g}"], seed=1,
        restarts="1000,oom=1000",  # if other programs run out of memory meanwhile, a SIGKILL counts as out of memory
    )  # fmt: skip
    began = time.monotonic()
    results: list[Any] = run.results()
    took_s = time.monotonic() - began
    if any(result != results[0] for result in results):
        raise RuntimeError(f"The replicas of {run.run_id} do not hold the same anchor.")
    counted = sum(sum(member.weight for member in seal.replicas.values()) for seal in seals(run).values())
    log = DecisionLog(view_of(run).store, run.run_id)
    log.read()
    n_restarts = sum(entry.kind == "restart" for entry in log.entries)
    planned = n * rounds * round(round_s / STEP_S)
    said = f"{n_restarts} restarts, {took_s:.0f} s for {rounds * round_s:.0f} s of steps"
    # the case with torchrun takes the same time
    print(f"goodput {counted / planned:.4f}, {said}", file=sys.stderr, flush=True)
    return 1 - counted / planned, said


def seals(run: Run) -> Mapping[int, Seal]:
    """Read the seals of a run's rounds, by their index."""
    prefix = f"{run.run_id}/diloco/main/seal/"
    keys = [entry.key for entry in view_of(run).store.list(prefix)]
    return {int(key.removeprefix(prefix)): Seal.parse(view_of(run).store.get(key), "", UNSIGNED) for key in keys}
